"""EAGLE-3: the draft network reads low, middle and high features, and predicts tokens directly.

Li et al. 2025 (2503.01840, section 3): the outputs of three layers of the target are joined and
mapped to the network's width; slot t reads this and the embedding of token t + 1; a head of the
network's own gives the probabilities of token t + 2. The next slot reads the network's own output.
The head may have a draft vocabulary, the most frequent tokens of the training text
(``draft_ids``): the others have probability 0 in a draft, and the target emits them.

The switches of EAGLE-3.1 and of the vLLM "speculators" files are keys for a new network:
``fc_norm``, ``norm_output``, ``norm_before_residual``. They change which tokens are drafted, never
the text. Drafts, rules and lossless classes are those of ``eagle``.

P-EAGLE (2602.01469) is the switch ``parallel``: after the slots of the text there are masks, slots
with a mask token and a learned feature, and one pass gives the probabilities of all depths. They
do not depend on the draft's tokens, so best-first trees cost no further pass. The default is then
a sampled chain. L1 with the rules for the draft's siblings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.bound import Bound
from specjax.checks import whole, yes_or_no
from specjax.drafters._keys import EagleKeys
from specjax.drafters.heads import (
    _eagle_shape,
    _features,
    _given,
    _network,
    _parallel_text,
    _rollout,
    _rollout_loss,
)
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._network import Parallel, Shape
from specjax.errors import UserError
from specjax.models.hf_config import value_of
from specjax.types import LM, Drafter

REFERENCE = ("li2025eagle3", "li2024eagle2", "hui2026peagle")

SHARED = EagleKeys
NAME = "eagle3"
SWITCHES: tuple[str, ...] = ("fc_norm", "norm_output", "norm_before_residual")
# Layers of a new parallel network.
LAYERS = 4


def make(
    target: LM,
    *,
    taps: Sequence[int] | str = (),
    draft_vocab: int = 0,
    draft_ids: np.ndarray | Sequence[int] | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    parallel: int = 0,
    mask_id: int | None = None,
    embeddings: bool = False,
    **shared: Any,
) -> Drafter:
    """Drafts with an EAGLE-3 or P-EAGLE network.

    The switches are for a new network. In files the tensors and config.json decide, and another
    value is an error.

    Args:
        target: the model whose layers it reads.
        taps: the layers, from 0, whose outputs it reads, as "1,5,9"; empty: as in the files, or for
            L layers 1, L // 2 - 1 and L - 4 (the first, the middle and the last one if L < 8).
        draft_vocab: size of the draft vocabulary of a new network; 0: all tokens, or the number of
            ``draft_ids``.
        draft_ids: i32[draft_vocab], ascending: its tokens. Training chooses the most frequent ones.
        fc_norm: a norm of each tap before they are joined (EAGLE-3.1).
        norm_output: the next slot reads the output after the last norm (EAGLE-3.1).
        norm_before_residual: the residual of the first layer is the normed feature.
        parallel: tokens that it drafts in one pass (P-EAGLE; then 4 ``layers`` if not given); 0:
            as in the files, or a pass for each.
        mask_id: the token of masks, with ``parallel``; None: as in the files, or the last one.
        embeddings: whether it has token embeddings of its own; they begin as the target's.
        shared: the keys of ``EagleKeys``; ``model`` may be a released network (EAGLE-3, SpecForge,
            speculators).

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files,
            taps that the target does not have, a wrong draft vocabulary, a tree that does not fit.
    """
    given = _given.read(NAME, target, keys := EagleKeys(**shared))
    masks = _parallel(target, given, parallel, mask_id)
    if masks is not None and given.params is None:
        keys = dataclasses.replace(keys, layers=keys.layers or LAYERS)
    flags = dict(zip(SWITCHES, (fc_norm, norm_output, norm_before_residual), strict=True))
    for key, value in flags.items():
        yes_or_no(key, value)
    if norm_output and masks is not None and given.params is None:
        raise UserError(
            "norm_output has no effect on a network that drafts all tokens in one pass; leave it "
            "out, or leave parallel out"
        )
    ids, size = _vocabulary(target, given, draft_vocab, draft_ids)
    asked = _eagle_shape.taps_of(taps)
    shape = _shape(target, given, keys, asked, size, flags | {"parallel": masks is not None})
    shape = dataclasses.replace(shape, shift=_eagle_shape.shift_of(given, keys.shift))
    return _build(target, given, keys, shape, ids, masks, _own_embedding(given, embeddings))


def _build(
    target: LM,
    given: Given,
    keys: EagleKeys,
    shape: Shape,
    ids: np.ndarray | None,
    masks: Parallel | None,
    own_embedding: bool,
) -> Drafter:
    network = _network.build(
        NAME,
        shape,
        given.ends,
        own_embedding=own_embedding,
        vocab_size=target.vocab_size,
        ids=ids,
        dtype=_eagle_shape.dtype_of(given.params),
        facts=_facts(target, shape, ids, masks),
        parallel=masks,
    )
    training = Bound(_rollout.training, network, target, defaults=_rollout_loss.EAGLE3)
    if masks is not None:
        training = Bound(_parallel_text.training, network, target)
    return _features.build(target, network, keys, given, training)


def _parallel(target: LM, given: Given, tokens: int, mask_id: int | None) -> Parallel | None:
    """How the network drafts in one pass; None: it does not. Raises UserError."""
    whole("parallel", tokens, 0)
    stored = given.config.get("parallel") if given.params is not None else None
    has = bool(tokens)
    if given.params is not None:
        has = isinstance(given.params, dict) and "mask_hidden" in given.params
    if tokens and (not has or stored not in (None, tokens)):
        raise UserError(
            f"parallel is {tokens}, and the given network drafts {stored if has else 1} "
            f"token{'s' * bool(has and stored != 1)} in one pass; leave it out"
        )
    if not has:
        if mask_id is not None:
            raise UserError(
                f"mask_id is {mask_id} and has no effect on a network that drafts one token in a "
                "pass; leave it out, or give parallel"
            )
        return None
    if not (tokens := tokens or stored or 0):
        raise UserError("parallel is missing; give the number of tokens the network drafts at once")
    own = given.config.get("mask_token_id")
    if mask_id is not None and own not in (None, whole("mask_id", mask_id, 0)):
        raise UserError(
            f"mask_id is {mask_id}, and the network was trained with {own}; leave it out"
        )
    own = mask_id if own is None else own
    own = target.vocab_size - 1 if own is None else own
    if own >= target.vocab_size:
        raise UserError(f"mask_id is {own}; the target's tokens are 0..{target.vocab_size - 1}")
    return Parallel(tokens, own)


def _own_embedding(given: Given, asked: bool) -> bool:
    yes_or_no("embeddings", asked)
    if given.params is None:
        return asked
    _eagle_shape.agreed("embeddings", asked, "embed" in given.params)
    return "embed" in given.params


def _facts(
    target: LM, shape: Shape, ids: np.ndarray | None, masks: Parallel | None
) -> tuple[tuple[str, Any], ...]:
    own: list[tuple[str, Any]] = [
        (key, getattr(shape, key)) for key in ("norm_output", "norm_before_residual")
    ]
    own.append(("taps", shape.taps))
    if masks is not None:
        own += [("parallel", masks.tokens), ("mask_token_id", masks.mask_id)]
    if ids is not None:
        # A drafter is a static argument, so its facts must have a hash.
        own += [("draft_ids", tuple(ids.tolist())), ("vocab_size", target.vocab_size)]
    return (*_eagle_shape.facts(shape), *own)


def _shape(
    target: LM,
    given: Given,
    keys: EagleKeys,
    asked: tuple[int, ...],
    vocab: int,
    flags: dict[str, bool],
) -> Shape:
    """The shape of the network; ``asked`` and ``flags`` are the keys. Raises UserError."""
    read, params = given.ends.width, given.params
    if params is None:
        config = _eagle_shape.config_of(NAME, given, read, keys)
        return Shape(config, read, _taps(target, given, asked, None), vocab, **flags)
    kernel = _eagle_shape.matrix(NAME, params, "fc.kernel")
    _eagle_shape.check_width(NAME, kernel[1], target, "embed" in params)
    _eagle_shape.agreed("fc_norm", flags.pop("fc_norm"), "fc_norm" in params)
    shape = Shape(
        _eagle_shape.config_of(NAME, given, kernel[1], keys),
        read,
        _taps(target, given, asked, kernel),
        vocab,
        fc_norm="fc_norm" in params,
        input_norm="input_norm" in params,
        parallel=flags.pop("parallel"),
        **{key: _flag(given, key, value) for key, value in flags.items()},
    )
    _eagle_shape.check(NAME, target, shape, params)
    return shape


def _taps(
    target: LM, given: Given, asked: tuple[int, ...], kernel: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The layers that the network reads; ``kernel`` is the shape of a stored fc."""
    stored = _eagle_shape.taps_of(given.config.get("taps", ()))
    if asked and stored and asked != stored:
        raise UserError(
            f"taps are {list(asked)}, and the given network reads {list(stored)}; leave them out"
        )
    layers = _eagle_shape.layers_of(NAME, target)
    taps = asked or stored or _eagle_shape.default_taps(layers)
    _eagle_shape.check_taps(NAME, target, taps)
    if kernel is not None and kernel[0] != len(taps) * given.ends.width:
        raise UserError(
            f"the {NAME} network reads features of width {kernel[0]} in total, and {len(taps)} "
            f"layers of the target have {len(taps) * given.ends.width}; give the taps that it was "
            "made for, or use one made for this target"
        )
    return taps


def _flag(given: Given, key: str, value: bool) -> bool:
    """A switch that tensors do not show. Raises UserError."""
    if not given.config:
        return value
    stored = value_of(given.config, key, bool, False)
    _eagle_shape.agreed(key, value, stored)
    return stored


def _vocabulary(
    target: LM, given: Given, size: int, draft_ids: Any
) -> tuple[np.ndarray | None, int]:
    """The draft vocabulary, None: all tokens, and its size. Raises UserError."""
    whole("draft_vocab", size, 0)
    stored = given.config.get("draft_ids")
    if draft_ids is not None and stored is not None and not np.array_equal(draft_ids, stored):
        raise UserError("draft_ids are not those of the given network; leave them out")
    ids = _eagle_shape.listed(draft_ids if stored is None else stored)
    if given.params is not None:
        own = _eagle_shape.matrix(NAME, given.params, "head.kernel")[-1]
        _given.sizes((own,), draft_vocab=(size, 0))
    elif size and ids is None and size != target.vocab_size:
        raise UserError(
            f"draft_vocab is {size}, and there are no draft_ids; give the tokens, or train the "
            "network with mode train, which chooses them"
        )
    else:
        own = size or (target.vocab_size if ids is None else len(ids))
    return _eagle_shape.ids_of(ids, own, target.vocab_size), own
