"""A tied head is a matrix product in the compiled loops, on the oldest and the newest jax.

As one loop over the vocabulary, fused with the norm before it, the head of a real model takes
several times as long on a CPU.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import by_default

from experiments.programs import hlo
from specjax import accept, decode, drafters, outcome, testing
from specjax.models import layers, lm, transformer
from specjax.testing import loop
from specjax.testing.models import prompts_of, tiny_t5
from specjax.types import LM, ModelParams

VOCAB, WIDTH = 77, 24
# The flags of the tests switch this off, which changes how products are compiled.
OPTIONS = {"xla_cpu_multi_thread_eigen": True}


def decoder(layers: int = 1):
    shape = testing.tiny_config(vocab_size=VOCAB, layers=layers, width=WIDTH)
    config = dataclasses.replace(shape, tie_embeddings=True)
    return lm.from_config(config), lm.init_params(config, jax.random.key(0))


def products(lowered) -> list[str]:
    """Where a product with the vocabulary is in the loops: "dot", or the kind of its fusion."""
    program, found = hlo.read(lowered.compile(OPTIONS).as_text()), []
    for _, each, looped in hlo.walk(program):
        inside = [i for part in program.of(each, "calls") for i in part.instructions.values()]
        for one in (each, *inside) if looped else ():
            if one.opcode == "dot" and VOCAB in one.arrays[0].dims:
                kind = each.attributes.partition("kind=")[2].split(",")[0]
                found.append(kind if each.opcode == "fusion" else each.opcode)
    return found


def plain(model: LM, params) -> list[str]:
    """Of plain decoding, for one row: where the head was slow."""
    drafter, pair = drafters.make("none", model), ModelParams(params, {})
    state = loop.begin(model, drafter, pair, prompts_of(model, [[1, 2]]), 8, 0)
    stop = outcome.stop_ids(None)
    return products(decode._autoregressive.lower(model, pair, state, jnp.int32(5), stop))


def drafted(name: str) -> list[str]:
    """Of rounds with a draft network that has a tied head, its own or the target's."""
    model, params = decoder(2)
    small, first = decoder()
    keys = {"model": small, "params": first} if name == "draft_model" else {}
    drafter = drafters.make(name, model, gamma=2, **keys)
    start = drafter.training.start(params, jax.random.key(1)) if not keys else first
    pair = ModelParams(params, start)
    state = loop.begin(model, drafter, pair, [[1, 2]], 8, 0)
    rule = accept.load(accept.default_rule(drafter))
    static = {"max_steps": 5, "verify_widths": None}
    return products(
        decode._generate.lower(model, drafter, rule, pair, state, outcome.stop_ids(None), **static)
    )


LOOPS = {
    "decoder": lambda: plain(*decoder()),
    "T5": lambda: plain(*tiny_t5(vocab_size=VOCAB, num_layers=1)),
    "draft_model": lambda: drafted("draft_model"),
    "eagle": lambda: drafted("eagle"),
}


def transposed(embed: nnx.Embed, hidden: jax.Array) -> jax.Array:
    """The head as ``nnx.Embed.attend`` computes it."""
    return layers.product(lambda x: jnp.dot(x, embed.embedding[...].T), hidden)


@pytest.mark.fast
@pytest.mark.parametrize("name", by_default(LOOPS, ("decoder", "T5")))
def test_no_product_with_the_vocabulary_is_a_loop(name):
    found = LOOPS[name]()
    assert found and "kLoop" not in found


@pytest.mark.fast
@pytest.mark.parametrize("name", by_default(LOOPS, ("decoder",)))
def test_a_transposed_head_is_detected(name, monkeypatch):
    monkeypatch.setattr(transformer, "tied_head", transposed)
    # Programs are shared by equal models; these are traced anew.
    jax.clear_caches()
    found = LOOPS[name]()
    jax.clear_caches()
    assert "kLoop" in found


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 2, 17)])
def test_values(shape):
    """They are those of ``nnx.Embed.attend``, in its precision."""
    for dtype in (jnp.float32, jnp.bfloat16):
        embed = nnx.Embed(VOCAB, WIDTH, dtype=dtype, rngs=nnx.Rngs(0))
        hidden = jax.random.normal(jax.random.key(1), (*shape, WIDTH), dtype)
        ours, theirs = layers.tied_head(embed, hidden), embed.attend(hidden)
        assert ours.dtype == theirs.dtype == dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=1e-2, atol=1e-5
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_some_tokens(tied, softcap):
    config = testing.tiny_config()
    config = dataclasses.replace(
        config, tie_embeddings=tied, head_bias=not tied, final_softcap=softcap
    )
    model, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    if not tied:
        params["head"]["bias"] = np.linspace(-1, 1, config.vocab_size, dtype=np.float32)
    hidden = 9 * np.random.default_rng(0).normal(size=(2, 3, config.hidden_size)).astype(np.float32)
    ids = np.array([3, 4, 30])
    some = jax.jit(lambda params: model.inside.some_logits(params, hidden, ids))(params)
    every = jax.jit(lambda params: model.unembed(params, hidden))(params)
    np.testing.assert_allclose(some, every[..., ids], rtol=1e-5, atol=1e-5)
