"""The lookahead trie of PIA: what followed the end of the text earlier, as a tree. L1.

Zhao et al. 2023 (2312.12728). The text itself and earlier outputs are searched. The original keeps
a trie of windows per token, with one frequency for the prompt ("input") and one for outputs
("output"), and weighs them (1 - output_weight) : output_weight. The frequencies of a trie are
counts of occurrences. Here the occurrences are counted directly: in the row's own buffer by
comparing, and in the outputs of earlier rows, if there are any, with a suffix array. No structure
grows on the device, and no entry is evicted by halving counts.

In the row's own text the longest n-gram is used that has enough continuations to fill a branch
(``depth`` nodes); in earlier outputs the longest n-gram that a token follows. The heaviest prefixes
of all these continuations are the tree.

Without ``datastore`` and ``warm`` a row searches its own text only. The published numbers of this
method are of a filled trie: give a ``datastore``, or let the drafter learn (``warm``), and report
this with the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import counts, ngrams, number
from specjax.drafters._keys import DatastoreKeys
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _frequency, _match, _memory
from specjax.drafters.lookup._suffix_array import follow, longest_match, sample
from specjax.types import DETERMINISTIC, LM, Draft, Drafter

REFERENCE = "zhao2024lookahead"

SHARED = DatastoreKeys


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    nodes: int
    depth: int
    max_ngram: int
    min_ngram: int
    samples: int
    output_weight: float
    reach: int  # of the datastore


def make(
    target: LM,
    *,
    nodes: int = 64,
    depth: int = 12,
    max_ngram: int = 8,
    min_ngram: int = 1,
    samples: int = 32,
    output_weight: float = 1e-4,
    **shared: Any,
) -> Drafter:
    """Drafts a tree from frequencies.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        nodes: size of the tree (the original's decoding_length).
        depth: longest branch (branch_length).
        max_ngram: longest n-gram matched.
        min_ngram: shortest n-gram matched.
        samples: occurrences used in the row's own text (the longest matches, the latest first),
            and in earlier outputs.
        output_weight: weight of an occurrence in an output, in (0, 1); in a prompt it is
            1 - output_weight.
        shared: ``DatastoreKeys``.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram, output_weight outside (0, 1), a datastore
            of another tokenizer.
    """
    keys = DatastoreKeys(**shared)
    counts(nodes=nodes, depth=depth, samples=samples)
    ngrams(max_ngram, min_ngram)
    number("output_weight", output_weight, "in (0, 1)", lambda x: 0 < x < 1)
    store = _memory.load(target, keys.datastore, max_ngram)
    reach = _memory.reach(store, max_ngram)
    settings = Settings(nodes, depth, max_ngram, min_ngram, samples, output_weight, reach)
    drafter = Drafter(
        init_params=lambda key: _memory.params(store),
        init=_memory.prompt_length,
        propose=Bound(_propose, settings),
        update=_memory.unchanged,
        nodes=nodes,
        name="trie",
        siblings=DETERMINISTIC,
        depth=min(depth, nodes),
        # Occurrences in the prompt and in the output have different weights.
        history=True,
        learn=_memory.learner(store, max_ngram, keys.memory),
    )
    return limited(drafter, keys.control)


def _propose(settings: Settings, params, keys, context, prompt_length):
    each = jax.vmap(Bound(_tree, settings), (None, 0, 0, 0))
    tree = each(params.draft, context.tokens, context.length, prompt_length)
    depth = min(settings.depth, settings.nodes)
    return Draft(tree.tokens, tree.valid, tree.parents, depth=depth), prompt_length


def _tree(settings: Settings, store, text, length, prompt_length) -> _frequency.Tree:
    windows, weights = _own(settings, text, length, prompt_length)
    if store:
        more, more_weights = _stored(settings, store["tokens"], store["order"], text, length)
        windows = jnp.concatenate([windows, more])
        weights = jnp.concatenate([weights, more_weights])
    return _frequency.tree(windows, weights.astype(jnp.float32), settings.nodes)


def _own(settings: Settings, text, length, prompt_length) -> tuple[jax.Array, jax.Array]:
    """Continuations in the row's own text, i32[K,D], and their weights f32[K]."""
    run = _match.own_runs(text, length, settings.max_ngram)
    run = jnp.where(run >= settings.min_ngram, run, 0)
    ends, runs = _match.best(run, settings.samples, settings.max_ngram)
    windows = _match.windows(text, ends, settings.depth, length)
    windows = jnp.where((runs > 0)[:, None], windows, -1)
    # The longest runs come first. So the occurrences of an n-gram are the first few, and a prefix
    # that is new among all occurrences is new among these.
    new = _frequency.prefixes(windows).is_first.sum(-1)
    sizes = jnp.arange(1, settings.max_ngram + 1)
    # [M] nodes for each n-gram length
    total = jnp.where(runs >= sizes[:, None], new, 0).sum(-1)
    size = jnp.max(jnp.where(total >= settings.depth, sizes, 0))
    weight = jnp.where(ends < prompt_length, 1 - settings.output_weight, settings.output_weight)
    return windows, jnp.where((runs > 0) & (runs >= size), weight, 0)


def _stored(settings: Settings, tokens, order, text, length) -> tuple[jax.Array, jax.Array]:
    """Continuations in earlier outputs, i32[K,D], and their weights f32[K]."""
    low, high, size = longest_match(
        tokens,
        order,
        text,
        length,
        max_ngram=settings.max_ngram,
        min_ngram=settings.min_ngram,
        reach=settings.reach,
    )
    places = sample(order, low, high, settings.samples)
    real = (places >= 0) & (size > 0)
    # Each sample counts for an equal part of all occurrences.
    part = (high - low) / jnp.maximum(real.sum(), 1)
    windows = follow(tokens, jnp.where(real, places + size, -1), settings.depth)
    return windows, jnp.where(real, settings.output_weight * part, 0)
