"""``check_draft`` names the row and the node of every mistake in a draft."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.errors import UserError
from specjax.types import Draft, Drafter, ModelParams

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


def _wrong_drafter(propose=None, **fields):
    """A drafter that proposes token 0 twice, with a mistake."""

    def signed(params, keys, context, state):
        tokens = jnp.zeros((len(context.length), 2), jnp.int32)
        draft = Draft(tokens, jnp.ones_like(tokens, bool))
        return propose(draft, state) if propose else (draft, state)

    return Drafter(**{"propose": signed, "nodes": 2, "name": "mine"} | fields)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            _wrong_drafter(nodes=3),
            "propose of mine returned tokens of shape (4, 2); with 3 nodes it must be (4, 3)",
        ),
        (
            _wrong_drafter(lambda draft, state: draft),
            "propose of mine returned Draft; it must be (Draft, state)",
        ),
        (
            _wrong_drafter(lambda draft, state: (state, draft)),
            "propose of mine returned (tuple, Draft); it must be (Draft, state)",
        ),
        (
            _wrong_drafter(lambda draft, s: (draft.replace(tokens=draft.tokens * 1.0), s)),
            "propose of mine returned tokens of dtype float32; it must be an integer",
        ),
        (
            _wrong_drafter(lambda draft, s: (draft.replace(valid=draft.tokens), s)),
            "propose of mine returned valid of dtype int32; it must be bool",
        ),
        (
            _wrong_drafter(lambda draft, s: (draft.replace(tokens=[[0, 0]]), s)),
            "propose of mine returned tokens of type list; it must be an array (4, 2)",
        ),
        (
            _wrong_drafter(lambda draft, s: (draft.replace(probs=jnp.ones((4, 2))), s)),
            "propose of mine returned probs of shape (4, 2); with 2 nodes it must be (4, 2, 3)",
        ),
        (_wrong_drafter(depth=1), "propose of mine returned a draft of depth 2; it declares"),
        (_wrong_drafter(nodes=2.0), "nodes of mine is 2.0; it must be a whole number >= 0"),
        (
            _wrong_drafter(init=lambda params, context: ()),
            "init of mine takes (params, context); it is called with (params, context, target_out, "
            "slots)",
        ),
        (_wrong_drafter(init=()), "init of mine is (); it must be a function (params,"),
        (
            _wrong_drafter(
                init=lambda p, c, o, s: c.length, update=lambda p, state, d, v, o: state[:1]
            ),
            "update of mine returned a state with int32[1] at state, and init one with "
            "int32[4]; every round must keep shapes and dtypes",
        ),
        (
            _wrong_drafter(update=lambda p, s, d, v, o: None),
            "update of mine returned a state of another structure (NoneType) than init (tuple)",
        ),
        (
            _wrong_drafter(lambda draft, state: (draft, state + 0.5), init=lambda p, c, o, s: 0),
            "propose of mine returned a state with float32[] at state, and init one with int32[]",
        ),
    ],
)
def test_a_mistake_of_form_is_one_line(drafter, message):
    """The first thing that is wrong, and the only finding."""
    target, params = testing.tabular(3), ModelParams(testing.random_table(0, 3))
    report = testing.check_drafter(drafter, target, params, progress=False)
    assert report.failed and len(report.findings) == 1
    assert report.findings[0].detail.startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": object()}, "drafter is of type object; it must be of type Drafter"),
        ({"params": {}}, "params is of type dict; it must be of type ModelParams"),
        ({"rules": ["match"]}, "accept is 'match'; it must be of type Accept: accept.load"),
    ],
)
def test_objects_of_another_type_are_refused(changes, message):
    drafter, params = _wrong_drafter(), ModelParams(testing.random_table(0, 3))
    given = {"drafter": drafter, "target": testing.tabular(3), "params": params} | changes
    with pytest.raises(UserError, match=re.escape(message)):
        testing.check_drafter(**given, progress=False)
