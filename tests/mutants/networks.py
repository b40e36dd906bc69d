"""Wrong versions of the drafter of a draft network (``drafters/heads/eagle/_drafter``).

All but ``declares_what_top_p_cut`` keep the output law: a rule accepts any draft rightly. They only
lower acceptance, so no check of texts can see them. ``tests/drafters/heads/test_eagle_mutants.py``
applies to each the test named in ``caught_by``, and compares tau.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from internals import drafters_growth, setup_of

from mutants.drafters import with_draft
from specjax.types import Drafter

# ROUNDS: after some rounds the state is that of a fresh prefill. REFERENCE: the first draft is that
# of the plain reference. CLAIMS: tokens are drawn from the declared probs.
ROUNDS, REFERENCE, CLAIMS = "rounds", "reference", "claims"


class Mistake(NamedTuple):
    """One mistake."""

    name: str
    mistake: str
    caught_by: str
    change: Callable[[Drafter], Drafter]


def with_stepper(
    drafter: Drafter, change: Callable[[drafters_growth.Stepper], drafters_growth.Stepper]
) -> Drafter:
    """The drafter with a changed stepper."""
    setup = setup_of(drafter)
    setup = setup._replace(stepper=change(setup.stepper))
    parts = {name: getattr(drafter, name).func for name in ("init", "propose", "update")}
    return drafter._replace(
        **{name: functools.partial(part, setup) for name, part in parts.items()}
    )


def _after_commit(change: Callable) -> Callable[[Drafter], Drafter]:
    """``change(old, new, verdict)`` gives what is kept after a verdict."""

    def stepper(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
        def commit(params, kept, drafted, verdict, target_out):
            new = right.commit(params, kept, drafted, verdict, target_out)
            return change(kept, new, verdict)

        return right._replace(commit=commit)

    return lambda drafter: with_stepper(drafter, stepper)


def _stale_features(old, new, verdict):
    rejected = (verdict.count <= verdict.path.shape[1])[:, None, None]
    return new.replace(features=jnp.where(rejected, old.features, new.features))


def _own_feature_at_the_end(old, new, verdict):
    last = (jnp.arange(new.features.shape[1]) == verdict.count[:, None] - 1)[..., None]
    return new.replace(features=jnp.where(last, old.recycled[:, None], new.features))


def _keeps_a_rejected_slot(old, new, verdict):
    rejected = (verdict.count > 0) & (verdict.count <= verdict.path.shape[1])
    cache = new.cache
    return new.replace(cache=cache.replace(length=cache.length + rejected.astype(jnp.int32)))


def _features_of_the_node_before(drafter: Drafter) -> Drafter:
    def update(params, state, draft, verdict, target_out):
        before = lambda x: jnp.concatenate([x[:, :1], x[:, :-1]], 1)  # noqa: E731
        taps = tuple(before(tap) for tap in target_out.taps)
        out = target_out._replace(hidden=before(target_out.hidden), taps=taps)
        return drafter.update(params, state, draft, verdict, out)

    return drafter._replace(update=update)


def _with_step(change: Callable) -> Callable[[Drafter], Drafter]:
    """``change(nodes, block)`` gives what ``Stepper.step`` reads."""

    def stepper(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
        def step(params, kept, nodes, block):
            return right.step(params, kept, *change(nodes, block))

        return right._replace(step=step)

    return lambda drafter: with_stepper(drafter, stepper)


def _position_one_later(nodes, block):
    return nodes._replace(layout=nodes.layout.replace(depth=nodes.layout.depth + 1)), block


def _feature_of_the_sibling(nodes, block):
    return nodes, None if block is None else block.replace(feature=block.feature[:, ::-1])


def _feature_of_the_target(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
    def begin(params, context, kept):
        begun = right.begin(params, context, kept)
        last = jnp.maximum(context.length - 2 - kept.cache.length, 0)[:, None, None]
        feature = jnp.take_along_axis(kept.features, last, 1)[:, 0]
        return begun._replace(kept=begun.kept.replace(recycled=feature))

    return right._replace(begin=begin)


def _zeros_outside(right: drafters_growth.Stepper) -> drafters_growth.Stepper:
    def filled(logits):
        return jnp.where(jnp.isneginf(logits), 0, logits)

    def begin(params, context, kept):
        begun = right.begin(params, context, kept)
        return begun._replace(logits=filled(begun.logits))

    def step(*args):
        logits, memory = right.step(*args)
        return filled(logits), memory

    return right._replace(begin=begin, step=step)


def _declares_what_top_p_cut(draft, keys, context):
    """Declares some probability for the first two tokens, which a cut-off may have excluded."""
    mixed = 0.9 * draft.probs + jnp.where(jnp.arange(draft.probs.shape[-1]) < 2, 0.05, 0)
    return draft.replace(probs=mixed)


MISTAKES = (
    Mistake(
        "stale_features",
        "after a partial rejection the features of the round before are fed again",
        ROUNDS,
        _after_commit(_stale_features),
    ),
    Mistake(
        "own_feature_at_the_end",
        "the slot of the new pending token gets the network's own output for a feature",
        ROUNDS,
        _after_commit(_own_feature_at_the_end),
    ),
    Mistake(
        "keeps_a_rejected_slot",
        "the draft cache keeps one slot of a rejected node, so later positions are off by one",
        ROUNDS,
        _after_commit(_keeps_a_rejected_slot),
    ),
    Mistake(
        "features_of_the_node_before",
        "the features are those of the node before each accepted one",
        ROUNDS,
        _features_of_the_node_before,
    ),
    Mistake(
        "position_one_later",
        "draft nodes have the rotary position of their child",
        REFERENCE,
        _with_step(_position_one_later),
    ),
    Mistake(
        "feature_of_the_sibling",
        "a node reads the network's output at a sibling of its parent",
        REFERENCE,
        _with_step(_feature_of_the_sibling),
    ),
    Mistake(
        "feature_of_the_target",
        "the first nodes read the target's newest feature again, and not the network's output",
        REFERENCE,
        lambda drafter: with_stepper(drafter, _feature_of_the_target),
    ),
    Mistake(
        "zeros_outside",
        "tokens outside of the draft vocabulary have the logit 0",
        REFERENCE,
        lambda drafter: with_stepper(drafter, _zeros_outside),
    ),
    Mistake(
        "declares_what_top_p_cut",
        "declares the probs of the draft vocabulary without the cut-off; breaks the law",
        CLAIMS,
        with_draft(_declares_what_top_p_cut),
    ),
)
