"""The lookahead trie of PIA: what followed the end of the text before, in it and in earlier outputs, as a tree. L1.

Zhao et al. 2023 (2312.12728), card C3. The original keeps a trie of windows per token, with a frequency for the prompt
("input") and one for outputs ("output"), and weighs them (1 - output_weight) : output_weight. The frequencies of a trie are
counts of occurrences, so here they are counted where they stand: in the row's own buffer, by comparing, and in the outputs
of earlier rows, if there are any, through a suffix array. Nothing grows on the device and nothing is evicted by halving.

In the row's own text the end is matched with the longest n-gram whose continuations fill a branch (``depth`` nodes), in
earlier outputs with the longest that anything follows; the heaviest prefixes of all these continuations are the tree.

Cold, a row knows itself only. Published numbers of this method are of a warm trie: give a ``datastore``, or let it learn
(``warm``), and say so with the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.checks import counts, ngrams, number
from specjax.drafters.lookup import _frequency, _match, _memory
from specjax.drafters.lookup._suffix_array import continuing, find, follow, last_tokens, sample
from specjax.types import DETERMINISTIC, LM, Draft, Drafter


def make(
    target: LM,
    *,
    nodes: int = 64,
    depth: int = 12,
    max_ngram: int = 8,
    min_ngram: int = 1,
    samples: int = 32,
    output_weight: float = 1e-4,
    datastore: _memory.Given = None,
    memory: int = 65536,
) -> Drafter:
    """Drafts a tree from frequencies.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        nodes: size of the tree (the original's decoding_length).
        depth: longest branch (branch_length).
        max_ngram: longest n-gram matched.
        min_ngram: shortest n-gram matched.
        samples: occurrences looked at in each of the two places; in the own text the latest of those with the longest match.
        output_weight: weight of an output's occurrence, in (0, 1); a prompt's has 1 - output_weight.
        datastore: outputs of earlier requests to begin with: a ``Store`` or the directory of one.
        memory: tokens of earlier outputs kept, beside the datastore, when it learns.

    Raises:
        UserError: numbers below 1, min_ngram > max_ngram, output_weight outside (0, 1), a datastore of another tokenizer.
    """
    counts(nodes=nodes, depth=depth, samples=samples)
    ngrams(max_ngram, min_ngram)
    number("output_weight", output_weight, "in (0, 1)", lambda x: 0 < x < 1)
    store = _memory.load(target, datastore, max_ngram)
    reach = _memory.reach(store, max_ngram)

    def own(text, length, prompt_length):
        """Continuations in the row's own text, i32[K,D], and their weights f32[K]."""
        run = _match.own_runs(text, length, max_ngram)
        ends, got = _match.best(jnp.where(run >= min_ngram, run, 0), samples, max_ngram)
        windows = jnp.where((got > 0)[:, None], _match.windows(text, ends, depth, length), -1)
        # The longest first, so the occurrences of an n-gram are the first few, and prefixes new among them stay so.
        new = _frequency.prefixes(windows).kept.sum(-1)
        sizes = jnp.arange(1, max_ngram + 1)
        total = jnp.where(got >= sizes[:, None], new, 0).sum(-1)  # [M] nodes for each n-gram length
        size = jnp.max(jnp.where(total >= depth, sizes, 0))
        weight = jnp.where(ends < prompt_length, 1 - output_weight, output_weight)
        return windows, jnp.where((got > 0) & (got >= size), weight, 0)

    def others(tokens, order, text, length):
        """The same in earlier outputs: after the longest n-gram that anything follows."""
        low, high = find(tokens, order, last_tokens(text, length, max_ngram), reach)
        sizes = jnp.arange(1, max_ngram + 1)
        size = jnp.max(
            jnp.where(continuing(tokens, order, low, high) & (sizes >= min_ngram), sizes, 0)
        )
        at = jnp.maximum(size - 1, 0)
        places = sample(order, low[at], high[at], samples)
        found = (places >= 0) & (size > 0)
        stands_for = (high[at] - low[at]) / jnp.maximum(found.sum(), 1)
        return follow(tokens, jnp.where(found, places + size, -1), depth), jnp.where(
            found, output_weight * stands_for, 0
        )

    def row(store, text, length, prompt_length):
        windows, weights = own(text, length, prompt_length)
        if store:
            more, also = others(store["tokens"], store["order"], text, length)
            windows, weights = jnp.concatenate([windows, more]), jnp.concatenate([weights, also])
        return _frequency.tree(windows, weights.astype(jnp.float32), nodes)

    def propose(params, keys, context, prompt_length):
        each = jax.vmap(row, (None, 0, 0, 0))
        tokens, parents, valid, _ = each(
            params.draft, context.tokens, context.length, prompt_length
        )
        return Draft(tokens, valid, parents, depth=min(depth, nodes)), prompt_length

    return Drafter(
        init_params=lambda key: _memory.params(store),
        init=lambda params, context, target_out, slots: context.length,
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=nodes,
        name="trie",
        siblings=DETERMINISTIC,
        depth=min(depth, nodes),
        learn=_memory.learner(store, max_ngram, memory),
    )
