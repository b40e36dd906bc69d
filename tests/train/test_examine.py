"""Block efficiency foreseen from text: closed forms, and what decoding the same prompts really takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.testing import cases
from specjax.topology import search
from specjax.train import examine
from specjax.types import ModelParams

fast = pytest.mark.fast
PROMPTS = [[0], [1, 2, 3], [4, 4], [2, 1, 0, 3]] * 32


@fast
@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.6, 1), (0.8, 4), (1.0, 4)])
def test_constant_acceptance_has_a_closed_form(alpha, gamma):
    new = 4000
    kept = np.full((1, new + 1, gamma), alpha)
    seen = examine.forecast(kept, [1], [1 + new])
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert seen.tau == pytest.approx(expected, rel=2e-3)
    assert seen.alpha == pytest.approx([alpha] * (1 if alpha == 0 else gamma))


@fast
def test_rounds_are_counted_as_they_fall():
    """Every outcome of a small text, walked through one by one."""
    rng = np.random.default_rng(0)
    kept, start, length = rng.random((1, 6, 2)), 2, 6

    def rounds(pending):  # expected rounds from here to the end
        left = length - 1 - pending
        if left <= 0:
            return 0.0
        total, reach = 1.0, 1.0
        for depth in range(min(2, left)):
            total += reach * (1 - kept[0, pending, depth]) * rounds(pending + depth + 1)
            reach *= kept[0, pending, depth]
        return total + reach * rounds(pending + min(2, left) + 1)

    seen = examine.forecast(kept, [start], [length])
    assert seen.tau == pytest.approx((length - start) / rounds(start - 1))


def _look(drafter, draft, **keys):
    settings = {"new_tokens": 24, "temperatures": (0.0, 1.0)} | keys
    return examine.examiner(testing.tabular(5), drafter, cases.table(0, 5), PROMPTS, **settings)(
        draft
    )


@pytest.mark.parametrize("eos", [(), (3,)])
def test_a_draft_model_is_foreseen(eos):
    draft = cases.table(0, 5) + 0.7 * cases.table(1, 5)
    drafter = drafters.make(
        "draft_model", testing.tabular(5), model=testing.tabular(5, "draft"), params=draft, gamma=3
    )
    seen = _look(drafter, draft, eos_id=eos)
    assert seen["tau_t0"] == seen["decoded_tau_t0"] > 1.5
    assert seen["tau_t1"] == pytest.approx(seen["decoded_tau_t1"], rel=0.05)
    assert 1.2 < seen["tau_t1"] < 4 and 0 < seen["alpha_t1_depth3"] < 1


def test_a_forecast_of_other_text_is_another():
    """The mutant: acceptance read one place too late. It must not agree with decoding."""
    draft = cases.table(0, 5) + 0.7 * cases.table(1, 5)
    drafter = drafters.make(
        "draft_model", testing.tabular(5), model=testing.tabular(5, "draft"), params=draft, gamma=3
    )
    late = drafter._replace(
        foresee=lambda *args: jnp.roll(drafter.training.foresee(*args), 1, axis=1)
    )
    assert _look(late, draft)["tau_t0"] != _look(drafter, draft)["decoded_tau_t0"]


def test_a_target_that_moves():
    draft = cases.table(1, 5)
    drafter = drafters.make(
        "draft_model", testing.tabular(5), model=testing.tabular(5, "draft"), params=draft, gamma=2
    )
    look = examine.examiner(
        testing.tabular(5),
        drafter,
        None,
        PROMPTS[:8],
        new_tokens=8,
        temperatures=(0.0,),
        moving=True,
    )
    far, same = (look({"target": target, "draft": draft}) for target in (cases.table(0, 5), draft))
    assert same["tau_t0"] == pytest.approx(8 / 3) and far["tau_t0"] < 2


def test_accuracies_choose_the_tree():
    draft = cases.table(0, 5) + 0.7 * cases.table(1, 5)
    drafter = drafters.make(
        "draft_model", testing.tabular(5), model=testing.tabular(5, "draft"), params=draft, gamma=3
    )
    pair, starts = ModelParams(cases.table(0, 5), draft), [len(p) for p in PROMPTS]
    texts = [examine.write(testing.tabular(5), pair, PROMPTS, 24, t) for t in (0.0, 1.0)]
    table = np.array(examine.accuracy(drafter, pair, texts, starts, 4))
    assert table.shape == (3, 4) and (table.sum(1) <= 1 + 1e-9).all()
    # A draft model reads the text itself: its depths differ by chance, and by the last tokens, only.
    assert np.abs(table - table[0]).max() < 0.1 and table[0, 0] > table[0, 1]
    whole = np.array(examine.accuracy(drafter, pair, texts, starts, 5))
    assert whole.sum(1) == pytest.approx([1, 1, 1])


@fast
def test_greedy_search_is_optimal_where_acceptance_falls():
    rng = np.random.default_rng(0)
    for _ in range(30):
        table = np.sort(rng.dirichlet(np.ones(5), size=rng.integers(1, 5))[:, :4], axis=1)[:, ::-1]
        nodes, depth = int(rng.integers(1, 12)), int(rng.integers(2, 5))
        tree, tokens = search.greedy(table, nodes, depth)
        assert tree.nodes == nodes and tree.depth <= depth
        assert tokens == pytest.approx(search.optimal(table, nodes, depth)[1])
        assert tokens == pytest.approx(search.expected_tokens(tree, table))
    rising = [
        [0.0, 0.9]
    ]  # the better child is the second: greedy takes the first one first, and so does optimal
    assert search.greedy(rising, 2, 1)[1] == pytest.approx(1.9)
    with pytest.raises(
        UserError, match="no tree of 9 nodes has depth 2 and branching 2; ask for at most 6"
    ):
        search.greedy([[0.5, 0.3]], 9, 2)
