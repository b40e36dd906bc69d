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

import os
from typing import Any

from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.draft_models import _small_model
from specjax.types import LM, Drafter, Params

REFERENCE = ("chen2024sequoia", "jeon2024recursive", "miao2024specinfer", "sun2023spectr")

SHARED = TreeKeys


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gaps: bool = False,
    params: Params = None,
    **shared: Any,
) -> Drafter:
    """Drafts a tree with a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or any model that ``hf.load`` takes.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``.
        shared: the keys of ``TreeKeys``; the default is the tree "4x2x1" with siblings
            "without_replacement".

    Raises:
        UserError: not a tree shape, more siblings than the vocabulary has tokens, another
            vocabulary than the target's.
    """
    keys = TreeKeys(**shared)
    method = Method("draft_tree", "4x2x1", "without_replacement", target.vocab_size)
    plan = _growth.read(method, keys)
    model, params = _small_model.load(target, model, params)
    return _small_model.build("draft_tree", model, params, plan, gaps=gaps)
