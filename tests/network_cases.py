"""Draft networks of every shape with random parameters, on a small random decoder."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from internals import heads_along_text as _along_text
from internals import heads_network
from internals import heads_network as _network
from internals import heads_rollout as _rollout

from specjax import testing
from specjax.drafters import files
from specjax.models.transformer_config import TransformerConfig
from specjax.types import ModelParams

VOCAB, WIDTH, STEPS = 32, 16, 3
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (2, 14))
# Tokens of a draft vocabulary.
IDS = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31], np.int32)
# Name -> keys of ``network``: every switch of both networks, one and two layers, grouped heads.
SHAPES = {
    "eagle": {},
    "eagle, 2 layers, bias": {"layers": 2, "fc_bias": True},
    "eagle3": {"taps": (0, 1, 2)},
    "eagle3, 2 layers": {"taps": (0, 1, 2), "layers": 2, "ids": IDS},
    "eagle3.1": {"taps": (0, 2), "fc_norm": True, "norm_output": True},
    "eagle3, norms": {"taps": (1,), "input_norm": True, "norm_before_residual": True, "qk": True},
}


@functools.cache
def target():
    """A decoder of three layers, and its parameters."""
    return testing.tiny(layers=3, width=WIDTH, vocab_size=VOCAB)


def network(*, taps=(), layers=1, ids=None, qk=False, shift=1, **switches) -> _network.Network:
    """A draft network for ``target``."""
    config = TransformerConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=256,
        qk_norm=qk,
    )
    vocab = (VOCAB if ids is None else len(ids)) if taps else None
    shape = heads_network.Shape(config, WIDTH, taps, vocab, shift=shift, **switches)
    ends = files.ends("eagle", target()[0])
    return _network.Network("eagle3" if taps else "eagle", shape, ends, ids=ids)


def random_params(made: _network.Network, scale: float = 0.2, seed: int = 0) -> ModelParams:
    """Normal parameters of this scale; norms too, around 1."""
    params = target()[1]
    like = jax.eval_shape(made.start, params, jax.random.key(0))
    draw = np.random.default_rng(seed)

    def one(path, x):
        values = scale * draw.normal(size=x.shape)
        return jnp.asarray(values + (path[-1].key == "scale"), x.dtype)

    return ModelParams(params, jax.tree.map_with_path(one, like))


def tapped(network):
    """The model of ``target`` with the taps that the network reads."""
    model = target()[0]
    return model.with_taps(network.shape.taps) if network.shape.taps else model


def logits_along(network, params, batch):
    """f[B,T,STEPS,V_d] of the columns of a text."""
    model = tapped(network)

    @jax.jit
    def run(params):
        text = _rollout.text(batch)
        features = network.read(params, _along_text.output(model, params.target, batch))
        before, logits = (), []
        for j in range(STEPS):
            fed, own = _rollout.step(network, text, j, params, features, before)
            features, before = fed.feature, (*before, own)
            logits.append(network.logits(params, fed.hidden))
        return jnp.stack(logits, 2)

    return np.asarray(run(params))
