"""Escalation: ask drafters in turn, the cheapest first; in each row the first that proposes wins. L1.

The general form of "n-gram, else draft model" (Spector and Ré 2023, 2308.04623; SAM-Decoding, 2411.10666; SuffixDecoding's
hybrid, 2411.04975), card D2. Who proposes depends on the committed text and on past rounds only, so the law of what is
emitted does not change. A drafter that no row needs does not run in that round. A draft model reads what it missed when its
turn comes; drafters that learn from the target's outputs (``token_recycling``, ``lookahead``, ``jacobi``) learn in their own
rounds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import rng, tree
from specjax.checks import number
from specjax.drafters.nested import _stages
from specjax.drafters.nested._stages import Stages
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, LM, Draft, Drafter, ModelParams, Output, Verdict


class State(struct.PyTreeNode):
    """What is carried: the drafters' states, who proposed last, and how each has done."""

    states: tuple[Any, ...]
    winner: jax.Array  # i32[B] the stage whose draft it was, of proposals or, if there were none, the last one asked
    rate: (
        jax.Array
    )  # f32[B,n] moving average of the share of its drafts that was accepted, 1 at first
    idle: jax.Array  # bool[B] whether the last verdict counted nothing
    seen: jax.Array  # i32[B] length of the text at the last proposal


def check(drafters: Stages, **_: Any) -> None:
    """Raises UserError unless ``make`` would know these drafters and take their keys."""
    _stages.check("escalate", drafters)


def make(target: LM, *, drafters: Stages, least: float = 0.0, decay: float = 0.8) -> Drafter:
    """Asks drafters in turn.

    Args:
        target: the model to be accelerated.
        drafters: label -> keys of a drafter ("name" among them, by default the label), asked in the alphabetical order of the
            labels, for a configuration keeps no other; or ready-made drafters in the order given. All chains, or
            deterministic drafts (chains and trees) only.
        least: a drafter whose rolling acceptance in a row has fallen below this share is not asked in that row any more.
        decay: weight of the past in that average, in [0, 1).

    Raises:
        UserError: no drafters, unknown ones, drafts that do not go together, a drafter that must take part in every round.
    """
    check(drafters)
    for name, value in (("least", least), ("decay", decay)):
        number(name, value, "in [0, 1)", lambda x: 0 <= x < 1)
    stages = _stages.build(target, drafters, gaps=True)
    nodes, longest = max(s.nodes for s in stages), max(s.longest for s in stages)
    if not nodes:
        raise UserError("escalate: none of the drafters drafts anything")
    kinds = {stage.siblings for stage in stages}
    if not kinds <= {CHAIN, DETERMINISTIC}:
        raise UserError(
            f"escalate takes chains and deterministic trees, and one of its drafters drafts {sorted(kinds)[-1]} siblings"
        )
    kind = CHAIN if kinds == {CHAIN} else DETERMINISTIC
    for stage in stages:
        if not stage.gaps:
            raise UserError(
                f"escalate: {stage.name} must take part in every round; it cannot wait for its turn"
            )

    def own(params: ModelParams, index: int) -> ModelParams:
        return params._replace(draft=params.draft[index])

    def init(params, context, target_out, slots):
        # Each is told of as many slots as it would have alone.
        states = tuple(
            s.init(own(params, i), context, target_out, slots - nodes + s.nodes)
            for i, s in enumerate(stages)
        )
        batch = context.length.shape[0]
        return State(
            states,
            jnp.full((batch,), len(stages), jnp.int32),
            jnp.ones((batch, len(stages)), jnp.float32),
            jnp.zeros((batch,), bool),
            jnp.zeros_like(context.length),
        )

    def propose(params, keys, context, state):
        batch = context.length.shape[0]
        winner = last = jnp.full((batch,), len(stages), jnp.int32)
        finished = state.idle & (
            context.length == state.seen
        )  # it stands still, so that nobody need run for it
        states, drafts = [], []
        for index, stage in enumerate(stages):
            mine, inner = own(params, index), keys.inner(index, same_target=True)
            asked = (winner == len(stages)) & (state.rate[:, index] >= least) & ~finished

            def run(old, stage=stage, mine=mine, inner=inner):
                return stage.propose(mine, inner, context, old)

            def rest(old, stage=stage, mine=mine):
                fake = rng.RowKeys(rng.row_keys(0, batch), jnp.zeros((), jnp.int32), context.length)
                with jax.disable_jit(False):  # only the shapes are wanted
                    shape = jax.eval_shape(lambda s: stage.propose(mine, fake, context, s)[0], old)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), old

            draft, after = jax.lax.cond(asked.any(), run, rest, state.states[index])
            proposed = (
                tree.exists(draft.valid, draft.parents).any(-1)
                if stage.nodes
                else jnp.zeros((batch,), bool)
            )
            winner, last = jnp.where(asked & proposed, index, winner), jnp.where(asked, index, last)
            states.append(after)
            drafts.append(draft)
        # Where nobody proposes the round still belongs to somebody: some nodes only look (those of lookahead's window),
        # and there is something to learn from the target's one token.
        winner = jnp.where(winner == len(stages), last, winner)
        return _merge(drafts, winner), State(
            tuple(states), winner, state.rate, state.idle, context.length
        )

    def _merge(drafts: Sequence[Draft], winner: jax.Array) -> Draft:
        batch, vocab = winner.shape[0], target.vocab_size
        drawn = any(draft.probs is not None for draft in drafts)
        if drawn and kind == DETERMINISTIC:
            raise UserError(
                "escalate: beside a deterministic tree every drafter must be deterministic; one samples"
            )
        tokens, valid = jnp.zeros((batch, nodes), jnp.int32), jnp.zeros((batch, nodes), bool)
        parents, finite = jnp.full((batch, nodes), -1, jnp.int32), jnp.ones((batch,), bool)
        probs = None
        for index, draft in enumerate(drafts):
            mine = (winner == index)[:, None]
            size = draft.tokens.shape[1]
            above = (
                jnp.arange(size, dtype=jnp.int32) - 1 if draft.parents is None else draft.parents
            )
            tokens = tokens.at[:, :size].set(jnp.where(mine, draft.tokens, tokens[:, :size]))
            valid = valid.at[:, :size].set(jnp.where(mine, draft.valid, valid[:, :size]))
            parents = parents.at[:, :size].set(jnp.where(mine, above, parents[:, :size]))
            if draft.finite is not None:
                finite &= draft.finite | ~mine[:, 0]
            if drawn:
                # A token that was not drawn has the law that is certain of it.
                laws = jax.nn.one_hot(draft.tokens, vocab) if draft.probs is None else draft.probs
                if probs is None:
                    probs = jnp.zeros((batch, nodes, vocab), laws.dtype)
                probs = probs.astype(jnp.promote_types(probs.dtype, laws.dtype))
                probs = probs.at[:, :size].set(jnp.where(mine[..., None], laws, probs[:, :size]))
        if kind == CHAIN:
            return Draft(tokens, valid, probs=probs, finite=finite)
        return Draft(tokens, valid, parents, finite=finite, depth=longest)

    def update(params, state, draft, verdict, target_out):
        accepted = (verdict.path >= 0).sum(-1)
        reach = tree.depths(draft.parents, *draft.tokens.shape) + 1
        tried = jnp.where(tree.exists(draft.valid, draft.parents), reach, 0).max(-1)
        share = (accepted / jnp.maximum(tried, 1)).astype(jnp.float32)
        states, rate = [], state.rate
        for index, stage in enumerate(stages):
            won = (state.winner == index) & (verdict.count > 0)
            n, m = stage.nodes, stage.longest
            part = Draft(
                draft.tokens[:, :n],
                draft.valid[:, :n],
                None if stage.siblings == CHAIN else draft.parents[:, :n],
                None if draft.probs is None else draft.probs[:, :n],
                draft.finite,
                stage.depth,
            )
            keep = won[:, None]
            said = Verdict(
                jnp.where(keep, verdict.tokens[:, : m + 1], -1),
                jnp.where(won, verdict.count, 0),
                jnp.where(keep, verdict.path[:, :m], -1),
            )
            seen = Output(*jax.tree.map(lambda x, n=n: x[:, : n + 1], tuple(target_out)))
            states.append(stage.update(own(params, index), state.states[index], part, said, seen))
            new = decay * rate[:, index] + (1 - decay) * share
            rate = rate.at[:, index].set(jnp.where(won & (tried > 0), new, rate[:, index]))
        return State(tuple(states), state.winner, rate, verdict.count == 0, state.seen)

    def learn(params, state, lengths):
        taught = []
        for index, stage in enumerate(stages):
            mine = own(params, index)
            alone = state.replace(draft=state.draft.states[index])
            taught.append(mine.draft if stage.learn is None else stage.learn(mine, alone, lengths))
        return tuple(taught)

    return Drafter(
        init_params=lambda key: tuple(
            s.init_params(None if key is None else jax.random.fold_in(key, i))
            for i, s in enumerate(stages)
        ),
        init=init,
        propose=propose,
        update=update,
        nodes=nodes,
        name="escalate",
        siblings=kind,
        depth=None if kind == CHAIN else longest,
        features=any(stage.features for stage in stages),
        constant_cost=False,  # which drafter proposes depends on the text
        learn=learn if any(stage.learn for stage in stages) else None,
    )
