"""``check_draft`` names the row and the node of every mistake in a draft."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.errors import UserError
from specjax.types import Draft

pytestmark = pytest.mark.fast
GOOD = {
    "tokens": [[0, 1, 2]],
    "valid": [[True] * 3],
    "parents": [[-1, 0, 0]],
    "probs": [[[0.5, 0.3, 0.2]] * 3],
}
OTHER_PROBS = [[[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]]


def draft_of(change):
    return Draft(**{name: jnp.asarray(value) for name, value in (GOOD | change).items()})


def test_a_correct_draft_passes():
    testing.check_draft(draft_of({}), 3, "independent")


@pytest.mark.parametrize(
    ("siblings", "change", "message"),
    [
        (
            "independent",
            {"parents": [[-1, 2, 0]]},
            "row 0, node 1 has a parent that does not come before it",
        ),
        ("independent", {"parents": [[-1, -2, 0]]}, "row 0, node 1 has a parent below -1"),
        ("independent", {"tokens": [[0, 3, 1]]}, "row 0, node 1 has a token outside 0..2"),
        (
            "independent",
            {"probs": [[[0.5, 0.3, 0.1]] * 3]},
            "row 0, node 0 has probs that do not sum to 1",
        ),
        (
            "independent",
            {"probs": [[[1.2, -0.2, 0.0]] * 3]},
            "row 0, node 0 has a negative probability",
        ),
        (
            "independent",
            {"probs": [[[np.nan, 0.5, 0.5]] * 3]},
            "row 0, node 0 has probs that are not finite",
        ),
        (
            "independent",
            {"probs": [[[0.0, 0.5, 0.5]] * 3]},
            "row 0, node 0 has a token of probability 0 in its own probs",
        ),
        (
            "without_replacement",
            {"parents": [[-1, -1, -1]]},
            "node 1 has a positive probability for the token of an earlier sibling",
        ),
        ("deterministic", {}, "a deterministic draft has no probs"),
        ("chain", {}, "parents must be None for a chain"),
        (
            "iid",
            {"parents": [[-1, -1, 0]], "probs": OTHER_PROBS},
            "node 1 has other probs than its sibling; i.i.d. siblings share one distribution",
        ),
    ],
)
def test_row_and_node_are_named(siblings, change, message):
    with pytest.raises(UserError) as error:
        testing.check_draft(draft_of(change), 3, siblings)
    assert message in str(error.value)


def test_more_siblings_than_tokens():
    draft = Draft(
        jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool), parents=jnp.full((1, 4), -1)
    )
    with pytest.raises(UserError, match="one of 4 siblings; the vocabulary has 3 tokens"):
        testing.check_draft(draft, 3, "deterministic")
