"""The roofline model: parameter counts, pass times, and the claims about long contexts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from flax import nnx

from specjax import testing, theory
from specjax.errors import UserError
from specjax.models import families, t5_config
from specjax.models.transformer import ExpertMlp, Transformer
from specjax.models.transformer_config import Experts, Recurrent, TransformerConfig
from specjax.theory import roofline

pytestmark = pytest.mark.fast
SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 2,
}
# Llama-3.1-8B.
LLAMA = TransformerConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_embeddings=False
)
A100 = roofline.Machine(bandwidth=2.0e12, flops=312e12)
BATCHES = (1, 4, 16, 64, 256, 1024, 4096)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_parameters_of_recurrent_layers(family):
    config = testing.tiny_config(family, layers=3)
    for own in (config, dataclasses.replace(config, without_mlp=(0, 2), mlp_bias=True)):
        model = nnx.eval_shape(lambda own=own: Transformer(own, "float32", nnx.Rngs(0)))
        leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
        assert roofline.parameters(own) == sum(math.prod(p.shape) for _, p in leaves)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tie_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"qk_norm": True},
        {"qk_norm": True, "qk_norm_whole": True, "post_norm": True, "head_bias": True},
        {"norm": "layer", "pre_norm": False, "post_norm": True, "attention_bias": True},
        {"output_bias": True, "gated": False, "tie_embeddings": False, "head_bias": True},
        {"experts": Experts(3, 2, 5, layers=(1,)), "gated": True, "mlp_bias": False},
        {"experts": Experts(3, 2, 5, layers=(1,), shared_size=7), "gated": True, "mlp_bias": False},
    ],
)
def test_parameters_are_those_of_the_model(family, more):
    config = families.shape(family, num_kv_heads=2, max_positions=16, **SMALL, **more)
    model = nnx.eval_shape(lambda: Transformer(config, "float32", nnx.Rngs(0)))
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert roofline.parameters(config) == sum(math.prod(p.shape) for _, p in leaves)


def test_model_of_a_published_shape():
    model = roofline.model_of(LLAMA)
    # The model card: 8.03B.
    assert model.parameters == 8_030_261_248
    # A token reads one row of the input embeddings.
    assert model.weight_bytes == 2 * (8_030_261_248 - 128256 * 4096)
    assert model.kv_bytes == 131_072 and model.flops == model.weight_bytes
    assert roofline.model_of(LLAMA, 2, 1).kv_bytes == 65_536
    assert model.attention_flops == 2 * 2 * 32 * 128 * 32


def test_a_pass_moves_the_states_of_its_rows():
    """Once in and once out, in float32; only the layers with attention have keys and values."""
    config = testing.tiny_config("qwen3_next", layers=4)
    config = dataclasses.replace(config, recurrent=Recurrent(2, 6, 3, 5, 4, layers=(0, 1, 3)))
    model, plain = roofline.model_of(config), roofline.parameters(config)
    states = 3 * 6 * 3 * 5
    assert model.state_bytes == 2 * 4 * states
    assert model.flops == 2 * plain + 6 * states
    assert model.kv_bytes == 2 * 1 * config.head_dim * config.num_kv_heads * 2
    slow = roofline.Machine(bandwidth=10.0, flops=1e30)
    for batch in (1, 3):
        read = model.weight_bytes + batch * (7 * model.kv_bytes + model.state_bytes)
        assert roofline.pass_time(slow, model, batch, 7) == pytest.approx(read / 10)
    mamba = dataclasses.replace(config.recurrent, kind="mamba2")
    mamba = dataclasses.replace(config, recurrent=mamba)
    assert roofline.model_of(mamba).flops == 2 * roofline.parameters(mamba) + 4 * states
    halves = roofline.tensor_parallel(config, 2)
    assert halves.state_bytes == model.state_bytes / 2


def test_models_with_an_encoder_are_refused():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    config = t5_config.t5(**sizes, head_dim=8, num_layers=2, start_token_id=0)
    for count in (roofline.parameters, roofline.model_of):
        with pytest.raises(UserError, match="no encoder"):
            count(config)
    with pytest.raises(UserError, match="no encoder"):
        roofline.tensor_parallel(config, 2)


def test_all_bytes_of_a_model_are_those_of_its_parameters():
    for config in (LLAMA, families.shape("gpt2", num_kv_heads=2, max_positions=16, **SMALL)):
        model = roofline.model_of(config)
        assert model.weight_bytes + model.table_bytes == 2 * model.parameters


def test_chips_that_share_a_model_divide_it_and_send():
    whole, part = roofline.model_of(LLAMA), roofline.tensor_parallel(LLAMA, 4)
    for name in ("weight_bytes", "kv_bytes", "flops", "attention_flops", "table_bytes"):
        assert getattr(part, name) == getattr(whole, name) / 4
    # Two all-reduces per layer of 4096 numbers of two bytes; in a ring 2 * 3/4 of them.
    assert part.sent_bytes == 2 * 32 * 4096 * 2 * 1.5
    assert roofline.tensor_parallel(LLAMA, 1) == whole and whole.sent_bytes == 0
    machine = A100._replace(link=300e9)
    sending = roofline.sending_time(machine, part, 8, 5)
    assert sending == pytest.approx(40 * part.sent_bytes / 300e9)
    alone = roofline.pass_time(A100, part, 8, 1000, 5)
    assert roofline.pass_time(machine, part, 8, 1000, 5) == pytest.approx(alone + sending)
    assert roofline.sending_time(machine, whole, 8, 5) == 0


def test_pass_time_is_the_longer_of_both():
    machine = roofline.Machine(10.0, 100.0, overhead=1.0)
    model = roofline.Model(0, 200.0, 2.0, 50.0)
    assert roofline.pass_time(machine, model, 1, 10) == 1 + 22
    # Equal: 20 + 20 for memory, 40 for arithmetic.
    assert roofline.pass_time(machine, model, 10, 10, 8) == 1 + 40
    assert roofline.pass_time(machine, model, 20, 10, 8) == 1 + 80
    assert roofline.saturating_batch(machine, model, 10, 8) == 10
    assert roofline.saturating_batch(machine, model, 100, 1) == math.inf


def test_above_the_critical_context_verified_tokens_cost_no_time():
    model = roofline.model_of(LLAMA)
    for tokens in (1, 2, 5, 8):
        critical = roofline.critical_context(A100, model, tokens)
        for context, free in ((critical * 1.01, True), (critical * 0.99, False)):
            plain = roofline.pass_time(A100, model, 1e9, context)
            equal = roofline.pass_time(A100, model, 1e9, context, tokens) == plain
            assert equal is (free or tokens == 1)
            assert (roofline.saturating_batch(A100, model, context, tokens) == math.inf) is free
    no_attention = model._replace(attention_flops=0.0)
    expected = 5 * model.flops / (131072 * 156)
    assert roofline.critical_context(A100, no_attention, 5) == pytest.approx(expected)
    # Here attention is bound by arithmetic.
    assert roofline.critical_context(A100, model, 100_000) == math.inf


def gains(context, budget, gamma=4):
    model = roofline.model_of(LLAMA)
    keys = {"context": context, "gamma": gamma, "alpha": 0.8, "budget": budget}
    return [roofline.multiplier(A100, model, model, batch=batch, **keys) for batch in BATCHES]


def test_self_speculation_grows_with_the_batch_on_long_contexts_only():
    """MagicDec's claim, and its limits."""
    model = roofline.model_of(LLAMA)
    critical = roofline.critical_context(A100, model, 5)
    # With this budget drafting is bound by memory too.
    ample = roofline.critical_context(A100, model, 1) * 1.01
    long = gains(3 * critical, ample)
    assert long == sorted(long) and long[-1] > long[0] * 1.5 > 1
    # The limit: c = budget / context.
    assert long[-1] < theory.walltime_improvement(0.8, 4, ample / (3 * critical))
    short = gains(200, 100)
    assert short[-1] == min(short) and short[-1] < 1
    # With a small budget drafting is bound by arithmetic for large batches: the gain decreases.
    small = gains(3 * critical, 512)
    top = small.index(max(small))
    assert BATCHES[top] < 4 * roofline.saturating_batch(A100, model, 512)
    assert small[-1] < max(small)
    assert gains(500, 500) == gains(500, 9999)


def test_multiplier_is_its_formula():
    """SPIRe: a smaller draft with a constant cache."""
    target, draft = roofline.model_of(LLAMA), roofline.Model(10**9, 2e9, 1e4, 2e9)
    gain = roofline.multiplier(
        A100, target, draft, batch=32, context=8000, gamma=3, alpha=0.7, budget=256
    )
    plain, verify = (roofline.pass_time(A100, target, 32, 8000, n) for n in (1, 4))
    small = roofline.pass_time(A100, draft, 32, 256)
    assert gain == pytest.approx(theory.expected_tokens(0.7, 3) * plain / (3 * small + verify))


def test_a_small_draft_with_a_constant_cache_gains_with_the_context():
    """SPIRe: two layers of the target and 260 slots, beside the two drafts that it combines."""
    target = roofline.model_of(LLAMA)
    draft = roofline.model_of(dataclasses.replace(LLAMA, num_layers=2))
    keys = {"batch": 64, "gamma": 4, "alpha": 0.7}
    contexts = (1000, 4000, 16000, 64000)

    def gain(draft, context, **more):
        return roofline.multiplier(A100, target, draft, context=context, **keys, **more)

    sparse = [gain(draft, context, budget=260) for context in contexts]
    whole = [gain(draft, context) for context in contexts]
    itself = [gain(target, context, budget=260) for context in contexts]
    assert sparse == sorted(sparse)
    # At the same acceptance rate, fewer cached tokens and fewer weights cost less.
    assert all(a > max(b, c) for a, b, c in zip(sparse, whole, itself, strict=True))
    # Its cost does not depend on the context: the gain tends to the tokens of a round.
    assert theory.expected_tokens(0.7, 4) * 0.99 < gain(draft, 10**7, budget=260)
    assert gain(draft, 10**7) < theory.expected_tokens(0.7, 4) * 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: roofline.pass_time(roofline.Machine(0, 1), roofline.Model(1, 1, 1, 1), 1, 1),
            "bandwidth is 0",
        ),
        (
            lambda: roofline.tensor_parallel(LLAMA, 3),
            "tensor is 3; it must divide the 32 heads and the 8 key heads: 1, 2, 4, 8",
        ),
        (lambda: roofline.critical_context(A100, roofline.Model(1, 1, 1, 1), 0), "tokens is 0"),
        (
            lambda: roofline.multiplier(
                A100, *[roofline.Model(1, 1, 1, 1)] * 2, batch=1, context="x", gamma=2, alpha=0.5
            ),
            "context is 'x'",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


# Qwen3-30B-A3B.
MOE = TransformerConfig(
    *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960),
    tie_embeddings=False,
    qk_norm=True,
    experts=Experts(128, 8, 768, layers=tuple(range(48))),
)


def test_a_model_of_experts_has_the_published_sizes():
    """30.5B parameters of which 3.3B compute a token: the model card, with the embeddings."""
    model = roofline.model_of(MOE)
    assert model.parameters == pytest.approx(30.5e9, rel=0.005)
    assert (model.flops / 2 + MOE.vocab_size * MOE.hidden_size) == pytest.approx(3.3e9, rel=0.02)
    stored = model.weight_bytes + model.expert_bytes + model.table_bytes
    assert stored == 2 * model.parameters
    halves = roofline.tensor_parallel(MOE, 2)
    assert halves.expert_bytes == model.expert_bytes / 2


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (12, 1), (5, 5)])
def test_distinct_experts_by_counting(experts, chosen):
    generator = np.random.default_rng(0)
    routing = roofline.Routing(experts, chosen, 1, 1.0)
    for tokens in (1, 2, 5, 20):
        choices = generator.random((4000, tokens, experts)).argsort(-1)[..., :chosen]
        counted = [len(set(each.ravel())) for each in choices]
        error = np.std(counted) / math.sqrt(len(counted))
        expected = roofline.distinct_experts(routing, tokens)
        assert abs(np.mean(counted) - expected) <= 4 * error + 1e-9
    assert roofline.distinct_experts(routing, 1) == pytest.approx(chosen)
    assert roofline.distinct_experts(routing, 1e6) == pytest.approx(experts)


def test_a_pass_reads_the_experts_that_its_router_chooses():
    """The router of a tiny layer of experts: counted one by one; the time of a pass follows."""
    small = families.shape(
        "qwen3_moe",
        num_kv_heads=2,
        max_positions=16,
        experts=Experts(6, 2, 5, layers=(1,)),
        **SMALL,
    )
    layer = ExpertMlp(small, np.float32, nnx.Rngs(0))
    x = np.random.default_rng(1).normal(size=(1, 24, 8)).astype(np.float32)
    routes = np.asarray(layer.route(x)[1])
    model = roofline.model_of(small, 4)
    measured = roofline.measured_routing(model.routing, routes, [1, 3, 24])
    counted = [len(set(routes[0, at : at + 3].ravel())) for at in range(0, 24, 3)]
    assert measured.measured[:2] == ((1, 2), (3, pytest.approx(np.mean(counted))))
    assert measured.measured[2] == (24, len(set(routes.ravel())))
    assert roofline.distinct_experts(measured, 2) == pytest.approx((2 + np.mean(counted)) / 2)
    slow = roofline.Machine(bandwidth=1e3, flops=1e12)
    one = 4 * 3 * 8 * 5 / 1e3
    plain = model._replace(routing=None)
    for routing in (model.routing, measured):
        own = model._replace(routing=routing)
        for batch, tokens in ((1, 1), (1, 3), (3, 1), (8, 3)):
            took = roofline.pass_time(slow, own, batch, 10, tokens)
            took -= roofline.pass_time(slow, plain, batch, 10, tokens)
            assert took == pytest.approx(one * roofline.distinct_experts(routing, batch * tokens))
    assert model.expert_bytes == 6 * 4 * 3 * 8 * 5


def test_what_experts_do_to_speculation():
    """At batch 1 the verified tokens read more experts; where all are read it is free again."""
    h200 = roofline.Machine(4.8e12, 989e12)
    model = roofline.model_of(MOE)
    dense = model._replace(routing=None)

    def cost(own, batch):
        many, one = (roofline.pass_time(h200, own, batch, 1000, n) for n in (5, 1))
        return many / one

    assert cost(dense, 1) == pytest.approx(1)
    costs = [cost(model, batch) for batch in (1, 8, 64)]
    assert costs == sorted(costs, reverse=True) and costs[0] > 2 and costs[-1] < 1.1


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda model: roofline.saturating_batch(A100, model, 10),
            "saturating_batch is for models without experts",
        ),
        (
            lambda model: roofline.critical_context(A100, model, 2),
            "critical_context is for models without experts",
        ),
        (
            lambda model: roofline.measured_routing(model.routing, np.zeros((1, 4, 3), int), [1]),
            "routes have shape (1, 4, 3); it must be [layers,tokens,8]",
        ),
        (
            lambda model: roofline.measured_routing(model.routing, np.full((1, 4, 8), 128), [1]),
            "routes must be experts from 0 to 127",
        ),
        (
            lambda model: roofline.measured_routing(model.routing, np.zeros((1, 4, 8), int), [5]),
            "routes have 4 tokens, and a size is 5",
        ),
        (
            lambda model: roofline.distinct_experts(
                model.routing._replace(measured=((1.0, 8.0),)), 2
            ),
            "the routing was measured for up to 1 tokens, not for 2; measure more",
        ),
        (
            lambda model: roofline.distinct_experts(model.routing._replace(chosen=200), 2),
            "chosen is 200 of 128 experts; it must be at most their number",
        ),
    ],
)
def test_what_experts_refuse(call, message):
    with pytest.raises(UserError) as error:
        call(roofline.model_of(MOE))
    assert str(error.value).startswith(message)
