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

import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files import Given
from specjax.drafters.growth import Plan
from specjax.drafters.heads import _along_text, _masked_text, _shape, _vocabulary
from specjax.drafters.heads._masked_text import Read, Reader
from specjax.drafters.heads.eagle import _drafter, _loss, _network
from specjax.drafters.heads.eagle._files import Eagle3
from specjax.drafters.heads.eagle._network import Network, Shape
from specjax.drafters.shared_keys import EagleKeys, check_mask, stated_switch
from specjax.errors import UserError
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, Drafter, ModelParams, Training

REFERENCE = ("li2025eagle3", "li2024eagle2", "hui2026peagle")

# Name of a target -> a head for it on the Hub.
RELEASED = {
    "vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
    "Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    "Qwen3-4B": "AngelSlim/Qwen3-4B_eagle3",
    "Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
}

NAME = "eagle3"
# Layers of a new parallel network.
LAYERS = 4
# Conditional drop of deeper masks (2602.01469), and the target's probs for labels.
PARALLEL = {"ce": 0.0, "teacher": 1.0, "keep": 0.8, "floor": 0.2}


class Keys(EagleKeys):
    """The keys of ``eagle3``."""

    taps: Sequence[int] | str = key(
        (),
        'the layers, from 0, whose outputs it reads, as "1,5,9"; empty: as in the files, or for L'
        " layers 1, L // 2 - 1 and L - 4 (the first, the middle and the last one if L < 8)",
        parse=_shape.taps_of,
        fact="taps",
    )
    draft_vocab: int = key(
        0,
        "size of the draft vocabulary of a new network; 0: all tokens, or the number of "
        "``draft_ids``",
        least=0,
        size=lambda params: params["head"]["kernel"].shape[-1],
    )
    draft_ids: np.ndarray | Sequence[int] | None = key(
        None,
        "i32[draft_vocab], ascending: its tokens. Training chooses the most frequent ones.",
        python=True,
        parse=_vocabulary.listed,
        fact="draft_ids",
    )
    width: int = key(
        0,
        "hidden size of a new network; 0: the target's. One of another width has token "
        "embeddings of its own, and they and its head begin random",
        least=0,
        size=lambda params: params["fc"]["kernel"].shape[1],
    )
    fc_norm: bool = key(
        False, "a norm of each tap before they are joined (EAGLE-3.1)", part="fc_norm"
    )
    norm_output: bool = stated_switch(
        "the next slot reads the output after the last norm (EAGLE-3.1)", "norm_output"
    )
    norm_before_residual: bool = stated_switch(
        "the residual of the first layer is the normed feature", "norm_before_residual"
    )
    parallel: int = key(
        0,
        "tokens that it drafts in one pass (P-EAGLE; then 4 ``layers`` if not given); 0: as in "
        "the files, or a pass for each",
        least=0,
        size=lambda params: None if "mask_hidden" in params else 0,
        fact="parallel",
    )
    mask_id: int | None = key(
        None,
        "the token of masks, with ``parallel``; None: as in the files, or the last one",
        least=0,
    )
    embeddings: bool = key(
        False,
        "whether it has token embeddings of its own; they begin as the target's",
        part="embed",
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with an EAGLE-3 or P-EAGLE network.

    The switches are for a new network. In files the tensors and config.json decide, and another
    value is an error.

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files,
            taps that the target does not have, a wrong draft vocabulary, a tree that does not fit.
    """
    given, keys = files.read(NAME, target, keys)
    mask_id = _mask_id(target, given, keys)
    if keys.parallel and given.params is None:
        where = "on a network that drafts all tokens in one pass"
        keys.refuse(("norm_output",), where, "leave it out, or leave parallel out")
        keys = dataclasses.replace(keys, layers=keys.layers or LAYERS)
    if given.params is None and keys.width not in (0, given.ends.width):
        keys = dataclasses.replace(keys, embeddings=True)
    ids, size = _draft_vocabulary(target, given, keys)
    shape = Shape(
        _shape.config_of(NAME, target, given, keys),
        given.ends.width,
        _taps(target, given, keys),
        size,
        fc_norm=keys.fc_norm,
        input_norm=given.params is not None and "input_norm" in given.params,
        norm_output=keys.norm_output,
        norm_before_residual=keys.norm_before_residual,
        shift=keys.shift,
        parallel=keys.parallel,
        mask_id=mask_id,
    )
    network = _network.build(NAME, shape, given, keys, target.vocab_size, ids)
    training = Bound(_loss.training, network, target, defaults=_loss.EAGLE3)
    if keys.parallel:
        training = Bound(_parallel_training, network, target)
    return _drafter.build(target, network, keys, given, training)


def _mask_id(target: LM, given: Given, keys: Keys) -> int | None:
    """The token of the masks of a network that drafts in one pass. Raises UserError."""
    if not keys.parallel:
        where = "on a network that drafts one token in a pass"
        keys.refuse(("mask_id",), where, "leave it out, or give parallel")
        if given.params is not None and "mask_hidden" in given.params:
            raise UserError(
                "parallel is missing; give the number of tokens the network drafts at once"
            )
        return None
    keys = given.agree(NAME, keys, mask_id=given.config.get("mask_token_id"))
    mask = target.vocab_size - 1 if keys.mask_id is None else keys.mask_id
    check_mask(mask, target)
    return mask


def _taps(target: LM, given: Given, keys: Keys) -> tuple[int, ...]:
    """The layers that the network reads. Raises UserError."""
    taps: Any = keys.taps or _shape.default_taps(_shape.layers_of(NAME, target))
    _shape.check_taps(NAME, target, taps)
    total = len(taps) * given.ends.width
    if given.params is not None and (read := len(given.params["fc"]["kernel"])) != total:
        raise UserError(
            f"the {NAME} network reads features of width {read} in total, and {len(taps)} "
            f"layers of the target have {total}; give the taps that it was made for, or use one "
            "made for this target"
        )
    return taps


def _draft_vocabulary(target: LM, given: Given, keys: Keys) -> tuple[np.ndarray | None, int]:
    """The draft vocabulary, None: all tokens, and its size. Raises UserError."""
    ids: Any = keys.draft_ids
    size = keys.draft_vocab or (target.vocab_size if ids is None else len(ids))
    if given.params is None and ids is None and size != target.vocab_size:
        raise UserError(
            f"draft_vocab is {size}, and there are no draft_ids; give the tokens, or train the "
            "network with mode train, which chooses them"
        )
    return _vocabulary.ids_of(ids, size, target.vocab_size), size


def _parallel_training(network: Network, target: LM, plan: Plan) -> Training:
    """The training part of a P-EAGLE network that grows its drafts as ``plan`` describes."""
    reader = reader_of(network, target.with_taps(network.shape.taps))
    loss = Bound(_masked_text.loss, reader, network.shape.parallel, **PARALLEL)
    start, along = Bound(Network.start, network), Bound(_masked_text.along, reader)
    return _along_text.training(loss, start, along, plan, network.facts)


def reader_of(network: Network, target: LM) -> Reader:
    """The network reads slots, and predicts two tokens ahead of the feature of each."""
    text, masked = Bound(_read, network, target), Bound(_masked, network)
    return Reader(text, masked, ahead=2, ids=network.ids, target=target)


def _read(network: Network, target: LM, params: ModelParams, batch: Batch) -> Read:
    out, text = _along_text.output(target, params.target, batch), _loss.text(batch)
    fed, block = _loss.step(network, text, 0, params, network.read(params, out), ())
    return Read(network.logits(params, fed.hidden), text.layout, block, out.logits)


def _masked(network: Network, params: ModelParams, read: Read, layout: Layout) -> Array:
    rows, count = layout.visible.shape[:2]
    tokens = jnp.full((rows, count), network.shape.mask_id, jnp.int32)
    features = jnp.broadcast_to(network.masked(params), (rows, count, network.width))
    cache = network.init_cache(rows, 0)
    fed, _ = network.apply(params, tokens, features, cache, layout, read.block)
    return network.logits(params, fed.hidden)


CODEC = Eagle3(NAME)
