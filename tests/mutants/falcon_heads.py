"""Mistakes of Falcon's network, drafting and training, beside those of ``mutants.falcon``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from internals import drafters_growth as _growth
from internals import heads_along_text as _along_text
from internals import heads_falcon_loss as _loss
from internals import heads_falcon_network as _network

from mutants import patches
from mutants.patches import Patched, instead, of_family
from specjax.drafters.heads.falcon import falcon
from specjax.tree import Layout

# The cases: a pass of the network, the drafts after rounds, the drafts along a text, the loss.
PASS, ROUNDS, ALONG, LOSS = "pass", "rounds", "along", "loss"


def _gates(order):
    def layer(right, own, x, carry, begins):
        def one(kernel):
            parts = jnp.split(kernel, 4, -1)
            return jnp.concatenate([parts[i] for i in order], -1)

        return right(jax.tree.map(one, own), x, carry, begins)

    return layer


def _one_bias(right, own, x, carry, begins):
    hidden = own["hidden"] | {"bias": jnp.zeros_like(own["hidden"]["bias"])}
    return right(own | {"hidden": hidden}, x, carry, begins)


def _first_layer_twice(right, params, *rest):
    own = params["1"] | {"hidden": params["0"]["hidden"]}
    return right(params | {"1": own}, *rest)


def _feature_before_token(right, net, params, tokens, features, *rest):
    kernel = params.draft["lstm"]["0"]["input"]["kernel"]
    half = len(kernel) // 2
    first = params.draft["lstm"]["0"]
    swapped = first["input"] | {"kernel": jnp.concatenate([kernel[half:], kernel[:half]])}
    lstm = params.draft["lstm"] | {"0": first | {"input": swapped}}
    params = params._replace(draft=params.draft | {"lstm": lstm})
    return right(net, params, tokens, features, *rest)


def _keys_late_after_the_first_round(right, net, params, tokens, features, before):
    slots = right(net, params, tokens, features, before)
    positions = before.cache.length[:, None] + jnp.arange(tokens.shape[1])
    positions += before.cache.length[:, None] > 0
    return slots.replace(own=_network.keys(net, params, slots.outputs, positions))


def _keeps_a_rejected_slot(right, before, slots, count):
    room = slots.outputs.shape[1] - 1
    more = (count > 0) & (before.cache.length > 0) & (count < room)
    return right(before, slots, count + more)


def _recent_one_early(right, before, slots, count):
    after = right(before, slots, count)
    earlier = jnp.concatenate([before.recent[:, -1:], after.recent[:, :-1]], 1)
    return after.replace(recent=earlier)


def _features_of_the_node_before(right, values, verdict):
    def before(x):
        return jnp.concatenate([x[:, :1], x[:, :-1]], 1)

    return right(jax.tree.map(before, values), verdict)


def _second_block_late(right, layout, size):
    found = right(layout, size)
    return Layout(found.visible, found.depth + 1)


def _block_above_not_seen(right, layout, size):
    found = right(layout, size)
    own = found.visible.shape[1]
    new = jnp.arange(found.visible.shape[2]) >= found.visible.shape[2] - own
    return found.replace(visible=found.visible & new)


def _carry_of_the_text(right, net, params, kept, nodes, block):
    carry = jnp.broadcast_to(kept.text.carry[:, None], block.carry.shape)
    return right(net, params, kept, nodes, block.replace(carry=carry))


def _logits_of_the_place_before(right, net, params, kept, nodes, block):
    logits, memory = right(net, params, kept, nodes, block)
    if int(nodes.depth) % net.shape.block:
        above = _growth.at(block, nodes.parents)
        logits = above.logits[:, :, int(nodes.depth) % net.shape.block - 1]
    return logits, memory


def _features_of_the_last_place(right, net, params, kept, nodes, block):
    features = jnp.broadcast_to(block.features[:, :, -1:], block.features.shape)
    return right(net, params, kept, nodes, block.replace(features=features))


def _tokens_of_another_path(right, net, params, kept, nodes, block):
    return right(net, params, kept, nodes, block.replace(tokens=jnp.zeros_like(block.tokens)))


# Training -------------------------------------------------------------------------------------


def _carry_of_other_documents(right, net, params, tokens, features, carry, begins=None, kept=None):
    if begins is not None:
        begins = begins.at[:, 1:].set(False)
    return right(net, params, tokens, features, carry, begins, kept)


def _other_documents_visible(right, layout, blocks):
    visible = blocks.number[:, :, None] >= blocks.number[:, None]
    return Layout(visible, layout.depth)


def _blocks_of_two_documents(right, depth, phase, size):
    rows, length = depth.shape
    return right(jnp.broadcast_to(jnp.arange(length), (rows, length)), phase, size)


def _answers_of_the_slot_before(right, net, tokens, features, given):
    def earlier(x):
        return jnp.concatenate([x[:, :1], x[:, :-1]], 1)

    token, feature = (_along_text.ahead(x, net.shape.block, x.shape[1]) for x in (tokens, features))
    token, feature = earlier(token), earlier(feature)
    return jnp.where(given, token, tokens), jnp.where(given[..., None], feature, features)


def _tokens_without_the_shift(right, features, batch):
    return batch.tokens[:, :-1], features


def _best_of_the_next_slot(right, net, out, batch, blocks):
    found = right(net, out, batch, blocks)
    return found._replace(best=_along_text.ahead(found.best, 1, found.best.shape[1]))


def _own_features(right, net, out, batch, blocks):
    return right(net, out, batch, blocks)._replace(features=out.hidden)


def _labels_before_whole_blocks(right, net, out, batch, blocks):
    whole = blocks._replace(whole=jnp.ones_like(blocks.whole))
    return right(net, out, batch, whole)


def _answers_of_all_wrong(right, key, blocks, labels, predicted, rate):
    """The rate is not applied."""
    return right(key, blocks, labels, predicted, 1.0)


def _hard_for_soft(right, net, params, keys, labels, *rest):
    return right(net, params, dataclasses.replace(keys, hard=1 - keys.hard), labels, *rest)


def _next_block_of_earlier_tokens(right, net, params, batch, text, number, *rest):
    earlier = jnp.concatenate([batch.tokens[:, :1], batch.tokens[:, :-1]], 1)
    return right(net, params, batch.replace(tokens=earlier), text, number, *rest)


NETWORK = (
    Patched(
        "gates_in_another_order",
        "the input and forget gates are swapped",
        PASS,
        instead(_network, "_lstm_layer", _gates((1, 0, 2, 3))),
    ),
    Patched(
        "cell_and_output_swapped",
        "the cell and the output gate are swapped",
        PASS,
        instead(_network, "_lstm_layer", _gates((0, 1, 3, 2))),
    ),
    Patched(
        "one_bias",
        "the second bias of the LSTM is left out",
        PASS,
        instead(_network, "_lstm_layer", _one_bias),
    ),
    Patched(
        "first_layer_twice",
        "the second LSTM layer has the recurrent map of the first",
        PASS,
        instead(_network, "lstm", _first_layer_twice),
    ),
    Patched(
        "feature_before_token",
        "the LSTM reads [feature ; token]",
        PASS,
        instead(_network, "recur", _feature_before_token),
    ),
)
DRAFTING = (
    Patched(
        "keys_late_after_the_first_round",
        "the keys of accepted tokens are one position too late",
        ROUNDS,
        instead(_network, "feed", _keys_late_after_the_first_round),
    ),
    Patched(
        "keeps_a_rejected_slot",
        "a rejected slot stays in the text",
        ROUNDS,
        instead(_network, "commit", _keeps_a_rejected_slot),
    ),
    Patched(
        "recent_one_early",
        "the first block begins one slot too early",
        ROUNDS,
        instead(_network, "commit", _recent_one_early),
    ),
    Patched(
        "features_of_the_node_before",
        "the features of accepted tokens are those of the node before",
        ROUNDS,
        instead(_growth, "fed_to_target", _features_of_the_node_before),
    ),
    Patched(
        "second_block_late",
        "the second block of a draft is one position too late",
        ROUNDS,
        instead(falcon, "block_layout", _second_block_late),
    ),
    Patched(
        "block_above_not_seen",
        "a block does not see the blocks above",
        ROUNDS,
        instead(falcon, "block_layout", _block_above_not_seen),
    ),
    Patched(
        "carry_of_the_text",
        "a deeper block begins with the carry of the text",
        ROUNDS,
        instead(falcon, "_step", _carry_of_the_text),
    ),
    Patched(
        "logits_of_the_place_before",
        "inside a block a node's children have the logits of the place before",
        ROUNDS,
        instead(falcon, "_step", _logits_of_the_place_before),
    ),
    Patched(
        "features_of_the_last_place",
        "the slots of a block read the feature of its last place",
        ROUNDS,
        instead(falcon, "_step", _features_of_the_last_place),
    ),
    Patched(
        "tokens_of_another_path",
        "the slots of a block do not read the tokens before its last one",
        ROUNDS,
        instead(falcon, "_step", _tokens_of_another_path),
    ),
)
TRAINING = (
    Patched(
        "carry_of_other_documents",
        "the LSTM goes on over the ends of documents",
        LOSS,
        instead(_network, "recur", _carry_of_other_documents),
    ),
    Patched(
        "other_documents_visible",
        "slots read the documents before",
        LOSS,
        instead(_loss, "relaxed", _other_documents_visible),
    ),
    Patched(
        "blocks_of_two_documents",
        "blocks are counted from the beginning of the row",
        LOSS,
        instead(_loss, "blocks_of", _blocks_of_two_documents),
    ),
    Patched(
        "answers_of_the_slot_before",
        "the answers are those of the slot before",
        LOSS,
        instead(_loss, "answered", _answers_of_the_slot_before),
    ),
    Patched(
        "tokens_without_the_shift",
        "a slot reads the token of its feature",
        ALONG,
        instead(_loss, "slots_of", _tokens_without_the_shift),
    ),
    Patched(
        "best_of_the_next_slot",
        "the hard label is that of the next slot",
        LOSS,
        instead(_loss, "_labels", _best_of_the_next_slot),
    ),
    Patched(
        "own_features",
        "the feature that is learnt is the one that the slot has read",
        LOSS,
        instead(_loss, "_labels", _own_features),
    ),
    Patched(
        "labels_before_whole_blocks",
        "slots before the first whole block are trained",
        LOSS,
        instead(_loss, "_labels", _labels_before_whole_blocks),
    ),
    Patched(
        "answers_of_all_wrong",
        "as many answers are given as are wrong",
        LOSS,
        instead(_loss, "choose", _answers_of_all_wrong),
    ),
    Patched(
        "hard_for_soft",
        "the shares of the hard and the soft label are swapped",
        LOSS,
        instead(_loss, "_compare", _hard_for_soft),
    ),
    Patched(
        "next_block_of_earlier_tokens",
        "along a text a second block reads the tokens one place earlier",
        ALONG,
        instead(_loss, "_next", _next_block_of_earlier_tokens),
    ),
    of_family(patches.LABELS_OF_ANOTHER_DOCUMENT, LOSS),
    of_family(patches.TEACHER_ONE_LATER, ALONG),
)
MISTAKES = (*NETWORK, *DRAFTING, *TRAINING)
