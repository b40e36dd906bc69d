"""The layer of experts against a literal formula and against transformers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import testing
from specjax.models.transformer import ExpertMlp
from specjax.models.transformer_config import Experts

WIDTH, INNER = 8, 6


def layer(
    experts: int,
    chosen: int,
    renormalise: bool = True,
    seed: int = 0,
    shared_size: int | None = None,
) -> ExpertMlp:
    sizes = Experts(experts, chosen, INNER, renormalise, shared_size=shared_size)
    config = testing.tiny_config("qwen3_next")
    config = dataclasses.replace(config, hidden_size=WIDTH, experts=sizes)

    def make() -> ExpertMlp:
        return ExpertMlp(config, jnp.float32, nnx.Rngs(seed))

    # Larger than at the start of training, so that routes and results differ clearly.
    state = jax.jit(lambda: jax.tree.map(lambda x: 20 * x, nnx.state(make())))()
    return nnx.merge(nnx.graphdef(nnx.eval_shape(make)), state)


output = nnx.jit(ExpertMlp.__call__)


def literal(module: ExpertMlp, x: np.ndarray) -> np.ndarray:
    """The result for x [N,E], token by token, in float64."""
    router, gate, up, down = (
        np.asarray(each[...], np.float64)
        for each in (module.router.kernel, module.gate, module.up, module.down)
    )
    out = np.zeros(x.shape)
    for row, token in enumerate(x.astype(np.float64)):
        scores = np.exp(token @ router - (token @ router).max())
        scores /= scores.sum()
        best = np.argsort(-scores)[: module.chosen]
        weights = scores[best] / (scores[best].sum() if module.renormalise else 1)
        for expert, weight in zip(best, weights, strict=True):
            inner = token @ gate[expert]
            inner = inner / (1 + np.exp(-inner)) * (token @ up[expert])
            out[row] += weight * (inner @ down[expert])
        if module.has_shared:
            *shared, factor = (
                np.asarray(each.kernel[...], np.float64)
                for each in (
                    *(module.shared.gate, module.shared.up, module.shared.down),
                    module.shared_gate,
                )
            )
            inner = token @ shared[0]
            inner = inner / (1 + np.exp(-inner)) * (token @ shared[1])
            out[row] += (inner @ shared[2]) / (1 + np.exp(-token @ factor))
    return out


def tokens(batch: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(batch, size, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(("renormalise", "shared"), [(False, None), (True, None), (True, 5)])
@pytest.mark.parametrize(("batch", "size"), [(1, 1), (2, 2), (2, 20)])
def test_equal_to_the_formula(batch, size, renormalise, shared):
    module, x = layer(12, 3, renormalise, shared_size=shared), tokens(batch, size)
    expected = literal(module, x.reshape(-1, WIDTH)).reshape(x.shape)
    np.testing.assert_allclose(output(module, jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_one_expert_and_all_experts():
    for experts, chosen in ((1, 1), (3, 3)):
        module, x = layer(experts, chosen), tokens(1, 2)
        expected = literal(module, x[0])
        got = output(module, jnp.asarray(x))[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 20])
def test_a_token_with_nan_changes_no_other_token(size):
    module, x = layer(12, 3), tokens(2, size)
    clean = np.asarray(output(module, jnp.asarray(x)))
    x[1, 0] = np.nan
    got = np.array(output(module, jnp.asarray(x)))
    assert np.isnan(got[1, 0]).all()
    got[1, 0] = clean[1, 0]
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("size", [2, 20])
def test_an_expert_with_infinite_kernels_changes_only_its_tokens(size):
    module, x = layer(12, 3), tokens(1, size)
    clean = np.asarray(output(module, jnp.asarray(x)))
    index = np.asarray(module.route(jnp.asarray(x))[1])
    expert = int(index[0, 0, 0])
    module.up[...] = module.up[...].at[expert].set(jnp.inf)
    got, uses = np.asarray(output(module, jnp.asarray(x))), (index == expert).any(-1)
    assert uses.any() and not uses.all()
    np.testing.assert_array_equal(got[~uses], clean[~uses])
    assert not np.isfinite(got[uses]).all(-1).any()


def test_both_computations_have_the_same_gradients():
    module, x = layer(12, 3), jnp.asarray(tokens(1, 4)[0])
    graph, state = nnx.split(module)

    def loss(state, name):
        own = nnx.merge(graph, state)
        weights, index = own.route(x[None])
        return (getattr(own, name)(x, weights[0], index[0]) ** 2).sum()

    few, many = (jax.grad(loss)(state, name) for name in ("_each_choice", "_each_expert"))
    for one, other in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("renormalise", [False, True])
def test_equal_to_transformers(renormalise):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    module = layer(12, 3, renormalise, seed=1)
    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_experts=12,
        num_experts_per_tok=3,
        norm_topk_prob=renormalise,
    )
    block = modeling.Qwen3MoeSparseMoeBlock(config)
    assert_equal(torch, module, block, [(block.gate, module.router)])


def assert_equal(torch, module: ExpertMlp, block, linear) -> None:
    """A block of transformers with our weights; ``linear``: its linear maps, and ours."""
    gate, up, down = (
        torch.tensor(np.asarray(each[...])) for each in (module.gate, module.up, module.down)
    )
    with torch.no_grad():
        for theirs, ours in linear:
            theirs.weight.copy_(torch.tensor(np.asarray(ours.kernel[...]).T.copy()))
        block.experts.gate_up_proj.copy_(torch.cat([gate, up], 2).transpose(1, 2))
        block.experts.down_proj.copy_(down.transpose(1, 2))
    for size in (1, 2, 30):
        x = tokens(2, size, seed=size)
        with torch.no_grad():
            expected = block(torch.tensor(x)).numpy()
        np.testing.assert_allclose(output(module, jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_a_shared_expert_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    module = layer(12, 3, seed=1, shared_size=5)
    config = transformers.Qwen3NextConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=5,
        num_experts=12,
        num_experts_per_tok=3,
    )
    block = modeling.Qwen3NextSparseMoeBlock(config)
    pairs = [(block.gate, module.router), (block.shared_expert_gate, module.shared_gate)]
    for name in ("gate", "up", "down"):
        own = getattr(block.shared_expert, f"{name}_proj")
        pairs.append((own, getattr(module.shared, name)))
    assert_equal(torch, module, block, pairs)
