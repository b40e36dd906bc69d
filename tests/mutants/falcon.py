"""Wrong versions of Falcon's drafter, which the tests of it must detect."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from internals import heads_falcon_loss as _falcon_loss
from internals import heads_falcon_network as _falcon_network

from mutants.networks import ROUNDS as BY_ROUNDS
from mutants.networks import Mistake, with_stepper
from specjax.tree import Layout


def _after_begin(change):
    """``change(net, params, context, old, new)`` gives what is kept after ``Stepper.begin``."""

    def stepper(right):
        net = right.init.args[0]

        def begin(params, context, kept):
            begun = right.begin(params, context, kept)
            text = change(net, params, context, kept, begun.kept.text)
            return begun._replace(
                kept=begun.kept.replace(text=text),
                memory=begun.memory.replace(carry=text.carry[:, None]),
            )

        return right._replace(begin=begin)

    return lambda drafter: with_stepper(drafter, stepper)


def _carry_of_rejected_tokens(net, params, context, old, new):
    """The carry after all slots that a round has room for, rejected ones too."""
    width = old.features.shape[1]
    places = old.text.cache.length[:, None] + 1 + jnp.arange(width)
    tokens = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")
    fed = _falcon_network.feed(net, params, tokens, old.features, old.text)
    return new.replace(carry=fed.carries[:, -1])


def _carry_of_the_round_before(net, params, context, old, new):
    del net, params, context
    started = (old.text.cache.length > 0)[:, None, None, None]
    return new.replace(carry=jnp.where(started, old.text.carry, new.carry))


def _newest_slots_of_the_round_before(net, params, context, old, new):
    del net, params, context
    started = (old.text.cache.length > 0)[:, None, None]
    return new.replace(recent=jnp.where(started, old.text.recent, new.recent))


ROUNDS = (
    Mistake(
        "carry_of_rejected_tokens",
        "the carry has read the slots after the accepted ones",
        BY_ROUNDS,
        _after_begin(_carry_of_rejected_tokens),
    ),
    Mistake(
        "carry_of_the_round_before",
        "the carry lacks the slots of this round",
        BY_ROUNDS,
        _after_begin(_carry_of_the_round_before),
    ),
    Mistake(
        "newest_slots_of_the_round_before",
        "the next round begins with an old block of slots",
        BY_ROUNDS,
        _after_begin(_newest_slots_of_the_round_before),
    ),
)


class Static(NamedTuple):
    """A change of the functions of the network or the loss."""

    change: Callable
    network: bool  # found by the plain reference, else by the formula of the loss


def _no_recurrence(patch):
    """Every slot is a text of its own, as in the released code."""
    right = _falcon_network.lstm

    def lstm(params, x, carry, begins=None, kept=None):
        del begins
        return right(params, x, carry, jnp.ones(x.shape[:2], bool), kept)

    patch.setattr(_falcon_network, "lstm", lstm)


def _causal_block(patch):
    """A slot does not see the later slots of its block."""
    right = _falcon_network.predict

    def predict(net, params, outputs, cache, layout, block=None):
        size = outputs.shape[1]
        own = layout.visible[:, :, -size:] & jnp.tril(jnp.ones((size, size), bool))
        visible = jnp.concatenate([layout.visible[:, :, :-size], own], 2)
        return right(net, params, outputs, cache, Layout(visible, layout.depth), block)

    patch.setattr(_falcon_network, "predict", predict)


def _one_step_less(patch):
    """A slot's label is k - 1 tokens ahead."""
    right = _falcon_loss._labels

    def labels(net, out, batch, blocks):
        shorter = net._replace(shape=net.shape.__class__(net.shape.config, net.shape.block - 1))
        own = right(net, out, batch, blocks)
        return right(shorter, out, batch, blocks)._replace(counted=own.counted)

    patch.setattr(_falcon_loss, "_labels", labels)


def _first_row_only(patch):
    """Only the first row of a batch is changed, as in the released code."""
    right = _falcon_loss.choose

    def choose(key, blocks, *rest):
        given = right(key, blocks, *rest)
        return given & (jnp.arange(len(given)) == 0)[:, None]

    patch.setattr(_falcon_loss, "choose", choose)


STATIC = {
    "no_recurrence": Static(_no_recurrence, True),
    "causal_block": Static(_causal_block, True),
    "one_step_less": Static(_one_step_less, False),
    "first_row_only": Static(_first_row_only, False),
}
