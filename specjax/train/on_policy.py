"""On-policy text: a draft model continues rows of the batch that it is trained on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.drafters import none
from specjax.errors import UserError
from specjax.train.programs import Rewrite
from specjax.types import LM, Batch, ModelParams


def rewriter(
    model: LM, share: float, prompt: int, temperature: float, eos_id: tuple[int, ...] = ()
) -> Rewrite:
    """A function (params, target_params, Batch, key) -> Batch, in which ``model`` continues rows.

    About ``share`` of the rows are chosen. Of a chosen row the first ``prompt`` tokens stay, and
    ``model``, with its current parameters, writes the others at ``temperature``. Only the
    written tokens are labels. An end-of-sequence token does not stop the writing: it fills the row,
    as in cropped text. A packed row becomes one document.

    Of a row of an encoder-decoder model the source and its start token stay, whatever ``prompt``
    is, and one of ``eos_id`` ends the writing.

    On-policy distillation: DistillSpec (2310.08461), algorithm 1, and GKD (2306.13649). The
    returned function raises UserError if ``prompt`` is not in 1..T.
    """
    drafter = none.make(model)

    def rewrite(params, target_params, batch, key):
        del target_params
        rows, width = batch.tokens.shape
        if model.encoder is not None:
            return _outputs(model, share, temperature, eos_id, params, batch, key)
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


def _outputs(
    model: LM,
    share: float,
    temperature: float,
    eos_id: tuple[int, ...],
    params: Any,
    batch: Batch,
    key: jax.Array,
) -> Batch:
    """``rewriter`` of sources and their outputs."""
    assert model.encoder is not None and batch.labelled is not None
    rows, width = batch.tokens.shape
    pick, noise = jax.random.split(key)
    # A row of padding has no source.
    chosen = jax.random.bernoulli(pick, share, (rows,)) & batch.labelled.any(-1)
    start = jnp.argmax(batch.tokens == model.encoder.start, -1).astype(jnp.int32) + 1
    state = decode.prefill(
        model,
        none.make(model),
        ModelParams(params),
        batch.tokens,
        start,
        jax.vmap(lambda row: jax.random.fold_in(noise, row))(jnp.arange(rows)),
        max_len=width,
        sampling=sampling.make_sampling(rows, temperature),
    )
    own = {"max_steps": width, "eos_id": eos_id}
    state = decode.autoregressive(model, ModelParams(params), state, **own)
    place = jnp.arange(width)
    written = (place >= start[:, None]) & (place < state.length[:, None])
    tokens = jnp.where(place < state.length[:, None], state.tokens[:, :width], 0)
    return Batch(
        jnp.where(chosen[:, None], tokens, batch.tokens),
        jnp.where(chosen[:, None], written, batch.labelled),
    )


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
