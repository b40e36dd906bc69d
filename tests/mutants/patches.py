"""Mistakes in the code of heads, each made by replacing one function of a module.

All keep the output law, and only lower acceptance: no check of texts can see them. Each is caught
by a comparison with a reference in plain NumPy, or with a formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from internals import heads_along_text as _along_text
from internals import heads_depth_loss as _depth_loss
from internals import heads_vocabulary as _vocabulary


class Patched(NamedTuple):
    """One mistake; ``change(patch)`` makes it with a ``pytest.MonkeyPatch``."""

    name: str
    mistake: str
    caught_by: str  # the case of the test that catches it
    change: Callable[[Any], None]


def instead(owner: Any, name: str, wrong: Callable) -> Callable[[Any], None]:
    """A change that calls ``wrong(right, *args)`` in the place of ``owner.name``."""

    def change(patch: Any) -> None:
        right = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: wrong(right, *args, **more))

    return change


def _decay_in_reverse(right, term, carry, depths, decay, *rest, **more):
    def changed(carry, depth):
        value, sizes, carry = term(carry, depth)
        return decay ** (depths - 1 - 2 * depth) * value, sizes, carry

    return right(changed, carry, depths, decay, *rest, **more)


def _labels_of_another_document(right, batch, *rest):
    return right(batch.replace(segments=None), *rest)


def _teacher_one_later(right, drafts, depth):
    return right(drafts._replace(ahead=drafts.ahead + 1), depth)


def _logits_of_the_next_draft_token(right, ids, logits, vocab_size):
    return right(ids, logits if ids is None else jnp.roll(logits, 1, -1), vocab_size)


# Of all heads that are trained at several depths; the case is that of the family.
DECAY_IN_REVERSE = (
    "decay_in_reverse",
    "the weight of a depth is that of the depth as far from the last one",
    instead(_depth_loss, "fold", _decay_in_reverse),
)
LABELS_OF_ANOTHER_DOCUMENT = (
    "labels_of_another_document",
    "drafts at the end of a document are trained on the tokens of the next one",
    instead(_along_text, "label", _labels_of_another_document),
)
TEACHER_ONE_LATER = (
    "teacher_one_later",
    "the teacher's probabilities are those of the token after the label",
    instead(_along_text.Drafts, "teachers", _teacher_one_later),
)
DRAFT_VOCABULARY = (
    "logits_of_the_next_draft_token",
    "every token of the draft vocabulary has the logit of the one before",
    instead(_vocabulary, "spread", _logits_of_the_next_draft_token),
)


def of_family(entry: tuple, case: str) -> Patched:
    """One of the mistakes above, caught by a case of a family."""
    name, mistake, change = entry
    return Patched(name, mistake, case, change)
