"""PaSS: look-ahead embeddings make the target guess several tokens in one pass. L1 with its rules.

Parallel Speculative Sampling, Monea, Joulin and Grave 2023 (2311.13581). L input embeddings are
trained and nothing else. After the pending token they stand for the next L tokens; the target's
output at each of them is the distribution of the token after it, without knowledge of the tokens
between. So the probabilities of a depth are the same on all paths, and best-first trees
(``tree="best_first"``) cost no further pass. The target's keys and values for them are dropped.

``calls=2``, as published: a pass over the pending token and the embeddings makes the draft, and a
second pass verifies it. The first draft token is drawn from the target's own distribution and
always accepted; a draft has up to L + 1 levels.

``calls=1`` verifies a draft and makes the next one in the same pass: the embeddings follow the
pending token and each node of the draft, and after the verdict those behind the last accepted node
give the next draft. They have not seen the token that the target added, so a draft has up to L
levels and all of its tokens are guesses. The pass is over (N + 1) (L + 1) tokens. The chain of this
variant is a tree without siblings: take a rule for trees.

The name is a keyword of Python: ``import`` cannot name this module, ``drafters.load("pass")`` can.
"""

from __future__ import annotations

from typing import Any

from specjax.checks import whole
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _given
from specjax.drafters.self_speculation import _look_ahead, _look_ahead_text
from specjax.errors import UserError
from specjax.types import LM, Drafter

REFERENCE = "monea2023pass"

SHARED = HeadKeys
HEADS = 4


def make(target: LM, *, calls: int = 2, **shared: Any) -> Drafter:
    """Drafts with look-ahead embeddings.

    Args:
        target: the model to be accelerated; its parameters do not change.
        calls: passes of the target per round: 2, one that drafts and one that verifies, or 1.
        shared: the keys of ``HeadKeys``; ``heads`` is the number of embeddings, 4 for new ones. The
            default is a chain of full length, drawn from the probabilities ("iid").

    Raises:
        UserError: files without embeddings or of another target, a target that takes no
            embeddings, another number of calls, a tree that does not fit.
    """
    keys = HeadKeys(**shared)
    if whole("calls", calls, 1) > 2:
        raise UserError(f"calls is {calls}; a round has 2 passes of the target, or 1")
    if target.extended is None:
        raise UserError(
            f"pass has its own input embeddings, and {target.name} takes none; take a decoder of "
            "specjax.models"
        )
    given = _given.read("pass", target, keys)
    stored = None if given.params is None else given.params["look_ahead"].shape[:1]
    (heads,) = _given.sizes(stored, heads=(keys.heads, HEADS))
    setup = _look_ahead.Setup(target, given.ends, heads, calls)
    return _look_ahead.build(setup, keys, given, _look_ahead_text.training)
