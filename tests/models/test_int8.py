"""``hf.load(weights="int8")``: kernels stay integers, and the model is that of their products."""

from __future__ import annotations

import dataclasses

import hf_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from quantised_cases import as_floats, both, in_int8

from specjax import accept, decode, drafters, rng, testing
from specjax.bench import provenance, summaries
from specjax.errors import UserError
from specjax.models import hf, layers, lm, memory
from specjax.models.transformer_config import Experts
from specjax.types import ModelParams

CONFIG = hf_cases.CONFIGS["llama-untied"]


def rounded(kernel):
    """(values, scale) by a loop over the columns."""
    values, scale = np.zeros(kernel.shape, np.int8), np.ones(kernel.shape[1], np.float32)
    for column in range(kernel.shape[1]):
        if largest := abs(kernel[:, column]).max():
            scale[column] = np.float32(largest) / np.float32(127)
        for row in range(kernel.shape[0]):
            values[row, column] = round(float(kernel[row, column] / scale[column]))
    return values, scale


@pytest.mark.fast
def test_integers_and_scales():
    kernel = np.random.default_rng(0).normal(0, [0.01, 1, 30, 0, 1e-30], (7, 5)).astype(np.float32)
    made, (values, scale) = layers.Int8.of(kernel), rounded(kernel)
    np.testing.assert_array_equal(made.values, values)
    np.testing.assert_array_equal(made.scale, scale)
    assert made.values.dtype == np.int8 and abs(made.values).max(0).tolist() == [127] * 3 + [0, 127]
    # The nearest integer: no number moves by more than half of a step.
    assert (abs(made.values * made.scale - kernel) <= made.scale * 0.5001).all()


@pytest.mark.fast
def test_which_parameters_are_integers(tmp_path):
    params = hf_cases.random_params(CONFIG)
    hf.save(tmp_path / "m", CONFIG, params)
    model = hf.load(tmp_path / "m", weights="int8")
    hf_cases.assert_same(
        *(
            flatten_dict(jax.tree.map(np.asarray, x))
            for x in as_leaves(model.params, in_int8(params))
        )
    )
    found = {
        "/".join(map(str, path)): leaf.dtype
        for path, leaf in flatten_dict(params_of(model.params)).items()
    }
    integers = {path for path, dtype in found.items() if dtype == np.int8}
    assert {path.split("/")[-1] for path in integers} == {"kernel"} and len(integers) == 2 * 7
    assert found["head/kernel"] == found["embed/embedding"] == np.float32
    assert summaries.size(model.params) == sum(x.size for x in jax.tree.leaves(params)) + sum(
        leaf.shape[1] for path, leaf in flatten_dict(params).items() if layers.in_int8(path)
    )
    facts = provenance.target(model.params, name="", directory=model.directory)
    assert facts["dtype"] == "int8" and facts["dequantised_from"] is None
    with pytest.raises(UserError, match="the parameters are not those of the config"):
        hf.save(tmp_path / "again", model.config, model.params)
    with pytest.raises(UserError, match="weights is 'int4'; it must be 'int8', or empty"):
        hf.load(tmp_path / "m", weights="int4")


def params_of(params):
    """The parameters with the integers alone."""
    return jax.tree.map(
        lambda x: getattr(x, "values", x), params, is_leaf=lambda x: isinstance(x, layers.Int8)
    )


def as_leaves(*trees):
    """Each as path -> array."""
    return [
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(x)}
        for x in trees
    ]


@pytest.mark.fast
def test_a_file_in_8_bits_is_rounded_to_itself(tmp_path):
    """Where the largest integer of each row is 127: the scale is the same again."""

    def change(values):
        for array in values.values():
            if array.dtype == np.int8:
                array[:] = array.clip(-127, 127)
                array[:, 3] = 127
        return values

    quantised, _ = both(tmp_path, "int8", change)
    params = hf.load(quantised, weights="int8").params
    kernel = params["layers"][1]["mlp"]["down"]["kernel"]
    values = hf.load(quantised).params["layers"][1]["mlp"]["down"]["kernel"]
    np.testing.assert_allclose(kernel.values * kernel.scale, values, rtol=1e-6)
    assert abs(np.asarray(kernel.values)).max(0).tolist() == [127] * 32


MODELS = {
    "llama": CONFIG,
    "biases": hf_cases.CONFIGS["llama-biases"],
    "gpt2": hf_cases.CONFIGS["gpt2"],
    "experts": dataclasses.replace(
        testing.tiny_config("qwen3_next", 61), experts=Experts(4, 2, 8, layers=(0,), shared_size=6)
    ),
    "recurrent": testing.tiny_config("qwen3_next", 61),
    "mamba": testing.tiny_config("nemotron_h", 61),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_products(name):
    """Within rounding, in long and in short blocks; those of the floats are others."""
    config = MODELS[name]
    params = hf_cases.random_params(config)
    model, quantised = lm.from_config(config), in_int8(params)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 24)))
    forward = jax.jit(lambda params, tokens: lm.forward(model, params, tokens).logits)
    for some in (tokens, tokens[:, :9]):
        logits, products, floats = (
            np.asarray(forward(each, some)) for each in (quantised, as_floats(quantised), params)
        )
        scale = abs(products).max()
        np.testing.assert_allclose(logits, products, atol=2e-5 * scale)
        assert abs(floats - products).max() > 2e-3 * scale


def test_activations_of_two_bytes_are_rounded_once():
    """float16 too: the sums before the scale are larger than its largest number."""
    rng = np.random.default_rng(2)
    kernel = layers.Int8.of(rng.normal(0, 0.3, (512, 8)).astype(np.float32) + 0.5)
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.asarray(rng.normal(8, 1, (2, 3, 512)), dtype)
        exact = np.asarray(x, np.float64) @ (kernel.values * np.float64(1) * kernel.scale)
        assert exact.max() / kernel.scale.min() > 1e5 and exact.max() < 6e4
        out = kernel.product(x)
        assert out.dtype == dtype
        nearest = jnp.asarray(exact, dtype)
        assert (
            abs(np.float64(out) - exact) <= abs(np.float64(nearest) - exact) * 1.001 + 0.01
        ).all()


def test_a_model_in_int8_passes_the_checks():
    """Blocks, trees and commits are those of single steps: its law is that of one model."""
    model, params = testing.tiny("llama")
    report = testing.check_lm(model, in_int8(params), progress=False)
    assert report.passed, report


def test_a_loop_converts_one_kernel_at_a_time():
    """A program whose kernels were all converted before the first product would hold them all."""
    config = testing.tiny_config("llama", 61, layers=3, width=128)
    model, params = lm.from_config(config), in_int8(lm.init_params(config, jax.random.key(0)))
    drafter, rule = drafters.make("prompt_lookup", model, gamma=2), accept.load("chain")
    both = ModelParams(params)
    packed = decode.pack_prompts([[1, 2, 3]])
    state = decode.prefill(model, drafter, both, *packed, rng.row_keys(0, [0]), max_len=16)
    loop = jax.jit(
        lambda both, state: decode.generate(model, drafter, rule, both, state, max_steps=8)
    )
    used = loop.lower(both, state).compile().memory_analysis().temp_size_in_bytes
    kernels = [x for x in jax.tree.leaves(params) if x.dtype == jnp.int8]
    assert used < 3 * 4 * max(x.size for x in kernels) < 0.4 * 4 * sum(x.size for x in kernels)


def test_conversions_in_any_order_are_detected(monkeypatch):
    monkeypatch.setattr(layers, "_after", lambda x, values: values)
    with pytest.raises(AssertionError):
        test_a_loop_converts_one_kernel_at_a_time()


@pytest.mark.fast
def test_memory_is_checked_for_integers(tmp_path, monkeypatch):
    config = hf_cases.shaped("llama", hidden_size=64, intermediate_size=256)
    hf.save(tmp_path / "m", config, hf_cases.random_params(config))
    asked = []
    monkeypatch.setattr(memory, "check", lambda need, what, right: asked.append((need, what)))
    for weights in ("int8", ""):
        model = hf.load(tmp_path / "m", weights=weights)
        need, what = asked.pop()
        # Without the scales.
        assert 0.95 < need / sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) <= 1
        assert what == f"m in {weights or 'float32'}"


def over(name, change):
    """Changes a function of ``Int8``."""
    own = getattr(layers.Int8, name)
    return name, lambda self, *args: change(own, self, *args)


MUTANTS = {
    "the scale of the next column": over(
        "product",
        lambda own, self, x: own(layers.Int8(self.values, jnp.roll(self.scale, 1)), x),
    ),
    "one scale": over(
        "product",
        lambda own, self, x: own(layers.Int8(self.values, self.scale.max() + 0 * self.scale), x),
    ),
    "the scale is left out": over(
        "product", lambda own, self, x: own(layers.Int8(self.values, 0 * self.scale + 1), x)
    ),
    "the scale of the inputs": over(
        "product",
        lambda own, self, x: (
            own(self, x)
            if len(set(self.values.shape)) > 1
            else own(layers.Int8(self.values, 0 * self.scale + 1), x * self.scale)
        ),
    ),
    "the scale is rounded to bfloat16": over(
        "product",
        lambda own, self, x: own(
            layers.Int8(self.values, self.scale.astype(jnp.bfloat16).astype(jnp.float32)), x
        ),
    ),
    "sums in bfloat16": over(
        "product", lambda own, self, x: own(self, x.astype(jnp.bfloat16)).astype(x.dtype)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name, monkeypatch):
    monkeypatch.setattr(layers.Int8, *MUTANTS[name])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_logits_are_those_of_the_products("llama")
