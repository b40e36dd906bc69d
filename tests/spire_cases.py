"""Shared by the tests of SPIRe: small models, and an oracle in NumPy that computes whole texts."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import prompt, testing, tree
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig
from specjax.models import lm

VOCAB, SLOTS = 32, 40
# Label -> sinks, window, feedback, own.
KINDS = {
    "feedback": (2, 5, True, True),
    "feedback, no own token": (1, 6, True, False),
    "feedback, no sinks": (0, 5, True, True),
    "sparse": (2, 5, False, True),
}
LENGTHS = (13, 1, 8)
PARENTS = (-1, 0, 0, 1, 3, 4, 2)
PATHS = ((0, 1, 3, 4, 5), (0, 2, 6, 0, 0), (0, 1, 3, 0, 0))
LEVELS = ((0,), (1, 2), (3, 6), (4,), (5,))


@functools.cache
def made(kind, layers=2, seed=0, family="llama", vocab=VOCAB, width=32):
    """(LM, params, config) of a random model whose next tokens depend strongly on the text."""
    decoder = testing.tiny_config(family, vocab_size=vocab, layers=layers, width=width)
    config = SpireConfig(decoder, *KINDS[kind])
    params = spire.with_memory(config, lm.init_params(decoder, jax.random.key(seed)))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    if config.feedback:
        weights = np.random.default_rng(seed).normal(size=layers + 1).astype(np.float32)
        params[spire.MEMORY] = {"weights": jnp.asarray(weights)}
    return spire.from_config(config), params, config


def oracle(config, params, text):
    """f64[n,V]: the logits of a Llama after each token, from the definition, in loops."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    decoder, table = config.decoder, params["embed"]["embedding"]
    layers = [params["layers"][number] for number in sorted(params["layers"])]
    mix = _softmax(params[spire.MEMORY]["weights"]) if config.feedback else None
    # Of each earlier token: what every layer reads to make its keys and values.
    earlier: list[list[np.ndarray]] = []
    logits = []
    for place, token in enumerate(text):
        seen = [at for at in range(place) if at < config.sinks or place - at < config.window]
        x = table[token]
        inputs, states = [], [x]
        for number, layer in enumerate(layers):
            sources = [(at, earlier[at][number]) for at in seen]
            sources += [(place, x)] if config.own else []
            inputs.append(x)
            x = x + _attention(decoder, layer, place, x, sources)
            x = x + _mlp(layer["mlp"], _norm(x, layer["mlp_norm"], decoder))
            states.append(x)
        memory = (
            None
            if mix is None
            else sum(share * each for share, each in zip(mix, states, strict=True))
        )
        earlier.append(inputs if memory is None else [memory] * len(layers))
        logits.append(table @ _norm(x, params["norm"], decoder))
    return np.array(logits)


def _attention(decoder, layer, place, x, sources):
    """The output for x [E], over the inputs [E] at positions."""
    own, width = layer["attention"], decoder.head_dim
    group = decoder.num_heads // decoder.num_kv_heads
    if not sources:
        return np.zeros_like(x)

    def project(kind, at, vector):
        heads = (_norm(vector, layer["attention_norm"], decoder) @ own[kind]["kernel"]).reshape(
            -1, width
        )
        return heads if kind == "v" else _rotated(heads, at, decoder.rope_theta)

    queries = project("q", place, x)
    keys = np.array([project("k", at, vector) for at, vector in sources])
    values = np.array([project("v", at, vector) for at, vector in sources])
    out = []
    for head, query in enumerate(queries):
        weights = _softmax(keys[:, head // group] @ query / np.sqrt(width))
        out.append(weights @ values[:, head // group])
    return np.concatenate(out) @ own["o"]["kernel"]


def _rotated(heads, at, theta):
    half = heads.shape[-1] // 2
    angle = at * theta ** (-np.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(x, own, decoder):
    return x / np.sqrt((x * x).mean() + decoder.norm_eps) * own["scale"]


def _mlp(own, x):
    gate = x @ own["gate"]["kernel"]
    return (gate / (1 + np.exp(-gate)) * (x @ own["up"]["kernel"])) @ own["down"]["kernel"]


def _softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def differences(kind, chunk=7, by_level=False):
    """The largest difference between passes over the cache and the oracle on whole texts.

    Ragged rows are prefilled in chunks longer than the cache, then fed a chain, a tree (at once, or
    level by level) and a chain; rows commit 0 to 7 tokens.
    """
    model, params, config = made(kind)
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, VOCAB, size).tolist() for size in LENGTHS]
    tokens, lengths = prompt.pack_prompts(rows)
    apply, commit = jax.jit(model.apply), jax.jit(model.commit)
    _, cache = prompt.feed(model, params, tokens, lengths, model.init_cache(3, SLOTS), chunk)
    worst = 0.0
    chain = (range(-1, 6), [range(7)] * 3, (2, 7, 1))
    for parents, paths, counts in (chain, (PARENTS, PATHS, (5, 3, 0)), chain):
        fed = draw.integers(0, VOCAB, (3, len(parents)))
        levels = LEVELS if by_level and parents == PARENTS else [range(len(parents))]
        got, block = _fed(apply, params, cache, parents, fed, levels)
        for row, text in enumerate(rows):
            for node in range(len(parents)):
                path = [node]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                expected = oracle(config, params, text + fed[row, path].tolist())[-1]
                worst = max(worst, np.abs(got[row, node] - expected).max())
            rows[row] = text + [int(fed[row, i]) for i in list(paths[row])[: counts[row]]]
        path = jnp.asarray([list(path) for path in paths])
        cache = commit(cache, block, jnp.asarray(counts, jnp.int32), path)
    return worst


def _fed(apply, params, cache, parents, tokens, levels):
    """(logits [B,n,V], block) of a tree that is fed in these groups of nodes."""
    order = [node for level in levels for node in level]
    place, block, logits = {-1: -1} | {node: i for i, node in enumerate(order)}, None, []
    above = [place[parents[node]] for node in order]
    done = 0
    for level in levels:
        done += len(level)
        layout = tree.layout(jnp.asarray([above[:done]] * len(tokens)), len(level))
        out, part = apply(params, jnp.asarray(tokens[:, list(level)]), cache, layout, block)
        block = part if block is None else tree.join(block, part)
        logits.append(np.asarray(out.logits))
    back = np.argsort(order)
    return np.concatenate(logits, 1)[:, back], jax.tree.map(lambda x: x[:, back], block)


def without_feedback(config):
    """The same shape without memory."""
    return dataclasses.replace(config, feedback=False, own=True)
