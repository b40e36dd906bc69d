"""Token trees: their shapes, the best shape for a measured acceptance, and dynamic trees.

- ``shapes``: templates and their files, on the host; trees of several token sequences.
- ``search``: Sequoia's search for the best static shape, and the measured acceptance by rank that
  it reads. On the host.
- ``dynamic``: EAGLE-2's expansion and reranking of nodes, best-first trees. On the device.
"""

from specjax.topology.shapes import (
    FORMS,
    Topology,
    chain,
    chains,
    check,
    from_ranks,
    full,
    merge_batched,
    parse,
    save,
)

__all__ = [
    "FORMS",
    "Topology",
    "chain",
    "chains",
    "check",
    "from_ranks",
    "full",
    "merge_batched",
    "parse",
    "save",
]
