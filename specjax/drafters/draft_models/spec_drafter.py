"""SpecDec's Spec-Drafter: a network with an encoder of its own that drafts a block in one pass.

Xia et al. 2023 (2203.16487), for encoder-decoder targets. A deep encoder reads the source once, a
shallow decoder reads what was written and a block of masks in both directions, and each mask gives
the distribution of its token, without knowledge of the other drafts. Nothing that the decoder
computed can be kept, so each round reads the output so far again: a draft costs one pass over the
output and the block, whose length grows with the output; of the last layer the masks alone are
computed. ``configs/spec_drafter.py`` trains it.

Each token is drawn from the declared probabilities of its place, or is the most probable one
("top_k"). L1 with the rules for the draft's siblings; the paper's Spec-Verification is the rule
``tolerance`` (L3). The probabilities of a depth are the same on all paths, so best-first trees
(``tree="best_first"``) cost no further pass.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from specjax import declare, sampling
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files, growth
from specjax.drafters.draft_models import _spec_network as network
from specjax.drafters.draft_models._spec_network import Net, Shape, Source
from specjax.drafters.files import Given
from specjax.drafters.files.codec import Codec, Rule, Rules
from specjax.drafters.growth import Begun, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss, _shape
from specjax.drafters.heads._along_text import Drafts, Texts
from specjax.drafters.heads._depth_loss import mean
from specjax.drafters.shared_keys import StoredKeys, stored_size
from specjax.errors import UserError
from specjax.models import lm, t5_config
from specjax.models.layers import dtype_of
from specjax.models.t5_config import T5Config
from specjax.topology import shapes
from specjax.types import LM, Array, Batch, Context, Drafter, ModelParams, Params

REFERENCE = "xia2023speculative"

NAME, BLOCK, LAYERS = "spec_drafter", 7, 2
NEEDS_ENCODER = True  # of its targets
# Tokens of the output that a pass has room for: so many, twice as many, and so on.
PIECE = 32
# The share of the rate of glancing that is gone at the end.
FALL = 0.4
# Our key -> the field of ``T5Config``.
_FIELDS = {"width": "hidden_size", "inner": "intermediate_size", "heads": "num_heads"}
_FIELDS |= {"head_dim": "head_dim", "layers": "num_layers", "encoder_layers": "encoder_layers"}


class Keys(StoredKeys):
    """The keys of ``spec_drafter``."""

    block: int = stored_size(
        "masks of a pass, the most tokens of a draft; 0: as in the files, or 7", fact="block_size"
    )
    width: int = key(0, "of the network; 0: the target's", least=0)
    inner: int = key(0, "width of its feed-forward; 0: the target's", least=0)
    heads: int = key(0, "attention heads; 0: the target's", least=0)
    head_dim: int = key(0, "width of an attention head; 0: the target's", least=0)
    layers: int = key(
        0,
        "of its decoder; 0: 2, the fewest with which a draft's places depend on each other",
        least=0,
    )
    encoder_layers: int = key(0, "of its encoder; 0: the target's", least=0)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a Spec-Drafter.

    The sizes are those of a new network. Of a stored one config.json decides, and another value is
    an error.

    Raises:
        UserError: a target without an encoder, files without a network or of another target, sizes
            that differ from the files, a draft longer than the block, a tree that does not fit.
    """
    if target.encoder is None or not isinstance(target.encoder.config, T5Config):
        raise UserError(
            f"{NAME} drafts for encoder-decoder models, and {target.name} is none of "
            "specjax.models; take a T5 model as the target, or pard, which drafts in one pass for "
            "decoders"
        )
    given, keys = files.read(NAME, target, keys, features=False)
    shape = _shape_of(target.encoder.config, given, keys)
    measured, chain = given.config.get("accuracy"), shapes.chain(shape.block)
    method = Method(NAME, chain, "iid", target.vocab_size, shape.block, True, measured)
    if given.params is not None:
        _shape.check_leaves(NAME, dict(network.leaves(shape)), flatten_dict(given.params))
    net = Net(shape, target.encoder.start, dtype_of(given.params))
    plan = growth.read(method, keys)
    stepper = Stepper(
        init=Bound(_init, net),
        begin=Bound(_begin, net),
        step=growth.step_at_depth,
        looped=True,
        independent=True,
        lazy=True,
    )
    stored = t5_config.write(dataclasses.replace(shape.config, eos_token_id=()))
    stored = {x: y for x, y in stored.items() if x not in ("architectures", "model_type")}
    start, texts = Bound(network.start, net), Bound(along, net, target)
    facts = (*stored.items(), *files.facts(Keys, shape))
    training = _along_text.training(Bound(loss, net), start, texts, plan, facts, before=0)
    own = given.init_params(NAME)
    drafter = growth.build(NAME, stepper, plan, own, training=training, gaps=True)
    # A pass reads the output so far.
    return drafter._replace(constant_cost=False)


def _shape_of(target: T5Config, given: Given, keys: Keys) -> Shape:
    """The shape of the stored network, or of a new one. Raises UserError."""
    base, config = target, given.config
    if config:
        if config.get("block_size") is None:
            raise UserError(
                f"config.json of the {NAME} lacks block_size; copy it again, or train it again"
            )
        base = t5_config.read(dict(config), target.eos_token_id)
        if base.start_token_id not in (None, target.start_token_id):
            raise UserError(
                f"the {NAME} was trained with the start token {base.start_token_id}, and outputs "
                f"of the target begin with {target.start_token_id}; take one of this target"
            )
        keys = given.agree(NAME, keys, **{key: getattr(base, own) for key, own in _FIELDS.items()})
    else:
        base = dataclasses.replace(base, num_layers=LAYERS)
    fields = {own: getattr(keys, key) or getattr(base, own) for key, own in _FIELDS.items()}
    fields |= {"num_kv_heads": fields["num_heads"], "start_token_id": target.start_token_id}
    return Shape(dataclasses.replace(base, **fields), keys.block or BLOCK)


def _init(net: Net, params: ModelParams, context: Context, *_: Any) -> Source:
    """``Stepper.init``: the encoder reads the sources, which end before the last token."""
    return network.read(net, params, context.tokens[:, :-1])


def _begin(net: Net, params: ModelParams, context: Context, source: Source) -> Begun:
    """``Stepper.begin``: one pass over the outputs so far and the masks after them."""
    count = jnp.maximum(context.length - source.count, 0)
    longest = count if context.done is None else jnp.where(context.done, 0, count)
    widths = _widths(context.tokens.shape[1])

    def with_room(width: int) -> Array:
        tokens = network.written(context.tokens, source, width)
        return network.logits(net, params, tokens, count, source)

    passes = [Bound(with_room, width) for width in widths]
    logits = jax.lax.switch(jnp.searchsorted(jnp.asarray(widths), longest.max()), passes)
    return Begun(logits[:, 0], source, reads=logits)


def _widths(slots: int) -> list[int]:
    """The numbers of tokens of an output that a pass may have room for, ascending."""
    widths = [PIECE]
    while widths[-1] < slots:
        widths.append(min(2 * widths[-1], slots))
    return widths


# Along a text, which is a source, the start token and an output, entry t is the draft that begins
# with tokens[t] pending: mask d, from 0, predicts tokens[t + 1 + d].


class LossKeys(declare.Keys, owner="loss."):
    """The keys of the loss."""

    places: int = key(
        1,
        "different beginnings of each row, or all where there are fewer (the paper has one)",
        least=1,
    )
    smoothing: float = key(0.1, "share of the loss that all tokens have", least=0, below=1)
    glancing: float = key(
        0.5,
        "answers that are given per wrong token at the first step; at step e of ``run_steps`` it "
        "is glancing * (1 - fall * e / run_steps)",
        least=0,
        most=1,
    )
    fall: float | None = key(
        None,
        "None: 0.4, so with the defaults the rate falls from 0.5 to 0.3",
        least=0,
        most=1,
        needs="glancing",
    )
    run_steps: int = key(0, "steps of the run")
    remat: bool = key(False, "recompute each layer in the backward pass")


@declare.method(LossKeys)
def loss(
    net: Net, params: Params, target_params: Params, batch: Batch, key: Array, keys: LossKeys
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label, and metrics.

    Of each row random beginnings of its output are read, and the tokens of the block after each are
    predicted. The loss is the cross-entropy with the text, of which ``smoothing`` is spread over
    all tokens. Numbers of answers are rounded down. What was given is not in the loss.

    Metrics: ``glanced``, the share of labels that were given; ``agreement_<d>`` for each depth d
    from 1, how often the most probable token is that of the text, of the labels in the loss;
    ``scale`` and ``uniform`` as in the loss of heads.

    Raises:
        UserError: values out of range or without effect, a text that is too short, labels of single
            depths.
    """
    _check(net, batch)
    pair, random = ModelParams({}, params), jax.random.split(key)
    source = network.read(net, pair, batch.tokens, keys.remat)
    pending = _along_text.random_places(random[0], batch, 1, 1, keys.places)
    known = _along_text.at(_along_text.labelled(batch, 1, 1), pending)
    answers, counted = _labels(net, batch, pending, known)
    written = network.written(batch.tokens, source, batch.tokens.shape[1])
    # Each beginning is a row of its own; the sources were read once.
    each = (source, written)
    repeated, tokens = jax.tree.map(lambda x: jnp.repeat(x, pending.shape[1], 0), each)
    read = jnp.maximum((pending - source.count[:, None]).reshape(-1) + 1, 1)
    given = jnp.zeros_like(counted)
    if keys.glancing:
        seen, source_seen = jax.lax.stop_gradient((pair, repeated))
        guess = sampling.argmax(network.logits(net, seen, tokens, read, source_seen))
        fall = FALL if keys.fall is None else keys.fall
        rate = keys.glancing * (1 - fall * _depth_loss.progress(batch, keys.run_steps))
        order = jax.random.uniform(random[1], counted.shape)
        number = _depth_loss.given_count(counted & (guess != answers), rate)
        given = _depth_loss.first_free(counted, order, number)
    logits = network.logits(net, pair, tokens, read, repeated, answers, given, keys.remat)
    return _compare(logits, answers, counted & ~given, given, keys.smoothing)


def _labels(net: Net, batch: Batch, pending: Array, known: Array) -> tuple[Array, Array]:
    """The tokens i32[B*P,K] after the pending ones, and whether they are labels."""
    place = pending[..., None] + 1 + jnp.arange(net.shape.block)
    inside = known[..., None] & (place < batch.tokens.shape[1])
    at = jax.vmap(lambda row, index: row[index])
    place = jnp.minimum(place, batch.tokens.shape[1] - 1)
    if batch.labelled is not None:
        inside &= at(batch.labelled, place)
    flat = (-1, net.shape.block)
    return at(batch.tokens, place).reshape(flat), inside.reshape(flat)


def _compare(
    logits: Array, labels: Array, counted: Array, given: Array, smoothing: float
) -> tuple[Array, dict[str, Any]]:
    """The loss and its metrics, of R blocks."""
    log_probs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    values = -(1 - smoothing) * own - smoothing * log_probs.mean(-1)
    metrics: dict[str, Any] = {
        "scale": jnp.float32(1),
        "uniform": jnp.log(jnp.float32(logits.shape[-1])),
        "glanced": mean(given.astype(jnp.float32), counted | given),
    }
    weights = dict.fromkeys(("loss", *metrics), counted.sum())
    weights["glanced"] = (counted | given).sum()
    same = sampling.argmax(logits) == labels
    for d in range(labels.shape[1]):
        metrics[f"agreement_{d + 1}"] = mean(same[:, d], counted[:, d])
        weights[f"agreement_{d + 1}"] = counted[:, d].sum()
    return mean(values, counted), {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def along(net: Net, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along``: at every entry. Each is a pass of its own.

    Entries in a source have no meaning.
    """
    text = batch.tokens[:, :-1]
    size = text.shape[1]
    theirs = lm.forward(target, params.target, text).logits
    source: Source = network.read(net, params, text)
    tokens = network.written(text, source, size)

    def one(place: Array) -> Array:
        read = jnp.maximum(place + 1 - source.count, 1)
        return network.logits(net, params, tokens, read, source)[:, :depth]

    every = jnp.moveaxis(jax.lax.map(one, jnp.arange(size)), 0, 1)  # [B,T,K,V]
    drafts = Drafts(batch, theirs, lambda state, d: (every[:, :, d], state), ahead=1)
    yield from drafts.along(depth)


def _check(net: Net, batch: Batch) -> None:
    """Raises UserError for a batch that has no blocks."""
    block, instead = net.shape.block, ", or lower drafter.block"
    _along_text.check_whole(NAME, batch)
    _along_text.check_length(batch, block, f"a block has {block} tokens", instead)


def _rules() -> Rules:
    """T5's names, and the masks': the authors' files are of fairseq.

    D width, A width of an attention's queries, N heads, F width of the feed-forward, R buckets of
    positions, K masks, V vocabulary size.
    """
    rules: list[Rule] = [Rule("mask_embeddings.weight", "masks", "K D")]

    def add(place: str, dims: str, parts: str = "") -> None:
        path = tuple(place.split("."))
        name = t5_config.name_of(path, gated="!gated" not in parts)
        rules.append(Rule(name, place, dims, path[-1] == "kernel", parts))

    add("embed.embedding", "V D")
    for bias, norm, layer, attentions in (
        ("source_bias", "source_norm", "source_layers.{i}", ("attention",)),
        ("bias", "norm", "layers.{j}", ("attention", "cross")),
    ):
        add(f"{bias}.table.embedding", "R N")
        add(f"{norm}.scale", "D")
        for part in attentions:
            add(f"{layer}.{part}_norm.scale", "D")
            for each, dims in {"q": "D A", "k": "D A", "v": "D A", "o": "A D"}.items():
                add(f"{layer}.{part}.{each}.kernel", dims)
        add(f"{layer}.mlp_norm.scale", "D")
        add(f"{layer}.mlp.gate.kernel", "D F", "gated")
        add(f"{layer}.mlp.up.kernel", "D F", "?gated")
        add(f"{layer}.mlp.up.kernel", "D F", "!gated")
        add(f"{layer}.mlp.down.kernel", "F D")
    add("head.kernel", "D V", "head")
    return tuple(rules)


class _Files(Codec):
    tables: ClassVar = {"": _rules()}


CODEC = _Files(NAME)
