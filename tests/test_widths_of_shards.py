"""Inside ``shard_map`` each shard chooses its own width, and its text is that of one device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import functools
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import PartitionSpec as P
    from specjax import accept, decode, drafters, rng, sampling, testing
    from specjax.types import ModelParams

    model = testing.tabular(6)
    params = ModelParams(testing.random_table(0, 6, 3.0), {})
    drafter, rule = drafters.make("prompt_lookup", model, gamma=5), accept.load("chain")
    # After the first text the lookup drafts, after the second it does not.
    packed, lengths = decode.pack_prompts([[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 0]])
    temperature = jnp.asarray([0.0, 1.0])

    def decoded(tokens, lengths, keys, temperature):
        settings = sampling.make_sampling(tokens.shape[0])
        state = decode.prefill(
            model, drafter, params, tokens, lengths, keys, max_len=32, limit=lengths + 20,
            sampling=settings.replace(temperature=temperature),
        )
        state, records = decode.generate(model, drafter, rule, params, state, max_steps=20)
        return state.tokens, state.length, records.emitted, records.verified

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, steps = P("batch"), P(None, "batch")
    sharded = jax.jit(jax.shard_map(
        decoded, mesh=mesh, in_specs=(rows, rows, rows, rows),
        out_specs=(rows, rows, steps, steps), check_vma=False,
    ))
    inputs = packed, lengths, rng.row_keys(3, 2), temperature
    tokens, length, emitted, verified = jax.device_get(sharded(*inputs))
    alone = [jax.device_get(decoded(*(x[i : i + 1] for x in inputs))) for i in range(2)]
    for row in range(2):
        np.testing.assert_array_equal(tokens[row], alone[row][0][0])
        np.testing.assert_array_equal(emitted[:, row], alone[row][2][:, 0])
        np.testing.assert_array_equal(verified[:, row], alone[row][3][:, 0])
    both = (emitted > 0).all(1)
    assert both.any() and (verified[both, 0] != verified[both, 1]).any()
    # One batch on one device has one width for both rows.
    together = jax.device_get(decoded(*inputs))
    np.testing.assert_array_equal(together[0], tokens)
    assert (together[3][both] == 6).all()
"""


@pytest.mark.slow
def test_each_shard_chooses_its_width():
    root = Path(__file__).parents[1]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = {"XLA_FLAGS": flags, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    subprocess.run(script, env=os.environ | environment, timeout=120, check=True)
