"""``expand`` runs every history once, with its probability."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing
from specjax.testing import exact

pytestmark = pytest.mark.fast


def expand(program, batch=1):
    with jax.enable_x64(True):
        return exact.expand(program, {"x": np.arange(batch)}, batch)


def test_draws_and_coins():
    """A draw, a draw without replacement and a coin: every outcome once, with its probability."""

    def program(script, rows):
        first = script.draw(0, jnp.asarray([[1.0, 0.0, 3.0]]).repeat(script.batch, 0))
        pair, real = script.draw_distinct(
            0, jnp.asarray([[0.5, 0.25, 0.25]]).repeat(script.batch, 0), 2, 7
        )
        coin = script.coins(1).flip(jnp.full((script.batch, 1), 0.2), jnp.ones((script.batch, 1)))
        return first, pair, real, coin

    result = expand(program)
    first, pair, real, coin = (np.asarray(x) for x in result.value)
    assert len(result.chance) == 2 * 6 * 2 and result.chance.sum() == pytest.approx(1, abs=1e-15)
    assert real.all() and (pair[:, 0] != pair[:, 1]).all()
    assert result.chance[first == 2].sum() == pytest.approx(0.75, abs=1e-15)
    assert result.chance[coin[:, 0]].sum() == pytest.approx(0.2, abs=1e-15)
    second = result.chance[(pair[:, 0] == 0) & (pair[:, 1] == 2)].sum()
    assert second == pytest.approx(0.5 * 0.5, abs=1e-15)


def dependent_draws(script, rows):
    """Five draws; the number of outcomes of each depends on the draw before it."""
    draws = [jnp.asarray(rows["x"]) % 3]
    for index in range(5):
        weights = jnp.asarray([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
        draws.append(script.draw(0, weights[draws[-1]], index))
    return jnp.stack(draws, 1)


@pytest.mark.parametrize("rows", [1, 2, 7, 4096])
def test_every_history_once(rows, monkeypatch):
    """The histories do not depend on the number of rows in a run."""
    monkeypatch.setattr(exact, "ROWS", rows)
    result = expand(dependent_draws, batch=5)
    history = np.concatenate([result.source[:, None], result.value], 1)
    assert len(np.unique(history, axis=0)) == len(history)
    chance = np.array([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    expected = np.prod(chance[history[:, 1:-1], history[:, 2:]], 1)
    np.testing.assert_allclose(result.chance, expected, rtol=1e-14)
    np.testing.assert_allclose(np.bincount(result.source, result.chance), np.ones(5), rtol=1e-14)


def test_too_many_histories(monkeypatch):
    monkeypatch.setattr(exact, "LARGEST", 20)
    with pytest.raises(testing.TooLarge, match="more than 20 histories"):
        expand(dependent_draws, batch=5)


def test_rows_that_depend_on_each_other_are_refused(monkeypatch):
    """A pending history cannot be repeated if its outcomes depend on its place in the batch."""
    monkeypatch.setattr(exact, "ROWS", 2)

    def program(script, rows):
        weights = jnp.asarray([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
        return script.draw(0, weights)

    with pytest.raises(testing.NotEnumerable, match="depends on other rows"):
        expand(program)
