"""Falcon's draft network in plain NumPy: one row, no cache, no jit.

Written from the paper (2412.12639, section 3.2). A text and a path of drafted tokens are fed as a
whole for every prediction.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from eagle_reference import feed_forward, linear, rms, rotated
from head_cases import softmax


class FalconNet(NamedTuple):
    """A network as arrays; ``params`` are those of ``drafters.heads._falcon_layers``."""

    params: dict
    head_dim: int
    block: int
    embedding: np.ndarray  # [V,D]
    unembed: np.ndarray  # [D,V]
    eps: float = 1e-6
    theta: float = 10000.0


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(params, x):
    """[T,2D] -> [T,D]."""
    for layer in ("0", "1"):
        own, outputs = params[layer], []
        width = own["hidden"]["kernel"].shape[0]
        h, c = np.zeros(width), np.zeros(width)
        for row in x:
            gates = linear(row, own["input"]) + linear(h, own["hidden"])
            i, f, g, o = np.split(gates, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            outputs.append(h)
        x = np.array(outputs)
    return x


def layer(net: FalconNet, x, ends):
    """The decoder layer at x [T,D]; slot t reads the slots up to ends[t]."""
    own = net.params["layers"]["0"]
    part, size = own["attention"], len(x)
    q, k, v = (linear(x, part[name]).reshape(size, -1, net.head_dim) for name in ("q", "k", "v"))
    if "q_norm" in part:
        q, k = rms(q, part["q_norm"]["scale"], net.eps), rms(k, part["k_norm"]["scale"], net.eps)
    q, k = rotated(q, net.theta), rotated(k, net.theta)
    k, v = (each.repeat(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = np.zeros_like(q)
    for t, end in enumerate(ends):
        for head in range(q.shape[1]):
            scores = q[t, head] @ k[: end + 1, head].T / np.sqrt(net.head_dim)
            out[t, head] = softmax(scores) @ v[: end + 1, head]
    return feed_forward(net, own, x + linear(out.reshape(size, -1), part["o"]))


def run(net: FalconNet, tokens, features, ends):
    """[T,D]: the estimated features of slots of these tokens and features."""
    x = np.concatenate([net.embedding[tokens], features], -1)
    return layer(net, lstm(net.params["lstm"], x), ends)


def after(net: FalconNet, text, features, path):
    """The logits f64[V] after the tokens ``path``, drafted after ``text``.

    ``features`` [n-1,D] are the target's, of all tokens of the text but the pending one.
    """
    features, tokens, size = np.asarray(features), [*text[1:], *path], net.block
    for _ in range(len(path) // size):
        count = len(features)
        ends = np.full(count, count - 1)
        block = run(net, tokens[:count], features, ends)[-size:]
        features = np.concatenate([features, block])
    count = len(features)
    hidden = run(net, tokens[:count], features, np.full(count, count - 1))
    return hidden[count - size + len(path) % size] @ net.unembed
