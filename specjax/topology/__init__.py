"""Token trees: their shapes, the best shape for a measured acceptance, and dynamic trees.

- ``shapes``: templates and their files. On the host.
- ``tries``: trees of several token sequences. On the host and on the device.
- ``search``: Sequoia's search for the best static shape. On the host.
- ``acceptance``: acceptance by rank, measured: the input of a search. On the host.
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
    parse,
    save,
)
from specjax.topology.tries import merge, merge_batched

__all__ = [
    "FORMS",
    "Topology",
    "chain",
    "chains",
    "check",
    "from_ranks",
    "full",
    "merge",
    "merge_batched",
    "parse",
    "save",
]
