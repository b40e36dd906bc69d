"""Text that models write: the target continues prompts, a draft continues rows of its training.

The target writes with speculative decoding, one batch at a time.

The text is to be the target's, so the pair of drafter and rule must be lossless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import decode, rng, sampling, sharding
from specjax.bench import methods, metrics, passes
from specjax.bench.methods import MethodChoice
from specjax.drafters import none
from specjax.models import hf
from specjax.train.update import Rewrite
from specjax.types import LM, Batch, ModelParams


class Writer(NamedTuple):
    """The target with a drafter and a rule."""

    target: LM
    method: passes.Method
    eos_id: tuple[int, ...]
    mesh: Mesh | None = None  # None: one device


def make_writer(
    target: hf.Loaded, keys: Mapping, rule: str = "chain", seed: int = 0, mesh: Mesh | None = None
) -> Writer:
    """The target with the drafter of these keys and a rule; "" is the recommended rule.

    On a mesh the axis "data" divides the rows, and "tensor" the matrices. Raises UserError if the
    drafter or the rule does not exist, they do not fit together, or the mesh cannot divide the
    target.
    """
    choice = MethodChoice(keys, rule, {})
    # No temperature is known here: a drafter for temperature 0 alone is not refused.
    method = methods.build(target.lm, target.params, choice, label="", seed=seed, temperatures=())
    if mesh is not None:
        method = method._replace(params=sharding.place(mesh, target.lm, method.params))
    return Writer(target.lm, method, target.config.eos_token_id, mesh)


def row_keys(seed: int, numbers: Sequence[int], index: int = 0) -> jax.Array:
    """key[B], each from the seed, the number of a prompt, and ``index``, which is that of the
    sampling setting."""
    return jax.vmap(lambda key: jax.random.fold_in(key, index))(rng.row_keys(seed, numbers))


def write(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    settings: Mapping[str, float],
    new_tokens: int,
    batch_size: int,
    width: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """(new tokens, rounds) of each prompt.

    Args:
        writer: see ``make_writer``.
        prompts: token ids, at most ``batch_size`` prompts. One ``width`` and one ``batch_size``
            compile once.
        keys: key[n], one per prompt.
        settings: of ``sampling.make_sampling``.
        new_tokens: the most that continue a prompt.
        batch_size: rows of the batch.
        width: of the buffer for prompts; None: the longest one.

    Raises UserError for prompts that do not fit the model; NonFiniteLogits.
    """
    # Repeat the last prompt to fill the batch; the limit below finishes these rows at once.
    rows = np.minimum(np.arange(batch_size), len(prompts) - 1)
    real = np.arange(batch_size) < len(prompts)
    packed, lengths = decode.pack_prompts([prompts[row] for row in rows], width)
    loops = sharding.loops(writer.mesh)
    target, drafter, rule, params = writer.method.pair(writer.target)
    state = loops.prefill(
        *(target, drafter, params, packed, lengths, keys[rows]),
        max_len=packed.shape[1] + new_tokens,
        limit=lengths + jnp.where(real, new_tokens, 0),
        sampling=sampling.make_sampling(batch_size, **settings),
    )
    state, records = loops.generate(
        target, drafter, rule, params, state, max_steps=new_tokens, eos_id=writer.eos_id
    )
    state, records = sharding.on_host(state), sharding.fetch(records)
    outputs = decode.outputs(state, np.asarray(lengths).tolist())[: len(prompts)]
    # As in ``metrics``: a round that emitted or proposed something was run.
    each = np.eye(batch_size, dtype=bool)[: len(prompts)]
    rounds = [metrics.count(records, row, 1).rounds for row in each]
    return outputs, rounds


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

    On-policy distillation: DistillSpec (2310.08461), algorithm 1, and GKD (2306.13649).
    """

    def rewrite(params, target_params, batch, key):
        rows, width = batch.tokens.shape
        pick, noise = jax.random.split(key)
        chosen = jax.random.bernoulli(pick, share, (rows,))
        text, start, ends = batch.tokens[:, :prompt], jnp.full((rows,), prompt, jnp.int32), None
        if model.encoder is not None:
            # A row of padding has no source.
            chosen &= batch.labelled.any(-1)
            text, ends = batch.tokens, eos_id
            start = jnp.argmax(batch.tokens == model.encoder.start, -1).astype(jnp.int32) + 1
        elif batch.segments is not None:
            # Padding cannot be continued.
            chosen &= (batch.segments[:, :prompt] > 0).all(-1)
        state = decode.prefill(
            *(model, none.make(model), ModelParams(params), text, start),
            jax.vmap(lambda row: jax.random.fold_in(noise, row))(jnp.arange(rows)),
            max_len=width,
            sampling=sampling.make_sampling(rows, temperature),
        )
        most = width if model.encoder is not None else width - prompt
        state = decode.autoregressive(
            model, ModelParams(params), state, max_steps=most, eos_id=ends
        )
        place, chosen = jnp.arange(width), chosen[:, None]
        inside = place < state.length[:, None]
        old = jnp.ones(batch.tokens.shape, bool) if batch.labelled is None else batch.labelled
        segments = None if batch.segments is None else jnp.where(chosen, 1, batch.segments)
        return Batch(
            jnp.where(chosen, jnp.where(inside, state.tokens[:, :width], 0), batch.tokens),
            jnp.where(chosen, inside & (place >= start[:, None]), old),
            segments,
        )

    return rewrite
