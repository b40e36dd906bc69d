"""Modules for multi-token prediction in plain NumPy: one row, no cache, no jit.

Written from DeepSeek-V3 (2412.19437, section 2.2): module k reads at slot t the output of module
k - 1 at slot t and token t + k + 1. A text and a path of drafted tokens are fed as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from eagle_reference import Plain, attention, feed_forward, linear, rms


class Modules(NamedTuple):
    """The modules as arrays; ``params`` are those of ``drafters.heads._mtp_network``."""

    params: dict
    head_dim: int
    embedding: np.ndarray  # [V,D]
    unembed: np.ndarray  # [D,V]
    hidden_first: bool
    recycled: str
    zero_first: bool


def run(net: Modules, module: int, tokens, features):
    """(normed output, what the next module reads) [T,D] of one module over T slots."""
    params = net.params["modules"][str(module)]
    plain = Plain(params, net.head_dim, net.embedding, net.unembed)
    embedded = net.embedding[np.asarray(tokens, int)].copy()
    if net.zero_first:
        embedded[:1] = 0
    read = [
        rms(embedded, params["token_norm"]["scale"], plain.eps),
        rms(features, params["feature_norm"]["scale"], plain.eps),
    ]
    layer = params["layers"]["0"]
    x = linear(np.concatenate(read[::-1] if net.hidden_first else read, -1), params["fc"])
    normed = rms(x, layer["attention_norm"]["scale"], plain.eps)
    x = feed_forward(plain, layer, x + attention(plain, layer["attention"], normed))
    hidden = rms(x, params["norm"]["scale"], plain.eps)
    return hidden, hidden if net.recycled == "normed" else x


def after(net: Modules, text, features, path):
    """The logits f64[V] after the tokens ``path``, drafted after ``text``.

    ``features`` [n-1,D] are the target's of all tokens of the text but the pending one.
    """
    tokens, slots = [*text, *path], len(text) - 1
    features, hidden = np.asarray(features), None
    last = len(net.params["modules"]) - 1
    for module in range(min(len(path), last) + 1):
        hidden, features_of_next = run(net, module, tokens[module + 1 :][:slots], features)
        read, features = features, features_of_next
    # The last module continues with its own outputs.
    for _ in range(len(path) - last):
        read = np.concatenate([read, features[-1:]])
        slots += 1
        hidden, features = run(net, last, tokens[last + 1 :][:slots], read)
    assert hidden is not None
    return hidden[-1] @ net.unembed
