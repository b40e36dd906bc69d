"""A roofline model: the gain of speculation on hardware that is not available.

A machine is two numbers and a model is four:

    t(B, S, n) = max((W + B (S kappa + Z)) / bandwidth, B n (F + S G) / flops) + B n X / link
                 + overhead

is the time of a pass over n new tokens in each of B rows with S cached tokens each. W are the bytes
of weights, kappa those of keys and values per cached token, F the operations per token, and G those
of attention per token and cached token. A pass is bound by memory or by arithmetic, by the longer
of both times. Z are the bytes that recurrent layers move of a row's state. X are the bytes that a
chip of several sends per token (``tensor_parallel``; 0 for one chip). With experts W depends on the
pass: beside the other weights it reads the experts that at least one of its B n tokens has chosen
(``distinct_experts``). Launches, latencies of communication, sampling and cache misses are not
modelled, except as ``overhead``.

Sources: Williams et al. 2009 (the roofline); MagicDec, Chen et al. 2024 (2408.11049), which drafts
with the target's weights and a constant part of its cache; SPIRe (2504.06419), which models its
throughput in this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from specjax import checks
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import chain

ACTIVATION_BYTES = 2  # of a number that chips exchange
STATE_BYTES = 4  # of a number of a state


class Machine(NamedTuple):
    """The hardware."""

    bandwidth: float  # bytes per second between memory and arithmetic
    flops: float  # operations per second
    overhead: float = 0.0  # seconds of every pass
    link: float = math.inf  # bytes per second that a chip sends to other chips


class Routing(NamedTuple):
    """The experts of a model: each token of each layer is computed by some of them."""

    experts: int  # in a layer
    chosen: int  # by a token
    layers: int  # that have experts
    bytes_each: float  # of one expert of one layer
    # (tokens, mean number of distinct experts that they choose in a layer), ascending: measured
    # (``measured_routing``). (): tokens choose independently and uniformly.
    measured: tuple[tuple[float, float], ...] = ()


class Model(NamedTuple):
    """What a pass of a model reads and computes, in bytes and operations."""

    parameters: int
    weight_bytes: float  # W, read in every pass
    kv_bytes: float  # kappa, per cached token
    flops: float  # F, per token
    attention_flops: float = 0.0  # G, per token and cached token
    # Of tables of which a token reads one row: stored, and not read in full.
    table_bytes: float = 0.0
    sent_bytes: float = 0.0  # X, per token, to the other chips that share the model
    routing: Routing | None = None  # of experts, whose bytes are not in ``weight_bytes``
    # Z, per row and pass: the states of recurrent layers, read once and written once.
    state_bytes: float = 0.0

    @property
    def expert_bytes(self) -> float:
        """Bytes of all experts."""
        own = self.routing
        return 0.0 if own is None else own.layers * own.experts * own.bytes_each


# Of a model whose layers are shared by several chips, each has a part.
DIVIDED = ("weight_bytes", "kv_bytes", "flops", "attention_flops", "table_bytes", "state_bytes")


def model_of(config: TransformerConfig, itemsize: int = 2, kv_itemsize: int | None = None) -> Model:
    """The ``Model`` of a decoder with ``itemsize`` bytes per parameter.

    Keys and values take ``kv_itemsize`` bytes each (default: ``itemsize``). Tables of which a token
    reads one row (positions, and input embeddings that are not also the head) count as parameters,
    but are neither read in full nor multiplied. Experts are routed uniformly; ``measured_routing``
    gives a routing of its own. The states of recurrent layers are float32. Raises UserError for
    sliding windows and encoders.
    """
    total = parameters(config)
    if config.windows:
        raise UserError(
            "the roofline model has no sliding windows: it takes a decoder that reads the whole "
            "cache in every layer with attention"
        )
    size = checks.count("itemsize", itemsize, 1)
    kv_size = size if kv_itemsize is None else checks.count("kv_itemsize", kv_itemsize, 1)
    looked_up = config.max_positions * config.hidden_size if config.positions == "learned" else 0
    if not config.tie_embeddings:
        looked_up += config.vocab_size * config.hidden_size
    layers, states, corrects = config.num_layers, 0, False
    if (recurrent := config.recurrent) is not None:
        corrects = recurrent.kind == "delta"
        layers -= len(recurrent.layers)
        states = len(recurrent.layers) * recurrent.value_heads
        states *= recurrent.key_dim * recurrent.value_dim
    width = layers * config.head_dim
    used = total - looked_up
    routing, computed = None, used
    if (own := config.experts) is not None:
        each, routed = 3 * config.hidden_size * own.intermediate_size, len(own.layers)
        routing = Routing(own.experts, own.chosen, routed, each * size)
        used -= routed * own.experts * each
        computed = used + routed * own.chosen * each
    # A multiplication and an addition for each weight; for each cached token and head, one product
    # for the attention score and one for the weighted sum of values. For each number of a state:
    # what the query reads of it, the update, and of the delta rule what the key reads.
    return Model(
        total,
        used * size,
        2 * width * config.num_kv_heads * kv_size,
        2 * computed + (6 if corrects else 4) * states,
        4 * width * config.num_heads,
        looked_up * size,
        routing=routing,
        state_bytes=2 * STATE_BYTES * states,
    )


def distinct_experts(routing: Routing, tokens: float) -> float:
    """The expected number of experts of a layer that at least one of ``tokens`` tokens chooses.

    With uniform and independent choices E (1 - (1 - k/E)^T): an expert is not among the k of one
    token with probability 1 - k/E. Measured numbers are interpolated. Raises UserError beyond them.
    """
    count, chosen = checks.count("experts", routing.experts), checks.count("chosen", routing.chosen)
    tokens = checks.cost("tokens", tokens)
    if chosen > count:
        raise UserError(f"chosen is {chosen} of {count} experts; it must be at most their number")
    if not routing.measured:
        return (
            count * -math.expm1(tokens * math.log1p(-chosen / count)) if chosen < count else count
        )
    sizes, numbers = zip((0.0, 0.0), *routing.measured, strict=True)
    if tokens > sizes[-1]:
        raise UserError(
            f"the routing was measured for up to {sizes[-1]:g} tokens, not for {tokens:g}; measure "
            "more"
        )
    return float(np.interp(tokens, sizes, numbers))


def measured_routing(routing: Routing, routes: npt.ArrayLike, sizes: Sequence[int]) -> Routing:
    """The routing with the numbers of distinct experts that a model's router has chosen.

    Args:
        routing: the number of experts, and what they weigh.
        routes: i[layers,tokens,chosen], the experts of consecutive tokens of a text in each layer.
        sizes: the numbers of tokens to count for: means over all layers, and over all groups of so
            many consecutive tokens that begin at a multiple of it.

    Raises UserError for routes of another shape, other experts, or fewer tokens than a size.
    """
    chosen = np.asarray(routes)
    if chosen.ndim != 3 or chosen.shape[2] != routing.chosen:
        raise UserError(
            f"routes have shape {chosen.shape}; it must be [layers,tokens,{routing.chosen}]"
        )
    if ((chosen < 0) | (chosen >= routing.experts)).any():
        raise UserError(f"routes must be experts from 0 to {routing.experts - 1}")
    measured = []
    for size in sorted({checks.count("a size", size) for size in sizes}):
        groups = chosen.shape[1] // size
        if not groups:
            raise UserError(f"routes have {chosen.shape[1]} tokens, and a size is {size}")
        some = chosen[:, : groups * size].reshape(-1, size * routing.chosen)
        used = (some[..., None] == np.arange(routing.experts)).any(1)
        measured.append((float(size), float(used.sum(1).mean())))
    return routing._replace(measured=tuple(measured))


def expert_time(machine: Machine, model: Model, tokens: float) -> float:
    """Seconds to read the experts that ``tokens`` tokens choose."""
    if (own := model.routing) is None:
        return 0.0
    read = own.layers * own.bytes_each * distinct_experts(own, tokens)
    return read / checks.cost("bandwidth", machine.bandwidth, positive=True)


def _refuse_experts(model: Model, what: str) -> None:
    if model.routing is not None:
        raise UserError(
            f"{what} is for models without experts: the bytes that a pass over experts reads are "
            "not linear in the batch; compare pass_time or scaling.speculative for some batches"
        )


def tensor_parallel(
    config: TransformerConfig, chips: int, itemsize: int = 2, kv_itemsize: int | None = None
) -> Model:
    """The part of ``model_of`` that each of ``chips`` chips has when they share every layer.

    Weights, heads, keys and values are divided evenly (norms too: they are small). Each layer has
    two all-reduces of the hidden state, in bfloat16, after attention and after the MLP. In a ring
    a chip sends 2 (chips - 1) / chips of the reduced bytes: Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms for clusters of workstations. Megatron-LM (1909.08053) describes
    the division. Raises UserError if ``chips`` does not divide the heads and the key heads.
    """
    whole, chips = model_of(config, itemsize, kv_itemsize), checks.count("tensor", chips, 1)
    heads = math.gcd(config.num_heads, config.num_kv_heads)
    if heads % chips:
        right = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(
            f"tensor is {chips}; it must divide the {config.num_heads} heads and the "
            f"{config.num_kv_heads} key heads: {right}"
        )
    reduced = 2 * config.num_layers * config.hidden_size * ACTIVATION_BYTES
    divided: dict[str, Any] = {name: getattr(whole, name) / chips for name in DIVIDED}
    if (own := whole.routing) is not None:
        divided["routing"] = own._replace(bytes_each=own.bytes_each / chips)
    return whole._replace(**divided, sent_bytes=2 * (chips - 1) / chips * reduced)


def parameters(config: TransformerConfig) -> int:
    """The number of parameters of a decoder. Raises UserError for a model with an encoder."""
    if config.positions == "relative":
        raise UserError("the roofline model has no encoder: it takes a decoder")
    return sum(leaf.size for leaf in jax.tree.leaves(lm.abstract_params(config)))


def pass_time(
    machine: Machine, model: Model, batch: float, context: float, tokens: int = 1
) -> float:
    """t(B, S, n): seconds of a pass over n = ``tokens`` new tokens in each row.

    B = ``batch`` rows with S = ``context`` cached tokens each.
    """
    memory, arithmetic, fixed = _parts(machine, model, context, tokens)
    batch = checks.cost("batch", batch, positive=True)
    fixed += expert_time(machine, model, batch * tokens)
    overhead = checks.cost("overhead", machine.overhead)
    sending = sending_time(machine, model, batch, tokens)
    return max(fixed + batch * memory, batch * arithmetic) + sending + overhead


def sending_time(machine: Machine, model: Model, batch: float, tokens: int = 1) -> float:
    """B n X / link: seconds of the communication of a pass, without overlap with other work."""
    sent = checks.cost("batch", batch) * checks.count("tokens", tokens, 1)
    sent *= checks.cost("sent_bytes", model.sent_bytes)
    if machine.link == math.inf:
        return 0.0
    return sent / checks.cost("link", machine.link, positive=True)


def _parts(
    machine: Machine, model: Model, context: float, tokens: int
) -> tuple[float, float, float]:
    """Seconds per row for cache and states and for arithmetic, and seconds for the weights."""
    bandwidth = checks.cost("bandwidth", machine.bandwidth, positive=True)
    flops = checks.cost("flops of the machine", machine.flops, positive=True)
    context, tokens = checks.cost("context", context), checks.count("tokens", tokens, 1)
    attention = checks.cost("attention_flops", model.attention_flops)
    work = checks.cost("flops", model.flops) + context * attention
    memory = context * checks.cost("kv_bytes", model.kv_bytes)
    memory = (memory + checks.cost("state_bytes", model.state_bytes)) / bandwidth
    weights = checks.cost("weight_bytes", model.weight_bytes) / bandwidth
    return memory, tokens * work / flops, weights


def saturating_batch(machine: Machine, model: Model, context: float, tokens: int = 1) -> float:
    """The batch above which a pass is bound by arithmetic, so that each token costs time.

    Memory takes W/bandwidth + B (S kappa + Z)/bandwidth and arithmetic B n (F + S G)/flops. The
    result is the B at which the two lines cross, or inf if they do not. Raises UserError for
    experts.
    """
    _refuse_experts(model, "saturating_batch")
    memory, arithmetic, fixed = _parts(machine, model, context, tokens)
    return fixed / (arithmetic - memory) if arithmetic > memory else math.inf


def critical_context(machine: Machine, model: Model, tokens: int) -> float:
    """The context above which a pass is bound by memory at every batch size; inf if there is none.

    The pass is over n = ``tokens`` tokens per row. Without the weights, both times are proportional
    to the batch, so for a large batch the larger slope decides: memory, if
    (S kappa + Z)/bandwidth >= n (F + S G)/flops, that is

        S >= S*(n) = max(0, n F - Z flops/bandwidth) / (kappa flops/bandwidth - n G)

    if the denominator is positive. If it is not, no context suffices (attention itself is bound by
    arithmetic). Reading the weights only adds to the memory time, so S*(n) is sufficient at every
    B; below it, ``saturating_batch`` is finite.

    Above S*(gamma + 1) verification costs one plain step at every B, without communication.
    Self-speculation with b < S cached tokens then drafts in a fraction
    (w + B b kappa') / (w + B S kappa') of a step, where w does not depend on B. This fraction
    decreases with B towards b/S, so the **speed-up grows with the batch**; on short contexts it
    shrinks. This holds while drafting is bound by memory too: at every B if b >= S*(1), else up to
    the ``saturating_batch`` of the draft's pass. MagicDec (2408.11049), analysis of the speed-up.
    Raises UserError for experts.
    """
    _refuse_experts(model, "critical_context")
    tokens = checks.count("tokens", tokens, 1)
    bandwidth = checks.cost("bandwidth", machine.bandwidth, positive=True)
    # Operations per byte.
    balance = checks.cost("flops of the machine", machine.flops, positive=True) / bandwidth
    spare = checks.cost("kv_bytes", model.kv_bytes) * balance
    spare -= tokens * checks.cost("attention_flops", model.attention_flops)
    left = tokens * checks.cost("flops", model.flops) - model.state_bytes * balance
    return max(left, 0.0) / spare if spare > 0 else math.inf


def multiplier(
    machine: Machine,
    target: Model,
    draft: Model,
    *,
    batch: int,
    context: float,
    gamma: int,
    alpha: float,
    budget: float | None = None,
) -> float:
    """The modelled speed-up M(B, S).

    M(B, S) = Omega(gamma, alpha) t_target(1) / (gamma t_draft(1) + t_target(gamma + 1)), where
    Omega are the expected tokens of a round. ``budget`` limits the tokens in the draft's cache
    (None: the whole context); ``batch`` and ``context`` as in ``pass_time``. With ``draft=target``
    it is self-speculation, MagicDec. SPIRe (2504.06419); MagicDec (2408.11049).
    """
    gamma = checks.count("gamma", gamma, 0)
    context = checks.cost("context", context)
    cached = context if budget is None else min(context, checks.cost("budget", budget))
    tokens = chain.expected_tokens(checks.one_rate("alpha", alpha), gamma)
    step, verify = (pass_time(machine, target, batch, context, n) for n in (1, gamma + 1))
    return chain.speedup(tokens, gamma * pass_time(machine, draft, batch, cached), verify, step)
