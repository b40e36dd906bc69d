"""Controllers: how they are named, and what the threshold answers."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import control
from specjax.control import Ahead
from specjax.errors import UserError

pytestmark = pytest.mark.fast


def test_names_and_numbers():
    assert "threshold" in control.names()
    for text in ("threshold:0.4", "threshold:least=0.4", "threshold: least = 0.4"):
        parsed = control.parse(text)
        assert parsed is not None and parsed.name == text
    assert control.parse("") is None
    own = control.load("threshold", least=0.4)
    assert control.parse(own) is own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threshold:x", "control is 'threshold:x'; 'x' is not a number, as in 'threshold:0.4'"),
        ("threshold:0.4,0.5", "threshold takes 1 values (least)"),
        ("threshold:most=0.4", "controller threshold does not take the key 'most'; it takes least"),
        ("threshold:1.5", "the threshold's least is 1.5; it must be a number in [0, 1]"),
        ("threshold:nan", "the threshold's least is nan; it must be a number in [0, 1]"),
        ("other", "unknown controller 'other'; it must be one of"),
        (0.4, "control is 0.4; give a controller, as in 'threshold:0.4'"),
    ],
)
def test_errors(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        control.parse(text)


def test_threshold():
    """A row goes on if the highest probability at one of its places is at least the threshold."""
    probs = np.array(
        [
            [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]],
            [[0.4, 0.4, 0.2], [0.4, 0.4, 0.2]],
            [[0.4, 0.4, 0.2], [0.9, 0.1, 0.0]],
            [[0.4, 0.4, 0.2], [0.9, 0.1, 0.0]],
        ]
    )
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(probs) + 100, jnp.float32)
    valid = jnp.asarray([[True, True], [True, True], [True, True], [True, False]])
    ahead = Ahead(0, logits, jnp.zeros((4, 2)), valid, jnp.zeros((4, 2)))
    for least, expected in (
        (0.45, [True, False, True, False]),
        (0.0, [True, True, True, True]),
        (1.0, [False, False, False, False]),
    ):
        answer, state = control.load("threshold", least=least).ask((), ahead)
        assert answer.tolist() == expected and state == ()


def test_logits_that_are_not_finite_stop_the_row():
    logits = jnp.asarray([[[jnp.nan, 0.0]], [[jnp.inf, 0.0]], [[0.0, -jnp.inf]]])
    zero = jnp.zeros((3, 1))
    ahead = Ahead(0, logits, zero, jnp.ones((3, 1), bool), zero)
    answer, _ = control.load("threshold", least=0.5).ask((), ahead)
    assert answer.tolist() == [False, False, True]


@pytest.mark.fast
def test_paths_of_profiles():
    """An equals sign is part of a path; a comma would end it."""
    text = control.with_profile("goodput:slack=1", "/tmp/goodput slack=1.json")
    assert control.read(text) == ("goodput", {"slack": 1, "profile": "/tmp/goodput slack=1.json"})
    with pytest.raises(UserError, match="cannot name a path with a comma; choose another"):
        control.with_profile("goodput", "/tmp/a,b/goodput.json")
    text = control.with_profile("specjax.control.goodput:make", "/tmp/goodput.json")
    assert control.read(text)[1] == {"profile": "/tmp/goodput.json"}
