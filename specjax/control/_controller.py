"""What a controller is, what it is asked, and what it counts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import sampling, tree
from specjax.control import costs
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, Array, Context, Draft, Lasting, Verdict


class Ahead(NamedTuple):
    """What is computed before the tokens of the next level are drawn.

    The level's places are the n nodes that would get children; a chain has one. All of it is a
    function of the committed text and of tokens that stay in the draft.
    """

    depth: Array | int  # i32[] tokens on every path so far; 0 before the first
    # f[B,m,V] the draft's own logits at each place, without sampling settings; m = n, or 1 if all
    # places have the same
    logits: Array
    log_prob: Array  # f[B,n] log of the product of the draft's probabilities on the path
    valid: Array  # bool[B,n] whether the place exists
    token_log_prob: Array  # f[B,n] that of the place's own token; 0 for the pending token
    # f[B,n] the drafter's own estimate that the next token at each place is accepted; None: it has
    # none
    confidence: Array | None = None


def _constant(state: Any, live: Array) -> Array:
    return jnp.full(live.shape, FOREVER, jnp.int32)


def _unchanged(state: Any, rounds: Array) -> Any:
    return state


# ``Controller.limit`` of a state that has it as its field ``length``.
length_of = operator.attrgetter("length")


def of_others(counts: Array) -> Array:
    """f32[B,...]: the sum over all other rows, so that no row counts twice."""
    return counts.sum(0) - counts


# Rounds of a pause that nothing ends.
FOREVER = 1 << 30
# The pause of a controller whose limit never changes.
ENDLESS = Lasting(_constant, _unchanged)


def _same_state(state: Any, draft: Draft, verdict: Verdict) -> Any:
    return state


class Controller(NamedTuple):
    """A controller as pure functions; its state is a pytree of arrays [B,...].

    It has at least one of ``ask``, ``limit`` and ``size``:

    - ``ask(state, Ahead) -> (bool[B], state)``: whether the row's draft gets the next level. A row
      that stopped is not asked again in this round: its answer and its new state are dropped.
    - ``limit(state) -> i32[B]``: the longest draft of the next round, in levels. It is known before
      the draft begins, so a round of limit 0 in all rows costs what plain decoding costs.
    - ``size(state, draft, log_prob f[B,N] | None) -> (i32[B,N], i32[B], state)``: of a grown tree
      that is a function of the committed text, the nodes in the order in which they are verified,
      parents first, and how many of them. ``log_prob`` is the draft's for each node, given its
      parent; None: it has none.
    - ``within(state, i32[B]) -> i32[B]``: a limit at most that of ``limit``, for drafts that are a
      function of the committed text and have so many levels. None: the same as ``limit``.
    - ``pause``: where the limit is 0, how long it stays, and the state afterwards. None: only
      ``update`` knows, round by round.
    - ``init(context) -> state``: after the prompt was read.
    - ``update(state, draft, verdict) -> state``: after the verdict, also of a draft without nodes.
      Rows with verdict count 0 keep their state, except where it is ``shared``.
    """

    name: str
    ask: Callable[[Any, Ahead], tuple[Array, Any]] | None = None
    init: Callable[[Context], Any] = lambda context: ()
    update: Callable[[Any, Draft, Verdict], Any] = _same_state
    limit: Callable[[Any], Array] | None = None
    within: Callable[[Any, Array], Array] | None = None
    size: Callable[..., tuple[Array, Array, Any]] | None = None
    pause: Lasting | None = None
    # (rows of a batch) -> None. Raises UserError if its costs were measured on another device, or
    # without so many rows. None: any.
    check_rows: Callable[[int], None] | None = None
    # The lengths that it chooses from, or knows the costs of. No draft is longer than the largest
    # one. (): any number.
    lengths: tuple[int, ...] = ()
    # With ``size``: the most nodes that are verified, one of ``costs.sizes`` of this number.
    most_nodes: int = 0
    # Whether trees must have so many nodes, because it was fitted to them.
    exact_nodes: bool = False
    # Whether its answers depend on the other rows of the batch. The output law of a row does not.
    shared: bool = False

    @property
    def has_state(self) -> bool:
        """Whether its answers may depend on earlier rounds."""
        return self.update is not _same_state

    def sizes(self, nodes: int) -> tuple[int, ...]:
        """``Rare.sizes`` of trees with so many nodes; (): it does not choose."""
        return () if self.size is None else costs.sizes(min(nodes, self.most_nodes))


def longest(controller: Controller | None, state: Any, reach: Array | None = None) -> Array | None:
    """i32[B] the longest draft of the next round, at least 0; None: the controller has no limit.

    ``reach`` i32[B]: the levels of drafts that are a function of the committed text; None: not
    known.
    """
    if controller is None or controller.limit is None:
        return None
    most = controller.limit(state)
    if reach is not None and controller.within is not None:
        most = jnp.minimum(most, controller.within(state, reach))
    return jnp.maximum(most, 0).astype(jnp.int32)


def check_tree(controller: Controller | None, name: str, siblings: str, nodes: int) -> None:
    """Raises UserError for a ``Controller.size`` and drafts of ``name`` that it does not take.

    It would change their law, or it was fitted to trees of another size.
    """
    if controller is None or controller.size is None:
        return
    if siblings != DETERMINISTIC:
        drawn = "a chain, which has no nodes to choose from" if siblings == CHAIN else "drawn nodes"
        raise UserError(
            f"control is {controller.name!r}, which leaves out nodes of a tree by their tokens, "
            f"and {name} drafts {drawn}; give tree='dynamic' or siblings='top_k', or control "
            "'goodput', which limits levels"
        )
    if controller.exact_nodes and nodes != controller.most_nodes:
        raise UserError(
            f"control is {controller.name!r}, which was fitted to trees of {controller.most_nodes} "
            f"nodes, and {name} drafts {nodes}; measure a profile with this tree"
        )


def sized(
    controller: Controller, state: Any, draft: Draft, log_prob: Array | None
) -> tuple[Draft, Array, Any]:
    """The draft with the nodes that ``Controller.size`` takes first and alone valid.

    Also i32[B,N], which node is now at each place, and the controller's state.
    """
    assert controller.size is not None
    order, count, state = controller.size(state, draft, log_prob)
    draft = tree.reordered(draft, order)
    valid = draft.valid & (jnp.arange(order.shape[1]) < count[:, None])
    return draft.replace(valid=valid), order, state


# What a round drafted and accepted, in levels, and what else controllers share.


def drafted(draft: Draft) -> Array:
    """i32[B]: the levels of a draft, those of its deepest node; 0 for a draft without nodes."""
    batch, size = draft.tokens.shape
    if not size:
        return jnp.zeros((batch,), jnp.int32)
    exist = tree.exists(draft.valid, draft.parents)
    depth = tree.depths(draft.parents, batch, size) + 1
    return jnp.where(exist, depth, 0).max(-1).astype(jnp.int32)


def accepted(verdict: Verdict) -> Array:
    """i32[B]: the accepted levels that were emitted."""
    return (verdict.path >= 0).sum(-1).astype(jnp.int32)


def live_mean(live: Array, values: Array) -> Array:
    """The mean of [B,...] over the rows ``live`` bool[B]; greedy and sampled rows may differ."""
    return (values * tree.aligned(live, values)).sum(0) / jnp.maximum(live.sum(), 1)


def of_round(draft: Draft, verdict: Verdict) -> tuple[Array, Array, Array]:
    """Of a round with other rows or drafters: the live rows bool[B], and ``drafted``, ``accepted``.

    Rows with verdict count 0 have 0 of both: they are finished, or another drafter wrote there.
    """
    live = verdict.count > 0
    return live, jnp.where(live, drafted(draft), 0), jnp.where(live, accepted(verdict), 0)


def entropies(logits: Array) -> Array:
    """f[...]: the entropy of softmax of ``logits`` f[...,V], in nats, in float32 at least."""
    logp = sampling.log_probs(logits)
    return -jnp.where(logp > -jnp.inf, jnp.exp(logp) * logp, 0).sum(-1)


def moved(
    keys: Any, state: Any, verdict: Verdict, levels: Array, falls: Array
) -> tuple[Array, Array]:
    """The new threshold and the new mean of the accepted shares, f32[B], as in Draft & Verify.

    The threshold moves towards the acceptance that is aimed at. Rounds without a draft change
    nothing.

    Args:
        keys: ``target``, ``step``, ``keep`` and ``memory`` of a controller.
        state: has the old ones, ``threshold`` and ``share``.
        verdict: of the last round.
        levels: i32[B] of its draft.
        falls: bool[B] whether the threshold may fall; otherwise it rises or stays.
    """
    threshold, newest = state.threshold, accepted(verdict) / jnp.maximum(levels, 1)
    mean = keys.memory * state.share + (1 - keys.memory) * newest
    lower = jnp.where(falls, threshold - keys.step, threshold)
    aim = jnp.where(mean < keys.target, threshold + keys.step, lower)
    new = jnp.clip(keys.keep * threshold + (1 - keys.keep) * aim, 0, 1)
    changed = new.astype(jnp.float32), mean.astype(jnp.float32)
    return tree.where_rows(levels > 0, changed, (threshold, state.share))


class Setup(NamedTuple):
    """The static settings of a controller that reads costs.

    Its states have the fields ``live`` and ``greedy``, bool[B].
    """

    known: costs.Known
    keys: Any

    @property
    def most(self) -> int:
        """The most tokens of a draft, as far as costs are known."""
        return costs.lengths(self.known)[-1]

    def costs(self, state: Any) -> costs.Costs:
        """The costs of the batch."""
        return costs.known_of(self.known, len(state.live))

    def each(self, field: str, state: Any) -> Array:
        """f32[B,n]: a field of ``RoundCosts`` by row."""
        return self.costs(state).each(field, state.greedy)

    def mean(self, field: str, state: Any) -> Array:
        """f32[n]: the mean over live rows of a field of ``RoundCosts``."""
        return live_mean(state.live, self.each(field, state))
