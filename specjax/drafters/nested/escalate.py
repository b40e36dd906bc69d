"""Escalation: asks drafters in turn, the cheapest first; in each row the first draft is used. L1.

The general form of "n-gram, else draft model" (Spector and Ré 2023, 2308.04623; SAM-Decoding,
2411.10666; SuffixDecoding's hybrid, 2411.04975). Which drafter proposes depends only on the
committed text and on past rounds, so the output law does not change. A drafter that no row needs
does not run in that round. A draft model reads the tokens that it missed when its turn comes.
Drafters that learn from the target's outputs (``token_recycling``, ``lookahead``, ``jacobi``) learn
only in rounds in which they propose.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare, tree
from specjax.accept.verdict import parents as parents_of
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import _limited
from specjax.drafters.nested import _stages
from specjax.drafters.nested._stages import Stages
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, LM, Array, Draft, Drafter, Output, Rare, Verdict

REFERENCE = "spector2023accelerating"
DECAY = 0.8


class State(struct.PyTreeNode):
    """The states of n drafters, which one proposed last, and how many tokens each had accepted."""

    states: tuple[Any, ...]
    # i32[B] the drafter that proposed; if none did, the last one that was asked.
    winner: Array
    # f32[B,n] moving average of the share of its draft that was accepted, 1 at first.
    rate: Array


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    vocab_size: int
    stages: tuple[Drafter, ...]  # the inner drafters in order
    siblings: str
    least: float
    decay: float

    @property
    def nodes(self) -> int:
        return max(stage.nodes for stage in self.stages)

    @property
    def longest(self) -> int:
        return max(stage.longest for stage in self.stages)


class Keys(declare.Keys):
    """The keys of ``escalate``."""

    LENGTH = "drafters"

    drafters: Stages = key(
        help='label -> keys of a drafter (including "name", by default the label), asked in the '
        "alphabetical order of the labels, because a configuration keeps no other order; or "
        "ready-made drafters in the given order. All chains, or all deterministic (chains and "
        "trees)."
    )
    least: float = key(
        0.0,
        "a drafter is not asked in a row any more once its moving average of accepted shares in "
        "that row is lower",
        least=0,
        below=1,
    )
    decay: float | None = key(
        None,
        "weight of the past in that average, in [0, 1). None: 0.8. Only with ``least`` above 0: "
        "otherwise the average is not used.",
        least=0,
        below=1,
        needs="least",
    )

    def check(self) -> None:
        _stages.check("escalate", self.drafters)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Asks drafters in turn.

    Raises:
        UserError: no drafters, unknown ones, drafts that cannot be combined, a drafter that must
            take part in every round, a decay without ``least``.
    """
    stages = tuple(_stages.build(target, keys.drafters, gaps=True))
    decay = DECAY if keys.decay is None else keys.decay
    stages = tuple(_stages.with_params(stage, index) for index, stage in enumerate(stages))
    settings = Settings(target.vocab_size, stages, _siblings(stages), keys.least, decay)
    learn = Bound(_learn, settings) if any(stage.rare.learn for stage in stages) else None
    check_rows = _limited.check_rows(stage.rare for stage in stages)
    return Drafter(
        init_params=Bound(_init_params, settings),
        init=Bound(_init, settings),
        propose=Bound(_propose, settings),
        update=Bound(_update, settings),
        nodes=settings.nodes,
        name="escalate",
        siblings=settings.siblings,
        depth=None if settings.siblings == CHAIN else settings.longest,
        features=any(stage.features for stage in stages),
        taps=_stages.taps(stages),
        history=keys.least > 0 or any(stage.history for stage in stages),
        constant_cost=False,
        rare=Rare(
            learn=learn,
            check_rows=check_rows,
            lengths=_lengths(stages),
            verdicts=keys.least > 0 or any(stage.rare.verdicts for stage in stages),
        ),
    )


def _lengths(stages: Sequence[Drafter]) -> tuple[int, ...]:
    """``Rare.lengths``: those of all drafters, if all are known."""
    of_stage = [
        stage.rare.lengths or ((stage.nodes,) if stage.whole and stage.siblings == CHAIN else ())
        for stage in stages
    ]
    return tuple(itertools.chain(*of_stage)) if all(of_stage) else ()


def _siblings(stages: Sequence[Drafter]) -> str:
    """The kind of siblings of the combined drafts. Raises UserError."""
    if not any(stage.nodes for stage in stages):
        raise UserError("escalate: none of the drafters drafts any tokens")
    kinds = {stage.siblings for stage in stages}
    if not kinds <= {CHAIN, DETERMINISTIC}:
        raise UserError(
            "escalate takes chains and deterministic trees; "
            f"one of its drafters drafts {sorted(kinds)[-1]} siblings"
        )
    for stage in stages:
        if not stage.gaps:
            raise UserError(
                f"escalate: {stage.name} must take part in every round; it cannot wait for its turn"
            )
    return CHAIN if kinds == {CHAIN} else DETERMINISTIC


def _init_params(settings: Settings, key):
    numbers = range(len(settings.stages))
    keys = [None if key is None else jax.random.fold_in(key, number) for number in numbers]
    return tuple(stage.init_params(own) for stage, own in zip(settings.stages, keys, strict=True))


def _init(settings: Settings, params, context, target_out, slots):
    states, layers = [], _stages.taps(settings.stages)
    for stage in settings.stages:
        own, out = (_stages.with_taps(stage, layers, each) for each in (context, target_out))
        # Each drafter gets the slots that it would have alone.
        states.append(stage.init(params, own, out, slots - settings.nodes + stage.nodes))
    batch, count = context.length.shape[0], len(states)
    winner = jnp.full((batch,), count, jnp.int32)
    return State(tuple(states), winner, jnp.ones((batch, count), jnp.float32))


def _propose(settings: Settings, params, keys, context, state):
    batch, no_winner = context.length.shape[0], len(settings.stages)
    winner = last = jnp.full((batch,), no_winner, jnp.int32)
    states, drafts, layers = [], [], _stages.taps(settings.stages)
    for index, (stage, own) in enumerate(zip(settings.stages, state.states, strict=True)):
        inner_keys = keys.inner(index, same_target=True)
        asked = (winner == no_winner) & (state.rate[:, index] >= settings.least) & ~context.finished
        seen = _stages.with_taps(stage, layers, context)
        draft, after = _stages.run_if(asked.any(), stage, own, params, inner_keys, seen)
        proposed = tree.exists(draft.valid, draft.parents).any(-1)
        winner, last = jnp.where(asked & proposed, index, winner), jnp.where(asked, index, last)
        states.append(after)
        drafts.append(draft)
    # A round without proposals belongs to the last drafter asked: its invalid nodes (the window of
    # lookahead) are scored too, and it learns from the target's one token.
    winner = jnp.where(winner == no_winner, last, winner)
    state = State(tuple(states), winner, state.rate)
    return _merge(settings, drafts, winner), state


def _merge(settings: Settings, drafts: Sequence[Draft], winner: Array) -> Draft:
    """One draft of ``nodes`` nodes: in each row that of ``winner`` i32[B], padded."""
    batch, chain = winner.shape[0], settings.siblings == CHAIN
    sampled = any(draft.probs is not None for draft in drafts)
    if sampled and not chain:
        raise UserError(
            "escalate: with a deterministic tree every drafter must be deterministic, "
            "and one of them samples"
        )
    every = _stages.probs_of(drafts, settings.vocab_size) if sampled else [None] * len(drafts)
    merged: Any = None
    finite, fed = jnp.ones((batch,), bool), jnp.zeros((batch,), jnp.int32)
    for index, (draft, probs) in enumerate(zip(drafts, every, strict=True)):
        mine = winner == index
        # The parent of a node that pads a draft is -1.
        own = tree.sized((draft.tokens, draft.valid, parents_of(draft) + 1, probs), settings.nodes)
        merged = jax.tree.map(jnp.zeros_like, own) if merged is None else merged
        merged = tree.where_rows(mine, own, merged)
        if draft.finite is not None:
            finite &= draft.finite | ~mine
        if draft.fed is not None:
            fed = jnp.where(mine, draft.fed, fed)
    tokens, valid, parents, probs = merged
    if chain:
        return Draft(tokens, valid, probs=probs, finite=finite, fed=fed)
    parents = parents.astype(jnp.int32) - 1
    return Draft(tokens, valid, parents, finite=finite, fed=fed, depth=settings.longest)


def _update(settings: Settings, params, state, draft, verdict, target_out):
    accepted = (verdict.path >= 0).sum(-1)
    depth = tree.depths(draft.parents, *draft.tokens.shape) + 1
    tried = jnp.where(tree.exists(draft.valid, draft.parents), depth, 0).max(-1, initial=0)
    share = (accepted / jnp.maximum(tried, 1)).astype(jnp.float32)
    states, rate, layers = [], state.rate, _stages.taps(settings.stages)
    for index, stage in enumerate(settings.stages):
        won = (state.winner == index) & (verdict.count > 0)
        out = _stages.with_taps(stage, layers, target_out)
        parts = _part_of(stage, won, draft, verdict, out)
        states.append(stage.update(params, state.states[index], *parts))
        new = settings.decay * rate[:, index] + (1 - settings.decay) * share
        rate = rate.at[:, index].set(jnp.where(won & (tried > 0), new, rate[:, index]))
    return State(tuple(states), state.winner, rate)


def _part_of(stage: Drafter, won: Array, draft, verdict, out) -> tuple[Draft, Verdict, Output]:
    """The draft, verdict and outputs of one inner drafter, in its sizes.

    The verdict counts 0 in rows where ``won`` bool[B] is False.
    """
    n, m, keep = stage.nodes, stage.longest, won[:, None]
    parents = draft.parents
    if stage.siblings == CHAIN:
        parents = None
    elif parents is None:
        parents = jnp.full_like(draft.tokens, -1)
    nodes = _sized(Draft(draft.tokens, draft.valid, parents, draft.probs), n, stage.whole)
    own_draft = nodes.replace(finite=draft.finite, depth=stage.depth)
    tokens = jnp.where(keep, verdict.tokens[:, : m + 1], -1)
    count = jnp.where(won, verdict.count, 0)
    own_verdict = Verdict(tokens, count, jnp.where(keep, verdict.path[:, :m], -1))
    own_out = Output(*_sized(tuple(out), n + 1, stage.whole and stage.features))
    return own_draft, own_verdict, own_out


def _sized(block, size: int, whole: bool):
    """The first ``size`` tokens of a block; with ``whole`` padded if it has fewer.

    Only a drafter whose drafts are whole needs padding, in rounds in which it did not propose.
    """
    return tree.sized(block, size) if whole else jax.tree.map(lambda x: x[:, :size], block)


def _learn(settings: Settings, params, state, lengths):
    every = zip(settings.stages, params.draft, state.draft.states, strict=True)
    return tuple(
        stage.rare.learn(params, state.replace(draft=inner), lengths) if stage.rare.learn else own
        for stage, own, inner in every
    )
