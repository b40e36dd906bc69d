"""A recorded text as a target, with its own vocabulary or with a vocabulary of two tokens.

``recorded`` replaces greedy decoding of a model that is not available: one-hot logits at the
recorded token, V wide for each node. It works with every rule and every drafter. But all that a
recording defines about a draft token is whether it is the recorded one. ``fold`` uses only that:
inside the loop the recorded token of each position is called 1 and any other token 0. So a round
costs the same at every vocabulary size, while the drafter works on the text itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import check_pair
from specjax.bound import Bound
from specjax.drafters._unreadable import Unreadable
from specjax.errors import UserError
from specjax.models.token_bytes import TokenBytes
from specjax.rng import RowKeys
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    LM,
    SIBLINGS,
    Accept,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Verdict,
)

_WITHOUT_A_MODEL = "replay takes drafters that need no more, such as prompt_lookup and draft_model"


class Position(struct.PyTreeNode):
    """The cache of a recorded target: only a length."""

    length: jax.Array  # i32[B]


@functools.cache  # equal arguments give the same object, so nothing is compiled twice
def recorded(
    vocab_size: int, vocabulary: str | None = None, token_bytes: TokenBytes | None = None
) -> LM:
    """A target that gives a recorded text; the last arguments are those of ``LM``.

    Its params are i32[B,S]: one text (prompt and output) per row, -1 beyond its end. The token at a
    position depends on the position alone, so a branch that left the recording is never followed
    by a right token. Logits f32[B,T,V] are one-hot. Beyond the end of the recording they are all 0:
    ``limit`` must stop the row before.
    """

    def apply(params, tokens, cache, layout=None, block=None):
        batch, size = tokens.shape
        fed = 0 if block is None else block.shape[1]
        layout = tree.chain_layout(batch, size, fed) if layout is None else layout
        following = _at(params, cache.length[:, None] + layout.depth[:, fed:] + 1)
        return Output(jax.nn.one_hot(following, vocab_size), jnp.zeros((batch, size, 1))), tokens

    own = {"vocabulary": vocabulary, "token_bytes": token_bytes}
    return LM(_init_cache, apply, _commit, vocab_size, **own, name="recorded")


def _init_cache(batch: int, slots: int) -> Position:
    return Position(jnp.zeros((batch,), jnp.int32))


def _commit(
    cache: Position, block: jax.Array, count: jax.Array, path: jax.Array | None = None
) -> Position:
    return cache.replace(length=cache.length + count)


def _at(record: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[B,T]: the recorded tokens at ``positions`` i32[B,T], -1 beyond the end."""
    return jnp.take_along_axis(record, positions, axis=1, mode="fill", fill_value=-1)


# In a vocabulary of two tokens ------------------------------------------------------------------


OTHER, RECORDED = 0, 1


def _always_recorded(params, tokens, cache, layout=None, block=None):
    logits = jnp.broadcast_to(jax.nn.one_hot(RECORDED, 2), (*tokens.shape, 2))
    return Output(logits, jnp.zeros((*tokens.shape, 1))), tokens


# The recorded token at every position.
TWO_TOKENS = LM(_init_cache, _always_recorded, _commit, vocab_size=2, name="recorded")


def fold(drafter: Drafter, rule: Accept) -> tuple[LM, Drafter, Accept]:
    """Target, drafter and rule of a greedy replay in a vocabulary of two tokens.

    Rounds and counts are those of ``recorded`` with this drafter and this rule. The text of the
    loop is the token 1 at every position. ``ModelParams.draft`` is {"record": i32[B,S] as for
    ``recorded``, S at least the loop's buffer; "drafter": the drafter's own};
    ``ModelParams.target`` is empty. Draft tokens beyond the end of the recording cannot be judged:
    they are neither drafted nor tested.

    Raises:
        UserError: a drafter that reads what the target computes; a rule that does not take its
            drafts; a lossy rule, which uses target probabilities that are not recorded.
    """
    check_pair(drafter, rule)
    if drafter.features:
        raise UserError(
            f"drafter {drafter.name} reads what the target computes, and a recording has only its "
            f"tokens; {_WITHOUT_A_MODEL}"
        )
    if rule.lossless_class == "L3":
        raise UserError(
            f"the rule {rule.name} is lossy and uses the target's probabilities, which a recording "
            "does not have; replay takes lossless rules (at temperature 0 they all accept exactly "
            "the recorded tokens)"
        )
    folded = drafter._replace(
        init=Bound(_init, drafter),
        propose=Bound(_propose, drafter),
        update=Bound(_update, drafter),
        siblings=CHAIN if drafter.siblings == CHAIN else DETERMINISTIC,
        # A pass over a recording costs nothing.
        whole=True,
        probs=None,
        training=None,
        learn=None,
    )

    def sampled(keys: RowKeys, draft: Draft, probs: jax.Array) -> Verdict:
        return rule.greedy(draft, probs)  # not used: every row is greedy

    return TWO_TOKENS, folded, rule._replace(sampled=sampled, siblings=SIBLINGS)


def _init(drafter: Drafter, params: ModelParams, context: Context, target_out: Output, slots: int):
    own = _own_params(drafter, params)
    return drafter.init(own, _recorded_text(params, context), target_out, slots)


def _propose(drafter: Drafter, params: ModelParams, keys: RowKeys, context: Context, state):
    """The drafter's draft in two tokens.

    Until the verdict the state is (the drafter's draft, its state, the recorded tokens that may be
    accepted). ``_update`` returns the drafter's own state again.
    """
    own = _own_params(drafter, params)
    draft, state = drafter.propose(own, keys, _recorded_text(params, context), state)
    record, length = params.draft["record"], context.length[:, None]
    right = _at(record, length + tree.depths(draft.parents, *draft.tokens.shape))
    shown = draft.replace(
        tokens=jnp.where(draft.tokens == right, RECORDED, OTHER),
        valid=draft.valid & (right >= 0),
        probs=None,
    )
    return shown, (draft, state, _at(record, length + jnp.arange(drafter.longest + 1)))


def _update(drafter: Drafter, params: ModelParams, state, shown: Draft, verdict: Verdict, out):
    draft, state, following = state
    emitted = jnp.arange(drafter.longest + 1) < verdict.count[:, None]
    verdict = verdict.replace(tokens=jnp.where(emitted, following, -1))
    # A finished row has no draft, as in the decode loop.
    draft = draft.replace(valid=draft.valid & (verdict.count > 0)[:, None])
    return drafter.update(_own_params(drafter, params), state, draft, verdict, out)


def _own_params(drafter: Drafter, params: ModelParams) -> ModelParams:
    nothing = Unreadable(
        f"drafter {drafter.name} reads the target's weights, and a recording has only its tokens; "
        f"{_WITHOUT_A_MODEL}"
    )
    return ModelParams(nothing, params.draft["drafter"])


def _recorded_text(params: ModelParams, context: Context) -> Context:
    """The context with the recorded tokens in the place of the loop's."""
    slots = context.tokens.shape[1]
    committed = jnp.arange(slots) < context.length[:, None]
    return context.replace(tokens=jnp.where(committed, params.draft["record"][:, :slots], -1))
