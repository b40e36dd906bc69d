"""Wrong versions of the drafter of several modules in sequence (``heads/eagle/_drafter``).

All keep the output law, and only lower acceptance. ``tests/drafters/heads/test_mtp_module.py``
detects each: after some rounds the logits are not those after a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from internals import drafters_growth

from mutants.networks import ROUNDS, Mistake, with_stepper
from specjax.types import Drafter


def _after_begin(change: Callable) -> Callable[[Drafter], Drafter]:
    """``change(old, new)`` gives what the modules after the first keep, of what they kept."""

    def stepper(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
        def begin(params, context, kept):
            begun = right.begin(params, context, kept)
            more = tuple(map(change, kept.more, begun.kept.more))
            return begun._replace(kept=begun.kept.replace(more=more))

        return right._replace(begin=begin)

    return lambda drafter: with_stepper(drafter, stepper)


def _own_slots_only(old, new):
    """Keeps the length: the slots of the committed text of this round are lost."""
    return new.replace(cache=new.cache.replace(length=old.cache.length))


def _stale_output(old, new):
    return new.replace(before=jnp.where(old.cache.length[:, None] > 0, old.before, new.before))


def _with_step(change: Callable) -> Callable[[Drafter], Drafter]:
    def stepper(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
        def step(params, kept, nodes, block):
            return right.step(params, *change(kept, nodes, block))

        return right._replace(step=step)

    return lambda drafter: with_stepper(drafter, stepper)


def _first_output_for_all(kept, nodes, block):
    """Every module reads the output of the first one."""
    first = kept.more[0].before
    return kept.replace(more=tuple(each.replace(before=first) for each in kept.more)), nodes, block


def _no_nodes_of_the_module(kept, nodes, block):
    """A module does not attend to the nodes above that it computed."""
    if block is not None:
        block = block.replace(slots=jax.tree.map(jnp.zeros_like, block.slots))
    return kept, nodes, block


MISTAKES = (
    Mistake(
        "own_slots_only",
        "the modules after the first do not keep the slots of the committed text",
        ROUNDS,
        _after_begin(_own_slots_only),
    ),
    Mistake(
        "stale_output",
        "a module begins with the output that the one before had a round ago",
        ROUNDS,
        _after_begin(_stale_output),
    ),
    Mistake(
        "first_output_for_all",
        "every module reads the output of the first one at the newest slot",
        ROUNDS,
        _with_step(_first_output_for_all),
    ),
    Mistake(
        "no_nodes_of_the_module",
        "a module has no keys and values of the nodes above",
        ROUNDS,
        _with_step(_no_nodes_of_the_module),
    ),
)
