"""Early exit: the first layers of the target and a head draft. L1 with the rule "chain".

LayerSkip, Elhoushi et al. 2024 (2404.16710), section 4.3, for drafts with the target's own head;
Kangaroo, Liu et al. 2024 (2404.18911), section 3, for a trained adapter between the exit and the
head. The keys and values of the first layers are the target's own for all committed tokens, so
without an adapter the drafter has no cache and no parameters. Draft probabilities depend on the
text alone. Kangaroo's second exit, where the draft is unsure, is ``control="threshold:0.6"``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare, divergences, sampling, tree
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import _foresee, files, growth
from specjax.drafters.files import Given, decoder_layers
from specjax.drafters.files.codec import Codec, linear, scale
from specjax.drafters.growth import Plan
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss, _prefix
from specjax.drafters.heads._depth_loss import LossKeys
from specjax.drafters.self_speculation import _exit_adapter, _own_cache
from specjax.drafters.self_speculation._exit_adapter import (
    LAYER,
    LINEAR,
    NONE,
    NORM,
    Adapter,
    Shape,
)
from specjax.drafters.shared_keys import StoredKeys
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.hf_config import value_of
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.types import (
    CHAIN,
    LM,
    Array,
    Batch,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Sublayers,
    Training,
)

# An early exit and its adapter, from the keys and from files.


def read(target: LM, asked: Any) -> tuple[Adapter, Given]:
    """The exit, with its parameters and its files; ``asked`` are the keys of ``early_exit``.

    Raises UserError.
    """
    given = Given(None, None, {})  # pyright: ignore[reportArgumentType]
    stored = asked.model or asked.params is not None or asked.dtype is not None
    if stored or asked.adapter not in ("", NONE) or asked.head == "own":
        given, asked = files.read("early_exit", target, asked)
    kind, own_head = asked.adapter or NONE, asked.head == "own"
    if kind != LAYER:
        asked.refuse(("head_dim",), f"on the adapter {kind!r}")
    layer = _exit_layer(target, asked.exit_layer)
    config = _config(target, asked, given, kind)
    shape = Shape(kind, config, target.vocab_size if own_head else None)
    if given.params is not None:
        _check_leaves(shape, given.params)
    part = target.with_part(Sublayers(*[tuple(range(layer))] * 2))
    if kind != NONE:
        part = part.with_taps((layer - 1,))
    if not shape.trained:
        given = given._replace(params=given.params or {})
    return Adapter(shape, layer, part, given.ends), given


def kind_of(params: Params) -> str:
    """The kind of adapter that has these parameters."""
    marks = {LAYER: "attention", LINEAR: "linear", NORM: "norm"}
    return next((kind for kind, module in marks.items() if module in params), NONE)


def _check_leaves(shape: Shape, params: Params) -> None:
    """Raises UserError unless ``params`` have exactly the leaves of an adapter of this shape."""
    wanted = jax.tree.map(jnp.shape, _exit_adapter.MODULE.leaves(shape))
    if shape.trained and wanted != jax.tree.map(jnp.shape, params):
        raise UserError(
            f"the parameters are not those of an adapter {shape.kind!r} of early_exit; give the "
            "parameters of one"
        )


def _exit_layer(target: LM, asked: int) -> int:
    """The number of layers that are computed. Raises UserError."""
    if target.layers is None or target.inside.part is None:
        target.with_part(Sublayers((), ()))
        raise UserError(f"{target.name} does not state how many layers it has")
    layer = asked or max(target.layers // 4, 1)
    if not 1 <= layer <= target.layers:
        raise UserError(
            f"exit_layer is {layer}, and {target.name} has {target.layers} layers; give 1 to "
            f"{target.layers}"
        )
    return layer


def _config(target: LM, asked: Any, given: Given, kind: str) -> TransformerConfig:
    """The shape of the adapter's norms and attention: of the files, or of a new one."""
    new = _prefix.new(target.width or 2, target, asked.head_dim)
    if kind == NONE or given.params is None:
        return new
    if kind != LAYER:
        eps = value_of(given.config, "rms_norm_eps", float, decoder_layers.EPS)
        return dataclasses.replace(new, norm_eps=eps)
    stored, attention = given.config or {"head_dim": new.head_dim}, given.params["attention"]
    return _prefix.stored_layer(
        "the adapter", attention, stored, asked.head_dim, new.hidden_size, inner=0
    )


REFERENCE = ("elhoushi2024layerskip", "liu2024kangaroo")

GAMMA = 5


class Keys(StoredKeys):
    """The keys of ``early_exit``."""

    exit_layer: int = key(
        0,
        "how many of its layers are computed, from 1 to all; 0: as in the files, else a quarter "
        "of them (LayerSkip's 8 of 32 for Llama 2 7B)",
        least=0,
        fact="exit_layer",
    )
    adapter: str = key(
        "",
        'what is between the exit and the head: "none", "norm", "linear", or "layer" '
        '(Kangaroo\'s); all but the first are trained. "": as in the files or params, else '
        '"none".',
        choices=("", *_exit_adapter.KINDS),
        size=kind_of,
    )
    head: str = key(
        "",
        '"shared", the target\'s, or "own", a trained copy of it. "": as in the files or '
        'params, else "shared".',
        choices=("", *_exit_adapter.HEADS),
        size=lambda params: "own" if "head" in params else "shared",
    )
    head_dim: int = key(0, "width of an attention head of a new layer; 0: the target's", least=0)
    reuse: bool = key(
        False,
        "whether the verification of a chain goes on from the layers that drafting computed "
        "(LayerSkip's cache): only its last token passes them again. Apart from rounding, texts "
        "are the same.",
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the first ``exit_layer`` layers of the target.

    Raises:
        UserError: an exit layer that the target does not have, keys without effect, files of
            another target, a shape that does not fit, reuse for a tree.
    """
    exit_, given = read(target, keys)
    chain, accuracy = shapes.chain(GAMMA), given.config.get("accuracy")
    method = Method("early_exit", chain, "iid", target.vocab_size, accuracy=accuracy)
    plan = growth.read(method, keys)
    if keys.reuse:
        _check_reuse(target, plan)
    inner = _exit_adapter.inner(exit_, plan.growth.depth, keys.reuse)
    kind = exit_.shape.kind
    drafter = _own_cache.build(
        "early_exit",
        inner,
        plan,
        given.init_params("early_exit"),
        gaps=kind != LAYER,
        probs=Bound(probs, exit_),
        training=_training(target, exit_, plan),
    )
    return drafter._replace(taps=() if kind == NONE else exit_.taps)


def _check_reuse(target: LM, plan: Plan) -> None:
    """Raises UserError unless the target can go on from the layers of such a draft."""
    if plan.growth.siblings != CHAIN:
        raise UserError(
            "reuse is True and the draft is a tree, whose leaves have passed no layer; draft a "
            "chain (gamma), or leave reuse out"
        )
    target.with_lower()


def _training(target: LM, exit_: Adapter, plan: Plan) -> Training:
    """Forecasts, and with parameters how they are trained."""
    whole = exit_.shape.kind == NONE
    target = target if whole else target.with_taps(exit_.taps)
    forecasts = _foresee.of_text(Bound(logits_of, exit_), Bound(both_logits, exit_, target), plan)
    training = Training(**forecasts, facts=exit_.facts, reads_tokens=whole)
    if not exit_.shape.trained:
        return training
    own = Bound(loss, exit_, target, ce=0.0, teacher=1.0)
    return training._replace(loss=own, start=Bound(_exit_adapter.start, exit_, target))


def acceptance_by_layer(
    target: LM,
    params: Params,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
) -> np.ndarray:
    """f64[L,tokens]: the acceptance probability of a draft by the first 1, ..., L layers.

    The output of each layer goes through the last norm and the head, as in a draft without adapter
    (the "logit lens", nostalgebraist 2020); one pass over a text gives all of them.
    It is sum_x min(target(x), exit(x)) at every output token, in order, given the text before it.
    At temperature 0 it is 1 where the exit prefers the target's token, else 0.

    Args:
        target: a decoder of ``specjax.models``.
        params: its parameters.
        prompts, outputs: token ids, row by row; the outputs must be the target's own, with these
            settings.
        settings: arguments of ``sampling.make_sampling``, without penalties, biases and bans.

    Raises:
        UserError: a model without layers or last norm, settings that depend on the text.
    """
    if target.layers is None or target.inside.last_norm is None or target.unembed is None:
        raise UserError(
            f"{target.name} does not give its layers and its last norm; take a decoder of "
            "specjax.models"
        )
    how = sampling.make_sampling(1, **settings)
    if how.maps is not None:
        raise UserError("penalties, biases and bans depend on the text; measure exits without them")
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    room, columns = max(map(len, outputs)), []
    for prompt, output in zip(prompts, outputs, strict=True):
        text = np.zeros((1, width), np.int32)
        text[0, : len(prompt) + len(output)] = [*prompt, *output]
        # The token at t + 1 is predicted at t.
        places = np.minimum(len(prompt) - 1 + np.arange(room), width - 1)
        values = _of_text(target, params, jnp.asarray(text), jnp.asarray(places), how)
        columns.append(np.asarray(values, np.float64)[:, : len(output)])
    return np.concatenate(columns, 1)


@functools.partial(jax.jit, static_argnums=0)
def _of_text(target: Any, params: Any, text: Array, places: Array, how: sampling.Sampling) -> Array:
    """f[L,N]: the overlap of every exit with the target at ``places`` i32[N] of a text i32[1,T].

    ``target`` is an ``LM`` with layers, a last norm and a head.
    """
    unembed, last_norm = target.unembed, target.inside.last_norm
    tapped = target.with_taps(tuple(range(target.layers)))
    out, _ = tapped.apply(params, text, target.init_cache(1, 0))
    probs = sampling.to_probs(unembed(params, out.hidden[:, places]), how)
    taps = jnp.stack([tap[:, places] for tap in out.taps])

    # The logits of one layer at a time.
    def one(x: Array) -> Array:
        exit_probs = sampling.to_probs(unembed(params, last_norm(params, x)), how)
        return jnp.minimum(probs, exit_probs).sum(-1)[0]

    return jax.lax.map(one, taps)


_PARTS = ("attention_norm", "attention.q", "attention.k", "attention.v", "attention.o")
_ATTENTION = {part: decoder_layers.NAMES[part] for part in _PARTS}


class _Files(Codec):
    """An adapter of some of these parts; the names are specjax's."""

    files = ("early_exit.safetensors",)
    tables: ClassVar = {
        "": (
            *decoder_layers.decoder_layer(
                "layers.0.", "", _ATTENTION, parts=dict.fromkeys(_ATTENTION, "layer"), biases={}
            ),
            *linear("linear", "linear", "D D", parts="linear"),
            *scale("norm", "norm", parts="norm"),
            *linear("lm_head", "head", "D V", parts="head"),
        )
    }


def logits(adapter: Adapter, params: ModelParams, tokens: Array, segments: Any = None) -> Array:
    """f[B,T,V]: what the exit predicts after each token of i32[B,T]."""
    out = lm.forward(adapter.part, params.target, tokens, segments)
    return _read(adapter, params, out, segments)


def _read(adapter: Adapter, params: ModelParams, out: Output, segments: Array | None) -> Array:
    """The exit's logits, from the outputs along whole texts."""
    if adapter.shape.kind != LAYER:
        return _exit_adapter.logits(adapter, params, out)[0]
    cache = _exit_adapter.init_cache(adapter, params, len(out.taps[0]), 0)
    layout = None if segments is None else tree.segments(segments)
    return _exit_adapter.logits(adapter, params, out, cache, layout)[0]


def both_logits(
    adapter: Adapter, target: LM, params: ModelParams, batch: Batch
) -> tuple[Array, Array]:
    """f[B,T,V] each: the logits of the exit and of the target, for all tokens but the last.

    ``target`` has the adapter's tap if there is an adapter: then one pass gives both.
    """
    out = _along_text.output(target, params.target, batch)
    if adapter.shape.kind == NONE:
        return logits_of(adapter, params, batch), out.logits
    return _read(adapter, params, out, _along_text.segments_of(batch)), out.logits


def logits_of(adapter: Adapter, params: ModelParams, batch: Batch) -> Array:
    """The first of ``both_logits``."""
    return logits(adapter, params, batch.tokens[:, :-1], _along_text.segments_of(batch))


def probs(adapter: Adapter, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    return _foresee.probs_along(logits(adapter, params, context.tokens), context)


@declare.method(LossKeys)
def loss(
    adapter: Adapter,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Array]]:
    """Loss f32[] per labelled position, and metrics.

    ce * cross-entropy with the text + teacher * divergence from the target's distribution
    (``divergences.DIVERGENCES``; forward KL has the gradient of Kangaroo's cross-entropy with soft
    labels). The target's logits are constants; its hidden states are not, for a caller that
    differentiates ``target_params``.

    Metrics: ``agreement`` and ``alpha``, the acceptance rates at temperature 0 and 1; ``scale`` and
    ``uniform`` as in ``heads._depth_loss``.

    Raises:
        UserError: weights out of range or without effect.
    """
    own, target_logits = both_logits(adapter, target, ModelParams(target_params, params), batch)
    target_logits = jax.lax.stop_gradient(target_logits)
    labels, counted = _along_text.label(batch, 1)
    first = jnp.maximum(counted.sum(), 1)
    value, sizes, _ = _depth_loss.compare(keys, first, own, target_logits, labels, counted)
    alpha = _depth_loss.mean(divergences.overlap(target_logits, own), counted)
    weight = jnp.float32(sizes.pop("labels"))
    return value, {**sizes, "alpha": alpha, "weight": weight}


CODEC = _Files("early_exit")
