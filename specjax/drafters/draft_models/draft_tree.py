"""A smaller language model drafts a tree of a fixed shape, level by level. L1 with the tree rules.

The siblings of a node are drawn in one of three ways, and the rule must take them
(``accept.check_pair`` tests it):

- "without_replacement" (Gumbel top-k): Sequoia (Chen et al. 2024, 2402.12374) and RSD-C (Jeon et
  al. 2024, 2402.14160);
- "iid": SpecInfer's expansion (Miao et al. 2024, 2305.09781) and, as "chains:KxL", SpecTr (Sun et
  al. 2023, 2310.15141);
- "top_k": the most probable tokens, a deterministic tree.

Rows at temperature 0 always take the most probable tokens. Each level is one pass of the draft
model over the nodes that have children; leaves are never fed.
"""

from __future__ import annotations

from specjax import declare
from specjax.drafters.draft_models import _small_model
from specjax.drafters.shared_keys import DraftKeys
from specjax.types import LM, Drafter

REFERENCE = ("chen2024sequoia", "jeon2024recursive", "miao2024specinfer", "sun2023spectr")


@declare.method(DraftKeys)
def make(target: LM, keys: DraftKeys) -> Drafter:
    """Drafts a tree with a small language model.

    Raises:
        UserError: not a tree shape, more siblings than the vocabulary has tokens, another
            vocabulary than the target's.
    """
    return _small_model.make("draft_tree", target, keys, "4x2x1", "without_replacement")
