"""Heads on the target's last feature in plain NumPy: one row, no cache, no jit.

Written from the papers: Medusa (2401.10774, section 2.1), Hydra and Hydra++ (2402.05109, sections 3
and 4), blockwise parallel decoding (1811.03115, section 6), the MLP speculator (2404.19124,
section 2), ReDrafter (2403.09919, section 3) and multi-token prediction (2404.19737, section 2).

Every function reads ``feature`` [E] of the token before the pending one, or ``features`` [T,E] of
all tokens up to it, and the tokens since: the pending one and the draft's. It gives the logits f64
[V] of the next one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from eagle_reference import Plain, attention, feed_forward, linear, rms
from head_cases import silu


class Heads(NamedTuple):
    """Heads as arrays."""

    params: dict
    embedding: np.ndarray  # [V,D]
    unembed: np.ndarray  # [D,V]
    head_dim: int = 0  # of layers before the heads
    last_norm: np.ndarray | None = None  # the factors of the target's last norm
    eps: float = 1e-6
    scale_input: bool = False
    stages: int = 1


def medusa(net: Heads, features, since):
    """Residual blocks, and a map to the vocabulary, of the head of this depth."""
    own, depth, x = net.params, len(since) - 1, features[-1]
    for layer in range(own["block"]["bias"].shape[1]):
        kernel, bias = (own["block"][name][depth, layer] for name in ("kernel", "bias"))
        x = x + silu(x @ kernel + bias)
    return x @ own["head"]["kernel"][depth]


def bpd(net: Heads, features, since):
    """A hidden layer for each slot, or one for all, and a residual connection to the feature."""
    up, down, depth = net.params["up"], net.params["down"], len(since) - 1
    x = features[-1]
    units = np.maximum(np.einsum("d,kdi->ki", x, up["kernel"]) + up["bias"], 0)
    joint = down["kernel"].shape[1] != units.shape[1]
    read = units.reshape(-1) if joint else units[depth]
    return (x + read @ down["kernel"][depth] + down["bias"][depth]) @ net.unembed


def hydra(net: Heads, features, since):
    """R x + SiLU(W x + b) of x = [feature, e(tokens since)], residual blocks, a map with a bias."""
    own, depth = net.params, len(since) - 1
    if "prefix" in own:
        features = decoder_layer(net, own["prefix"], features)
        features = rms(features, own["prefix"]["norm"]["scale"], net.eps)
    head, x = own["mlp"][str(depth)], np.concatenate([features[-1], *net.embedding[since]])
    x = linear(x, head["skip"]) + silu(linear(x, head["in"]))
    for block in range(len(head.get("blocks", {}))):
        x = x + silu(linear(x, head["blocks"][str(block)]))
    return linear(x, own["head"][str(depth)])


def mtp(net: Heads, features, since):
    """A decoder layer for each depth, on the input of the target's last one."""
    x = decoder_layer(net, net.params["layers"][str(len(since) - 1)], features)[-1]
    return rms(x, net.last_norm, net.eps) @ net.unembed


def decoder_layer(net: Heads, layer, x):
    """[T,E] -> [T,E]: a Llama layer."""
    plain = Plain(layer, net.head_dim, net.embedding, net.unembed, eps=net.eps)
    normed = rms(x, layer["attention_norm"]["scale"], net.eps)
    return feed_forward(plain, layer, x + attention(plain, layer["attention"], normed))


def mlp_speculator(net: Heads, features, since):
    """s_i = GELU(LN(w_s W s_(i-1) + w_e E(token))), and a map to the vocabulary, for each stage."""
    own = net.params
    tied = len(own["emb"]) == 1 and "proj" in own
    keep = 0.5 ** (0.5 / net.stages)
    weight = math.sqrt((1 - keep**2) * own["emb"].shape[2] / 2) / keep
    state = features[-1]
    if net.scale_input:
        state = rms(state, 1 / math.sqrt(2), net.eps)
    for stage, token in enumerate(since):
        at = 0 if tied else stage
        into = own["proj"][str(0 if tied else stage - 1)] if stage else own["proj_in"]
        state = state @ into + weight * own["emb"][at, token]
        state = rms(state, own["ln"]["scale"][at], net.eps) + own["ln"]["bias"][at]
        state = state * (1 + np.array([math.erf(x / math.sqrt(2)) for x in state])) / 2
    return state @ own["head"][str(0 if tied else len(since) - 1)]


def redrafter(net: Heads, features, since):
    """A recurrent state of the tokens beside the feature, and the same blocks at any depth."""
    own, state = net.params, np.zeros_like(features[-1])
    for token in since:
        embedded = net.embedding[token]
        if "rnn" not in own:
            state = state + embedded
            continue
        w, u = own["rnn"]["w"], own["rnn"]["u"]
        state = silu(linear(embedded, w) + linear(state, u))
    x = np.concatenate([features[-1], state])
    if "input_proj" in own:
        x = linear(x, own["input_proj"])
    for block in range(len(own["block"])):
        x = x + silu(linear(x, own["block"][str(block)]))
    return x @ own["head"]["kernel"]
