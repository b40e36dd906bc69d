"""What a controller is, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specjax.types import Draft, Verdict


class Ahead(NamedTuple):
    """What is computed before the tokens of the next level are drawn.

    The level's places are the n nodes that would get children; a chain has one. All of it is a
    function of the committed text and of tokens that stay in the draft.
    """

    depth: jax.Array | int  # i32[] tokens on every path so far; 0 before the first
    # f[B,m,V] the draft's own logits at each place, without sampling settings; m = n, or 1 if all
    # places have the same
    logits: jax.Array
    log_prob: jax.Array  # f[B,n] log of the product of the draft's probabilities on the path
    valid: jax.Array  # bool[B,n] whether the place exists
    token_log_prob: jax.Array  # f[B,n] that of the place's own token; 0 for the pending token


def _no_state(batch: int) -> Any:
    del batch
    return ()


def _same_state(state: Any, draft: Draft, verdict: Verdict) -> Any:
    del draft, verdict
    return state


class Controller(NamedTuple):
    """A controller as pure functions; its state is a pytree of arrays [B,...].

    - ``ask(state, Ahead) -> (bool[B], state)``: whether the row's draft gets the next level. A row
      that stopped is not asked again in this round: its answer and its new state are dropped.
    - ``init(batch) -> state``: before the first round.
    - ``update(state, draft, verdict) -> state``: after the verdict; rows with verdict count 0 keep
      their state.
    """

    ask: Callable[[Any, Ahead], tuple[jax.Array, Any]]
    name: str
    init: Callable[[int], Any] = _no_state
    update: Callable[[Any, Draft, Verdict], Any] = _same_state

    @property
    def has_state(self) -> bool:
        """Whether its answers may depend on earlier rounds."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.init(1))))
