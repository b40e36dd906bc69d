"""A decoder compiles to the program of its switches: those that are off leave no operation."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, testing, tree
from specjax.models import lm
from specjax.models.families import FAMILIES
from specjax.models.transformer_config import Experts, Recurrent
from specjax.step import speculative_step
from specjax.types import ModelParams

LLAMA = testing.tiny_config()
LAYERS, SLOTS = LLAMA.num_layers, 24


def chain(config, batch=1):
    """The lowered text of a pass over a chain."""
    model = lm.from_config(config)
    cache = jax.eval_shape(lambda: model.init_cache(batch, SLOTS))
    tokens = jax.ShapeDtypeStruct((batch, 4), jnp.int32)
    return jax.jit(model.apply).lower(lm.abstract_params(config), tokens, cache).as_text()


def programs(config, batch=1):
    """The lowered text of a chain, a tree, a commit, and a round of prompt lookup."""
    model = lm.from_config(config)
    params = lm.abstract_params(config)
    pair = ModelParams(params)
    lookup = drafters.make("prompt_lookup", model, gamma=4)
    rule = accept.load(accept.default_rule(lookup))

    def state(params):
        arrays = jnp.ones((batch, 9), jnp.int32), jnp.full(batch, 9), rng.row_keys(0, batch)
        return decode.prefill(model, lookup, params, *arrays, max_len=SLOTS)

    cache = jax.eval_shape(lambda: model.init_cache(batch, SLOTS))
    tokens = jax.ShapeDtypeStruct((batch, 4), jnp.int32)
    parents = jnp.asarray([[-1, 0, 0, 1]] * batch)
    _, block = jax.eval_shape(model.apply, params, tokens, cache)
    count = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def branching(params, tokens, cache):
        return model.apply(params, tokens, cache, tree.layout(parents))

    def a_round(params, state):
        return speculative_step(model, lookup, rule, params, state)

    return {
        "chain": chain(config, batch),
        "tree": jax.jit(branching).lower(params, tokens, cache).as_text(),
        "commit": jax.jit(model.commit).lower(cache, block, count).as_text(),
        "round": jax.jit(a_round).lower(pair, jax.eval_shape(state, pair)).as_text(),
    }


def operations(text):
    """How often a program has each operation."""
    return collections.Counter(re.findall(r"(?<!#)stablehlo\.(\w+)", text))


def test_the_operations_of_a_llama():
    """Counted by hand from the equations; one more would be a branch of another family."""
    made = programs(LLAMA)
    passed = operations(made["chain"])
    # q, k, v, o, gate, up, down; scores and values of the block and of the cache. The values of a
    # short block are sums of products.
    assert passed["dot_general"] == LAYERS * 10 + 1
    assert passed["rsqrt"] == 2 * LAYERS + 1
    # Angles are computed once, and their functions for queries and for keys.
    assert passed["cosine"] == passed["sine"] == 2 * LAYERS
    # The weights of both parts; all layers call one function SiLU.
    assert passed["exponential"] == 2 * LAYERS + 1
    for name in ("tanh", "erf", "scatter", "remainder", "case", "while", "sort"):
        assert not passed[name], name
    commit = operations(made["commit"])
    assert commit["dynamic_update_slice"] == 2 * LAYERS
    assert not commit["scatter"] and not commit["remainder"]


@pytest.mark.parametrize("family", by_default(["llama", "gpt2"], ["llama"]))
def test_the_program_depends_on_the_switches_alone(family):
    """Not on the name of the family, nor on switches with a value that changes nothing."""
    config = testing.tiny_config(family)
    right = programs(config)
    for other in FAMILIES:
        assert chain(dataclasses.replace(config, family=other)) == right["chain"]
    same = {
        "windows": (None,) * LAYERS,
        "output_bias": config.attention_bias,
        "rotary_dim": config.head_dim,
        "query_scalar": config.head_dim,
        "unrotated": (LAYERS,),
        "experts": Experts(4, 2, 8),
    }
    assert programs(dataclasses.replace(config, **same)) == right


def test_windows_that_hold_every_text_cost_nothing():
    wide = dataclasses.replace(LLAMA, windows=(64, None))
    assert programs(wide, 2) == programs(LLAMA, 2)
    narrow = programs(dataclasses.replace(LLAMA, windows=(8, None)))
    assert operations(narrow["commit"])["scatter"] == 2


CHANGES = {
    "norm": "rms1p",
    "pre_norm": False,
    "post_norm": True,
    "parallel": True,
    "qk_norm": True,
    "activation": "gelu",
    "gated": False,
    "positions": "learned",
    "rotary_dim": 4,
    "unrotated": (1,),
    "windows": (3, None),
    "query_scalar": 3.0,
    "attention_softcap": 5.0,
    "final_softcap": 5.0,
    "embedding_scale": 3.0,
    "attention_bias": True,
    "mlp_bias": True,
    "experts": Experts(4, 2, 8, layers=(0,)),
    "without_mlp": (1,),
    "recurrent": Recurrent(1, 2, 4, 4, 3, layers=(0,)),
}


@pytest.mark.parametrize("field", by_default(CHANGES, ("windows", "parallel")))
def test_every_switch_changes_the_program(field):
    assert chain(dataclasses.replace(LLAMA, **{field: CHANGES[field]})) != chain(LLAMA)


def test_the_embedding_scale_is_rounded_as_the_embeddings():
    """Gemma's: the root of 3072, 55.43, is 55.5 in bfloat16."""
    config = dataclasses.replace(LLAMA, embedding_scale=3072**0.5)
    for dtype, value in ((jnp.bfloat16, 55.5), (jnp.float32, 3072**0.5)):
        params = {"embed": {"embedding": jnp.ones((LLAMA.vocab_size, LLAMA.hidden_size), dtype)}}
        params = lm.init_params(config, jax.random.key(0), dtype) | params
        model = lm.from_config(config, dtype)
        assert model.embed is not None
        embedded = model.embed(params, jnp.asarray([[3]]))
        assert embedded.dtype == dtype and float(embedded[0, 0, 0]) == np.float32(value)
