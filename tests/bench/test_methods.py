"""Methods that are refused before anything is compiled."""

from __future__ import annotations

import cases
import pytest

from specjax import testing
from specjax.bench import methods
from specjax.errors import UserError

pytestmark = pytest.mark.fast


def build(warm: bool, **keys):
    choice = methods.MethodChoice({"name": "trie", "nodes": 4} | keys, "deterministic", {}, warm)
    return methods.build(
        testing.tabular(3), cases.table(0), choice, label="", seed=0, temperatures=(0.0,)
    )


def test_memory_is_for_warm_drafters():
    assert build(True, memory=64).warm and not build(False).warm
    with pytest.raises(UserError, match="memory is 64: it limits what a warm drafter learns"):
        build(False, memory=64)
