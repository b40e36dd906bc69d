"""Mistakes of heads on the target's last feature (``drafters.heads.multi``).

They replace functions that a drafter takes when it is made.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from internals import drafters_growth as _growth
from internals import heads_heads as _heads
from internals import heads_prefix as _prefix

from mutants import patches
from mutants.patches import Patched, instead, of_family
from specjax.drafters.heads.multi import bpd, hydra, medusa, mlp_speculator, mtp, redrafter

# The features and their cache ------------------------------------------------------------------


def _features_of_the_node_before(right, values, verdict):
    def before(x):
        return jnp.concatenate([x[:, :1], x[:, :-1]], 1)

    return right(jax.tree.map(before, values), verdict)


def _feature_of_the_token_before(right, values, index):
    return right(values, jnp.maximum(index - 1, 0))


def _feature_of_the_round_before(right, heads, params, state, drafted, verdict, target_out):
    new = right(heads, params, state, drafted, verdict, target_out)
    rejected = (verdict.count <= verdict.path.shape[1]) & state.known
    return new.replace(feature=jnp.where(rejected[:, None], state.feature, new.feature))


def _late_after_the_first_round(right, config, params, features, cache, layout=None):
    if layout is None and cache.k[0].shape[2]:
        layout = _prefix_layout(features, cache)
    return right(config, params, features, cache, layout)


def _prefix_layout(features, cache):
    layout = _heads.tree.chain_layout(*features.shape[:2], 0)
    late = (cache.length > 0)[:, None].astype(jnp.int32)
    return layout.replace(depth=layout.depth + late)


def _no_prefix_norm(right, config, params, features, cache, layout=None):
    own = dict(params.draft["prefix"])
    own["norm"] = jax.tree.map(jnp.ones_like, own["norm"])
    return right(
        config, params._replace(draft=params.draft | {"prefix": own}), features, cache, layout
    )


def _prefix_of_other_documents(right, heads, target, params, batch, *places):
    found = right(heads, target, params, batch.replace(segments=None), *places)
    return found._replace(batch=batch)


# Training -------------------------------------------------------------------------------------


def _token_before_along(right, heads, params, tokens, *rest):
    earlier = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], 1)
    return right(heads, params, earlier, *rest)


def _labels_one_early(right, *args):
    return right(*args)._replace(ahead=1)


# The heads ------------------------------------------------------------------------------------


def _stack_in_reverse(patch):
    """Head d has the parameters of head K - 1 - d, in drafting and in training."""
    step, every = _heads.step_of, _heads.at_all_depths

    def reverse(params):
        return params._replace(draft=jax.tree.map(lambda x: x[::-1], params.draft))

    patch.setattr(_heads, "step_of", lambda head, params, *rest: step(head, reverse(params), *rest))
    patch.setattr(
        _heads, "at_all_depths", lambda head, params, *rest: every(head, reverse(params), *rest)
    )


def _blocks_in_reverse(right, unembed, own, target_params, hidden):
    block = jax.tree.map(lambda x: x[::-1], own["block"])
    return right(unembed, own | {"block": block}, target_params, hidden)


def _no_residual(right, unembed, own, target_params, hidden):
    block = own["block"]
    for layer in range(block["bias"].shape[0]):
        hidden = jax.nn.silu(hidden @ block["kernel"][layer] + block["bias"][layer])
    return hidden @ own["head"]["kernel"]


def _tokens_in_reverse(right, embed, layers, params, state, depth, tokens):
    feature, path = state
    given = path.at[..., depth].set(tokens)
    wrong = given.at[..., : depth + 1].set(given[..., : depth + 1][..., ::-1])
    logits, _ = right(embed, layers, params, (feature, wrong), depth, wrong[..., depth])
    return logits, (feature, given)


def _pending_left_out(right, embed, layers, params, state, depth, tokens):
    feature, path = state
    given = path.at[..., depth].set(tokens)
    wrong = given.at[..., 0].set(0)
    logits, _ = right(embed, layers, params, (feature, wrong), depth, wrong[..., depth])
    return logits, (feature, given)


def _one_block_less(right, embed, layers, *rest):
    return right(embed, max(layers - 1, 1), *rest)


def _scale_ignored(right, scale_input, params, feature):
    return right(not scale_input, params, feature)


def _another_weight(right, tie, weight, *rest):
    return right(tie, weight**2, *rest)


def _embedding_of_the_next_stage(right, tie, weight, params, state, depth, tokens):
    own = params.draft
    own = own | {"emb": jnp.roll(own["emb"], -1, 0)}
    return right(tie, weight, params._replace(draft=own), state, depth, tokens)


def _first_map_at_every_stage(right, tie, weight, params, state, depth, tokens):
    own = params.draft
    if depth and own["proj_in"].shape == own["proj"]["0"].shape:
        own = own | {"proj": dict.fromkeys(own["proj"], own["proj_in"])}
    return right(tie, weight, params._replace(draft=own), state, depth, tokens)


def _recurrence_forgotten(right, embed, params, state, depth, tokens):
    feature, past = state
    return right(embed, params, (feature, jnp.zeros_like(past)), depth, tokens)


def _recurrent_maps_swapped(right, embed, params, state, depth, tokens):
    own = params.draft
    if "rnn" in own:
        w, u = own["rnn"]["w"], own["rnn"]["u"]
        swapped = {"w": {"kernel": u["kernel"]}, "u": u | {"kernel": w["kernel"]}}
        own = own | {"rnn": swapped}
    return right(embed, params._replace(draft=own), state, depth, tokens)


def _state_before_the_feature(right, embed, params, state, depth, tokens):
    def swapped(x):
        half = len(x) // 2
        return jnp.concatenate([x[half:], x[:half]])

    own = dict(params.draft)
    if "input_proj" in own:
        own["input_proj"] = own["input_proj"] | {"kernel": swapped(own["input_proj"]["kernel"])}
    else:
        first = own["block"]["0"]
        own["block"] = own["block"] | {"0": first | {"kernel": swapped(first["kernel"])}}
    return right(embed, params._replace(draft=own), state, depth, tokens)


def _last_feature(right, heads, out):
    """Layers of the target's last one read its output, and not their own input."""
    return out.hidden


def _no_last_norm(right, target, params, x):
    return target.unembed(params.target, x)


def _layers_in_reverse(right, heads, params, features):
    return right(heads, params, features)[..., ::-1, :]


def _trunk_late_after_the_first_round(right, shape, params, features, cache, layout=None):
    if layout is None and cache.k[0].shape[2]:
        layout = _prefix_layout(features, cache)
    return right(shape, params, features, cache, layout)


def _no_feature_beside(right, unembed, own, target_params, feature):
    def without(params, hidden):
        return unembed(params, hidden - feature)

    return right(without, own, target_params, feature)


def _units_in_reverse(right, up, feature):
    units = right(up, feature)
    count = len(up["bias"])
    return units.reshape(*units.shape[:-1], count, -1)[..., ::-1, :].reshape(units.shape)


DRAFTING = (
    Patched(
        "features_of_the_node_before",
        "the feature is that of the node before the accepted one",
        "medusa",
        instead(_growth, "fed_to_target", _features_of_the_node_before),
    ),
    Patched(
        "feature_of_the_token_before",
        "heads read the feature of the token before, in prompts too",
        "medusa",
        instead(_heads, "_at", _feature_of_the_token_before),
    ),
    Patched(
        "feature_of_the_round_before",
        "after a rejection heads read the feature of the round before",
        "medusa",
        instead(_heads, "_commit", _feature_of_the_round_before),
    ),
    Patched(
        "late_after_the_first_round",
        "the prefix layer reads accepted tokens one position too late",
        "hydra",
        instead(_prefix, "_apply", _late_after_the_first_round),
    ),
    Patched(
        "trunk_late_after_the_first_round",
        "the layers read accepted tokens one position too late",
        "mtp",
        instead(mtp, "_apply", _trunk_late_after_the_first_round),
    ),
)
TRAINING = (
    Patched(
        "token_before_along",
        "in training heads read the token before the newest one",
        "hydra",
        instead(_heads, "_step_along", _token_before_along),
    ),
    Patched(
        "labels_one_early",
        "heads are trained on the token before the one that they predict",
        "hydra",
        instead(_heads, "drafts", _labels_one_early),
    ),
    of_family(patches.DECAY_IN_REVERSE, "hydra"),
    of_family(patches.LABELS_OF_ANOTHER_DOCUMENT, "hydra"),
    of_family(patches.TEACHER_ONE_LATER, "hydra"),
)
PREFIX = (
    Patched(
        "no_prefix_norm",
        "the norm behind the prefix layer has no factors",
        "hydra",
        instead(_prefix, "_apply", _no_prefix_norm),
    ),
    Patched(
        "prefix_of_other_documents",
        "in training the prefix layer reads the documents before",
        "hydra",
        instead(_heads, "drafts", _prefix_of_other_documents),
    ),
)
HEADS = (
    Patched("stack_in_reverse", "the heads are in reverse order", "medusa", _stack_in_reverse),
    Patched(
        "blocks_in_reverse",
        "the residual blocks of a head are in reverse order",
        "medusa",
        instead(medusa, "_head", _blocks_in_reverse),
    ),
    Patched(
        "no_residual",
        "the blocks of a head are not residual",
        "medusa",
        instead(medusa, "_head", _no_residual),
    ),
    Patched(
        "tokens_in_reverse",
        "a head reads the tokens since the feature in reverse order",
        "hydra",
        instead(hydra, "_step", _tokens_in_reverse),
    ),
    Patched(
        "pending_left_out",
        "deeper heads read token 0 in the place of the pending one",
        "hydra",
        instead(hydra, "_step", _pending_left_out),
    ),
    Patched(
        "one_block_less",
        "a head leaves out its last block",
        "hydra",
        instead(hydra, "_step", _one_block_less),
    ),
    Patched(
        "scale_ignored",
        "the first state is scaled, where it is not, and the reverse",
        "mlp_speculator",
        instead(mlp_speculator, "_begin", _scale_ignored),
    ),
    Patched(
        "another_weight",
        "the weight of the embeddings is squared",
        "mlp_speculator",
        instead(mlp_speculator, "_step", _another_weight),
    ),
    Patched(
        "embedding_of_the_next_stage",
        "a stage reads the embeddings of the next one",
        "mlp_speculator",
        instead(mlp_speculator, "_step", _embedding_of_the_next_stage),
    ),
    Patched(
        "first_map_at_every_stage",
        "every stage has the first one's map of the state",
        "mlp_speculator",
        instead(mlp_speculator, "_step", _first_map_at_every_stage),
    ),
    Patched(
        "recurrence_forgotten",
        "the state is that of the newest token only",
        "redrafter",
        instead(redrafter, "_step", _recurrence_forgotten),
    ),
    Patched(
        "recurrent_maps_swapped",
        "the maps of the token and of the state are swapped",
        "redrafter",
        instead(redrafter, "_step", _recurrent_maps_swapped),
    ),
    Patched(
        "state_before_the_feature",
        "the blocks read [state ; feature]",
        "redrafter",
        instead(redrafter, "_step", _state_before_the_feature),
    ),
    Patched(
        "last_feature",
        "further last layers read the output of the last one",
        "mtp",
        instead(_heads.Heads, "read", _last_feature),
    ),
    Patched(
        "no_last_norm",
        "the target's last norm is left out",
        "mtp",
        instead(mtp, "_logits", _no_last_norm),
    ),
    Patched(
        "layers_in_reverse",
        "the further last layers are in reverse order",
        "mtp",
        instead(mtp, "_begin", _layers_in_reverse),
    ),
    Patched(
        "no_feature_beside",
        "a slot does not add the feature",
        "bpd",
        instead(bpd, "_head", _no_feature_beside),
    ),
    Patched(
        "units_in_reverse",
        "the hidden units of all slots are in reverse order",
        "bpd, joint",
        instead(bpd, "_joint_inside", _units_in_reverse),
    ),
)
MISTAKES = (*DRAFTING, *TRAINING, *PREFIX, *HEADS)
