"""A smaller language model drafts a tree; its shape depends on the context. L1 with tree rules.

The dynamic tree of EAGLE-2 (Li et al. 2024, 2406.16858, section 4), with an ordinary draft model.
The score of a node is the product of the draft model's probabilities on its path. Level by level,
the ``top_k`` best nodes of the last level get ``top_k`` children each; the ``nodes`` best of all
these candidates are the draft.

The tree is a function of the committed text alone. Scores come from the unchanged logits of the
draft model, without the row's temperature and cut-offs (as in the authors' code): these settings
would change which tree is best, never the output law.
"""

from __future__ import annotations

import os

from specjax import control as controllers
from specjax.checks import counts
from specjax.drafters._growth import Plan
from specjax.drafters._growth.plans import eagle2
from specjax.drafters.draft_models import _small_model
from specjax.types import LM, Drafter, Params

REFERENCE = "li2024eagle2"


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    nodes: int = 32,
    depth: int = 5,
    top_k: int = 6,
    control: str = "",
    gaps: bool = False,
    params: Params = None,
) -> Drafter:
    """Drafts a dynamic tree with a small language model, in ``depth`` passes.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or any model that ``hf.load`` takes.
        nodes: size of the tree that the target verifies.
        depth: number of levels, the length of the longest path.
        top_k: number of nodes of a level that get children, and number of children of each.
        control: ends a tree early; see ``control.parse``.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: a number below 1, more nodes than candidates, a top_k beyond the vocabulary,
            another vocabulary than the target's.
    """
    counts(nodes=nodes, depth=depth, top_k=top_k)
    model, params = _small_model.load(target, model, params)
    plan = Plan(eagle2(model.vocab_size, nodes, depth, top_k), controllers.parse(control))
    return _small_model.build("dynamic_tree", model, params, plan, gaps=gaps)
