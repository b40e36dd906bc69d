"""The block network and its corrections in plain NumPy: one row, no cache, no jit.

Written from DFlash (2602.06036, section 3), DFlare (2606.02091), DSpark (2607.05147, sections 3.2
and 3.3), Domino (2605.29707), DFlash 2 (inco.ai/blog/dflash2) and xPress (2608.02438). The taps of
a whole text are fed for every block.

The text has n tokens. The target's hidden states of the first n - 1, at the positions 0 to n - 2,
are the context. The block is the pending token at position n - 1 and masks behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from eagle_reference import linear, rms
from falcon_reference import sigmoid
from head_cases import silu, softmax


class BlockNet(NamedTuple):
    """A network as arrays; ``params`` are those of ``drafters.heads.block``."""

    params: dict
    head_dim: int
    embedding: np.ndarray  # [V,D]
    unembed: np.ndarray  # [D,V]
    tokens: int  # K of a draft
    anchor: bool = False
    causal: bool = False
    windows: tuple[int | None, ...] = ()
    mask_id: int | None = None
    plain: int = 0
    candidates: int = 0
    ids: tuple[int, ...] | None = None  # the draft vocabulary
    eps: float = 1e-6
    theta: float = 10000.0


class Drafted(NamedTuple):
    """The depths of one draft."""

    logits: np.ndarray  # f64[K,V], -inf outside of the draft vocabulary
    confidence: np.ndarray | None  # f64[K] before the sigmoid
    block: np.ndarray  # f64[K,V] before the correction
    every: np.ndarray  # f64[K,V] of a selector, of all tokens as if they were candidates


def rotated(x, positions, theta):
    """x [T,H,d]: the pair (i, i + d/2) at position t is turned by t / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None, None] / theta ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def contexts(net: BlockNet, taps):
    """The context [T,D] of every layer, from taps [T,n,D]."""
    params, count = net.params, len(net.params["layers"])
    scale = params["hidden_norm"]["scale"]
    if "mix" not in params:
        return [rms(linear(taps.reshape(len(taps), -1), params["fc"]), scale, net.eps)] * count
    found = []
    for layer in range(count):
        weights = softmax(params["mix"][layer])
        mixed = sum(weight * taps[:, i] for i, weight in enumerate(weights))
        found.append(rms(mixed, scale, net.eps))
    return found


def keys_and_values(net: BlockNet, layer, x, positions, of_context: bool):
    """[T,H,d] each; DFlare's layers have maps of their own for the context."""
    part = layer["attention"]
    to_k, to_v = part["k"], part["v"]
    if of_context and "context_k" in layer:
        to_k, to_v = layer["context_k"], layer["context_v"]
    k, v = (linear(x, each).reshape(len(x), -1, net.head_dim) for each in (to_k, to_v))
    if "k_norm" in part:
        k = rms(k, part["k_norm"]["scale"], net.eps)
    return rotated(k, positions, net.theta), v


def convolutions(part, x):
    """The functions before and after a part of a layer that reads x [F,D]."""
    _, taps, width = part["base"].shape
    change = linear(x, part["project"]).reshape(len(x), 2, taps, -1)
    group = width // change.shape[-1]

    def convolution(side):
        def apply(values):
            out = np.zeros_like(values)
            for place in range(len(values)):
                for channel in range(width):
                    for tap in range(min(taps, place + 1)):
                        kernel = part["base"][side, tap, channel]
                        kernel = kernel + change[place, side, tap, channel // group]
                        out[place, channel] += kernel * values[place - tap, channel]
            return out

        return apply

    return convolution(0), convolution(1)


def feed_forward(net: BlockNet, layer, x):
    """[F,D]: x with the result of the feed-forward part."""
    read, mlp = rms(x, layer["mlp_norm"]["scale"], net.eps), layer["mlp"]
    before, after = same, same
    if "mlp_conv" in layer:
        before, after = convolutions(layer["mlp_conv"], read)
    read = before(read)
    inner = silu(linear(read, mlp["gate"])) * linear(read, mlp["up"])
    return x + after(linear(inner, mlp["down"]))


def same(x):
    return x


def attention(net: BlockNet, index: int, x, context):
    """[F,D]: the places of the block, whose states are x [F,D], read the context and each other."""
    layer = net.params["layers"][str(index)]
    part, before, size = layer["attention"], len(context), len(x)
    window = net.windows[index] if net.windows else None
    positions = before + np.arange(size)
    normed = rms(x, layer["attention_norm"]["scale"], net.eps)
    convolved, after = same, same
    if "attention_conv" in layer:
        convolved, after = convolutions(layer["attention_conv"], normed)
    normed = convolved(normed)
    q = linear(normed, part["q"]).reshape(size, -1, net.head_dim)
    if "q_norm" in part:
        q = rms(q, part["q_norm"]["scale"], net.eps)
    q = rotated(q, positions, net.theta)
    text = keys_and_values(net, layer, context, np.arange(before), True)
    own = keys_and_values(net, layer, normed, positions, False)
    k, v = (np.concatenate(pair) for pair in zip(text, own, strict=True))
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for place in range(size):
        at = before + place
        read = [
            other
            for other in range(before + size)
            if not (net.causal and other > at) and not (window and at - other >= window)
        ]
        for head in range(q.shape[1]):
            scores = k[read, head // group] @ q[place, head] / np.sqrt(net.head_dim)
            out[place, head] = softmax(scores) @ v[read, head // group]
    return after(linear(out.reshape(size, -1), part["o"]))


def outputs(net: BlockNet, taps, pending: int):
    """[F,D]: the outputs at all places of a block."""
    params, places = net.params, net.tokens + (not net.anchor)
    table = params["embed"]["embedding"] if "embed" in params else net.embedding
    mask = params["mask"] if net.mask_id is None else table[net.mask_id]
    x = np.stack([table[pending]] + [mask] * (places - 1))
    for index, context in enumerate(contexts(net, taps)):
        x = x + attention(net, index, x, context)
        x = feed_forward(net, params["layers"][str(index)], x)
    return rms(x, params["norm"]["scale"], net.eps)


def gru(own, state, x):
    """A GRU without biases; PyTorch's gates: reset, update, new."""
    of_x, of_state = np.split(x @ own["w"], 3), np.split(state @ own["u"], 3)
    reset, update = sigmoid(of_x[0] + of_state[0]), sigmoid(of_x[1] + of_state[1])
    return (1 - update) * np.tanh(of_x[2] + reset * of_state[2]) + update * state


def markov(own, state, row, hidden):
    """(What is added to the logits, the state) of DSpark's three heads."""
    if "gate" in own:
        row = sigmoid(linear(np.concatenate([hidden, row]), own["gate"])) * row
    if "joint" in own:
        read = np.concatenate([state, row, hidden])
        gate, candidate, out = np.split(linear(read, own["joint"]), 3)
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        row = np.tanh(out)
    return linear(row, own["out"]), state


def refined(own, places, tokens, place: int):
    """What xPress adds to the logits at a place; ``tokens`` are those before each of ``places``."""
    mean = places.mean(0) @ own["mean"]["kernel"]
    parts = [
        np.concatenate([linear(places[j], own["hidden"]), mean, own["table"][tokens[j]]])
        @ own["in"]["kernel"]
        for j in range(place + 1)
    ]
    mixed = sum(own["mix"][:, place, j] * part for j, part in enumerate(parts))
    x = parts[place] + mixed
    inner = silu(linear(x, own["gate"])) * linear(x, own["up"])
    return linear(x + linear(inner, own["down"]), own["readout"])


def selected(net: BlockNet, token: int, hidden, logits):
    """(logits of the candidates, -inf of others; of all as if they were candidates) of DFlash 2."""
    own = net.params["selector"]
    every = logits + own["after"] @ (own["before"][token] * linear(hidden, own["hidden"]))
    best = np.argsort(-logits, kind="stable")[: net.candidates]
    return np.where(np.isin(np.arange(len(logits)), best), every, -np.inf), every


def draft(net: BlockNet, taps, earlier: int, pending: int, tokens) -> Drafted:
    """All depths of a draft of these ``tokens``; ``taps`` [n-1,n,D] are of the text.

    ``earlier`` is the text's token before the pending one.
    """
    params, logits, sure, block, edges = net.params, [], [], [], []
    table = params["embed"]["embedding"] if "embed" in params else net.embedding
    state = np.zeros(len(params["gru"]["u"])) if "gru" in params else None
    if "joint" in params.get("markov", {}):
        state = np.zeros(params["markov"]["table"].shape[1])
    before = [pending, *tokens]
    places, first = outputs(net, taps, pending), int(not net.anchor)
    for depth, hidden in enumerate(places[first:]):
        own = linear(hidden, params["head"]) if "head" in params else hidden @ net.unembed
        read, token = hidden, before[depth]
        block.append(own)
        if "selector" in params:
            own, every = selected(net, token, hidden, own)
            edges.append(every)
        if "refiner" in params:
            fed = before if net.anchor else [earlier, *before]
            own = own + refined(params["refiner"], places, fed, depth + first)
        if "markov" in params:
            row = params["markov"]["table"][token]
            change, state = markov(params["markov"], state, row, hidden)
            own, read = own + change, np.concatenate([hidden, row])
        if "gru" in params:
            state = gru(params["gru"], state, table[token])
            inner = silu(linear(np.concatenate([hidden, state]), params["prefix"]["in"]))
            own = own + linear(inner, params["prefix"]["out"]) * (depth >= net.plain)
        if "confidence" in params:
            sure.append(linear(read, params["confidence"])[0])
        every = np.full(len(net.embedding), -np.inf)
        every[list(net.ids or range(len(every)))] = own
        logits.append(every)
    return Drafted(
        np.array(logits), np.array(sure) if sure else None, np.array(block), np.array(edges)
    )
