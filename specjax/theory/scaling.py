"""Predictions for a named device: tokens per second, memory, and where speculation stops to gain.

The chips form a mesh data x tensor. The rows of a batch are divided over the data axis, and each
of the data groups has its own copy of the models; the chips of the tensor axis share every layer.
With r = B / data rows in a group, t the time of a pass of one chip (``theory.roofline``, with the
part of the model that the chip has) and S cached tokens in each row:

    plain tokens per second        B / t(r, S, 1)
    speculative tokens per second  B tau / (gamma d + t(r, S, v))
    speed-up                       tau t(r, S, 1) / (gamma d + t(r, S, v))
    bytes of a chip                weights + r S kappa, of the target and of the drafter

where a round drafts gamma tokens in time d each, verifies v tokens (gamma + 1 in a chain, the nodes
and the root in a tree) and emits tau tokens. For a chain tau follows from the acceptance rate:
``chain.expected_tokens``. The passes of the drafter have the same rows and cached tokens.

The numbers are computed from peak values: no program is faster. Not modelled: launches and gaps
between programs (except as ``overhead``), sampling and acceptance, the latency of collectives (only
their bytes count, and all links of a chip send at full rate), collectives of embeddings and logits,
the network between hosts, padding, prefill, and the memory of activations, logits and programs.
Weights in one byte are multiplied at bfloat16's rate. The speed-up is a ratio of two such times: it
may be above or below a measured one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specjax import checks
from specjax.errors import UserError
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import chain, roofline
from specjax.theory.devices import Device, named

PRECISIONS = {"bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
"""Bytes of a weight, or of a cached number."""
DraftCost = TransformerConfig | roofline.Model | float
"""What drafting costs: see ``Speculation``."""
LEAST_GAIN = 1e-9  # a speed-up above 1 by less is rounding


class Setup(NamedTuple):
    """A model on chips: made by ``setup_of``."""

    device: Device
    machine: roofline.Machine  # one chip
    target: roofline.Model  # the part of one chip
    layers: int
    data: int
    tensor: int
    itemsize: int  # bytes of a weight
    kv_itemsize: int  # bytes of a cached number


class Speculation(NamedTuple):
    """What a round drafts, and how much of it is accepted: give ``alpha`` or ``tau``.

    ``draft`` is the cost of one draft token as a share of the target's pass over one token, a
    ``TransformerConfig`` that is divided over the tensor axis like the target, or the ``Model``
    that each chip runs. A cost takes no memory.
    """

    gamma: int  # draft tokens, one after the other; of a tree: its depth
    alpha: float | None = None  # acceptance rate of each token of a chain
    tau: float | None = None  # tokens per round, between 1 and gamma + 1
    verified: int | None = None  # tokens in the verifying pass; None: gamma + 1
    draft: DraftCost = 0.0


class Memory(NamedTuple):
    """Bytes of one chip."""

    weights: float
    cache: float
    drafter: float  # its weights and its cache
    available: float

    @property
    def total(self) -> float:
        """All bytes that are needed."""
        return self.weights + self.cache + self.drafter

    @property
    def fits(self) -> bool:
        """Whether the device has them."""
        return self.total <= self.available


class Plain(NamedTuple):
    """A prediction for plain decoding."""

    tokens_per_second: float  # of all chips
    step: float  # seconds
    memory: Memory


class Speculative(NamedTuple):
    """A prediction for speculative decoding."""

    tokens_per_second: float  # of all chips
    speedup: float
    tokens_per_round: float
    draft: float  # seconds of a round
    verify: float  # seconds of a round
    memory: Memory


def setup_of(
    device: str | Device,
    config: TransformerConfig,
    *,
    data: int = 1,
    tensor: int = 1,
    precision: str = "bfloat16",
    cache: str = "bfloat16",
    overhead: float = 0.0,
) -> Setup:
    """A model on data x tensor chips of a device: a name of ``devices.names()``, or a ``Device``.

    ``precision`` is that of the weights and ``cache`` that of keys and values, keys of
    ``PRECISIONS``. Every pass takes ``overhead`` seconds in addition. Raises UserError for an
    unknown device or precision, and for a tensor axis that does not divide the heads.
    """
    for name, value in (("precision", precision), ("cache", cache)):
        checks.one_of(name, value, tuple(PRECISIONS))
    chip, sizes = named(device), (PRECISIONS[precision], PRECISIONS[cache])
    machine = chip.machine(checks.cost("overhead", overhead))
    target = roofline.tensor_parallel(config, tensor, *sizes)
    data = checks.count("data", data, 1)
    return Setup(chip, machine, target, config.num_layers, data, tensor, *sizes)


def plain(setup: Setup, batch: int, context: float) -> Plain:
    """Plain decoding of ``batch`` rows with ``context`` cached tokens each.

    Raises UserError if the model and the cache do not fit.
    """
    rows, needed = _rows(setup, batch), _fitting(setup, batch, context, 0.0)
    step = roofline.pass_time(setup.machine, setup.target, rows, context)
    return Plain(batch / step, step, needed)


def speculative(setup: Setup, speculation: Speculation, batch: int, context: float) -> Speculative:
    """Speculative decoding of ``batch`` rows with ``context`` cached tokens each.

    Raises UserError if the models and their caches do not fit.
    """
    tau = tokens_per_round(speculation)
    rows = _rows(setup, batch)
    needed = _fitting(setup, batch, context, speculation.draft)
    step, draft, verify = _times(setup, speculation, rows, context)
    gain = chain.speedup(tau, draft, verify, step)
    return Speculative(batch * gain / step, gain, tau, draft, verify, needed)


def tokens_per_round(speculation: Speculation) -> float:
    """tau: as given, or from alpha for a chain. Raises UserError unless one of both is given."""
    gamma, alpha, tau = checks.count("gamma", speculation.gamma), speculation.alpha, speculation.tau
    if (alpha is None) == (tau is None):
        raise UserError(f"alpha is {alpha} and tau is {tau}; give one of them")
    if alpha is not None:
        return chain.expected_tokens(checks.one_rate("alpha", alpha), gamma)
    return chain.tokens_of(tau or 0.0, gamma, "tau")[0]


def memory(setup: Setup, batch: int, context: float, draft: DraftCost = 0.0) -> Memory:
    """Bytes of each chip for ``batch`` rows with ``context`` cached tokens each."""
    rows, (weights, per_row) = _rows(setup, batch), _stored(setup.target, context)
    drafter, more_per_row = _stored(_drafter(setup, draft)[0], context)
    return Memory(weights, rows * per_row, drafter + rows * more_per_row, setup.device.memory)


def largest_batch(setup: Setup, context: float, draft: DraftCost = 0.0) -> int:
    """The most rows with ``context`` cached tokens each that fit; 0 if the weights do not fit."""
    weights, per_row = _stored(setup.target, checks.cost("context", context, positive=True))
    drafter, more_per_row = _stored(_drafter(setup, draft)[0], context)
    spare = setup.device.memory - weights - drafter
    return setup.data * max(0, math.floor(spare / (per_row + more_per_row)))


def break_even(setup: Setup, speculation: Speculation, context: float) -> float:
    """The largest batch at which speculation gains: inf if it always does, 0 if it never does.

    The result is real, and below the number of data groups if no batch gains; the memory is not
    considered. It is exact: all times are linear between the batches at which a pass becomes bound
    by arithmetic. If the gain grows with the batch (long contexts), smaller batches may not gain.
    Raises UserError for experts, where the times are not linear.
    """
    tau = tokens_per_round(speculation)

    def saved(rows: float) -> float:
        step, draft, verify = _times(setup, speculation, rows, context)
        gain = chain.speedup(tau, draft, verify, step) - 1
        return (draft + verify) * gain if abs(gain) > LEAST_GAIN else 0.0

    return setup.data * last_positive(saved, _kinks(setup, speculation, context))


def collective_time(setup: Setup, batch: int, tokens: int = 1) -> float:
    """Seconds of both all-reduces of one layer, in a pass over ``tokens`` tokens per row.

    A lower bound of the time, so what it takes from the gain is the least.
    """
    rows = _rows(setup, batch)
    return roofline.sending_time(setup.machine, setup.target, rows, tokens) / setup.layers


def _rows(setup: Setup, batch: int) -> int:
    """Rows of one group of the data axis."""
    if checks.count("batch", batch, 1) % setup.data:
        raise UserError(
            f"batch is {batch} and data is {setup.data}; the batch must be a multiple of data"
        )
    return batch // setup.data


def _verified(speculation: Speculation) -> int:
    gamma = checks.count("gamma", speculation.gamma)
    if speculation.verified is None:
        return gamma + 1
    return checks.count("verified", speculation.verified, gamma + 1)


def _drafter(setup: Setup, draft: DraftCost) -> tuple[roofline.Model | None, float]:
    """What each chip runs and stores for drafting, or None and the cost."""
    if isinstance(draft, roofline.Model):
        return draft, 0.0
    if isinstance(draft, TransformerConfig):
        sizes = setup.itemsize, setup.kv_itemsize
        return roofline.tensor_parallel(draft, setup.tensor, *sizes), 0.0
    return None, checks.cost("draft", draft)


def _times(
    setup: Setup, speculation: Speculation, rows: float, context: float
) -> tuple[float, float, float]:
    """Seconds of a plain step, and of a round's drafting and verification."""
    machine, gamma = setup.machine, checks.count("gamma", speculation.gamma)
    step = roofline.pass_time(machine, setup.target, rows, context)
    verify = roofline.pass_time(machine, setup.target, rows, context, _verified(speculation))
    model, cost = _drafter(setup, speculation.draft)
    one = cost * step if model is None else roofline.pass_time(machine, model, rows, context)
    return step, gamma * one, verify


def _kinks(setup: Setup, speculation: Speculation, context: float) -> list[float]:
    """The rows at which the passes of a round, and a plain step, become bound by arithmetic."""
    passes = [(setup.target, 1), (setup.target, _verified(speculation))]
    if (model := _drafter(setup, speculation.draft)[0]) is not None:
        passes.append((model, 1))
    return [roofline.saturating_batch(setup.machine, m, context, n) for m, n in passes]


def _stored(model: roofline.Model | None, context: float) -> tuple[float, float]:
    """Bytes of weights, and of the cache and the states of a row."""
    if model is None:
        return 0.0, 0.0
    weights = checks.cost("weight_bytes", model.weight_bytes)
    weights += checks.cost("table_bytes", model.table_bytes) + model.expert_bytes
    cache = checks.cost("context", context) * checks.cost("kv_bytes", model.kv_bytes)
    # Each pass moves a state twice.
    return weights, cache + checks.cost("state_bytes", model.state_bytes) / 2


def _fitting(setup: Setup, batch: int, context: float, draft: DraftCost) -> Memory:
    """``memory``; UserError if it does not fit."""
    needed = memory(setup, batch, context, draft)
    if needed.fits:
        return needed
    parts = f"weights {needed.weights / 1e9:.1f}, cache {needed.cache / 1e9:.1f}"
    parts += f", drafter {needed.drafter / 1e9:.1f}"
    empty = memory(setup, batch, 0, draft)
    right = "a smaller batch or a shorter context" if empty.fits else "weights of fewer bytes"
    raise UserError(
        f"each chip needs {needed.total / 1e9:.1f} GB ({parts}) and {setup.device.name} has "
        f"{needed.available / 1e9:.0f} GB; use more chips on the tensor axis, or {right}"
    )


def last_positive(function: Callable[[float], float], kinks: Sequence[float]) -> float:
    """The supremum of the x > 0 with function(x) > 0: inf if there is no bound, 0 for no such x.

    ``function`` is linear between 0, the ``kinks`` (positive, some may be inf) and inf. Where it is
    0 up to rounding it must return 0.
    """
    points = sorted(x for x in kinks if 0 < x < math.inf) or [1.0]
    last = points[-1]
    # Beyond the last kink the slope decides.
    if function(1e9 * last) > 0:
        return math.inf
    if function(last) > 0:
        slope = (function(2 * last) - function(last)) / last
        return last - function(last) / slope
    points = [points[0] * 1e-6, *points]
    for low, high in zip(points[-2::-1], points[:0:-1], strict=True):
        if (value := function(low)) > 0:
            return low + (high - low) * value / (value - function(high))
    return 0.0
