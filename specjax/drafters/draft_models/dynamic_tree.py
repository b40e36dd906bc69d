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

from specjax import declare
from specjax.control import Controller
from specjax.declare import key
from specjax.drafters.draft_models import _small_model
from specjax.drafters.growth.plans import DYNAMIC
from specjax.drafters.shared_keys import DraftKeys, ModelKeys
from specjax.types import LM, Drafter

REFERENCE = "li2024eagle2"


class Keys(ModelKeys):
    """The keys of ``dynamic_tree``."""

    LENGTH = "depth"

    nodes: int = key(32, "size of the tree that the target verifies", least=1)
    depth: int = key(5, "number of levels, the length of the longest path", least=1)
    top_k: int = key(
        6, "number of nodes of a level that get children, and number of children of each", least=1
    )
    control: str | Controller = key("", "ends a tree early; see ``control.parse``")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts a dynamic tree with a small language model, in ``depth`` passes.

    Raises:
        UserError: a number below 1, more nodes than candidates, a top_k beyond the vocabulary,
            another vocabulary than the target's.
    """
    return _small_model.make("dynamic_tree", target, DraftKeys(**vars(keys)), DYNAMIC)
