"""A recorded text as a target: an ``LM`` that says it, and the same decoding in a vocabulary of two.

``recorded`` is greedy decoding of a model that is not there: one-hot logits at the recorded token, right for every rule and
every drafter, and V wide for each node. But of a draft token a recording can only tell whether it is the recorded one.
``fold`` asks no more: inside the loop the recorded token of each place is called 1 and any other token 0, so that a round
costs the same at every vocabulary, while the drafter works on the text itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.accept import check_pair
from specjax.errors import UserError
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
)


class Place(struct.PyTreeNode):
    """All that a recorded target remembers."""

    length: jax.Array  # i32[B]


@functools.cache  # equal arguments, the same target: nothing is compiled twice
def recorded(vocab_size: int, vocabulary: str | None = None) -> LM:
    """A target that says a recorded text: its params are i32[B,S], one text (prompt and output) per row, -1 beyond its end.

    What it says at a place depends on the place alone, so a branch that left the recording gets nothing from it. Logits
    f32[B,T,V] are one-hot; where nothing is recorded they are all zero, and ``limit`` must have stopped the row before.
    """

    def apply(params, tokens, cache, parents=None):
        batch, size = tokens.shape
        block = (
            size if parents is None else parents.shape[1]
        )  # earlier calls fed the first block - size of it
        depth = tree.depths(parents, batch, block)[:, block - size :]
        said = _at(params, cache.length[:, None] + depth + 1)
        return Output(jax.nn.one_hot(said, vocab_size), jnp.zeros((batch, size, 1))), cache

    return LM(_nowhere, apply, _forward, vocab_size, vocabulary=vocabulary, name="recorded")


def _nowhere(batch: int, slots: int) -> Place:
    return Place(jnp.zeros((batch,), jnp.int32))


def _forward(cache: Place, count: jax.Array, path: jax.Array | None = None) -> Place:
    return cache.replace(length=cache.length + count)


def _at(record: jax.Array, place: jax.Array) -> jax.Array:
    """i32[B,T]: the recorded tokens at ``place`` i32[B,T], -1 where there are none."""
    return jnp.take_along_axis(record, place, axis=1, mode="fill", fill_value=-1)


# --- in a vocabulary of two ------------------------------------------------------------------------------------------


OTHER, RECORDED = 0, 1


def _confirms(params, tokens, cache, parents=None):
    logits = jnp.broadcast_to(jax.nn.one_hot(RECORDED, 2), (*tokens.shape, 2))
    return Output(logits, jnp.zeros((*tokens.shape, 1))), cache


YES = LM(
    _nowhere, _confirms, _forward, vocab_size=2, name="recorded"
)  # whatever the place, the recorded token


def fold(drafter: Drafter, rule: Accept) -> tuple[LM, Drafter, Accept]:
    """Target, drafter and rule of a greedy replay: the same rounds and counts as ``recorded``, the drafter and the rule.

    Its text is the token 1 wherever there is one. ``ModelParams.draft`` is {"record": i32[B,S] as for ``recorded``, S at
    least the loop's buffer; "drafter": the drafter's own}, ``ModelParams.target`` is empty. Draft tokens beyond the end of
    the recording cannot be judged: they are neither drafted nor tested.

    Raises:
        UserError: a drafter that reads what the target computes, a rule that does not take its drafts, and a lossy rule: it
            looks at the target's laws, which nobody recorded.
    """
    check_pair(drafter, rule)
    if drafter.features:
        raise UserError(
            f"drafter {drafter.name} reads what the target computes, and a recording has only its tokens; "
            "replay takes drafters that need no more, such as prompt_lookup and draft_model"
        )
    if rule.lossless_class == "L3":
        raise UserError(
            f"the rule {rule.name} is lossy and looks at the target's laws, which a recording has not; "
            "replay takes lossless rules (at temperature 0 they all keep what is the recorded token)"
        )
    kind = CHAIN if drafter.siblings == CHAIN else DETERMINISTIC
    longest = drafter.longest

    def inner(params: ModelParams) -> ModelParams:
        return ModelParams(_Missing(drafter.name), params.draft["drafter"])

    def text(params: ModelParams, context: Context) -> Context:
        slots = context.tokens.shape[1]
        there = jnp.arange(slots) < context.length[:, None]
        return context.replace(tokens=jnp.where(there, params.draft["record"][:, :slots], -1))

    def init(params, context, target_out, slots):
        return drafter.init(inner(params), text(params, context), target_out, slots)

    def propose(params, keys, context, state):
        draft, state = drafter.propose(inner(params), keys, text(params, context), state)
        record, length = params.draft["record"], context.length[:, None]
        said = _at(record, length + tree.depths(draft.parents, *draft.tokens.shape))
        shown = draft.replace(
            tokens=jnp.where(draft.tokens == said, RECORDED, OTHER),
            valid=draft.valid & (said >= 0),
            probs=None,
        )
        # Until the verdict only: what ``update`` returns is the drafter's own state again.
        return shown, (draft, state, _at(record, length + jnp.arange(longest + 1)))

    def update(params, state, shown, verdict, target_out):
        draft, state, said = state
        there = jnp.arange(longest + 1) < verdict.count[:, None]
        verdict = verdict.replace(tokens=jnp.where(there, said, -1))
        draft = draft.replace(
            valid=draft.valid & (verdict.count > 0)[:, None]
        )  # as the loop does with finished rows
        return drafter.update(inner(params), state, draft, verdict, target_out)

    def sampled(keys: RowKeys, draft: Draft, laws: jax.Array):  # never: every row is greedy
        return rule.greedy(draft, laws)

    folded = drafter._replace(
        init=init,
        propose=propose,
        update=update,
        siblings=kind,
        probs=None,
        training=None,
        learn=None,
    )
    return YES, folded, rule._replace(sampled=sampled, siblings=SIBLINGS)


@jax.tree_util.register_static  # no leaves: it travels wherever parameters do
@dataclasses.dataclass(frozen=True)
class _Missing:
    """Stands for the weights of a target that was recorded: whoever reaches into them is told."""

    reader: str

    def _tell(self, *_: Any) -> NoReturn:
        raise UserError(
            f"drafter {self.reader} reads the target's weights, and a recording has only its tokens; "
            "replay takes drafters that need no more, such as prompt_lookup and draft_model"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = _tell
