"""Look-ahead embeddings along a text: their loss, and which drafts would have been accepted.

Behind the token at place s, embedding i (from 0) predicts tokens[s+2+i]. With one pass per round
they are behind the token before the pending one, with two behind the pending one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.checks import whole
from specjax.divergences import DIVERGENCES
from specjax.drafters import _foresee
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _compared, _text
from specjax.drafters.self_speculation import _look_ahead
from specjax.drafters.self_speculation._look_ahead import Setup
from specjax.errors import UserError
from specjax.types import Array, Batch, ModelParams, Params, Training

PLACES = 32


def training(setup: Setup, plan: Plan) -> Training:
    """The training part of the drafter."""
    along = Bound(_along, setup)
    one = setup.calls == 1
    foresee = _text.foresee(along, plan) if one else _foresee.of_plan(along, plan)
    ranks = _text.ranks if one else _foresee.ranks_along
    return Training(
        loss=Bound(loss, setup),
        start=Bound(_start, setup),
        foresee=foresee,
        ranks=Bound(ranks, along, setup.depth),
    )


def _start(setup: Setup, target_params: Params, key: Array) -> Params:
    """The embeddings of random tokens."""
    some = jax.random.randint(key, (setup.rows,), 0, setup.target.vocab_size)
    return {"look_ahead": setup.ends.embed(target_params, some).astype(jnp.float32)}


def outputs(setup: Setup, params: ModelParams, batch: Batch, places: Array) -> tuple[Array, Array]:
    """Hidden vectors of the text [B,T,E], and of the embeddings behind ``places`` [B,P,L,E].

    ``places`` i32[B,P] are of the T tokens of the text that are fed. One pass.
    """
    text = batch.tokens[:, :-1]
    (rows, size), (_, count) = text.shape, places.shape
    if batch.segments is None:
        own = tree.chain_layout(rows, size)
    else:
        own = tree.segments(batch.segments[:, :-1])
    fed = jnp.concatenate([text, _look_ahead.ids(setup, rows, count).reshape(rows, -1)], 1)
    # The text sees itself. An embedding sees what its place sees, and those before it there.
    each = jnp.repeat(places, setup.rows, 1)
    before = jnp.take_along_axis(own.visible, each[..., None], 1)
    group, step = jnp.divmod(jnp.arange(count * setup.rows), setup.rows)
    among = (group[:, None] == group) & (step <= step[:, None])
    among = jnp.broadcast_to(among, (rows, *among.shape))
    above = jnp.pad(own.visible, ((0, 0), (0, 0), (0, count * setup.rows)))
    visible = jnp.concatenate([above, jnp.concatenate([before, among], 2)], 1)
    depth = jnp.take_along_axis(own.depth, each, 1) + 1 + step
    layout = tree.Layout(visible, jnp.concatenate([own.depth, depth], 1).astype(jnp.int32))
    cache = setup.target.init_cache(rows, 0)
    hidden = _look_ahead.apply(setup, params, fed, cache, layout).hidden
    return hidden[:, :size], hidden[:, size:].reshape(rows, count, setup.rows, -1)


def loss(
    setup: Setup,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    *,
    ce: float = 1.0,
    teacher: float = 0.0,
    decay: float = 1.0,
    places: int = PLACES,
    divergence: str = "forward_kl",
    pace: float | None = None,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first embedding, and metrics.

    The embeddings follow ``places`` random tokens of each row, or all of them where there are
    fewer. The loss is the sum over the embeddings i of decay^i (ce * cross-entropy with the text +
    teacher * divergence from the target, one of ``divergences.DIVERGENCES``). It is divided by the
    number of labels of the first embedding (with ``Batch.depths``: of all). ``pace`` in [0, 1]
    gives the embeddings the weights of D-PACE instead of ``decay`` (``_compared.Pace``). The
    metrics ``agreement_<i>``, i from 1, are how often an embedding's best token is the target's;
    ``scale`` and ``uniform`` are as in the loss of heads.

    Raises:
        UserError: weights out of range, a batch of fewer than 3 tokens.
    """
    _compared.check(ce, teacher, decay, divergence, pace)
    _check(batch, places)
    pair, size = ModelParams(target_params, params), batch.tokens.shape[1] - 1
    chosen = _places(key, batch.tokens.shape[0], size, places)
    text, hidden = outputs(setup, pair, batch, chosen)
    teachers = jax.lax.stop_gradient(setup.ends.unembed(target_params, text))
    first = jnp.maximum(_number_of_labels(setup, batch, chosen), 1)
    terms = _compared.Terms(first, ce, teacher, DIVERGENCES[divergence], pace)
    before = _compared.begin(terms, chosen.shape, teachers.dtype)
    labels = _Labels(setup, batch, chosen, teachers, terms)
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights = dict.fromkeys(("loss", *metrics), first)
    for depth in range(setup.rows):
        logits = setup.ends.unembed(target_params, hidden[:, :, depth])
        value, sizes, before = _term(labels, depth, logits, before)
        total += decay**depth * value
        metrics[f"agreement_{depth + 1}"] = sizes.pop("agreement")
        weights[f"agreement_{depth + 1}"] = sizes.pop("labels")
        metrics |= {name: metrics[name] + decay**depth * each for name, each in sizes.items()}
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


class _Labels(NamedTuple):
    """What the logits of an embedding are compared with."""

    setup: Setup
    batch: Batch
    places: Array  # i32[B,P]
    teachers: Array  # f[B,T,V] the target's logits, constants
    terms: _compared.Terms


def _term(
    labels: _Labels, depth: int, logits: Array, before: _compared.Pace | None
) -> tuple[Array, dict[str, Array], _compared.Pace | None]:
    """The loss of one embedding from its logits f[B,P,V]; its metrics; the next ``Pace``."""
    setup, batch, places, teachers, terms = labels
    tokens, counted = _label(setup, batch, places, depth)
    own = _text.ahead(teachers, depth + 1, teachers.shape[1])
    own = jnp.take_along_axis(own, places[..., None], 1)
    return _compared.compare(terms, logits, own, tokens, counted, before)


def _label(setup: Setup, batch: Batch, places: Array, number: int) -> tuple[Array, Array]:
    """``_text.label`` of an embedding at the places: i32[B,P], bool[B,P].

    With two passes per round the target's own output is depth 0 of a draft.
    """
    tokens, counted = _text.label(batch, number + 2, number + setup.calls - 1)
    return _at(tokens, places), _at(counted, places)


def _number_of_labels(setup: Setup, batch: Batch, places: Array) -> Array:
    """i32[]: as ``_text.number_of_labels``, of the embeddings at the places."""
    every = range(1 if batch.depths is None else setup.rows)
    return functools.reduce(
        jnp.add, (_label(setup, batch, places, number)[1].sum() for number in every)
    )


def _at(values: Array, places: Array) -> Array:
    """values [B,T] at ``places`` i32[B,P]."""
    return jnp.take_along_axis(values, places, 1)


def _places(key: Array, rows: int, size: int, most: int) -> Array:
    """i32[B,P]: different places of each row, at random."""
    order = jax.vmap(lambda own: jax.random.permutation(own, size))(jax.random.split(key, rows))
    return order[:, : min(most, size)].astype(jnp.int32)


def _check(batch: Batch, places: int) -> None:
    whole("loss.places", places, 1)
    if batch.tokens.shape[1] < 3:
        raise UserError(
            "look-ahead embeddings predict two tokens ahead; raise train.length to 2 or more"
        )


def _along(setup: Setup, params: ModelParams, batch: Batch, depth: int) -> _text.Texts:
    """For each depth the labels, the draft's logits, and the target's, at every place of the text.

    With one pass per round an entry belongs to the token before the pending one, with two to the
    pending token.
    """
    size = batch.tokens.shape[1] - 1
    places = jnp.broadcast_to(jnp.arange(size), (batch.tokens.shape[0], size))
    text, hidden = outputs(setup, params, batch, places)
    unembed = Bound(setup.ends.unembed, params.target)
    own, more = unembed(text), 2 - setup.calls
    for d in range(depth):
        # With two passes, depth 0 is the target's own output.
        behind = d - (setup.calls == 2)
        logits = own if behind < 0 else unembed(hidden[:, :, behind])
        yield _text.label(batch, d + 1 + more)[0], logits, _text.ahead(own, d + more, size)
