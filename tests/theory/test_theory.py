"""The closed forms against the numbers that the papers print, and against simulations that know none of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import theory
from specjax.errors import UserError
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.theory import cascade, goodput, roofline

pytestmark = pytest.mark.fast
TARGET, DRAFT = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
few = settings(max_examples=40, deadline=None)
rates = st.floats(0, 1)


# Acceptance.


def test_overlap_of_the_toy_laws():
    """Card A2: alpha .6."""
    assert theory.overlap(TARGET, DRAFT) == pytest.approx(0.6)
    assert theory.divergence(TARGET, DRAFT) == pytest.approx(0.4)
    laws = np.stack([TARGET, DRAFT]), np.stack([DRAFT, DRAFT])
    np.testing.assert_allclose(theory.overlap(*laws), [0.6, 1])
    assert theory.acceptance_rate(*laws) == pytest.approx(0.8)
    assert theory.acceptance_rate(*laws, weights=[3, 1]) == pytest.approx(0.7)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=6))
@few
def test_divergence_is_a_distance_and_one_less_the_overlap(pairs):
    target, draft = (law / law.sum() for law in np.array(pairs).T)
    apart = theory.divergence(target, draft)
    assert 0 <= apart <= 1 and apart == pytest.approx(1 - theory.overlap(target, draft))
    assert (
        apart == pytest.approx(theory.divergence(draft, target))
        and theory.divergence(draft, draft) == 0
    )


def simulate(generator, gamma, samples):
    """(how often each draft token was accepted, tokens per round) of speculative sampling with the toy laws."""
    tokens = generator.choice(3, (samples, gamma), p=DRAFT)
    accepted = generator.random((samples, gamma)) * DRAFT[tokens] < TARGET[tokens]
    emitted = np.where(accepted.all(1), gamma, accepted.argmin(1)) + 1
    return accepted.mean(), emitted.mean()


def test_simulated_rounds():
    alpha = theory.acceptance_rate(TARGET[None], DRAFT[None])
    for gamma in (1, 3, 8):
        accepted, tokens = simulate(np.random.default_rng(gamma), gamma, 40_000)
        assert accepted == pytest.approx(alpha, abs=0.01)
        assert tokens == pytest.approx(theory.expected_tokens(alpha, gamma), rel=0.015)
    long = simulate(np.random.default_rng(0), 60, 20_000)[
        1
    ]  # never all accepted: gamma ends after the first rejection
    assert long == pytest.approx(theory.oracle_tokens(alpha), rel=0.02)


def test_simulated_depths():
    """Each depth with a chance of its own."""
    chances = np.array([0.9, 0.5, 0.7])
    accepted = np.random.default_rng(0).random((40_000, 3)) < chances
    tokens = 1 + np.cumprod(accepted, 1).sum(1).mean()
    assert tokens == pytest.approx(theory.expected_tokens_by_depth(chances), rel=0.015)
    assert theory.expected_tokens_by_depth([]) == 1


@given(rates, st.integers(0, 40))
@few
def test_expected_tokens_is_the_sum_of_powers(alpha, gamma):
    tokens = theory.expected_tokens(alpha, gamma)
    assert isinstance(tokens, float) and tokens == pytest.approx(
        sum(alpha**i for i in range(gamma + 1))
    )
    assert tokens == pytest.approx(theory.expected_tokens_by_depth([alpha] * gamma))
    assert tokens <= theory.oracle_tokens(alpha) * (1 + 1e-9)


def test_expected_tokens_at_the_ends():
    assert theory.expected_tokens(1.0, 4) == 5 and theory.expected_tokens(0.0, 4) == 1
    assert theory.expected_tokens(1 - 1e-15, 4) == pytest.approx(5)
    assert theory.oracle_tokens(1.0) == math.inf and theory.oracle_tokens(0.75) == 4
    np.testing.assert_allclose(theory.expected_tokens(np.array([0, 0.5, 1]), 2), [1, 1.75, 3])


# The tables of Leviathan et al. (2211.17192).


@pytest.mark.parametrize(
    ("alpha", "gamma", "work", "gain"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1(alpha, gamma, work, gain):
    """c and c-hat are 0. The paper prints one digit less of some of these."""
    assert round(theory.operations(alpha, gamma, 0), 2) == work
    assert round(theory.walltime_improvement(alpha, gamma, 0), 2) == gain
    assert round(theory.expected_tokens(alpha, gamma), 2) == gain


BEST = {  # c: (gamma, speed-up) at alpha .5, .6, .7, .8, .9
    0.01: [(5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)],
    0.02: [(4, 1.79), (6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)],
    0.05: [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)],
    0.10: [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)],
    0.20: [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)],
}


@pytest.mark.parametrize("c", BEST)
def test_optimal_gamma(c):
    for alpha, (gamma, gain) in zip((0.5, 0.6, 0.7, 0.8, 0.9), BEST[c], strict=True):
        found = theory.optimal_gamma(alpha, c)
        assert (found[0], round(found[1], 2)) == (gamma, gain)
        assert found[1] == theory.walltime_improvement(alpha, gamma, c)
        assert found[1] == pytest.approx(
            theory.speedup(theory.expected_tokens(alpha, gamma), gamma * c, 1.0)
        )


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "gain"),
    [(0.75, 7, 0.02, 3.2), (0.80, 7, 0.04, 3.3), (0.82, 7, 0.11, 2.5)],
)
def test_predictions_for_t5(alpha, gamma, c, gain):
    """English to German at temperature 0, with the small, the base and the large draft model."""
    assert round(theory.walltime_improvement(alpha, gamma, c), 1) == gain


@given(rates, st.floats(0.01, 1.5))
@few
def test_corollary_3_9(alpha, c):
    possible = theory.improvement_possible(alpha, c)
    gamma, gain = theory.optimal_gamma(alpha, c, limit=60)
    assert possible == (alpha > c) and gain >= theory.guaranteed_improvement(alpha, c) - 1e-9
    if not possible:
        assert (gamma, gain) == (0, 1.0) == (0, theory.guaranteed_improvement(alpha, c))
    one = theory.walltime_improvement(alpha, 1, c)
    assert one == pytest.approx((1 + alpha) / (1 + c)) and gain >= one - 1e-9


@given(rates, st.integers(0, 30), st.floats(0, 2))
@few
def test_work_never_falls(alpha, gamma, c_hat):
    work = theory.operations(alpha, gamma, c_hat)
    assert work >= 1 - 1e-9
    assert work * theory.walltime_improvement(alpha, gamma, 0) == pytest.approx(
        gamma * c_hat + gamma + 1
    )


def test_measured_verification():
    """A pass that costs a step for every token makes every draft a loss; any spelling of the costs is the same."""
    assert theory.optimal_gamma(0.9, 0.01, verify=lambda n: float(n)) == (0, 1.0)
    spellings = (
        lambda n: 1 + 0.25 * (n - 1),
        {5: 2.0},
        {1: 1.0, 3: 1.5, 5: 2},
        [1.0, 1.25, 1.5, 1.75, 2.0],
    )
    for verify in spellings:
        assert theory.verify_cost(verify, 4) == pytest.approx(1.75)
        gain = theory.walltime_improvement(0.8, 3, 0.1, verify)
        assert gain == pytest.approx(theory.expected_tokens(0.8, 3) / (0.3 + 1.75))
    assert theory.optimal_gamma(0.95, 0.01, verify={5: 1.0})[0] == 4  # as far as it was measured
    slow = theory.optimal_gamma(0.8, 0.02, verify=spellings[0])
    assert slow[0] < theory.optimal_gamma(0.8, 0.02)[0] and slow[1] > 1
    with pytest.raises(UserError, match="verify is known for up to 5 tokens and 6 are asked for"):
        theory.walltime_improvement(0.8, 5, 0.1, {5: 2.0})


def test_cost_of_a_text():
    """1000 tokens at 2 a round with gamma 3: half of what is verified becomes text."""
    share = theory.used_share(2.0, 3)
    assert share == 0.5 and theory.rounds(1000, share, 3) == 500
    assert theory.total_cost(1000, share, 3, 0.1) == pytest.approx(500 * 1.3)
    assert theory.total_cost(1000, share, 3, 0.1, [1, 1, 1, 1.2]) == pytest.approx(500 * 1.5)
    assert 1000 / theory.total_cost(1000, share, 3, 0.1) == pytest.approx(
        theory.speedup(2.0, 0.3, 1.0)
    )
    least = theory.break_even_share(3, 0.1)
    assert least == pytest.approx(1.3 / 4) and theory.total_cost(
        1000, least, 3, 0.1
    ) == pytest.approx(1000)


# Goodput.


@pytest.mark.parametrize(
    ("batch", "relative", "best"),
    [
        (1, [1, 1.62, 1.99, 2.20, 2.31, 2.35], 5),
        (64, [1, 1.62, 1.37, 1.18, 1.03, 0.90], 1),
        (256, [1, 0.84, 0.72, 0.62, 0.54, 0.48], 0),
    ],
)
def test_goodput_under_load(batch, relative, best):
    """Card E4: a target pass takes at least 1 and is bound by arithmetic above 128 tokens, drafting a token .05 of it; alpha
    .7. The printed figures are goodput(k) / goodput(0) with the time max(1, B (k + 1) / 128) + .05 k, all 18 of them."""

    def time(k):
        return max(1.0, batch * (k + 1) / 128) + 0.05 * k

    alphas = np.full(batch, 0.7)
    values = [goodput.goodput(alphas, k, time(k)) for k in range(6)]
    assert [round(value / values[0], 2) for value in values] == relative
    assert goodput.best_length(alphas, time, 5) == (best, values[best])


def test_goodput_by_depth():
    table = [[0.9, 0.5], [0.2, 1.0]]
    np.testing.assert_allclose(goodput.tokens(table, 2), [1 + 0.9 + 0.45, 1.4])
    np.testing.assert_allclose(goodput.tokens([0.5, 0], 2), [1.75, 1])
    np.testing.assert_allclose(goodput.tokens(0.5, 2), [1.75])
    assert goodput.best_length(table, lambda k: 1.0, 9)[0] == 2  # no deeper than is known
    with pytest.raises(UserError, match=r"alphas has shape \(2, 2\) and k is 3"):
        goodput.tokens(table, 3)


def test_latency_is_fitted():
    true = goodput.Latency(2e-6, 5e-5, 0.01)
    sizes = list(itertools.product((0, 1e4, 1e6), (1, 64, 512)))
    noise = np.random.default_rng(0).normal(1, 0.01, len(sizes))
    found = goodput.fit((*size, true(*size)) for size in sizes)
    assert found == pytest.approx(true)
    rough = goodput.fit((*size, true(*size) * n) for size, n in zip(sizes, noise, strict=True))
    assert rough(1e5, 100) == pytest.approx(true(1e5, 100), rel=0.05)
    with pytest.raises(UserError, match="do not tell the coefficients apart"):
        goodput.fit([(10 * n, n, 1.0 + n) for n in range(1, 6)])


# Cascades.


def run_lengths(generator, chance, limit, samples):
    """How many coins in a row show heads, of at most ``limit``."""
    return np.cumprod(generator.random((samples, limit)) < chance, axis=1).sum(1)


@pytest.mark.parametrize(
    ("alpha", "inner", "n", "k"),
    [(0.8, 0.6, 2, 3), (0.5, 0.9, 3, 1), (0.9, 0.3, 1, 5), (1, 0.7, 2, 2)],
)
def test_vertical_cascade(alpha, inner, n, k):
    generator, samples = np.random.default_rng(1), 40_000
    drafted = sum(run_lengths(generator, inner, k, samples) + 1 for _ in range(n))
    emitted = np.minimum(run_lengths(generator, alpha, n * (k + 1), samples), drafted) + 1
    cost = 1 + n * 0.2 + n * k * 0.03
    assert cascade.vertical_improvement(alpha, inner, n, k, 0.2, 0.03) == pytest.approx(
        emitted.mean() / cost, rel=0.015
    )


def test_vertical_cascade_near_the_limit():
    limit = cascade.vertical_improvement(1, 0.7, 2, 3, 0.1, 0.01)
    for near in (1 - 1e-15, 1 - 1e-12, 1 - 1e-9):
        assert cascade.vertical_improvement(near, 0.7, 2, 3, 0.1, 0.01) == pytest.approx(
            limit, rel=1e-7
        )
    for alpha in (0.0, 0.3, 0.9):  # as the paper has it
        phi = cascade.generating_function(alpha, 0.7, 3)
        printed = (1 - alpha * phi**2) / (1 - alpha) / (1 + 2 * 0.1 + 6 * 0.01)
        assert cascade.vertical_improvement(alpha, 0.7, 2, 3, 0.1, 0.01) == pytest.approx(printed)
    assert cascade.vertical_improvement(0.5, 0.7, 0, 3, 0.1, 0.01) == 1


@pytest.mark.parametrize("x", [0, 0.3, 0.9, 1])
def test_generating_function(x):
    tokens = run_lengths(np.random.default_rng(2), 0.7, 4, 40_000) + 1
    assert cascade.generating_function(x, 0.7, 4) == pytest.approx(
        (float(x) ** tokens).mean(), abs=0.005
    )


def test_cascades_of_one_drafter_are_chains():
    slope = (
        cascade.generating_function(1, 0.7, 4) - cascade.generating_function(1 - 1e-6, 0.7, 4)
    ) / 1e-6
    assert slope == pytest.approx(theory.expected_tokens(0.7, 4), rel=1e-4)
    chain = theory.walltime_improvement(0.8, 5, 0.1)
    assert cascade.vertical_improvement(0.8, 0.3, 5, 0, 0.1, 0.01) == pytest.approx(chain)
    assert cascade.horizontal_improvement([0.8], [5], [0.1]) == pytest.approx(chain)


def test_horizontal_cascade():
    alphas, lengths, costs = (0.8, 0.6), (3, 4), (0.1, 0.01)
    chances = np.repeat(alphas, lengths)
    emitted = np.cumprod(np.random.default_rng(3).random((40_000, 7)) < chances, axis=1).sum(1) + 1
    found = cascade.horizontal_improvement(alphas, lengths, costs)
    assert found == pytest.approx(emitted.mean() / 1.34, rel=0.015)
    printed = (sum(0.8**i for i in range(4)) + 0.8**3 * sum(0.6**i for i in range(1, 5))) / 1.34
    assert found == pytest.approx(printed)
    with pytest.raises(UserError, match="have 2, 1 and 2 entries"):
        cascade.horizontal_improvement(alphas, [1], costs)


# Roofline.

SHAPE = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 2,
}
LLAMA = TransformerConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_embeddings=False
)  # Llama-3.1-8B
A100 = roofline.Machine(bandwidth=2.0e12, flops=312e12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "more", [{}, {"tie_embeddings": False}, {"attention_bias": True, "mlp_bias": True}]
)
def test_parameters_are_those_of_the_model(family, more):
    config = TransformerConfig(family, num_kv_heads=2, max_positions=16, **SHAPE, **more)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    assert roofline.parameters(config) == sum(
        math.prod(p.shape) for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param))
    )


def test_model_of_a_known_shape():
    model = roofline.model_of(LLAMA)
    assert model.parameters == 8_030_261_248  # as its model card says: 8.03B
    assert model.weight_bytes == 2 * (
        8_030_261_248 - 128256 * 4096
    )  # the input embeddings are looked up
    assert model.kv_bytes == 131_072 and model.flops == model.weight_bytes
    assert roofline.model_of(LLAMA, 2, 1).kv_bytes == 65_536
    assert model.attention_flops == 2 * 2 * 32 * 128 * 32


def test_reads_fall_by_the_tokens_of_a_round():
    model = roofline.Model(100, 200.0, 4.0, 200.0)
    plain, fast = (
        roofline.reads_per_token(model, 2, 50),
        roofline.reads_per_token(model, 2, 50, 2.5),
    )
    assert plain == (100, 200) and fast == (40, 80)


def test_pass_time_is_the_slower_of_both():
    machine, model = (
        roofline.Machine(10.0, 100.0, overhead=1.0),
        roofline.Model(0, 200.0, 2.0, 50.0),
    )
    assert roofline.pass_time(machine, model, 1, 10) == 1 + 22
    assert roofline.pass_time(machine, model, 10, 10, 8) == 1 + 40  # tie: 20 + 20 read, 40 computed
    assert roofline.pass_time(machine, model, 20, 10, 8) == 1 + 80
    assert roofline.saturating_batch(machine, model, 10, 8) == 10
    assert roofline.saturating_batch(machine, model, 100, 1) == math.inf


def test_critical_context_is_where_verification_stops_paying_for_its_tokens():
    model = roofline.model_of(LLAMA)
    for tokens in (1, 2, 5, 8):
        critical = roofline.critical_context(A100, model, tokens)
        for context, free in ((critical * 1.01, True), (critical * 0.99, False)):
            plain = roofline.pass_time(A100, model, 1e9, context)
            assert (roofline.pass_time(A100, model, 1e9, context, tokens) == plain) is (
                free or tokens == 1
            )
            assert (roofline.saturating_batch(A100, model, context, tokens) == math.inf) is free
    no_attention = model._replace(attention_flops=0.0)
    assert roofline.critical_context(A100, no_attention, 5) == pytest.approx(
        5 * model.flops / (131072 * 156)
    )
    assert (
        roofline.critical_context(A100, model, 100_000) == math.inf
    )  # attention is bound by arithmetic


def gains(context, budget, gamma=4):
    model = roofline.model_of(LLAMA)
    return [
        roofline.self_speculation(
            A100, model, batch=b, context=context, gamma=gamma, alpha=0.8, budget=budget
        )
        for b in (1, 4, 16, 64, 256, 1024, 4096)
    ]


def test_self_speculation_grows_with_the_batch_on_long_contexts_only():
    """MagicDec's claim, and where it ends."""
    model = roofline.model_of(LLAMA)
    critical = roofline.critical_context(A100, model, 5)
    ample = (
        roofline.critical_context(A100, model, 1) * 1.01
    )  # then drafting stays bound by memory as well
    long = gains(3 * critical, ample)
    assert long == sorted(long) and long[-1] > long[0] * 1.5 > 1
    assert long[-1] < theory.walltime_improvement(
        0.8, 4, ample / (3 * critical)
    )  # the limit: c = budget / context
    short = gains(200, 100)
    assert short[-1] == min(short) and short[-1] < 1
    thin = gains(
        3 * critical, 512
    )  # drafting is bound by arithmetic at last, and the gain falls again
    top = thin.index(max(thin))
    assert (1, 4, 16, 64, 256, 1024, 4096)[top] < 4 * roofline.saturating_batch(
        A100, model, 512
    ) and thin[-1] < max(thin)
    assert gains(500, 500) == gains(500, 9999)


def test_multiplier_is_its_formula():
    """SPIRe: a smaller draft with a constant cache."""
    target, draft = roofline.model_of(LLAMA), roofline.Model(10**9, 2e9, 1e4, 2e9)
    found = roofline.multiplier(
        A100, target, draft, batch=32, context=8000, gamma=3, alpha=0.7, budget=256
    )
    plain, verify = (roofline.pass_time(A100, target, 32, 8000, n) for n in (1, 4))
    small = roofline.pass_time(A100, draft, 32, 256)
    assert found == pytest.approx(theory.expected_tokens(0.7, 3) * plain / (3 * small + verify))


# Mistakes.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tokens(1.1, 3), "alpha is 1.1; it must lie between 0 and 1"),
        (lambda: theory.expected_tokens(math.nan, 3), "alpha is nan; it must be a finite number"),
        (lambda: theory.expected_tokens(np.array([0.5, -0.5]), 3), "alpha is -0.5"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma is -1; it must be a whole number >= 0"),
        (lambda: theory.expected_tokens(0.5, 1.5), "gamma is 1.5; it must be a whole number >= 0"),
        (lambda: theory.expected_tokens("half", 1), "alpha is 'half'; it must be a number"),
        (lambda: theory.expected_tokens_by_depth([0.5, 2]), "acceptance is 2"),
        (lambda: theory.oracle_tokens(-1.0), "alpha is -1"),
        (lambda: theory.walltime_improvement(0.5, 2, -0.1), "c is -0.1; it must be at least 0"),
        (
            lambda: theory.walltime_improvement(0.5, 2, 0.1, lambda n: 0),
            "verify(3) is 0; it must be positive",
        ),
        (lambda: theory.walltime_improvement(0.5, 2, 0.1, {3: math.nan}), "verify[3] is nan"),
        (lambda: theory.optimal_gamma(0.5, math.nan), "c is nan"),
        (lambda: theory.optimal_gamma(2, 0.1), "alpha is 2"),
        (lambda: theory.operations(0.5, 2, -1), "c_hat is -1"),
        (lambda: theory.speedup(2.0, 0.1, 0.0), "verify is 0; it must be positive"),
        (lambda: theory.speedup(2.0, 0.1, 1.0, math.inf), "step is inf"),
        (lambda: theory.speedup(2.0, [0.1], 1.0), "draft has shape (1,); it must be one number"),
        (
            lambda: theory.used_share(5.0, 3),
            "tokens_per_round is 5; a round of gamma 3 emits at most 4",
        ),
        (lambda: theory.rounds(10, 0, 3), "share is 0; it must be positive"),
        (lambda: theory.overlap([0.5, 0.6], [1, 0]), "the target's law sums to 1.1"),
        (lambda: theory.overlap([0.5, 0.5], [1, 0, 0]), "shape (2,) and the draft's (3,)"),
        (lambda: theory.divergence([2.0, -1.0], [1, 0]), "the target's law is 2"),
        (
            lambda: theory.acceptance_rate([TARGET], [DRAFT], [0]),
            "weights must be at least 0, and not all 0",
        ),
        (
            lambda: theory.acceptance_rate([TARGET], [DRAFT], [1, 1]),
            "weights has shape (2,); the laws need (1,)",
        ),
        (lambda: goodput.goodput([0.5], 2, 0), "time is 0; it must be positive"),
        (lambda: goodput.tokens([0.5, 1.5], 2), "alphas is 1.5"),
        (lambda: goodput.fit([(1, 2)]), "profiles must be rows of"),
        (lambda: cascade.vertical_improvement(0.5, 0.5, -1, 2, 0.1, 0.1), "inner_rounds is -1"),
        (lambda: cascade.horizontal_improvement([0.5], [2], [-1]), "a cost is -1"),
        (
            lambda: roofline.pass_time(roofline.Machine(0, 1), roofline.Model(1, 1, 1, 1), 1, 1),
            "bandwidth is 0",
        ),
        (lambda: roofline.critical_context(A100, roofline.Model(1, 1, 1, 1), 0), "tokens is 0"),
        (
            lambda: theory.walltime_improvement(0.5, "3", 0.1),
            "gamma is '3'; it must be a whole number",
        ),
        (
            lambda: theory.walltime_improvement(0.5, None, 0.1),
            "gamma is None; it must be a whole number",
        ),
        (lambda: theory.walltime_improvement(0.5, 3, "0.1"), "c is '0.1'; it must be a number"),
        (lambda: theory.total_cost(10, 0.5, "3", 0.1), "gamma is '3'"),
        (
            lambda: theory.optimal_gamma([0.5, 0.6], 0.1),
            "alpha has shape (2,); it must be one number",
        ),
        (
            lambda: theory.optimal_gamma(0.5, 0.1, verify=2.0),
            "verify is 2.0; it must be a function",
        ),
        (
            lambda: theory.verify_cost(5.0, 2),
            "verify is 5.0; it must be a function, a mapping or a list",
        ),
        (lambda: theory.verify_cost({3: "2"}, 2), "verify[3] is '2'; it must be a number"),
        (lambda: theory.improvement_possible([0.5], 0.1), "alpha has shape (1,)"),
        (lambda: theory.rounds(10, [0.5], 3), "share has shape (1,)"),
        (lambda: theory.expected_tokens(10**400, 3), "alpha is larger than a float can be"),
        (lambda: theory.expected_tokens(0.5, 10**400), "gamma is above 2^53"),
        (lambda: theory.expected_tokens_by_depth([[0.5], [0.6]]), "acceptance has shape (2, 1)"),
        (
            lambda: theory.acceptance_rate(np.ones((0, 1)), np.ones((0, 1))),
            "there is no position in the laws",
        ),
        (lambda: goodput.fit(5), "profiles is 5; give rows of"),
        (lambda: goodput.tokens([], 2), "alphas is empty"),
        (lambda: goodput.best_length([], lambda k: 1.0, 3), "alphas is empty"),
        (
            lambda: goodput.best_length([[0.5], [0.5, 0.6]], lambda k: 1.0, 3),
            "alphas is [[0.5], [0.5, 0.6]]",
        ),
        (lambda: goodput.best_length([0.5], 1.0, 3), "time is 1.0; it must be a function"),
        (
            lambda: cascade.horizontal_improvement(0.5, 2, 0.1),
            "alphas, lengths and costs must be lists",
        ),
        (lambda: cascade.generating_function([0.5], 0.5, 2), "x has shape (1,)"),
        (
            lambda: cascade.vertical_improvement(0.5, [0.5], 1, 2, 0.1, 0.1),
            "inner_alpha has shape (1,)",
        ),
        (
            lambda: roofline.self_speculation(
                A100, roofline.Model(1, 1, 1, 1), batch=1, context="x", gamma=2, alpha=0.5, budget=1
            ),
            "context is 'x'",
        ),
    ],
)
def test_mistakes_are_told(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
