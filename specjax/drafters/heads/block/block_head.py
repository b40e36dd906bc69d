"""Block drafters: a small network drafts a whole block of tokens in one pass.

One component for DFlash and the drafters after it, which differ in a few switches:

- DFlash (2602.06036): the target's taps, fused once, are keys and values of every layer; the block
  is the pending token and masks, attends to itself in both directions, and its masks predict.
- DSpark (2607.05147, ``anchor``, ``correction="markov"``, ``confidence``): the pending token's
  place predicts too; a low-rank bias corrects each depth by the token drafted before it.
- JetSpec (2606.18394, ``causal``): attention inside the block is causal; ``tree="best_parents"``.
- Domino (2605.29707, ``anchor``, ``correction="gru"``): a GRU over the draft's tokens corrects.
- DFlare (2606.02091, ``context="mixed"``): each layer has its own mixture of the taps.
- DFlash 2 (inco.ai/blog/dflash2, ``conv=2``, ``correction="selector"``): convolutions inside the
  block; a draft's tokens are among the ``candidates`` best of each depth, with logits that the
  token before changes. ``Draft.probs`` are those of the candidates, and 0 for other tokens.
- xPress (2608.02438, ``correction="refiner"``): a causal mixture of the block's places and tokens.

Without a correction the probabilities of a depth are the same on all paths, so best-first trees
(DDTree, 2604.12989) cost no further pass. With one, dynamic trees apply it to the tokens of each
path: on DSpark that is PCTree (2608.02123). The default is a sampled chain: the probabilities after
the correction are those that a token is drawn from. L1 with the rules for the draft's siblings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import cache as kv
from specjax import declare, sampling
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.declare import key
from specjax.divergences import overlap
from specjax.drafters import files, growth
from specjax.drafters.files import Given
from specjax.drafters.growth import Begun, Nodes, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss, _prefix, _shape, _vocabulary
from specjax.drafters.heads._along_text import PLACES, Drafts, Texts
from specjax.drafters.heads._depth_loss import DepthKeys
from specjax.drafters.heads.block import _network as network
from specjax.drafters.heads.block._corrections import (
    CONTEXTS,
    CORRECTIONS,
    BlockShape,
    Corrected,
    selector_scores,
    sizes_of,
)
from specjax.drafters.heads.block._corrections import Given as Before
from specjax.drafters.heads.block._files import BlockFiles
from specjax.drafters.heads.block._network import Net
from specjax.drafters.heads.eagle._network import layer_facts
from specjax.drafters.heads.eagle._network import logits as logits_of
from specjax.drafters.shared_keys import StackedKeys, check_mask, stated_switch, stored_size
from specjax.errors import UserError
from specjax.models.layers import dtype_of
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.types import (
    LM,
    Array,
    Batch,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Verdict,
)

REFERENCE = (
    "chen2026dflash",
    "cheng2026dspark",
    "li2026chains",
    "hu2026jetspec",
    "huang2026domino",
    "zhang2026dflare",
    "wang2026xpress",
    "incoai2026dflash",
)

# Name of a target -> a head for it on the Hub.
RELEASED = {"Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16", "Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16"}

NAME = "block_head"
# The keys of config.json are those of DFlash's files, at the top level or in ``dflash_config``.
SLIDING, FULL = "sliding_attention", "full_attention"
# Of a new network.
BLOCK, RANK, PLAIN, CANDIDATES, EXPANSION, GROUP = 8, 256, 1, 16, 2, 16


def _correction_of(params: Params) -> str:
    """The correction that has these parameters."""
    kinds = {"gate": "gated", "joint": "rnn"}
    if "markov" in params:
        return next((name for part, name in kinds.items() if part in params["markov"]), "markov")
    return next((name for name in ("gru", "selector", "refiner") if name in params), "none")


def _rank_of(params: Params) -> int | None:
    """The rank of the correction that has these parameters; None: it has none."""
    if "gru" in params:
        return np.shape(params["prefix"]["out"]["kernel"])[0]
    tables = (("markov", "table"), ("selector", "before"), ("refiner", "table"))
    return next((np.shape(params[part][own])[-1] for part, own in tables if part in params), None)


class Keys(StackedKeys):
    """The keys of ``block_head``."""

    taps: Sequence[int] | str = key(
        (),
        'the layers, from 0, whose outputs it reads, as "1,5,9"; empty: as many as the network '
        "has, evenly spaced from 1 to L - 3 of L",
        parse=_shape.taps_of,
        fact="target_layer_ids",
    )
    block: int = stored_size(
        "places of a block, with the pending token's; 0: 8. It drafts block - 1 tokens, with "
        "``anchor`` block.",
        fact="block_size",
    )
    context: str = key(
        "",
        '"shared" (one fusion of the taps, "") or "mixed" (one mixture for each layer)',
        choices=("", *CONTEXTS),
        size=lambda params: "mixed" if "mix" in params else "shared",
    )
    causal: bool = stated_switch(
        "whether a place attends only to the places before it", "causal_head"
    )
    causal_sliding: bool = stated_switch(
        "whether that holds in the layers with a ``window`` alone", "causal_sliding"
    )
    anchor: bool | None = key(
        None,
        "whether the pending token's place predicts, and each place the token after its own; "
        "None: as in the files, False for a new network",
        fact="sample_from_anchor",
        missing=False,
        override=True,
    )
    correction: str = key(
        "",
        '"none" (""), "markov", "gated", "rnn" (DSpark), "gru" (Domino), "selector" (DFlash 2) or '
        '"refiner" (xPress)',
        choices=("", *CORRECTIONS),
        size=_correction_of,
    )
    rank: int = key(0, "of the correction; 0: 256", least=0, size=_rank_of)
    state: int = stored_size(
        "the width of the GRU; 0: the target's width", lambda params: params["gru"]["u"].shape[0]
    )
    plain: int | None = key(
        None,
        "how many first tokens the GRU does not correct; None: 1",
        least=0,
        fact="pure_draft_prefix_len",
        missing=0,
    )
    candidates: int = stored_size(
        "how many tokens of each depth the selector chooses from; 0: 16, or all if there are fewer",
        fact="selector_top_k",
    )
    expansion: int = key(
        0,
        "the width of the refiner's feed-forward part, as a multiple of ``rank``; 0: 2",
        least=0,
        size=lambda params: sizes_of(params)["expansion"],
    )
    conv: int = key(
        0,
        "how many places of the block the convolutions before and after each part of a layer read "
        "(DFlash 2: 2); 0: there are none",
        least=0,
        size=lambda params: sizes_of(params)["conv"],
    )
    conv_group: int = key(
        0,
        "channels whose kernels change by the same number; 0: 16",
        least=0,
        size=lambda params: sizes_of(params)["conv_group"],
        needs="conv",
    )
    confidence: bool = key(
        False,
        "whether it estimates that the next token is accepted, for ``control``",
        part="confidence",
    )
    window: int = key(
        0, "how many positions each layer but the last one attends to; 0: to all", least=0
    )
    mask_id: int | None = key(
        None,
        "a token whose embedding the masks have; None: an embedding of their own",
        least=0,
        fact="mask_token_id",
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a block network.

    Keys but ``model`` and the shape of a draft are for a new network. Of a stored one the tensors
    and config.json decide, and another value is an error. Only ``anchor`` replaces what the files
    state, with a warning: some released files do not state it.

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files, a
            draft longer than the block, a mask_id outside the vocabulary, a tree that does not fit.
    """
    given, agreed = files.read(NAME, target, keys)
    shape = _shape_of(target, given, agreed, keys)
    ids = None
    if shape.head is not None:
        stored = _vocabulary.listed(given.config.get("draft_ids"))
        ids = _vocabulary.ids_of(stored, shape.head, target.vocab_size)
    net = Net(shape, given.ends, dtype_of(given.params), ids)
    independent = shape.correction == "none"
    chain, drafted = shapes.chain(shape.positions), shape.candidates or shape.drafted
    accuracy = given.config.get("accuracy")
    method = Method(NAME, chain, "iid", drafted, shape.positions, independent, accuracy)
    plan, tapped = growth.read(method, keys), target.with_taps(shape.taps)
    training = _along_text.training(
        Bound(loss, net, tapped),
        Bound(network.start, shape),
        Bound(along, net, tapped),
        plan,
        _facts(shape, ids),
    )
    stepper = Stepper(
        init=Bound(_init, net),
        begin=Bound(_begin, net, plan.growth.depth),
        step=Bound(_step, net),
        commit=Bound(_commit, net),
        looped=True,
        independent=independent,
        lazy=True,
        confidence=_confidence if shape.confidence else None,
    )
    own = given.init_params(NAME)
    drafter = growth.build(NAME, stepper, plan, own, training=training, features=True)
    return drafter._replace(taps=shape.taps)


def _shape_of(target: LM, given: Given, keys: Keys, asked: Keys) -> BlockShape:
    """The shape of the network, from the keys of ``block_head``. Raises UserError.

    ``keys`` agree with stored parameters; ``asked`` are those that were given.
    """
    layers, width = _shape.layers_of(NAME, target), given.ends.width
    raw = given.config
    sliding = raw.get("sliding_window") or 0 if SLIDING in (raw.get("layer_types") or ()) else 0
    if given.params is not None and raw:
        keys = given.agree(NAME, keys, window=sliding)
    stored = given.params or {}
    masked, sure = "mask" in stored, stored.get("confidence")
    if masked and asked.mask_id is not None:
        raise UserError(
            f"mask_id is {asked.mask_id}, and the given {NAME} has an embedding of its masks; "
            "leave it out"
        )
    correction, anchor = keys.correction or "none", bool(keys.anchor)
    block = keys.block or BLOCK
    gru, plain = correction == "gru", PLAIN if keys.plain is None else keys.plain
    candidates = keys.candidates or CANDIDATES
    _check_effects(block - (not anchor), block, plain, correction, asked)
    config = _shape.config_of(NAME, target, given, keys)
    config = dataclasses.replace(config, windows=_windows(config, raw, keys.window))
    if keys.causal_sliding and (keys.causal or not config.windows):
        raise UserError("causal_sliding has no effect with causal or without window; leave it out")
    taps: Any = keys.taps or default_taps(layers, config.num_layers)
    _shape.check_taps(NAME, target, taps)
    shape = BlockShape(
        config=config,
        taps=taps,
        positions=block - (not anchor),
        vocab=target.vocab_size,
        context=keys.context or "shared",
        causal=keys.causal,
        causal_sliding=keys.causal_sliding,
        anchor=anchor,
        correction=correction,
        rank=0 if correction == "none" else keys.rank or RANK,
        state=(keys.state or width) if gru else 0,
        plain=plain if gru else 0,
        candidates=min(candidates, target.vocab_size) if correction == "selector" else 0,
        expansion=(keys.expansion or EXPANSION) if correction == "refiner" else 0,
        conv=keys.conv,
        conv_group=keys.conv_group or GROUP,
        confidence=keys.confidence,
        mask_id=None if masked else keys.mask_id,
        head=stored["head"]["kernel"].shape[1] if "head" in stored else None,
        # The width of its kernel shows whether it reads the token before.
        sure_of_token=sure is None or len(sure["kernel"]) != width,
    )
    _check(target, given, shape)
    return shape


def _facts(shape: BlockShape, ids: np.ndarray | None) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold in addition to the tensors."""
    windows = shape.config.windows
    own = (
        ("block_size", shape.fed(shape.positions)),
        ("target_layer_ids", shape.taps),
        ("causal_head", shape.causal),
        ("sample_from_anchor", shape.anchor),
        ("causal_sliding", shape.causal_sliding or None),
        ("pure_draft_prefix_len", shape.plain if shape.correction == "gru" else None),
        ("selector_top_k", shape.candidates or None),
        ("mask_token_id", shape.mask_id),
        *_vocabulary.facts(ids, shape.vocab),
        ("sliding_window", next(filter(None, windows), None)),
        ("layer_types", tuple(SLIDING if each else FULL for each in windows) or None),
    )
    return (*layer_facts(shape.config), *((key, value) for key, value in own if value is not None))


def _check_effects(drafts: int, block: int, plain: int, correction: str, asked: Keys) -> None:
    """Raises UserError for keys without effect, and for a block that drafts no token."""
    if drafts < 1:
        raise UserError(
            f"block is {block}, which drafts no token; give at least 2, or 1 with anchor"
        )
    if correction == "gru" and plain >= drafts:
        raise UserError(
            f"plain is {plain} and a block drafts {drafts} tokens: the correction has no effect; "
            f"give less than {drafts} (0: all are corrected), or leave correction out"
        )
    kinds_of = {"rank": CORRECTIONS[1:], "state": ("gru",), "plain": ("gru",)}
    kinds_of |= {"candidates": ("selector",), "expansion": ("refiner",)}
    for name, kinds in kinds_of.items():
        if correction not in kinds:
            right = f"leave it out, or take {' or '.join(kinds)}"
            asked.refuse((name,), f"on the correction {correction!r}", right)


def _windows(
    config: TransformerConfig, raw: Mapping[str, Any], window: int
) -> tuple[int | None, ...]:
    """``TransformerConfig.windows``: as in config.json, or in all layers but the last."""
    if not window:
        return ()
    types = raw.get("layer_types") or (*(SLIDING,) * (config.num_layers - 1), FULL)
    if len(types) != config.num_layers or not set(types) <= {SLIDING, FULL}:
        raise UserError(
            f"layer_types is {list(types)}; it must name {SLIDING} or {FULL} for each of the "
            f"{config.num_layers} layers"
        )
    windows = tuple(window if kind == SLIDING else None for kind in types)
    if not any(windows):
        raise UserError(
            f"window is {window}, and the only layer has none; leave it out, or raise layers"
        )
    return windows


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers of a target of ``layers``, evenly spaced from 1 to ``layers`` - 3.

    The authors' code of DFlash; a single one is in the middle. Fewer where the target has too few.
    """
    if count == 1 or layers < 5:
        return (layers // 2,)
    spaced = np.round(1 + np.arange(count) * (layers - 4) / (count - 1)).astype(int)
    return tuple(sorted({int(each) for each in spaced}))


def _check(target: LM, given: Given, shape: BlockShape) -> None:
    """Raises UserError for parameters of another shape, and for a wrong mask."""
    width, group = shape.config.hidden_size, shape.conv_group
    if shape.conv and width % group:
        raise UserError(f"conv_group is {group}; it must divide the width, {width}")
    check_mask(shape.mask_id, target)
    if given.params is None:
        return
    if shape.head is not None and shape.correction == "selector":
        raise UserError(
            f"the {NAME} network has a selector and an LM head of {shape.head} draft tokens; a "
            "selector is for the target's vocabulary"
        )
    if shape.mask_id is None and "mask" not in given.params:
        raise UserError(
            f"the {NAME} network has no embedding of its masks; give mask_id, the token that it "
            "was trained with"
        )
    _shape.check(NAME, given, _shape.leaves_of(Bound(network.start, shape)))


# The cache has the target's taps of the committed text as keys and values. A verdict leaves the
# taps of the pending token and the accepted nodes, and ``commit`` appends them: the cache never
# holds what was computed for a draft.


class Block(struct.PyTreeNode):
    """What a round's pass over the block leaves for all depths."""

    logits: Array  # f[B,K,V] without a correction
    hidden: Array  # [B,K,D]


class Memory(struct.PyTreeNode):
    """What the children of nodes read."""

    state: Array  # [B,P,S] of the correction
    confidence: Array | None  # f32[B,P] that the next token is accepted


def _init(net: Net, params: ModelParams, context: Context, out: Output, slots: int) -> KVCache:
    batch, size = out.hidden.shape[:2]
    cache = network.init_cache(net, batch, slots)
    if not size:
        return cache
    feed = Bound(_feed, net, params)
    return _prefix.feed(feed, kv.commit, out.taps, context.length - 1, cache)[1]


def _feed(
    net: Net, params: ModelParams, taps: tuple[Array, ...], cache: KVCache
) -> tuple[None, KVBlock]:
    positions = cache.length[:, None] + jnp.arange(taps[0].shape[1])
    return None, network.read(net, params, taps, positions)


def _begin(net: Net, depth: int, params: ModelParams, context: Context, cache: KVCache) -> Begun:
    """``Stepper.begin``: one pass over the block of ``depth`` tokens.

    A row whose text has one token cannot draft: there are no taps to read.
    """
    outputs = network.draft(net, params, context.pending, depth, cache)
    hidden = outputs[:, net.shape.first :]
    block = Block(logits_of(net.ends, params, hidden), hidden)
    before = jnp.maximum(context.length - 2, 0)[:, None]
    token = jnp.take_along_axis(context.tokens, before, 1)
    state = network.first_state(net, params, outputs[:, None], token)
    first, memory = _depth(net, params, block, state, context.pending[:, None], 0)
    return Begun(first[:, 0], cache, memory, cache.length > 0, reads=block)


def _step(
    net: Net, params: ModelParams, block: Block, nodes: Nodes, above: Memory
) -> tuple[Array, Memory]:
    """``Stepper.step``: the memory of a node is the correction's state after its token."""
    state = growth.at(above.state, nodes.parents)
    state = jnp.broadcast_to(state, (*nodes.tokens.shape, state.shape[-1]))
    return _depth(net, params, block, state, nodes.tokens, nodes.depth)


def _depth(
    net: Net, params: ModelParams, block: Block, state: Array, tokens: Array, depth: Any
) -> tuple[Array, Memory]:
    """The logits f[B,n,V] after n nodes, ``depth`` tokens after the pending one; their memory."""

    def at_nodes(x: Array) -> Array:
        return jnp.broadcast_to(x[:, depth][:, None], (*tokens.shape, x.shape[-1]))

    before = Before(tokens, at_nodes(block.hidden), at_nodes(block.logits), depth)
    after = network.correct(net, params, state, before)
    logits = _vocabulary.spread(net.ids, after.logits, net.shape.vocab)
    sure = after.confidence
    return logits, Memory(after.state, None if sure is None else jax.nn.sigmoid(sure))


def _confidence(memory: Memory) -> Array:
    """``Stepper.confidence``."""
    assert memory.confidence is not None
    return memory.confidence


def _commit(
    net: Net, params: ModelParams, cache: KVCache, drafted: None, verdict: Verdict, out: Output
) -> KVCache:
    """Appends the pending token and the accepted nodes, without the newest token."""
    taps = growth.fed_to_target(out.taps, verdict)
    return kv.commit(cache, _feed(net, params, taps, cache)[1], verdict.count)


# Of a depth: after the correction, and the logits f[B,P,V_d] before it (None before the first).
State = tuple[Corrected, Array | None]


class LossKeys(DepthKeys):
    """The keys of the loss."""

    confidence: float = key(
        0.0,
        "weight of the cross-entropy of the confidence with the overlap of draft and target",
        least=0,
    )
    base: float = key(
        0.0,
        "share of the loss of the logits before the correction, at the first step; it falls to 0 "
        "at the last one (Domino)",
        least=0,
        most=1,
    )
    run_steps: int = key(0, "steps of the run")
    selector: float = key(
        1.0,
        "weight of the selector's cross-entropy with the target's preferred token, which takes the "
        "place of the last candidate if it is none (DFlash 2)",
        least=0,
    )
    uncorrected: float = key(
        0.0,
        "weight of the loss of the logits before the correction, which is added (xPress)",
        least=0,
    )
    consistency: float = key(
        0.0,
        "weight of the loss of drafts after their own tokens, which is added: the mean of "
        "``passes``, each after the preferred tokens of the one before, the first after those "
        "before the correction (xPress)",
        least=0,
    )
    passes: int = key(3, "of ``consistency``", least=1)
    places: int = key(
        PLACES,
        "features of each row that blocks are behind: random ones, of those that have a label",
        least=1,
    )


@declare.method(LossKeys)
def loss(
    net: Net, target: LM, params: Any, target_params: Any, batch: Batch, key: Array, keys: LossKeys
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first depth (with ``Batch.depths``: of all), and metrics.

    ``_depth_loss.loss`` of blocks behind random features, or all of them where there are fewer, and
    at every depth the confidence's term, without the weights of ``pace``. With ``base`` it is
    (1 - b) of that and b of the loss of the block's own logits, where b falls linearly to 0
    during the run (Domino, 2605.29707: the base loss's curriculum). Metrics are also
    ``alpha_<d>``, the acceptance rate at temperature 1. The target's logits are constants, its
    hidden states not. With a selector the logits before it are compared; ``selected_<d>`` is how
    often it prefers the target's token, and ``recall_<d>`` how often this is a candidate.

    Raises:
        UserError: weights out of range or without effect, a batch of fewer than 3 tokens.
    """
    _check_loss(net.shape, keys)
    _along_text.check_length(batch, 2, "blocks predict two tokens ahead")
    pair, count = ModelParams(target_params, params), net.shape.positions
    batch = _along_text.of_output(target, batch)
    out = _along_text.output(target, target_params, batch)
    chosen = _along_text.random_places(key, batch, 2, count, keys.places)
    outputs = _run(net, pair, out, batch, count)(chosen)
    few = _along_text.few(target, target_params, out, chosen, count)
    again = Bound(_drafts, net, pair, out, batch, outputs, chosen, few)
    parts = _parts(net, again(), keys, again)
    number = parts[0][1].number_of_labels(count)
    more = Bound(_confidence_term, net, keys.confidence)
    if net.shape.candidates:
        more = Bound(_selector_term, net, params["selector"], keys)
    value, metrics = jnp.zeros(()), {}
    for weight, drafts in parts:
        own, sizes = _depth_loss.loss(drafts, keys, count, number, None if metrics else more)
        value += weight * own
        sums = {name: metrics.get(name, 0) + weight * sizes[name] for name in ("scale", "uniform")}
        metrics = sizes | metrics | sums
    return value, metrics


def _check_loss(shape: BlockShape, keys: LossKeys) -> None:
    """Raises UserError for keys without effect."""
    if keys.confidence and not shape.confidence:
        raise UserError(
            f"loss.confidence is {keys.confidence}, and the network has no confidence; set "
            "drafter.confidence, or leave loss.confidence out"
        )
    if not shape.candidates:
        keys.refuse(("selector",), f"on the correction {shape.correction!r}")
    for name in ("base", "uncorrected", "consistency"):
        if (value := getattr(keys, name)) and shape.correction in ("none", "selector"):
            has = "a selector" if shape.candidates else "no correction"
            raise UserError(
                f"loss.{name} is {value}, and the network has {has}; leave loss.{name} out"
            )


def _parts(net: Net, drafts: Drafts, keys: LossKeys, again: Callable) -> list[tuple[Any, Drafts]]:
    """The drafts that are compared, with their weights.

    ``again(tokens)`` are the drafts after ``tokens`` i32[B,P] of each depth.
    """

    def block(state: State, depth: int) -> tuple[Array, State]:
        state = drafts.step(state, depth)[1]
        assert state[1] is not None
        return state[1], state

    before = drafts._replace(step=block)
    if net.shape.candidates:
        return [(1.0, before)]
    parts = [(1.0, drafts)]
    if keys.base:
        share = keys.base * (1 - _depth_loss.progress(drafts.batch, keys.run_steps))
        parts = [(1 - share, drafts), (share, before)]
    if keys.uncorrected:
        parts.append((keys.uncorrected, before))
    draft = before
    for _ in range(keys.passes if keys.consistency else 0):
        draft = again(_preferred(net, draft))
        parts.append((keys.consistency / keys.passes, draft))
    return parts


def _preferred(net: Net, drafts: Drafts) -> list[Array]:
    """The preferred token i32[B,P] of each depth but the last one."""
    state, found = drafts.state, []
    for depth in range(net.shape.positions - 1):
        logits, state = drafts.step(state, depth)
        best = sampling.argmax(logits)
        found.append(best if net.ids is None else jnp.asarray(net.ids)[best])
    return found


def _selector_term(
    net: Net, own: Params, keys: LossKeys, first: Array, state: State, logits: Array, *rest: Array
) -> tuple[Array, dict[str, Array]]:
    """``_depth_loss.More``: the terms of the confidence and of the selector ``own``."""
    (teacher, counted), after = rest, state[0]
    value, sizes = _confidence_term(net, keys.confidence, first, state, after.logits, *rest)
    best, ids = sampling.argmax(teacher), sampling.top(logits, net.shape.candidates)[1]
    same = ids == best[..., None]
    has = same.any(-1)
    ids = ids.at[..., -1].set(jnp.where(has, ids[..., -1], best))
    place = jnp.where(has, jnp.argmax(same, -1), ids.shape[-1] - 1)
    assert after.factor is not None
    scores = jax.nn.log_softmax(selector_scores(own, after.factor, logits, ids))
    right = jnp.take_along_axis(scores, place[..., None], -1)[..., 0]
    value -= keys.selector * jnp.where(counted, right, 0).sum() / first
    each = keys.selector * counted.sum() / first
    added = {"scale": each, "uniform": each * jnp.log(float(ids.shape[-1]))}
    sizes |= {name: sizes.get(name, 0) + size for name, size in added.items()}
    sizes["selected"] = _depth_loss.mean(sampling.argmax(after.logits) == best, counted)
    sizes["recall"] = _depth_loss.mean(has, counted)
    return value, sizes


def _confidence_term(
    net: Net, weight: float, first: Array, state: State, logits: Array, *rest: Array
) -> tuple[Array, dict[str, Array]]:
    """``_depth_loss.More``: the acceptance rate, and the loss of the confidence."""
    teacher, counted = rest
    logits = _vocabulary.spread(net.ids, logits, net.shape.vocab)
    shared = jax.lax.stop_gradient(overlap(teacher, logits))
    number, value = counted.sum(), jnp.zeros(())
    sizes = {"alpha": _depth_loss.mean(shared, counted)}
    confidence = state[0].confidence
    if weight and confidence is not None:
        # Cross-entropy of sigmoid(x) with the share c: log(1 + e^x) - c x.
        wrong = jax.nn.softplus(confidence) - shared * confidence
        value = weight * jnp.where(counted, wrong, 0).sum() / first
        sizes["scale"] = weight * number / first
        sizes["uniform"] = weight * jnp.log(2.0) * number / first
    return value, sizes


def along(net: Net, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along``: blocks of ``depth`` tokens behind every feature."""
    out = _along_text.output(target, params.target, batch)
    rows, size = out.hidden.shape[:2]
    run = _run(net, params, out, batch, depth)
    outputs = _along_text.in_pieces(lambda places: run(jnp.tile(places, (rows, 1))), size)
    yield from _drafts(net, params, out, batch, outputs).along(depth)


def _drafts(
    net: Net,
    params: ModelParams,
    out: Output,
    batch: Batch,
    outputs: Array,
    places: Array | None = None,
    few: Any = None,
    tokens: Sequence[Array] | None = None,
) -> Drafts:
    """The corrected logits of blocks with these outputs [B,P,F,D] behind places; None: all.

    ``few`` as in ``Drafts``. The logits are corrected by ``tokens`` i32[B,P] of each depth; None:
    the text's.
    """

    def text(by: int) -> Array:
        after = _along_text.ahead(batch.tokens, by, out.hidden.shape[1])
        return after if places is None else _along_text.at(after, places)

    def step(state: State, depth: int) -> tuple[Array, State]:
        own = outputs[:, :, depth + net.shape.first]
        logits = logits_of(net.ends, params, own)
        token = text(depth + 1) if tokens is None or not depth else tokens[depth - 1]
        before = Before(token, own, logits, depth)
        after = network.correct(net, params, state[0].state, before)
        return after.logits, (after, logits)

    state = network.first_state(net, params, outputs, text(0))
    chosen = places if places is None else (places,) * (outputs.shape[2] - net.shape.first)
    start = Corrected(jnp.zeros(()), state, None), None
    return Drafts(batch, out.logits, step, start, chosen, net.ids, few=few)


def _run(
    net: Net, params: ModelParams, out: Output, batch: Batch, depth: int
) -> Callable[[Array], Array]:
    """A function of places i32[B,P]: the outputs [B,P,F,D] of blocks of ``depth`` tokens there."""
    rows, size = out.hidden.shape[:2]
    every = _along_text.every_place(rows, size)
    text = network.read(net, params, out.taps, every)
    starts = every - _along_text.layout_of(batch).depth

    def run(places: Array) -> Array:
        pending = _along_text.at(batch.tokens, places + 1)
        own = _along_text.at(starts, places)
        return network.along(net, params, text, own, pending, places, depth)

    return run


CODEC = BlockFiles(NAME)
