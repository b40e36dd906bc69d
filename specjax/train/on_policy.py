"""On-policy text: a draft model continues rows of the batch that it is trained on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.drafters import none
from specjax.errors import UserError
from specjax.train.programs import Rewrite
from specjax.types import LM, Batch, ModelParams


def rewriter(model: LM, share: float, prompt: int, temperature: float) -> Rewrite:
    """A function (params, target_params, Batch, key) -> Batch, in which ``model`` continues rows.

    About ``share`` of the rows are chosen. Of a chosen row the first ``prompt`` tokens stay, and
    ``model``, with its current parameters, writes the others at ``temperature``. Only the
    written tokens are labels. An end-of-sequence token does not stop the writing: it fills the row,
    as in cropped text. A packed row becomes one document.

    On-policy distillation: DistillSpec (2310.08461), algorithm 1, and GKD (2306.13649). The
    returned function raises UserError if ``prompt`` is not in 1..T.
    """
    drafter = none.make(model)

    def rewrite(params, target_params, batch, key):
        del target_params
        rows, width = batch.tokens.shape
        if not 0 < prompt < width:
            raise UserError(
                f"config.data.on_policy_prompt is {prompt}; it must be in 1..config.train.length"
            )
        pick, noise = jax.random.split(key)
        chosen = jax.random.bernoulli(pick, share, (rows,))
        if batch.segments is not None:
            # Padding cannot be continued.
            chosen &= (batch.segments[:, :prompt] > 0).all(-1)
        state = decode.prefill(
            model,
            drafter,
            ModelParams(params),
            batch.tokens[:, :prompt],
            jnp.full((rows,), prompt, jnp.int32),
            jax.vmap(lambda row: jax.random.fold_in(noise, row))(jnp.arange(rows)),
            max_len=width,
            sampling=sampling.make_sampling(rows, temperature),
        )
        state = decode.autoregressive(model, ModelParams(params), state, max_steps=width - prompt)
        return _replaced(batch, state.tokens[:, :width], chosen, prompt)

    return rewrite


def _replaced(batch: Batch, written: jax.Array, chosen: jax.Array, prompt: int) -> Batch:
    """``batch`` with the rows ``chosen`` bool[B] taken from ``written`` i32[B,T+1] (-1 = none)."""
    rows = chosen[:, None]
    tokens = jnp.where(rows, jnp.maximum(written, 0), batch.tokens)
    old = jnp.ones(tokens.shape, bool) if batch.labelled is None else batch.labelled
    labelled = jnp.where(rows, jnp.arange(tokens.shape[1]) >= prompt, old)
    segments = batch.segments
    if segments is not None:
        segments = jnp.where(rows, 1, segments)
    return Batch(tokens, labelled, segments)
