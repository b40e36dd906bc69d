"""Controlled acceptance: another drafter's cost, with a chosen acceptance rate. L1.

For measuring the system apart from the models: every round does all the work of the inner drafter,
and then its tokens are replaced. At each depth the draft has the target's own greedy continuation
with probability ``rate``, independently, and otherwise a token that greedy decoding does not
choose. So at temperature 0 the acceptance rate (alpha of Leviathan et al. 2023, 2211.17192,
section 3.1) is ``rate`` at every depth, for any size of model and with random weights, and the text
is that of plain greedy decoding. (A rule that ignores the target, such as vLLM's "synthetic" rule,
also controls acceptance, but its text has no meaning.)

``length`` gives the tokens per round in place of a rate, so that speed is measured at the
acceptance of another system: a number, or a published curve with a number for each draft length.
``schedule`` says at which depths tokens are accepted: with the least variance, as vLLM does, or
independently with one rate (``theory.minimum_variance_rates``, ``theory.equal_rate``). Rounds that
a limit or end-of-sequence cuts are shorter.

The continuation is decoded while the prompt is read, before any time is measured. On sampled text
the class is L1 too, but the acceptance rate is not ``rate``; the command line refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, decode, rng, sampling, theory, tree
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import none
from specjax.drafters.draft_models import _small_model
from specjax.drafters.nested import _stages
from specjax.drafters.nested._stages import Stages
from specjax.errors import UserError
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    LM,
    Array,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Rare,
)

REFERENCE = "leviathan2023fast"


class State(struct.PyTreeNode):
    """The inner drafter's state, and the target's greedy text."""

    inner: Any
    record: Array  # i32[B,S] the prompt, then its greedy continuation


def _lengths(value: Any) -> tuple[float, ...]:
    """The tokens per round that the key ``length`` names; (): not given. Raises UserError."""
    try:
        parts = value.split(",") if isinstance(value, str) else np.atleast_1d(value).tolist()
        lengths = tuple(float(part) for part in parts if part != "")
    except (TypeError, ValueError):
        lengths = (math.nan,)
    if not all(1 <= each < math.inf for each in lengths):
        raise UserError(
            f"length is {value!r}; give tokens per round, each at least 1, as 3.54 or 1.84,2.45"
        )
    return lengths


class Keys(declare.Keys):
    """The keys of ``controlled``."""

    LENGTH = "drafters"

    drafters: Stages = key(
        help="the inner drafter, which determines the cost: label -> its keys, or a list with a "
        "ready-made ``Drafter``. A chain, or a deterministic tree; of a tree, one node at each "
        "depth is controlled and the others are wrong."
    )
    rate: float | None = key(
        None,
        "probability that the controlled token of a depth is the target's, in [0, 1]; 0.8 unless "
        "``length`` is given",
        least=0,
        most=1,
    )
    length: Sequence[float] | str = key(
        (),
        "instead of ``rate``: tokens per round, the target's own included, as 3.54; or one for "
        "each draft length from 1 on, as 1.84,2.45,2.87, of which the inner drafter's is taken",
        parse=_lengths,
    )
    schedule: str = key(
        "minimum_variance",
        "of ``length``: the first tokens always and one with the rest of the probability, or "
        "independent, one rate at every depth",
        choices=("minimum_variance", "independent"),
        needs="length",
    )

    def check(self) -> None:
        _stages.check("controlled", self.drafters, "one inner drafter and got {got}; give one")
        if self.length and self.rate is not None:
            raise UserError("controlled takes a rate or a length, not both; leave one of them out")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a chosen acceptance rate at another drafter's cost.

    Raises:
        UserError: no inner drafter or several, one that drafts no tokens or samples siblings, a
            rate outside [0, 1], a rate and a length, a length that the draft cannot have.
    """
    [stage] = _stages.build(target, keys.drafters, gaps=False)
    if not stage.nodes:
        raise UserError(f"controlled: {stage.name} drafts no tokens; give another inner drafter")
    if stage.siblings not in (CHAIN, DETERMINISTIC):
        raise UserError(
            "controlled takes chains and deterministic trees; "
            f"{stage.name} drafts {stage.siblings} siblings"
        )
    rates = _rates(keys, stage.longest)
    stage = _stages.with_params(stage, "drafter")
    return stage._replace(
        init_params=Bound(_init_params, stage, rates),
        init=Bound(_init, target, stage),
        propose=Bound(_propose, target.vocab_size, stage),
        update=Bound(_update, stage),
        name="controlled",
        # The recorded continuation needs the target.
        features=True,
        # The continuation of the prompt, and not of the text.
        history=True,
        rare=Rare(rows=stage.rare.rows, check_rows=stage.rare.check_rows),
        # Every round costs the same.
        whole=True,
        adaptive=False,
        greedy_only=True,
        probs=None,
        training=None,
    )


def _rates(keys: Keys, depth: int) -> tuple[float, ...]:
    """The conditional acceptance at each depth. Raises UserError."""
    if not keys.length:
        return (0.8 if keys.rate is None else keys.rate,) * depth
    if 1 < len(keys.length) < depth:
        raise UserError(
            f"length has {len(keys.length)} values, and the inner drafter drafts {depth} tokens; "
            "give one for each draft length up to that"
        )
    tokens = float(keys.length[depth - 1 if len(keys.length) > 1 else 0])
    if tokens > depth + 1:
        raise UserError(
            f"length is {tokens:g}, and a round with {depth} draft tokens has at most {depth + 1}; "
            "give a smaller one, or a longer draft"
        )
    if keys.schedule == "independent":
        return (theory.equal_rate(tokens, depth),) * depth
    return tuple(theory.minimum_variance_rates(tokens, depth))


def _init_params(stage: Drafter, rates: tuple[float, ...], key):
    # The rates are a parameter, so that no program is compiled again for others.
    return {"drafter": stage.init_params(key), "rate": jnp.asarray(rates, jnp.float32)}


def _init(target: LM, stage: Drafter, params, context, target_out, slots):
    inner = stage.init(params, context, target_out, slots)
    return State(inner, _greedy_text(target, params, context, slots))


def _propose(vocab: int, stage: Drafter, params, keys, context, state):
    inner_keys, rate = keys.inner(0, same_target=True), params.draft["rate"]
    draft, inner = stage.propose(params, inner_keys, context, state.inner)
    right, wrong_or_right = _controlled(vocab, rate, keys, context, state.record, stage.longest)
    # Never true, but unknown to the compiler: the inner drafter's tokens have to be computed.
    needed = draft.tokens < -1
    if draft.parents is None:
        tokens = jnp.where(needed, draft.tokens, wrong_or_right)
        draft = Draft(tokens, jnp.ones_like(draft.valid), finite=draft.finite)
        return draft, state.replace(inner=inner)
    level = tree.depths(draft.parents, *draft.tokens.shape)
    main = _first_path(draft, stage.longest)

    def at_nodes(values):
        return jnp.take_along_axis(values, level, axis=1, mode="clip")

    # Another node with the controlled token or the right token would change the acceptance rate, so
    # it is made invalid.
    controlled = at_nodes(wrong_or_right)
    disturbs = ~main & ((draft.tokens == at_nodes(right)) | (draft.tokens == controlled))
    tokens = jnp.where(main & ~needed, controlled, draft.tokens)
    draft = draft.replace(tokens=tokens, valid=draft.valid & ~disturbs, probs=None)
    return draft, state.replace(inner=inner)


def _controlled(vocab: int, rate: Array, keys, context, record: Array, longest: int):
    """The target's next greedy tokens i32[B,M], and the same with some replaced by wrong ones."""
    batch, depth = context.length.shape[0], jnp.arange(longest)
    coins = keys.inner(1).coins(longest)
    chance = jnp.broadcast_to(rate, (batch, longest))
    is_right = coins.flip(chance, jnp.ones_like(chance))
    right = jnp.take_along_axis(record, context.length[:, None] + depth, axis=1, mode="clip")
    return right, jnp.where(is_right, right, (right + 1) % vocab)


def _update(stage: Drafter, params, state, *args):
    return state.replace(inner=stage.update(params, state.inner, *args))


def _greedy_text(target: LM, params: ModelParams, context, slots: int) -> Array:
    """i32[B,slots]: the text and the target's greedy continuation of it."""
    batch, width = context.tokens.shape
    tokens = jnp.pad(context.tokens, ((0, 0), (0, slots + 1 - width)), constant_values=-1)
    state = DecodeState(
        tokens=tokens,
        length=context.length,
        limit=jnp.full((batch,), slots, jnp.int32),
        done=context.length >= slots,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=_small_model.fed(target, params.target, context, slots),
        draft=(),
        # Greedy decoding does not draw from them.
        keys=rng.row_keys(0, batch),
        round=jnp.zeros((), jnp.int32),
        # The row's penalties, biases and bans: the text is the mapped target's.
        sampling=sampling.make_sampling(batch, 0.0).replace(maps=context.sampling.maps),
        made_for=none.make(target).tag,
    )
    state = decode.autoregressive(target, params, state, max_steps=slots)
    return jnp.maximum(state.tokens[:, :slots], 0)


def _first_path(draft: Draft, longest: int) -> Array:
    """bool[B,N]: the path of first children from the pending token down."""
    assert draft.parents is not None
    node = jnp.arange(draft.tokens.shape[1])
    exists = tree.exists(draft.valid, draft.parents)
    main, above = jnp.zeros_like(exists), jnp.full(exists.shape[:1], -1)
    for _ in range(longest):
        children = exists & (draft.parents == above[:, None])
        first = jnp.where(children.any(-1), jnp.argmax(children, -1), -2)
        main, above = main | (node == first[:, None]), first
    return main
