"""The loops that experiments/tree_cost times: whole rounds, and the parts of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.loops import Loop, repeat, tie
from specjax import accept, decode, outcome, rng, sampling, step
from specjax.accept.verdict import along
from specjax.drafters import growth
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.types import (
    DETERMINISTIC,
    IID,
    LM,
    WITHOUT_REPLACEMENT,
    Accept,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
)

# Rule -> the siblings of its drafts.
RULES = {
    "recursive": WITHOUT_REPLACEMENT,
    "traversal": WITHOUT_REPLACEMENT,
    "match": WITHOUT_REPLACEMENT,
    "deterministic": DETERMINISTIC,
    "k_seq": IID,
}


def rounds(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    state: DecodeState,
    iterations: int,
) -> Loop:
    """Whole rounds; each loop begins with a text of the same length."""

    def body(iteration, state, params, length):
        length = jnp.where(iteration == 0, length, state.length)
        state = state.replace(length=length, cache=state.cache.replace(length=length - 1))
        return step.speculative_step(target, drafter, rule, params, state)[0]

    return repeat(body, iterations, state, params, state.length)


def commits(target: LM, params: Any, state: DecodeState, path: jax.Array, iterations: int) -> Loop:
    """Commits a path of the tree, always at the same position."""
    size = path.shape[1] + 1
    tokens = state.tokens[:, :size]
    block = target.apply(params, tokens, target.init_cache(tokens.shape[0], 0))[1]

    def body(_, cache, path, block):
        (path,) = tie(cache.length, path)
        kept = target.commit(cache, block, (path >= 0).sum(-1), path)
        return kept.replace(length=cache.length)

    return repeat(body, iterations, state.cache, path, block)


def sums(
    part: Callable[..., jax.Array], cases: Sequence[tuple[Draft, jax.Array]], iterations: int
) -> Loop:
    """Sums of ``part(iteration, draft, logits)`` over the iterations, one for each case.

    The result of an iteration sets one of the next logits, so nothing can be hoisted.
    """

    def body(iteration, carry, draft):
        logits, total = carry
        logits = logits.at[0, 0, 0].add(jnp.where(total.sum() == -7, 1, 0))
        return logits, total + part(iteration, draft, logits)

    loops = []
    for draft, logits in cases:
        out = jax.eval_shape(part, jnp.zeros((), jnp.int32), draft, logits)
        carry = logits, jnp.zeros(out.shape, out.dtype)
        loops.append(repeat(body, iterations, carry, draft))
    return lambda: [loop()[1] for loop in loops]


def constant(draft: Draft, siblings: str) -> Drafter:
    """A drafter that proposes ``draft`` in every round and does nothing else."""
    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, out, slots: {},
        propose=lambda params, keys, context, state: (draft, state),
        update=lambda params, state, draft, verdict, out: state,
        nodes=draft.tokens.shape[1],
        name="constant",
        siblings=siblings,
        depth=draft.longest,
    )


def shaped(tree: shapes.Topology, tokens: jax.Array) -> Draft:
    """A draft of that shape, without probs."""
    parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), tokens.shape)
    return Draft(tokens, jnp.ones_like(tokens, bool), parents, depth=tree.depth)


def drawn(
    tree: shapes.Topology, batch: int, siblings: str, seed: int, vocab: int
) -> tuple[Draft, jax.Array]:
    """(a draft drawn from its probs, target logits f32[B,N+1,V]); they overlap by about a half."""
    noise = np.random.default_rng(seed)
    shape = (batch, tree.nodes + 1, vocab)
    logits = jnp.asarray(5 * noise.standard_normal(shape, np.float32))
    drafted = logits + jnp.asarray(noise.standard_normal(shape, np.float32))
    inner = [node for node in range(-1, tree.nodes) if tree.children[node + 1]]
    keys = rng.RowKeys(
        rng.row_keys(seed, batch), jnp.zeros((), jnp.int32), jnp.ones((batch,), jnp.int32)
    )
    context = Context(
        jnp.ones((batch, 1), jnp.int32),
        jnp.ones((batch,), jnp.int32),
        sampling.make_sampling(batch),
    )
    kind = next(name for name, kind in growth.KINDS.items() if kind == siblings)
    family, each = growth.family(tree, inner), np.arange(len(inner))
    # Of a job the keys and the context are read alone.
    nothing: Any = None
    job = growth.Job(nothing, None, nothing, keys, context, nothing, None)
    every = jnp.ones((batch,), bool)
    rows = growth.Rows(every, every, ())
    draft = growth.draw(job, rows, drafted[:, np.array(inner) + 1], each, family, kind)
    return shaped(tree, draft.tokens).replace(probs=draft.probs), logits


class Round(NamedTuple):
    """The models, and the state before the round that is measured."""

    target: LM
    params: Any
    tree: shapes.Topology
    draft: Draft
    state: DecodeState
    path: jax.Array  # i32[B,D] nodes to commit

    @property
    def vocab(self) -> int:
        return self.target.vocab_size

    @property
    def batch(self) -> int:
        return self.path.shape[0]


def prepare(config: TransformerConfig, tree: shapes.Topology, batch: int, context: int) -> Round:
    """Random weights and a random text of ``context`` tokens."""
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    noise = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context + tree.nodes))
    tokens = jnp.asarray(noise, jnp.int32)
    draft = shaped(tree, tokens[:, context:])
    state = decode.prefill(
        target,
        constant(draft, DETERMINISTIC),
        ModelParams(params),
        tokens[:, :context],
        jnp.full((batch,), context, jnp.int32),
        rng.row_keys(0, batch),
        max_len=config.max_positions - tree.nodes,
        sampling=sampling.make_sampling(batch, temperature=0.0),
    )
    # The last node of each level: commit moves their cache entries the farthest.
    last = jnp.asarray([level[-1] for level in tree.levels], jnp.int32)
    return Round(target, params, tree, draft, state, jnp.broadcast_to(last, (batch, tree.depth)))


def greedy_loops(one: Round, case: tuple[Draft, jax.Array], iterations: int) -> dict:
    """Name -> (loop, iterations): a round at temperature 0, and its parts on one case."""
    rule, short = accept.load("recursive"), 10 * iterations
    light = one.state.replace(cache=(), draft=())

    def greedy_accept(_, draft, logits):
        return rule.greedy(draft, logits).tokens

    def greedy_bookkeeping(_, draft, logits):
        verdict = along(draft, one.path, one.path[:, 0])
        drafted, tested = outcome.counts(draft, verdict, False)
        verdict, ended = outcome.cut(verdict, light, None)
        verdict = outcome.withdraw(
            verdict, ~outcome.finite(draft, verdict, logits, rule.whole_tree)
        )
        after = outcome.advance(light, verdict, ended, ended)
        return after.tokens.sum(-1) + after.length + drafted + tested + after.done

    drafter = constant(one.draft, DETERMINISTIC)
    whole = rounds(one.target, drafter, rule, ModelParams(one.params), one.state, iterations)
    return {
        "greedy_step": (whole, iterations),
        "greedy_accept": (sums(greedy_accept, [case], short), short),
        "greedy_bookkeeping": (sums(greedy_bookkeeping, [case], short), short),
        "greedy_commit": (commits(one.target, one.params, one.state, one.path, short), short),
    }


def sampled_loops(one: Round, cases: dict[str, list], iterations: int) -> dict:
    """Name -> (loop, iterations): softmax, and softmax with each rule, at temperature 1."""
    settings, short = sampling.make_sampling(one.batch), 10 * iterations

    def softmax(_, draft, logits):
        # All probabilities are computed, although few of them are read.
        (probs,) = tie(draft.tokens, sampling.to_probs(logits, settings))
        return probs[..., 0]

    def sampled(name):
        def part(iteration, draft, logits):
            state = one.state
            keys = rng.RowKeys(state.keys, iteration, state.length + iteration)
            probs = sampling.to_probs(logits, settings)
            verdict = accept.load(name).sampled(keys, draft, probs)
            # The tokens are read as well, or the compiler would drop the draw of the last one.
            return jnp.stack([verdict.count - 1, verdict.tokens.max(-1)])

        return part

    loops = {"softmax": (sums(softmax, cases[DETERMINISTIC][:1], short), short)}
    for name, kind in RULES.items():
        loop = sums(sampled(name), cases[kind], iterations)
        loops[f"sampled_{name}"] = loop, iterations * len(cases[kind])
    return loops
