"""EAGLE-1, EAGLE-2's tree and EAGLE-3 in plain NumPy: one row, no cache, no jit.

Written from the papers (2401.15077 section 4, 2406.16858 section 4, 2503.01840 section 3) and the
files of EAGLE-3.1. A text and a path of drafted tokens are fed as a whole for every prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from head_cases import silu, softmax


class Plain(NamedTuple):
    """A draft network as arrays; ``params`` are those of ``drafters.heads.eagle._network``."""

    params: dict
    head_dim: int
    embedding: np.ndarray  # [V,D]
    unembed: np.ndarray  # [D,V] of the target, for EAGLE-1
    ids: np.ndarray | None = None
    norm_output: bool = False
    norm_before_residual: bool = False
    eps: float = 1e-6
    theta: float = 10000.0
    shift: int = 1


def rms(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def linear(x, part):
    return x @ part["kernel"] + part.get("bias", 0)


def rotated(x, theta):
    """x [T,H,d]: the pair (i, i + d/2) at position t is turned by t / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] / theta ** (np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(net: Plain, part, x):
    """Causal grouped-query attention over x [T,W]."""
    size = len(x)
    q, k, v = (linear(x, part[name]).reshape(size, -1, net.head_dim) for name in ("q", "k", "v"))
    if "q_norm" in part:
        q, k = rms(q, part["q_norm"]["scale"], net.eps), rms(k, part["k_norm"]["scale"], net.eps)
    q, k = rotated(q, net.theta), rotated(k, net.theta)
    k, v = (each.repeat(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = np.zeros_like(q)
    for t in range(size):
        for head in range(q.shape[1]):
            weights = softmax(q[t, head] @ k[: t + 1, head].T / np.sqrt(net.head_dim))
            out[t, head] = weights @ v[: t + 1, head]
    return linear(out.reshape(size, -1), part["o"])


def feed_forward(net: Plain, layer, x):
    y, mlp = rms(x, layer["mlp_norm"]["scale"], net.eps), layer["mlp"]
    return x + linear(silu(linear(y, mlp["gate"])) * linear(y, mlp["up"]), mlp["down"])


def read(net: Plain, hidden, taps):
    """The target's features [T,D] as the network reads them; ``taps`` [T,n,E] for EAGLE-3."""
    params = net.params
    if "head" not in params:
        return hidden
    if "fc_norm" in params:
        taps = np.stack(
            [rms(taps[:, i], params["fc_norm"]["scale"][i], net.eps) for i in range(taps.shape[1])],
            1,
        )
    joined = taps.reshape(len(taps), -1)
    if "input_norm" in params:
        joined = rms(joined, params["input_norm"]["scale"], net.eps)
    return linear(joined, params["fc"])


def run(net: Plain, tokens, features):
    """(what the head reads, what the next slot reads) for slots of these tokens and features."""
    params = net.params
    layers = [params["layers"][str(i)] for i in range(len(params["layers"]))]
    table = params["embed"]["embedding"] if "embed" in params else net.embedding
    first, embedded = layers[0], table[tokens]
    if "head" in params:
        normed = rms(features, first["feature_norm"]["scale"], net.eps)
        x = np.concatenate([rms(embedded, first["token_norm"]["scale"], net.eps), normed], -1)
        residual = normed if net.norm_before_residual else features
        x = residual + attention(net, first["attention"], x)
    else:
        x = linear(np.concatenate([embedded, features], -1), params["fc"])
        x = x + attention(net, first["attention"], x)
    x = feed_forward(net, first, x)
    for layer in layers[1:]:
        y = rms(x, layer["attention_norm"]["scale"], net.eps)
        x = feed_forward(net, layer, x + attention(net, layer["attention"], y))
    if "head" not in params:
        return x, x
    hidden = rms(x, params["norm"]["scale"], net.eps)
    return hidden, hidden if net.norm_output else x


def logits(net: Plain, hidden, vocab_size):
    """f64[V]; -inf for tokens outside of the draft vocabulary."""
    if "head" not in net.params:
        return hidden @ net.unembed
    own = linear(hidden, net.params["head"])
    if net.ids is None:
        return own
    every = np.full(vocab_size, -np.inf)
    for index, token in enumerate(net.ids):
        every[token] = own[index]
    return every


def newest(net: Plain, text, features, path):
    """(what the head reads, what the next slot reads) [D] after tokens drafted after a text.

    ``features`` [n-1,D] are those of all tokens of the text but the pending one.
    """
    features, tokens = np.asarray(features), [*text[net.shift :], *path]
    for _ in path:
        size = len(features)
        _, recycled = run(net, tokens[:size], features)
        features = np.concatenate([features, recycled[-1:]])
    hidden, recycled = run(net, tokens[: len(features)], features)
    return hidden[-1], recycled[-1]


def after(net: Plain, text, features, path):
    """The logits f64[V] after the tokens ``path``, drafted after ``text``.

    ``features`` are those of ``newest``.
    """
    return logits(net, newest(net, text, features, path)[0], len(net.embedding))


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def eagle2(predict: Callable, nodes: int, depth: int, top_k: int) -> list[tuple[int, ...]]:
    """The paths of EAGLE-2's tree; ``predict(path)`` are the logits after a path.

    Level by level, the ``top_k`` best nodes get ``top_k`` children each; then the ``nodes`` best of
    all, in the order in which they were made.
    """
    pool, frontier = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            scores = log_softmax(predict(path))
            for token in np.argsort(-scores, kind="stable")[:top_k]:
                level.append(((*path, int(token)), score + scores[token]))
        pool += level
        frontier = sorted(level, key=lambda node: -node[1])[:top_k]
    best = sorted(range(len(pool)), key=lambda index: -pool[index][1])[:nodes]
    return [pool[index][0] for index in sorted(best)]
