"""How well every layer of a model drafts for the whole model, from one pass over a text.

The output of each layer goes through the last norm and the head (the "logit lens", nostalgebraist
2020). That is what ``early_exit`` without an adapter drafts with, for every exit layer at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.errors import UserError
from specjax.types import LM, Params


def acceptance_by_layer(
    target: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
) -> np.ndarray:
    """f64[L,tokens]: the acceptance probability of a draft by the first 1, ..., L layers.

    It is sum_x min(target(x), exit(x)) at every output token, in order, given the text before it.
    At temperature 0 it is 1 where the exit prefers the target's token, else 0.

    Args:
        target: a decoder of ``specjax.models``.
        params: its parameters.
        prompts, outputs: token ids, row by row; the outputs must be the target's own, with these
            settings.
        settings: arguments of ``sampling.make_sampling``, without penalties, biases and bans.

    Raises:
        UserError: a model without layers or last norm, settings that depend on the text.
    """
    if target.layers is None or target.last_norm is None or target.unembed is None:
        raise UserError(
            f"{target.name} does not give its layers and its last norm; take a decoder of "
            "specjax.models"
        )
    how = sampling.make_sampling(1, **settings)
    if how.maps is not None:
        raise UserError("penalties, biases and bans depend on the text; measure exits without them")
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    room, columns = max(map(len, outputs)), []
    for prompt, output in zip(prompts, outputs, strict=True):
        text = np.zeros((1, width), np.int32)
        text[0, : len(prompt) + len(output)] = [*prompt, *output]
        # The token at t + 1 is predicted at t.
        places = np.minimum(len(prompt) - 1 + np.arange(room), width - 1)
        values = _of_text(target, params, jnp.asarray(text), jnp.asarray(places), how)
        columns.append(np.asarray(values, np.float64)[:, : len(output)])
    return np.concatenate(columns, 1)


@functools.partial(jax.jit, static_argnums=0)
def _of_text(
    target: LM, params: Params, text: jax.Array, places: jax.Array, how: sampling.Sampling
) -> jax.Array:
    """f[L,N]: the overlap of every exit with the target at ``places`` i32[N] of a text i32[1,T]."""
    assert target.layers and target.unembed is not None and target.last_norm is not None
    unembed, last_norm = target.unembed, target.last_norm
    tapped = target.with_taps(tuple(range(target.layers)))
    out, _ = tapped.apply(params, text, target.init_cache(1, 0))
    probs = sampling.to_probs(unembed(params, out.hidden[:, places]), how)
    taps = jnp.stack([tap[:, places] for tap in out.taps])

    # The logits of one layer at a time.
    def one(x: jax.Array) -> jax.Array:
        exit_probs = sampling.to_probs(unembed(params, last_norm(params, x)), how)
        return jnp.minimum(probs, exit_probs).sum(-1)[0]

    return jax.lax.map(one, taps)
