"""``Drafter.update``: a row with verdict count 0 keeps its state, whatever the target computed.

The text of a finished row cannot change, so no check of texts can see it.
"""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, rng, step
from specjax.testing import loop
from specjax.types import Verdict

# Its state is written from the target's output.
DEFAULT = ("early_exit layer",)
PROMPTS = ([0, 1, 1, 0, 1], [1, 0], [1, 1, 0, 1, 0, 0])


@pytest.mark.parametrize("name", by_default(cases.NAMES, DEFAULT))
def test_a_row_without_tokens_keeps_its_state(name):
    """In the second round, in every row and beside rows with tokens."""
    _, target, drafter, params = cases.case(name)
    state = loop.begin(target, drafter, params, PROMPTS, 12, 0)
    rule = accept.load(accept.default_rule(drafter))
    state, _ = jax.jit(lambda state: step.speculative_step(target, drafter, rule, params, state))(
        state
    )

    @jax.jit
    def updated(state, counts):
        keys = rng.RowKeys(state.keys, state.round, state.length, nodes=drafter.nodes)
        draft, proposed = step.propose(target, drafter, params, state, keys)
        out = step.score(target, drafter, params, state.replace(draft=proposed), draft).out
        some, most = counts[:, None] > 0, drafter.longest
        tokens = jnp.where(some & (jnp.arange(most + 1) == 0), 1, -1)
        verdict = Verdict(tokens, counts, jnp.full((len(counts), most), -1))
        return proposed, drafter.update(params, proposed, draft, verdict, out)

    for counts in ([0, 0, 0], [1, 0, 1]):
        before, after = updated(state, jnp.asarray(counts))
        for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            if np.shape(old)[:1] == (len(counts),):
                np.testing.assert_array_equal(np.asarray(old)[1], np.asarray(new)[1])
