"""What a test of a method needs: tiny models, tabular models whose law is known exactly, and the chi-square test.

Shipped with the library, because whoever writes a drafter or a rule has to prove it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling
from specjax.models import lm
from specjax.models.transformer import TransformerConfig
from specjax.types import LM, Output


def tiny_config(family: str = "llama", vocab_size: int = 32, layers: int = 2, width: int = 32) -> TransformerConfig:
    """A decoder small enough to compile in a second: grouped-query attention for "llama", biases for "gpt2"."""
    return TransformerConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2 if family == "llama" else 4,
        head_dim=width // 4,
        max_positions=128,
        attention_bias=family == "gpt2",
        mlp_bias=family == "gpt2",
    )


def tiny(family: str = "llama", seed: int = 0, scale: float = 8.0, **shape) -> tuple[LM, dict]:
    """A random tiny decoder. ``scale`` multiplies its weights, so that its laws are far from uniform."""
    config = tiny_config(family, **shape)
    params = lm.init_params(config, jax.random.key(seed))
    return lm.from_config(config), jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


class TabularCache(struct.PyTreeNode):
    """The last committed token, and the block that a commit chooses from."""

    length: jax.Array  # i32[B]
    last: jax.Array  # i32[B], -1 before the first
    block: jax.Array  # i32[B,slots]


def tabular(vocab_size: int, name: str = "tabular") -> LM:
    """A model that is a table: its params are logits f32[V+1,V,V], indexed by the last two tokens (V = there is none).

    It has a cache, takes chains and trees, and its law can be read off: what a decode loop makes of it can be checked
    against the truth.
    """

    def init_cache(batch: int, slots: int) -> TabularCache:
        empty = jnp.zeros((batch,), jnp.int32)
        return TabularCache(length=empty, last=empty - 1, block=jnp.zeros((batch, slots), jnp.int32))

    def apply(params, tokens, cache, parents=None):
        batch, size = tokens.shape
        if parents is None:
            parents = jnp.broadcast_to(jnp.arange(size) - 1, (batch, size))
        before = jnp.take_along_axis(tokens, jnp.maximum(parents, 0), axis=1)
        before = jnp.where(parents < 0, cache.last[:, None], before)
        before = jnp.where(before < 0, vocab_size, before)
        logits = params[before, jnp.clip(tokens, 0, vocab_size - 1)]
        hidden = jnp.zeros((batch, size, 1), logits.dtype)
        return Output(logits, hidden), cache.replace(block=cache.block.at[:, :size].set(tokens))

    def commit(cache, count, path=None):
        index = jnp.maximum(count - 1, 0)
        if path is not None:
            nodes = jnp.pad(path + 1, ((0, 0), (1, 0)))  # the root of the block, then the accepted nodes
            index = jnp.take_along_axis(nodes, index[:, None], axis=1)[:, 0]
        last = jnp.take_along_axis(cache.block, index[:, None], axis=1)[:, 0]
        return cache.replace(length=cache.length + count, last=jnp.where(count > 0, last, cache.last))

    return LM(init_cache, apply, commit, vocab_size, name=name)


def random_table(seed: int, vocab_size: int, sharpness: float = 1.5, dtype=np.float32) -> jax.Array:
    """Params for ``tabular``: logits f32[V+1,V,V]."""
    table = np.random.default_rng(seed).normal(size=(vocab_size + 1, vocab_size, vocab_size))
    return jnp.asarray((sharpness * table).astype(dtype))


def sequence_law(model: LM, params, prompt: Sequence[int], steps: int, **settings) -> np.ndarray:
    """The exact law of the next ``steps`` tokens after ``prompt``: float[V,...,V] (``steps`` axes), by enumeration.

    ``settings`` are those of ``sampling.make_sampling``. Works for any model with a small vocabulary.
    """
    vocab = model.vocab_size
    continuations = list(itertools.product(range(vocab), repeat=steps - 1)) or [()]
    tokens = jnp.asarray([list(prompt) + list(c) for c in continuations], jnp.int32)
    logits = lm.forward(model, params, tokens).logits[:, len(prompt) - 1 :]
    laws = np.asarray(sampling.to_probs(logits, sampling.make_sampling(len(continuations), **settings)), np.float64)
    joint = np.ones((len(continuations), 1))
    for row, continuation in enumerate(continuations):
        for place, token in enumerate(continuation):
            joint[row] *= laws[row, place, token]
    return (joint * laws[:, -1]).reshape((vocab,) * steps)


def chi_square(counts: np.ndarray, law: np.ndarray, *, least: float = 5.0) -> tuple[float, int, float]:
    """Pearson's test of observed counts against a law: (statistic, degrees of freedom, p-value).

    Cells that expect fewer than ``least`` are pooled; an observation where the law is 0 gives p = 0.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if counts[law <= 0].sum() > 0:
        return float("inf"), 1, 0.0
    expected = law / law.sum() * counts.sum()
    small = expected < least
    pooled_counts = np.append(counts[~small], counts[small].sum())
    pooled = np.append(expected[~small], expected[small].sum())
    keep = pooled > 0
    statistic = float((((pooled_counts - pooled) ** 2)[keep] / pooled[keep]).sum())
    freedom = int(keep.sum()) - 1
    return statistic, freedom, chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with ``freedom`` degrees of freedom > ``statistic``)."""
    if freedom < 1:
        return 1.0
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the sum of absolute differences."""
    return float(0.5 * np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum())


def joint_law(law: Callable, vocab: int, steps: int) -> np.ndarray:
    """The law of the first ``steps`` tokens of a model given as prefix -> law: float64[V,...,V]."""
    out = np.zeros((vocab,) * steps)
    _extend(out, (), 1.0, law)
    return out


def enumerate_chain(
    coins: Callable, resolve: Callable, draft_laws: Callable, target_laws: Callable, vocab: int, gamma: int
) -> np.ndarray:
    """The exact law of the first ``gamma + 1`` tokens when a chain rule runs once and the target goes on by itself.

    Args:
        coins, resolve: the rule's own functions (``accept.chain.coins`` and ``resolve``), or a mutant's.
        draft_laws: prefix (tuple of tokens) -> law of the next draft token, float64[V].
        target_laws: prefix -> law of the next target token, float64[V].
        vocab, gamma: sizes.

    Returns:
        float64[V,...,V] with gamma + 1 axes. Every draft and every outcome of the coins is weighed; nothing is sampled.
        Run it under ``jax.enable_x64``.
    """
    from specjax.types import Draft

    law = np.zeros((vocab,) * (gamma + 1))
    drafts = list(itertools.product(range(vocab), repeat=gamma))
    patterns = np.array(list(itertools.product((False, True), repeat=gamma)))
    for tokens in drafts:
        probs = np.stack([draft_laws(tokens[:i]) for i in range(gamma)])
        target = np.stack([target_laws(tokens[:i]) for i in range(gamma + 1)])
        weight = np.prod([probs[i, t] for i, t in enumerate(tokens)])
        if weight == 0:
            continue
        rows = len(patterns)
        draft = Draft(
            tokens=jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (rows, gamma)),
            valid=jnp.ones((rows, gamma), bool),
            probs=jnp.broadcast_to(jnp.asarray(probs), (rows, gamma, vocab)),
        )
        laws = jnp.broadcast_to(jnp.asarray(target), (rows, gamma + 1, vocab))
        target_mass, draft_mass = (np.asarray(x, np.float64) for x in coins(draft, laws))
        keep = np.minimum(1.0, target_mass / draft_mass)
        chance = np.where(patterns, keep, 1 - keep).prod(-1)
        accepted, next_law = resolve(jnp.asarray(patterns), draft, laws)
        for row in range(rows):
            if chance[row] == 0:
                continue
            head, final = tokens[: int(accepted[row])], np.asarray(next_law[row], np.float64)
            final = final / final.sum()
            for token in range(vocab):
                _extend(law, (*head, token), weight * chance[row] * final[token], target_laws)
    return law


def _extend(law: np.ndarray, prefix: tuple[int, ...], weight: float, target_laws: Callable) -> None:
    if weight == 0:
        return
    if len(prefix) == law.ndim:
        law[prefix] += weight
        return
    for token, chance in enumerate(target_laws(prefix)):
        _extend(law, (*prefix, token), weight * chance, target_laws)
