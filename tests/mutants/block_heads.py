"""Mistakes of the block network, of its drafting and of its training (``drafters.heads.block``)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from internals import heads_block as _block
from internals import heads_block_corrections as _corrections
from internals import heads_block_network as _network

from mutants import patches
from mutants.patches import Patched, instead, of_family
from specjax import cache as kv

# The network ----------------------------------------------------------------------------------


def _keys_without_norm(right, layer, context, angle):
    kept, layer.attention.qk_norm = layer.attention.qk_norm, "none"
    result = right(layer, context, angle)
    layer.attention.qk_norm = kept
    return result


def _one_late(right, cache, size, layout):
    return right(cache, size, layout.replace(depth=layout.depth + 1))


def _contexts(change, taps, angle, net):
    """``BlockNet.read`` with ``change(net, taps)``, the contexts of the layers."""
    contexts = change(net, taps)
    pairs = [net.layers[str(i)].read(each, angle) for i, each in enumerate(contexts)]
    return tuple(zip(*pairs, strict=True))


def _no_context_norm(right, net, taps, angle):
    if not hasattr(net, "fc"):
        return right(net, taps, angle)

    def contexts(net, taps):
        return [net.fc(taps.reshape(*taps.shape[:-2], -1))] * len(net.layers)

    return _contexts(contexts, taps, angle, net)


def _mixed(weights_of):
    def read(right, net, taps, angle):
        if hasattr(net, "fc"):
            return right(net, taps, angle)

        def contexts(net, taps):
            mixed = jnp.einsum("ln,btnd->lbtd", weights_of(net.mix[...]), taps)
            return list(net.hidden_norm(mixed))

        return _contexts(contexts, taps, angle, net)

    return read


def _first_mixture(mix):
    return jnp.broadcast_to(jax.nn.softmax(mix, -1)[:1], mix.shape)


def _softmax_over_layers(mix):
    return jax.nn.softmax(mix, 0)


def _no_last_norm(right, net, x, angle, views, cache):
    for index in range(len(net.layers)):
        stored = _network.stored(cache, None, index)
        x, _, _ = net.layers[str(index)](x, angle, views[index], stored)
    return x


def _another_mask(right, net, params, *rest):
    mask = net.shape.mask_id
    if mask is not None:
        mask = (mask + 1) % net.shape.vocab
        net = net._replace(shape=dataclasses.replace(net.shape, mask_id=mask))
    return right(net, params, *rest)


def _taps_in_reverse(right, net, params, taps, positions):
    return right(net, params, taps[::-1], positions)


def _every_place_visible(right, cache, size, layout):
    return right(cache, size, layout.replace(visible=jnp.ones_like(layout.visible)))


def _causal(right, cache, size, layout):
    return right(cache, size, layout.replace(visible=jnp.tril(layout.visible)))


def _place_before_the_mask(right, net, params, pending, tokens, *rest):
    outputs = right(net, params, pending, tokens, *rest)
    if net.shape.anchor:
        return outputs
    return jnp.concatenate([outputs[:, :1], outputs[:, :-1]], 1)


def _short_window(right, net, *rest):
    for layer in net.layers.values():
        scores = layer.attention.scores
        layer.attention.scores = scores._replace(window=scores.window and scores.window - 1)
    return right(net, *rest)


def _key_heads_in_groups(right, layer, context, angle):
    """The keys of the context are in the order of the other group."""
    k, v = right(layer, context, angle)
    return k[:, :, ::-1], v[:, :, ::-1]


# The corrections ------------------------------------------------------------------------------


def _gates_swapped(right, own, state, x):
    def swapped(kernel):
        reset, update, new = jnp.split(kernel, 3, -1)
        return jnp.concatenate([update, reset, new], -1)

    return right({name: swapped(kernel) for name, kernel in own.items()}, state, x)


def _state_forgotten(right, shape, embed, params, state, given):
    return right(shape, embed, params, jnp.zeros_like(state), given)


def _plain_one_more(right, shape, embed, params, state, given):
    plain = shape.plain + 1 if shape.correction == "gru" else shape.plain
    return right(dataclasses.replace(shape, plain=plain), embed, params, state, given)


def _parts_swapped(right, kind, own, state, row, hidden):
    if kind == "rnn":

        def swapped(x):
            gate, candidate, out = jnp.split(x, 3, -1)
            return jnp.concatenate([candidate, gate, out], -1)

        own = own | {"joint": {name: swapped(x) for name, x in own["joint"].items()}}
    return right(kind, own, state, row, hidden)


def _gate_of_the_token_only(right, kind, own, state, row, hidden):
    hidden = jnp.zeros_like(hidden) if kind == "gated" else hidden
    return right(kind, own, state, row, hidden)


def _confidence_of_another_token(right, shape, embed, params, state, given):
    after = right(shape, embed, params, state, given)
    if after.confidence is None:
        return after
    other = given._replace(tokens=(given.tokens + 1) % shape.vocab)
    return after._replace(confidence=right(shape, embed, params, state, other).confidence)


# DFlash 2 -------------------------------------------------------------------------------------


def _later_places(right, x, kernels):
    return right(x[:, ::-1], kernels[:, ::-1])[:, ::-1]


def _around_the_block(right, x, kernels):
    rolled = [jnp.roll(x, tap, 1) * kernels[:, :, tap] for tap in range(kernels.shape[2])]
    return sum(rolled[1:], rolled[0])


def _not_the_pending_place(right, x, kernels):
    kernels = kernels.at[:, 1, 1:].set(0) if kernels.shape[2] > 1 else kernels
    return right(x, kernels)


def _taps_swapped(right, x, kernels):
    return right(x, kernels[:, :, ::-1])


def _sides_swapped(right, convolutions, x):
    return right(convolutions, x)[::-1]


def _groups_one_off(right, convolutions, x):
    base = convolutions.base[...][:, None, None]
    return base + jnp.roll(right(convolutions, x) - base, convolutions.group, -1)


def _fewer_candidates(right, shape, *rest):
    return right(dataclasses.replace(shape, candidates=max(shape.candidates - 1, 0)), *rest)


def _others_with_their_logits(right, shape, embed, params, state, given):
    after = right(shape, embed, params, state, given)
    if not shape.candidates:
        return after
    others = jnp.isneginf(after.logits)
    return after._replace(logits=jnp.where(others, given.logits, after.logits))


def _token_0_before_all(right, shape, own, given):
    return right(shape, own, given._replace(tokens=jnp.zeros_like(given.tokens)))


def _changes_alone(right, own, factor, logits, ids):
    return right(own, factor, jnp.zeros_like(logits), ids)


# xPress ---------------------------------------------------------------------------------------


def _mixture_transposed(right, shape, own, state, given):
    return right(shape, own | {"mix": jnp.swapaxes(own["mix"], 1, 2)}, state, given)


def _mixture_of_the_place_alone(right, shape, own, state, given):
    # The row of the mean stays.
    return right(shape, own, state.at[..., : -shape.rank].set(0), given)


def _one_place_early(right, shape, own, state, given):
    return right(shape, own, state, given._replace(depth=given.depth - 1))


def _mean_without_the_pending_place(right, shape, params, state, outputs, token):
    first, masks = outputs[..., :1, :], outputs[..., 1:, :]
    # Masks whose mean with the first place is the mean of the masks.
    size = masks.shape[-2]
    mean = ((size + 1) * masks.mean(-2, keepdims=True) - first) / size
    outputs = jnp.concatenate([first, jnp.broadcast_to(mean, masks.shape)], -2)
    return right(shape, params, state, outputs, token)


def _another_token_before(right, shape, params, state, outputs, token):
    return right(shape, params, state, outputs, (token + 1) % shape.vocab)


def _token_rows_of_the_next_token(right, shape, own, mean, tokens, hidden):
    return right(shape, own, mean, (tokens + 1) % shape.vocab, hidden)


def _own_tokens_are_zeros(right, net, drafts):
    return [jnp.zeros_like(each) for each in right(net, drafts)]


# Drafting -------------------------------------------------------------------------------------


def _context_late_after_the_first_round(right, net, params, taps, cache):
    positions = cache.length[:, None] + jnp.arange(taps[0].shape[1])
    positions += cache.length[:, None] > 0
    return None, _network.read(net, params, taps, positions)


def _keeps_a_rejected_token(right, net, params, cache, drafted, verdict, target_out):
    taps = _block.growth.fed_to_target(target_out.taps, verdict)
    rejected = (verdict.count > 0) & (verdict.count <= verdict.path.shape[1])
    return kv.commit(cache, _block._feed(net, params, taps, cache)[1], verdict.count + rejected)


def _taps_of_the_node_before(right, net, params, cache, drafted, verdict, target_out):
    taps = tuple(jnp.concatenate([x[:, :1], x[:, :-1]], 1) for x in target_out.taps)
    return right(net, params, cache, drafted, verdict, target_out._replace(taps=taps))


def _last_token_one_off(right, net, params, block, state, tokens, depth):
    logits, memory = right(net, params, block, state, tokens, depth)
    last = depth == net.shape.positions - 1
    return jnp.where(last, jnp.roll(logits, 1, -1), logits), memory


def _last_place_of_the_depth_before(right, net, params, block, state, tokens, depth):
    before = jnp.minimum(depth, net.shape.positions - 2)
    block = block.replace(
        hidden=block.hidden.at[:, depth].set(block.hidden[:, before]),
        logits=block.logits.at[:, depth].set(block.logits[:, before]),
    )
    return right(net, params, block, state, tokens, depth)


# Training -------------------------------------------------------------------------------------


def _later(right, by, *args):
    """``along`` with all positions of the blocks later by so many."""
    past = _network.past
    _network.past = lambda cache, size, layout: past(
        cache, size, layout.replace(depth=layout.depth + by)
    )
    found = right(*args)
    _network.past = past
    return found


def _second_block_late(right, net, params, text, starts, pending, places, tokens):
    args = net, params, text, starts, pending, places, tokens
    late = jnp.arange(places.shape[1])[:, None, None] == 1
    return jnp.where(late, _later(right, 1, *args), right(*args))


def _reads_earlier_documents(right, net, params, text, starts, *rest):
    return right(net, params, text, jnp.zeros_like(starts), *rest)


def _sees_the_pending_taps(right, net, params, text, starts, pending, places, tokens):
    later = jnp.minimum(places + 1, text.size - 1)
    return _later(right, -1, net, params, text, starts, pending, later, tokens)


def _correction_of_the_token_before(right, net, params, out, batch, *rest):
    earlier = jnp.concatenate([batch.tokens[:, :1], batch.tokens[:, :-1]], 1)
    drafts = right(net, params, out, batch.replace(tokens=earlier), *rest)
    return drafts._replace(batch=batch)


NETWORK = (
    Patched(
        "context_keys_without_norm",
        "the keys of the committed text are not normed",
        "dflash",
        instead(_network._Layer, "read", _keys_without_norm),
    ),
    Patched(
        "block_one_late",
        "the block is one position too late, in drafting and in training",
        "dflash",
        instead(_network, "past", _one_late),
    ),
    Patched(
        "context_without_norm",
        "the fused taps are not normed",
        "dflash",
        instead(_network.BlockNet, "read", _no_context_norm),
    ),
    Patched(
        "first_mixture_for_all",
        "every layer reads the first layer's mixture of the taps",
        "dflare",
        instead(_network.BlockNet, "read", _mixed(_first_mixture)),
    ),
    Patched(
        "softmax_over_layers",
        "the weights of a tap sum to 1 over the layers",
        "dflare",
        instead(_network.BlockNet, "read", _mixed(_softmax_over_layers)),
    ),
    Patched(
        "without_last_norm",
        "the head reads outputs without the last norm",
        "dflash",
        instead(_network.BlockNet, "__call__", _no_last_norm),
    ),
    Patched(
        "another_mask",
        "the masks have the embedding of the next token of the vocabulary",
        "dspark",
        instead(_network, "draft", _another_mask),
    ),
    Patched(
        "taps_in_reverse",
        "the taps are fused in reverse order",
        "dflash",
        instead(_network, "read", _taps_in_reverse),
    ),
    Patched(
        "every_place_visible",
        "attention inside a causal block is in both directions",
        "dflare",
        instead(_network, "past", _every_place_visible),
    ),
    Patched(
        "causal_block",
        "attention inside every block is causal",
        "dflash",
        instead(_network, "past", _causal),
    ),
    Patched(
        "place_before_the_mask",
        "each token is predicted at the place before its mask",
        "dflash",
        instead(_network, "draft", _place_before_the_mask),
    ),
    Patched(
        "short_window",
        "the window is one position too short",
        "dflash",
        instead(_network.BlockNet, "__call__", _short_window),
    ),
    Patched(
        "key_heads_in_reverse",
        "the key heads of the context are those of the other group",
        "dflash",
        instead(_network._Layer, "read", _key_heads_in_groups),
    ),
)
CORRECTIONS = (
    Patched(
        "gates_swapped",
        "the GRU's reset and update gates are swapped",
        "domino",
        instead(_corrections, "gru", _gates_swapped),
    ),
    Patched(
        "state_forgotten",
        "the correction begins every depth with zeros",
        "domino",
        instead(_corrections, "step", _state_forgotten),
    ),
    Patched(
        "plain_one_more",
        "the GRU begins one token too late",
        "domino",
        instead(_corrections, "step", _plain_one_more),
    ),
    Patched(
        "parts_swapped",
        "the gate and the candidate of the RNN are swapped",
        "rnn",
        instead(_corrections, "_markov", _parts_swapped),
    ),
    Patched(
        "gate_of_the_token_only",
        "the gate does not read the output of the network",
        "gated",
        instead(_corrections, "_markov", _gate_of_the_token_only),
    ),
    Patched(
        "confidence_of_another_token",
        "the confidence reads the row of the next token of the vocabulary",
        "dspark",
        instead(_corrections, "step", _confidence_of_another_token),
    ),
)
DFLASH2 = (
    Patched(
        "later_places",
        "the convolutions read the places behind, not those before",
        "dflash2",
        instead(_network, "_convolved", _later_places),
    ),
    Patched(
        "around_the_block",
        "the convolution of the pending token's place reads the last place",
        "dflash2",
        instead(_network, "_convolved", _around_the_block),
    ),
    Patched(
        "not_the_pending_place",
        "the convolution of the first mask does not read the pending token's place",
        "dflash2",
        instead(_network, "_convolved", _not_the_pending_place),
    ),
    Patched(
        "convolution_taps_swapped",
        "a place and the one before it have each other's kernels",
        "dflash2",
        instead(_network, "_convolved", _taps_swapped),
    ),
    Patched(
        "sides_swapped",
        "the convolutions before and after a part have each other's kernels",
        "dflash2",
        instead(_network._Convolutions, "__call__", _sides_swapped),
    ),
    Patched(
        "groups_one_off",
        "the changes of the kernels are those of the next group of channels",
        "dflash2",
        instead(_network._Convolutions, "__call__", _groups_one_off),
    ),
    Patched(
        "fewer_candidates",
        "the selector chooses from one token fewer",
        "dflash2",
        instead(_corrections, "step", _fewer_candidates),
    ),
    Patched(
        "others_with_their_logits",
        "tokens that are no candidates keep their probabilities",
        "dflash2",
        instead(_corrections, "step", _others_with_their_logits),
    ),
    Patched(
        "token_0_before_all",
        "the selector reads the row of token 0 at all depths",
        "dflash2",
        instead(_corrections, "selector_factor", _token_0_before_all),
    ),
    Patched(
        "changes_alone",
        "the logits of the block are used to find candidates only",
        "dflash2",
        instead(_corrections, "selector_scores", _changes_alone),
    ),
)
XPRESS = (
    Patched(
        "mixture_transposed",
        "a place is mixed with the weights of the places that read it",
        "xpress",
        instead(_corrections, "_refined", _mixture_transposed),
    ),
    Patched(
        "mixture_of_the_place_alone",
        "a place does not read the places before it",
        "xpress",
        instead(_corrections, "_refined", _mixture_of_the_place_alone),
    ),
    Patched(
        "one_place_early",
        "the mixture takes each place for the one before",
        "xpress",
        instead(_corrections, "_refined", _one_place_early),
    ),
    Patched(
        "mean_without_the_pending_place",
        "the mean is that of the masks",
        "xpress",
        instead(_corrections, "begin", _mean_without_the_pending_place),
    ),
    Patched(
        "another_token_before",
        "the pending token's place reads the next token of the vocabulary",
        "xpress",
        instead(_corrections, "begin", _another_token_before),
    ),
    Patched(
        "token_rows_of_the_next_token",
        "a place reads the row of the next token of the vocabulary",
        "xpress",
        instead(_corrections, "_refiner_input", _token_rows_of_the_next_token),
    ),
)
DRAFTING = (
    Patched(
        "context_late_after_the_first_round",
        "the keys of tokens that were accepted in rounds are one position too late",
        "dflash",
        instead(_block, "_feed", _context_late_after_the_first_round),
    ),
    Patched(
        "keeps_a_rejected_token",
        "the cache keeps the first rejected token",
        "dflash",
        instead(_block, "_commit", _keeps_a_rejected_token),
    ),
    Patched(
        "taps_of_the_node_before",
        "the taps of a committed token are those of the node before it",
        "dflash",
        instead(_block, "_commit", _taps_of_the_node_before),
    ),
    Patched(
        "last_token_one_off",
        "the last token of a draft is the next one of the vocabulary",
        "dflash",
        instead(_block, "_depth", _last_token_one_off),
    ),
    Patched(
        "last_place_of_the_depth_before",
        "the last token of a draft is predicted at the place before its own",
        "dflash",
        instead(_block, "_depth", _last_place_of_the_depth_before),
    ),
)
TRAINING = (
    Patched(
        "second_block_late",
        "the second block of a row is one position too late",
        "dflash",
        instead(_network, "along", _second_block_late),
    ),
    Patched(
        "earlier_documents_visible",
        "a block sees the documents before its own in the row",
        "dflash",
        instead(_network, "along", _reads_earlier_documents),
    ),
    Patched(
        "sees_the_pending_taps",
        "a block sees the taps of its pending token, which no draft has",
        "dflash",
        instead(_network, "along", _sees_the_pending_taps),
    ),
    Patched(
        "correction_of_the_token_before",
        "training corrects by the token one place earlier than drafting does",
        "dspark",
        instead(_block, "_drafts", _correction_of_the_token_before),
    ),
    Patched(
        "second_block_late_with_convolutions",
        "the second block of a row is one position too late",
        "dflash2",
        instead(_network, "along", _second_block_late),
    ),
    Patched(
        "second_block_late_with_a_refiner",
        "the second block of a row is one position too late",
        "xpress",
        instead(_network, "along", _second_block_late),
    ),
    Patched(
        "own_tokens_are_zeros",
        "drafts after their own tokens are trained after token 0",
        "xpress",
        instead(_block, "_preferred", _own_tokens_are_zeros),
    ),
    of_family(patches.DECAY_IN_REVERSE, "dflash"),
    of_family(patches.LABELS_OF_ANOTHER_DOCUMENT, "dflash"),
    of_family(patches.TEACHER_ONE_LATER, "dflash"),
)
MISTAKES = (*NETWORK, *CORRECTIONS, *DFLASH2, *XPRESS, *DRAFTING, *TRAINING)
