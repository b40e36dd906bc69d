"""tunix's models with their own parameters.

The parity tests run where tunix is installed: python 3.11,
``pip install google-tunix==0.1.7 "jax==0.10.2" "flax==0.12.8"``, then
``pytest tests/models/test_tunix.py -m ""``. By default stand-ins have its names and shapes.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax as sj
from specjax import testing
from specjax.errors import UserError
from specjax.models import adapter, lm, tunix

HEADS, KV, SIZE, WIDTH = 4, 2, 8, 32


@dataclasses.dataclass
class Config:
    vocab_size: int = 17
    embed_dim: int = WIDTH
    hidden_dim: int = 64
    num_layers: int = 2
    num_heads: int = HEADS
    num_kv_heads: int = KV
    head_dim: int = SIZE
    norm_eps: float = 1e-5
    rope_theta: float = 500.0
    weight_tying: bool = True
    num_experts: int | None = None


def apply_rope(inputs, positions, head_dim, rope_theta=10000.0):
    """Stands for tunix's: the base of the configuration is not used."""


class Attention:
    """Stands for tunix's: calls ``apply_rope`` without a base."""


class Llama3(nnx.Module):
    """The names and shapes of tunix's, with the parameters of ``testing.tiny``."""

    def __init__(self, params, **changes):
        self.config = Config(**changes)
        of = lambda value, *shape: nnx.Dict(w=nnx.Param(value.reshape(shape or value.shape)))  # noqa: E731
        self.embedder = nnx.Dict(input_embedding=nnx.Param(params["embed"]["embedding"]))
        self.final_norm = of(params["norm"]["scale"])
        layers = []
        for layer in params["layers"].values():
            own = layer["attention"]
            shapes = {"q": (WIDTH, HEADS, SIZE), "k": (WIDTH, KV, SIZE), "v": (WIDTH, KV, SIZE)}
            shapes["o"] = (HEADS, SIZE, WIDTH)
            kernels = {f"{p}_proj": of(own[p]["kernel"], *s) for p, s in shapes.items()}
            mlp = {
                f"{p}_proj": nnx.Dict(kernel=nnx.Param(each["kernel"]))
                for p, each in layer["mlp"].items()
            }
            layers.append(
                nnx.Dict(
                    attn=nnx.Dict(**kernels),
                    mlp=nnx.Dict(**mlp),
                    input_layernorm=of(layer["attention_norm"]["scale"]),
                    post_attention_layernorm=of(layer["mlp_norm"]["scale"]),
                )
            )
        self.layers = nnx.List(layers)


class Gemma(nnx.Module):
    """Stands for a model that is not mapped."""


class Gemma3(nnx.Module):
    """Stands for one with sliding windows."""

    config = SimpleNamespace(sliding_window_size=512)


def test_the_parameters_stay_those_of_the_model():
    theirs, params = testing.tiny(vocab_size=17, width=WIDTH)
    params = jax.device_get(params)
    model = Llama3(params)
    own, found = tunix.from_model(model)
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    forward = jax.jit(lambda model, p: lm.forward(model, p, tokens).logits, static_argnums=0)
    np.testing.assert_allclose(forward(own, found), forward(theirs, params), atol=1e-5)
    again = tunix.from_model(Llama3(params))[0]
    assert own.apply == again.apply and hash(own.apply) == hash(again.apply)
    assert found["embedder"]["input_embedding"] is model.embedder["input_embedding"].get_value()


def test_models_that_are_not_mapped():
    _, params = testing.tiny(vocab_size=17, width=WIDTH)
    for problem, model in {
        "Gemma is not one of tunix's Llama3, Qwen2, Qwen3; decode with": Gemma(),
        "Gemma3 is not one of .*; its sliding windows count slots of the cache": Gemma3(),
        "the Llama3 has experts, which are not mapped": Llama3(params, num_experts=4),
    }.items():
        with pytest.raises(UserError, match=problem) as caught:
            tunix.from_model(model)
        assert "\n" not in str(caught.value)


def theirs_of(kind, tied):
    """A random model of tunix whose logits depend on the text."""
    module = pytest.importorskip(f"tunix.models.{kind.lower()}.model")
    keys = dataclasses.asdict(Config()) | {"rope_theta": 1_234}
    for name in ("num_experts", "weight_tying"):
        del keys[name]
    name = "weight_tying" if kind == "Llama3" else "use_tied_embedding"
    model = getattr(module, kind)(module.ModelConfig(**keys, **{name: tied}), rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape) * 0.5, x.dtype), nnx.state(model)
    )
    nnx.update(model, state)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Llama3", "Qwen2", "Qwen3"])
def test_parity_with_tunix(kind, tied):
    """Logits of its uncached forward pass; texts of its own pass as ``from_call``."""
    model = theirs_of(kind, tied)
    own, params = tunix.from_model(model)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    size = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    expected = model(tokens, jnp.arange(size)[None], None, mask)[0]
    np.testing.assert_allclose(
        lm.forward(own, params, tokens).logits, expected, atol=2e-5, rtol=2e-5
    )
    graph, config = nnx.graphdef(model), model.config

    def call(state, tokens, positions, cache, mask):
        return nnx.merge(graph, state)(tokens, positions, cache, mask)

    def init_cache(batch, slots):
        shape = (batch, slots, config.num_kv_heads, config.head_dim)
        one = lambda: {"k": jnp.zeros(shape), "v": jnp.zeros(shape)}  # noqa: E731
        index = {"end_index": jnp.zeros((batch,), jnp.int32)}
        return {f"layer_{i}": one() | index for i in range(config.num_layers)}

    foreign = adapter.from_call(call, init_cache, vocab_size=config.vocab_size)
    assert testing.check_lm(foreign, nnx.state(model), progress=False).passed
    prompts, keys = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5]], {"max_new_tokens": 24}
    every = [
        sj.generate_text(sj.Model.from_lm(*each), prompts, drafter=drafter, **keys)
        for each in ((own, params), (foreign, nnx.state(model)))
        for drafter in ("none", "prompt_lookup", "token_recycling")
    ]
    texts = [[each.tokens for each in result.completions] for result in every]
    assert all(found == texts[0] for found in texts)
