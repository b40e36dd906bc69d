"""Predictions for a device: against numbers computed by hand, and their limits."""

from __future__ import annotations

import itertools
import math

import pytest

from specjax import theory
from specjax.errors import UserError
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import devices, roofline, scaling
from specjax.theory.scaling import Speculation

pytestmark = pytest.mark.fast
# Llama-3.2-1B and Llama-3.1-8B.
SMALL = TransformerConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072)
LARGE = TransformerConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_embeddings=False
)
READ = 2 * (8_030_261_248 - 128256 * 4096)  # bytes of the weights that a pass reads
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


def test_one_row_is_bound_by_memory():
    """Bandwidth divided by bytes."""
    setup = scaling.setup_of("H100 SXM", LARGE)
    result = scaling.plain(setup, 1, 1000)
    assert result.step == pytest.approx((READ + 1000 * 131_072) / 3.35e12)
    assert result.tokens_per_second == pytest.approx(1 / result.step)
    half = scaling.setup_of("H100 SXM", LARGE, precision="int8", cache="int8")
    assert scaling.plain(half, 1, 1000).step == pytest.approx(result.step / 2)


def test_a_large_batch_is_bound_by_arithmetic():
    setup = scaling.setup_of("A100 80GB SXM", SMALL)
    work = roofline.model_of(SMALL).flops + 100 * 4 * 16 * 64 * 32
    result = scaling.plain(setup, 4096, 100)
    assert result.tokens_per_second == pytest.approx(312e12 / work)


def test_a_round_is_its_formula():
    setup = scaling.setup_of("H200", LARGE, overhead=1e-5)
    step = (READ + 8 * 2000 * 131_072) / 4.8e12 + 1e-5
    chain = scaling.speculative(setup, Speculation(3, alpha=0.7, draft=0.05), 8, 2000)
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert chain.tokens_per_round == pytest.approx(tokens)
    assert chain.draft == pytest.approx(0.15 * step) and chain.verify == pytest.approx(step)
    assert chain.speedup == pytest.approx(tokens / 1.15)
    assert chain.tokens_per_second == pytest.approx(8 * tokens / (1.15 * step))
    draft = roofline.model_of(SMALL)
    tree = Speculation(4, tau=3.2, verified=64, draft=SMALL)
    result = scaling.speculative(setup, tree, 8, 2000)
    one = (draft.weight_bytes + 8 * 2000 * 32_768) / 4.8e12 + 1e-5
    assert result.draft == pytest.approx(4 * one)
    # 512 tokens are bound by arithmetic.
    work = READ + 2000 * 4 * 32 * 128 * 32
    assert result.verify == pytest.approx(512 * work / 989.5e12 + 1e-5)
    assert result.speedup == pytest.approx(3.2 * step / (result.draft + result.verify))
    given = scaling.speculative(setup, tree._replace(draft=draft), 8, 2000)
    assert given == result


def test_memory_is_weights_cache_and_drafter():
    setup = scaling.setup_of("TPU v5p", LARGE, data=2, tensor=4)
    needed = scaling.memory(setup, 16, 4096, SMALL)
    assert needed.weights == 2 * 8_030_261_248 / 4
    assert needed.cache == 8 * 4096 * 131_072 / 4
    small = 2 * roofline.parameters(SMALL) / 4 + 8 * 4096 * 32_768 / 4
    assert needed.drafter == pytest.approx(small)
    assert needed.total == needed.weights + needed.cache + needed.drafter
    assert needed.fits and needed.available == 95e9
    assert scaling.memory(setup, 16, 4096).drafter == 0
    # An int8 model takes half; the cache has its own precision.
    half = scaling.memory(scaling.setup_of("TPU v5p", LARGE, precision="int8"), 1, 4096)
    assert half.weights == 8_030_261_248 and half.cache == 4096 * 131_072


@pytest.mark.parametrize("draft", [0.0, SMALL])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 4)])
def test_the_largest_batch_fits_and_one_more_group_of_rows_does_not(data, tensor, draft):
    setup = scaling.setup_of("TPU v6e", LARGE, data=data, tensor=tensor)
    most = scaling.largest_batch(setup, 3000, draft)
    assert most > 0 and most % data == 0
    assert scaling.memory(setup, most, 3000, draft).fits
    assert not scaling.memory(setup, most + data, 3000, draft).fits
    assert scaling.largest_batch(scaling.setup_of("TPU v5e", LARGE), 1) == 0


def test_a_data_axis_multiplies_the_throughput():
    one = scaling.setup_of("TPU v5e", SMALL)
    four = scaling.setup_of("TPU v5e", SMALL, data=4)
    plan = Speculation(4, alpha=0.7, draft=0.1)
    assert scaling.plain(four, 32, 500).step == scaling.plain(one, 8, 500).step
    first, second = (
        scaling.speculative(s, plan, b, 500).tokens_per_second for s, b in ((one, 8), (four, 32))
    )
    assert second == pytest.approx(4 * first)
    plan = Speculation(16, alpha=0.3, draft=0.01)
    limit = scaling.break_even(one, plan, 100)
    assert 1 < limit < math.inf
    assert scaling.break_even(four, plan, 100) == pytest.approx(4 * limit)


def test_communication_is_that_of_a_ring_and_takes_from_the_gain():
    alone = scaling.setup_of("H100 SXM", LARGE)
    assert scaling.collective_time(alone, 8, 5) == 0
    setup = scaling.setup_of("H100 SXM", LARGE, tensor=8)
    # Two all-reduces of 40 x 4096 numbers of two bytes; a chip sends 2 * 7/8 of them.
    layer = 2 * 40 * 4096 * 2 * 1.75 / 450e9
    assert scaling.collective_time(setup, 8, 5) == pytest.approx(layer)
    free = setup._replace(machine=setup.machine._replace(link=math.inf))
    plan = Speculation(4, alpha=0.8, draft=0.0)
    verify = [scaling.speculative(s, plan, 8, 1000).verify for s in (setup, free)]
    assert verify[0] - verify[1] == pytest.approx(32 * layer)
    gains = [scaling.speculative(s, plan, 8, 1000).speedup for s in (setup, free)]
    assert gains[0] < gains[1]
    assert gains[1] == pytest.approx(theory.expected_tokens(0.8, 4))


@pytest.mark.parametrize("draft", [0.0, 0.1, SMALL])
@pytest.mark.parametrize("context", [0, 1000, 20_000])
def test_rejected_drafts_gain_nothing(draft, context):
    setup = scaling.setup_of("H100 SXM", LARGE)
    none = Speculation(4, alpha=0.0, draft=draft)
    assert scaling.break_even(setup, none, context) == 0
    assert scaling.speculative(setup, none, 1, context).speedup <= 1


@pytest.mark.parametrize("device", devices.names())
@pytest.mark.parametrize("context", [0, 300, 20_000])
@pytest.mark.parametrize("draft", [0.0, 0.08, SMALL])
def test_the_break_even_batch_grows_with_alpha_and_is_the_last_gain(device, context, draft):
    setup = scaling.setup_of(devices.named(device)._replace(memory=1e30), LARGE)
    plans = [Speculation(5, alpha=alpha, draft=draft) for alpha in ALPHAS]
    limits = [scaling.break_even(setup, plan, context) for plan in plans]
    assert limits == sorted(limits)
    for plan, limit in zip(plans, limits, strict=True):

        def gain(batch, plan=plan):
            return scaling.speculative(setup, plan, max(1, batch), context).speedup

        if 2 < limit < math.inf:
            assert gain(math.floor(limit)) >= 1 - 1e-6 and gain(math.ceil(limit) + 1) <= 1 + 1e-9
        batches = [4**power for power in range(12)]
        beyond = [batch for batch in batches if batch > limit]
        assert all(gain(batch) <= 1 + 1e-6 for batch in beyond)
        if limit == math.inf:
            assert gain(4**14) > 1


def test_the_last_positive_point_of_linear_pieces():
    def hat(x):
        return min(x - 1, 5 - x)

    assert scaling.last_positive(hat, [3]) == pytest.approx(5)
    assert scaling.last_positive(lambda x: 2 - x, []) == pytest.approx(2)
    assert scaling.last_positive(lambda x: -1, [2, math.inf]) == 0
    assert scaling.last_positive(lambda x: x - 9, [1]) == math.inf
    # Positive up to 1, negative up to 3, then 0.
    saw = {0: 1, 1: 0, 2: -1, 3: 0}

    def pieces(x):
        low = min(int(x), 2)
        return saw[low] + min(x - low, 1) * (saw[low + 1] - saw[low])

    assert scaling.last_positive(pieces, [1, 2, 3]) == pytest.approx(1)


def test_gains_are_monotone():
    setup = scaling.setup_of("B200", LARGE, tensor=2)
    by_alpha = [
        scaling.speculative(setup, Speculation(4, alpha=a, draft=SMALL), 16, 1000).speedup
        for a in ALPHAS
    ]
    by_batch = [
        scaling.speculative(setup, Speculation(4, alpha=0.6), 4**power, 0).speedup
        for power in range(6)
    ]
    assert all(a < b for a, b in itertools.pairwise(by_alpha))
    assert by_batch == sorted(by_batch, reverse=True) and by_batch[0] > 2 > 1 > by_batch[-1]


H100 = scaling.setup_of("H100 SXM", LARGE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scaling.setup_of("V100", LARGE), "there is no device 'V100'; known are TPU v4"),
        (lambda: scaling.setup_of("H200", LARGE, tensor=3), "tensor is 3; it must divide the 32"),
        (lambda: scaling.setup_of("H200", LARGE, data=0), "data is 0"),
        (
            lambda: scaling.setup_of("H200", LARGE, precision="float32"),
            "precision is 'float32'; it must be one of bfloat16, float16, float8, int8",
        ),
        (
            lambda: scaling.plain(scaling.setup_of("TPU v5e", LARGE), 1, 10),
            "each chip needs 16.1 GB (weights 16.1, cache 0.0, drafter 0.0) and TPU v5e has 16 GB; "
            "use more chips on the tensor axis, or weights of fewer bytes",
        ),
        (
            lambda: scaling.speculative(H100, Speculation(4, alpha=0.5, draft=SMALL), 64, 8192),
            "each chip needs 104.4 GB (weights 16.1, cache 68.7, drafter 19.7) and H100 SXM has "
            "80 GB; use more chips on the tensor axis, or a smaller batch or a shorter context",
        ),
        (
            lambda: scaling.plain(scaling.setup_of("H200", LARGE, data=4), 6, 10),
            "batch is 6 and data is 4; the batch must be a multiple of data",
        ),
        (lambda: scaling.break_even(H100, Speculation(4), 10), "alpha is None and tau is None"),
        (lambda: scaling.break_even(H100, Speculation(4, 0.5, 2.0), 10), "give one of them"),
        (lambda: scaling.break_even(H100, Speculation(4, 1.5), 10), "alpha is 1.5"),
        (
            lambda: scaling.break_even(H100, Speculation(4, tau=5.5), 10),
            "tau is 5.5; it must be between 1 and gamma + 1, which is 5",
        ),
        (
            lambda: scaling.speculative(H100, Speculation(4, tau=2, verified=3), 1, 10),
            "verified is 3",
        ),
        (lambda: scaling.plain(H100, 0, 10), "batch is 0"),
        (lambda: scaling.plain(H100, 1, -1), "context is -1"),
        (
            lambda: scaling.speculative(H100, Speculation(4, tau=2, draft=-0.1), 1, 10),
            "draft is -0.1",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)
