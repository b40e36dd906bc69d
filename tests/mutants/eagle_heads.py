"""Mistakes of EAGLE's networks, their drafting and their training (``drafters.heads.eagle``).

They are those of EAGLE-1 and EAGLE-3, of modules for multi-token prediction, and of P-EAGLE.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from internals import drafters_growth as _growth
from internals import heads_along_text as _along_text
from internals import heads_masked_text as _masked_text
from internals import heads_network as _network
from internals import heads_network_drafter as _drafter
from internals import heads_rollout as _loss

from mutants import patches
from mutants.patches import Patched, instead, of_family
from specjax import tree
from specjax.drafters.heads.eagle import eagle3, mtp_module

# The cases: EAGLE-1, EAGLE-3, P-EAGLE, modules.
ONE, THREE, PARALLEL, MODULES = "eagle", "eagle3", "p_eagle", "mtp_module"


def _fed(change):
    """``change(hidden, normed, raw)`` gives ``Fed``; EAGLE-3 and modules."""

    def call(right, net, *rest):
        kept, net.norm = net.norm, _Twice(net.norm)
        fed, own = right(net, *rest)
        both, net.norm = net.norm, kept
        return change(fed, both.normed, both.raw), own

    return call


class _Twice:
    """A norm that keeps what it read and gave."""

    def __init__(self, norm):
        self.norm, self.raw, self.normed = norm, None, None

    def __call__(self, x):
        self.raw, self.normed = x, self.norm(x)
        return self.normed


def _other_recycled(fed, normed, raw):
    return _network.Fed(fed.hidden, raw if fed.feature is normed else normed)


def _raw_to_the_head(fed, normed, raw):
    return _network.Fed(raw, fed.feature)


def _switched(name):
    """The network of another value of a switch."""

    def call(right, net, *rest):
        kept, net.shape = net.shape, dataclasses.replace(net.shape, **{name: _other(net, name)})
        result = right(net, *rest)
        net.shape = kept
        return result

    return call


def _other(net, name):
    return not getattr(net.shape, name)


def _feature_before_token(right, net, embedded, features, *rest):
    return right(net, features, embedded, *rest)


def _no_token_norm(right, layer, embedded, features):
    normed = layer.feature_norm(features)
    return jnp.concatenate([embedded, normed], -1), normed


def _taps_in_reverse(right, net, taps):
    return right(net, taps[..., ::-1, :])


def _tap_norms_in_reverse(right, net, taps):
    if not net.shape.fc_norm:
        return right(net, taps)
    kept, net.fc_norm = net.fc_norm, lambda x: kept(x[..., ::-1, :])[..., ::-1, :]
    result = right(net, taps)
    net.fc_norm = kept
    return result


def _first_module_for_all(right, network, params, number=0):
    return right(network, params, 0)


def _zero_first_ignored(right, network, params, tokens, *rest, **more):
    if network.shape.zero_first:
        network = type("Other", (type(network),), {})(*network)
        network = network._replace(shape=dataclasses.replace(network.shape, zero_first=False))
    return right(network, params, tokens, *rest, **more)


# Drafting -------------------------------------------------------------------------------------


def _late_after_the_first_round(right, network, params, tokens, features, cache, *rest, **more):
    if rest or not cache.k[0].shape[2]:
        return right(network, params, tokens, features, cache, *rest, **more)
    layout = tree.chain_layout(*tokens.shape, 0)
    late = (cache.length > 0)[:, None].astype(jnp.int32)
    layout = layout.replace(depth=layout.depth + late)
    return right(network, params, tokens, features, cache, layout, **more)


def _features_of_the_node_before(right, values, verdict):
    return right(jax.tree.map(lambda x: jnp.concatenate([x[:, :1], x[:, :-1]], 1), values), verdict)


def _tokens_of_the_slot_before(right, tokens, end, length, width, shift=0):
    return right(tokens, end, length, width, shift - 1)


def _recycled_at_every_node(right, network, params, kept, nodes, block):
    if block is not None:
        block = block.replace(feature=jnp.broadcast_to(kept.recycled[:, None], block.feature.shape))
    return right(network, params, kept, nodes, block)


def _token_of_the_parent(right, network, params, kept, nodes, block):
    above = jnp.broadcast_to(kept.pending[:, None], nodes.tokens.shape)
    if block is not None:
        parents = _growth.at(block.tokens[..., None], nodes.parents)[..., 0]
        above = jnp.where(jnp.asarray(nodes.parents) >= 0, parents, above)
    logits, memory = right(network, params, kept, nodes._replace(tokens=above), block)
    return logits, memory.replace(tokens=nodes.tokens)


def _sees_other_branches(right, network, params, kept, nodes, block):
    layout = nodes.layout
    visible = jnp.ones_like(layout.visible)
    seen = nodes._replace(layout=layout.replace(visible=visible))
    return right(network, params, kept, seen, block)


def _deep_nodes_one_late(right, network, params, kept, nodes, block):
    """From the second level on."""
    layout = nodes.layout
    late = jnp.asarray(nodes.depth > 1, jnp.int32)
    new = jnp.arange(layout.depth.shape[1]) >= layout.depth.shape[1] - nodes.tokens.shape[1]
    layout = layout.replace(depth=layout.depth + late * new)
    return right(network, params, kept, nodes._replace(layout=layout), block)


def _outputs_of_the_module_before(right, network, params, context, kept, fresh, missing):
    late = jnp.concatenate([fresh[:, :1], fresh[:, :-1]], 1)
    return right(network, params, context, kept, late, missing)


# Masks ----------------------------------------------------------------------------------------


def _zeros_for_the_mask(right, network, params):
    return jnp.zeros_like(right(network, params))


def _with_another_mask(network):
    shape = network.shape
    return network._replace(shape=dataclasses.replace(shape, mask_id=max(shape.mask_id - 1, 0)))


def _another_mask_token(patch):
    right_draft, right_text = _drafter._begin_parallel, eagle3._masked
    patch.setattr(
        _drafter, "_begin_parallel", lambda net, *rest: right_draft(_with_another_mask(net), *rest)
    )
    patch.setattr(eagle3, "_masked", lambda net, *rest: right_text(_with_another_mask(net), *rest))


def _masks_one_late(patch):
    right_draft, right_text = _masked_text.layout_of_draft, _masked_text.layout_of_masks

    def late(layout, first):
        behind = jnp.arange(layout.depth.shape[1]) >= first
        return layout.replace(depth=layout.depth + behind)

    patch.setattr(
        _masked_text,
        "layout_of_draft",
        lambda missing, width, masks: late(right_draft(missing, width, masks), width),
    )
    patch.setattr(
        _masked_text,
        "layout_of_masks",
        lambda text, masks: late(right_text(text, masks), text.depth.shape[1]),
    )


def _masks_see_themselves_only(patch):
    right_draft, right_text = _masked_text.layout_of_draft, _masked_text.layout_of_masks

    def alone(layout, first):
        size = layout.visible.shape[2]
        column = jnp.arange(size)
        row = column[size - layout.visible.shape[1] :]
        mask = (column < first) | (column == row[:, None])
        return layout.replace(visible=layout.visible & mask)

    patch.setattr(
        _masked_text,
        "layout_of_draft",
        lambda missing, width, masks: alone(right_draft(missing, width, masks), width),
    )
    patch.setattr(
        _masked_text,
        "layout_of_masks",
        lambda text, masks: alone(right_text(text, masks), text.depth.shape[1]),
    )


def _masks_see_the_next_slot(right, text, masks):
    later = masks._replace(places=jnp.minimum(masks.places + 1, text.depth.shape[1] - 1))
    return right(text, masks).replace(visible=right(text, later).visible)


# Training -------------------------------------------------------------------------------------


def _token_of_the_step_before(right, network, text, number, *rest):
    if not number:
        return right(network, text, number, *rest)
    earlier = jnp.concatenate([text.tokens[:, :1], text.tokens[:, :-1]], 1)
    return right(network, text._replace(tokens=earlier), number, *rest)


def _true_features_at_every_step(right, network, text, params, state, number):
    logits, (_, blocks) = right(network, text, params, state, number)
    return logits, (state[0], blocks)


def _steps_do_not_move(right, text, step, *places):
    return right(text, 0, *places)


def _compared_one_later(right, keys, labels, *rest):
    size = labels.logits.shape[1]
    later = jax.tree.map(lambda x: _along_text.ahead(x, 1, size), labels)
    return right(keys, later, *rest)


def _kept_of_the_next_label(right, keys, labels, *rest):
    kept = _along_text.ahead(labels.kept, 1, labels.kept.shape[1])
    return right(keys, labels._replace(kept=kept), *rest)


def _features_of_the_column(right, keys, labels, *rest):
    """Smooth L1 from the feature that the slot has read."""
    features = jnp.concatenate([labels.features[:, :1], labels.features[:, :-1]], 1)
    return right(keys, labels._replace(features=features), *rest)


def _one_later_in_vocabulary(right, ids, tokens, vocab_size):
    place = right(ids, tokens, vocab_size)
    return place if ids is None else jnp.where(place > 0, place - 1, place)


NETWORK = (
    Patched(
        "other_recycled",
        "the next slot reads the raw output, where it is the normed one, and the reverse",
        THREE,
        instead(_network.Eagle3, "__call__", _fed(_other_recycled)),
    ),
    Patched(
        "raw_to_the_head",
        "the head reads the output before the last norm",
        THREE,
        instead(_network.Eagle3, "__call__", _fed(_raw_to_the_head)),
    ),
    Patched(
        "other_residual",
        "the residual of the first layer is the normed feature, where it is the raw one",
        THREE,
        instead(_network.Eagle3, "__call__", _switched("norm_before_residual")),
    ),
    Patched(
        "feature_before_token",
        "the linear map reads [feature ; token]",
        ONE,
        instead(_network.Eagle, "__call__", _feature_before_token),
    ),
    Patched(
        "no_token_norm",
        "the embedding is not normed",
        THREE,
        instead(_network._Wide, "join", _no_token_norm),
    ),
    Patched(
        "taps_in_reverse",
        "the taps are joined in reverse order",
        THREE,
        instead(_network.Eagle3, "read", _taps_in_reverse),
    ),
    Patched(
        "tap_norms_in_reverse",
        "each tap has the norm of another one",
        THREE,
        instead(_network.Eagle3, "read", _tap_norms_in_reverse),
    ),
    Patched(
        "first_module_for_all",
        "every module has the parameters of the first",
        MODULES,
        instead(mtp_module.MtpNetwork, "module", _first_module_for_all),
    ),
    Patched(
        "module_reads_hidden_second",
        "the linear map of a module reads its two parts in the other order",
        MODULES,
        instead(mtp_module.MtpModule, "__call__", _switched("hidden_first")),
    ),
    Patched(
        "module_hands_on_the_other_output",
        "a module hands on the normed output, where it is the raw one",
        MODULES,
        instead(mtp_module.MtpModule, "__call__", _fed(_other_recycled)),
    ),
    Patched(
        "zero_first_ignored",
        "the first token is read, where it is zeros",
        MODULES,
        instead(_network.Network, "apply", _zero_first_ignored),
    ),
)
DRAFTING = (
    Patched(
        "late_after_the_first_round",
        "the slots of accepted tokens are one position too late",
        THREE,
        instead(_network.Network, "apply", _late_after_the_first_round),
    ),
    Patched(
        "features_of_the_node_before",
        "the features of accepted tokens are those of the node before",
        THREE,
        instead(_growth, "fed_to_target", _features_of_the_node_before),
    ),
    Patched(
        "tokens_of_the_slot_before",
        "the slots of accepted tokens read the token of their feature",
        THREE,
        instead(_growth, "lacking", _tokens_of_the_slot_before),
    ),
    Patched(
        "recycled_at_every_node",
        "deeper nodes read the output at the pending token",
        THREE,
        instead(_drafter, "_step", _recycled_at_every_node),
    ),
    Patched(
        "token_of_the_parent",
        "a node reads the token of its parent",
        THREE,
        instead(_drafter, "_step", _token_of_the_parent),
    ),
    Patched(
        "sees_other_branches",
        "a node attends to all nodes that were fed before",
        THREE,
        instead(_drafter, "_step", _sees_other_branches),
    ),
    Patched(
        "deep_nodes_one_late",
        "nodes from the second level on are one position too late",
        THREE,
        instead(_drafter, "_step", _deep_nodes_one_late),
    ),
    Patched(
        "outputs_of_the_slot_before",
        "a module reads the output of the one before at an earlier slot",
        MODULES,
        instead(_drafter, "_begin_modules", _outputs_of_the_module_before),
    ),
    of_family(patches.DRAFT_VOCABULARY, THREE),
)
MASKS = (
    Patched(
        "zeros_for_the_mask",
        "masks read zeros in the place of their feature",
        PARALLEL,
        instead(_network.Network, "masked", _zeros_for_the_mask),
    ),
    Patched(
        "another_mask_token",
        "masks have the embedding of the token before theirs",
        PARALLEL,
        _another_mask_token,
    ),
    Patched("masks_one_late", "masks are one position too late", PARALLEL, _masks_one_late),
    Patched(
        "masks_see_themselves_only",
        "masks do not see the masks before them",
        PARALLEL,
        _masks_see_themselves_only,
    ),
    Patched(
        "masks_see_the_next_slot",
        "in training masks see the slot after their own",
        PARALLEL,
        instead(_masked_text, "layout_of_masks", _masks_see_the_next_slot),
    ),
)
TRAINING = (
    Patched(
        "token_of_the_step_before",
        "a later step reads the token of the step before",
        THREE,
        instead(_loss, "step", _token_of_the_step_before),
    ),
    Patched(
        "true_features_at_every_step",
        "every step reads the features of step 0",
        THREE,
        instead(_loss, "_logits", _true_features_at_every_step),
    ),
    Patched(
        "steps_do_not_move",
        "later steps have the positions of step 0",
        THREE,
        instead(_loss.tree, "columns", _steps_do_not_move),
    ),
    Patched(
        "compared_one_later",
        "a step is compared with the target one token later",
        THREE,
        instead(_loss, "_compare", _compared_one_later),
    ),
    Patched(
        "kept_of_the_next_label",
        "a label counts if the next one is in the draft vocabulary",
        THREE,
        instead(_loss, "_compare", _kept_of_the_next_label),
    ),
    Patched(
        "features_of_the_column",
        "the feature that is learnt is the one that the slot has read",
        ONE,
        instead(_loss, "_compare", _features_of_the_column),
    ),
    Patched(
        "label_one_off_in_the_vocabulary",
        "a label is the token before it in the draft vocabulary",
        THREE,
        instead(_loss, "place_of", _one_later_in_vocabulary),
    ),
    of_family(patches.DECAY_IN_REVERSE, THREE),
    of_family(patches.LABELS_OF_ANOTHER_DOCUMENT, THREE),
)
MISTAKES = (*NETWORK, *DRAFTING, *MASKS, *TRAINING)
