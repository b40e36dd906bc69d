"""Drafts along a text: what each depth of them predicts, and where labels count.

A place s of a text of T + 1 tokens is that of a feature of the target, from which tokens[s + 1] was
drawn; the draft there has this token pending and predicts tokens[s + 2 + d] at depth d, from 0.
Drafters that read tokens predict one token ahead of a place (``Drafts.ahead`` 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.bound import Bound
from specjax.drafters import _foresee
from specjax.drafters._foresee import Along, Texts
from specjax.drafters.growth import Plan
from specjax.drafters.heads._vocabulary import spread
from specjax.errors import UserError
from specjax.models import lm
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, Output, Params, Training

# Places at which drafts are computed at once, in training and in a piece of a forecast.
PLACES = 32


class Drafts(NamedTuple):
    """Drafts at P places of each row of a text, after the text's own tokens."""

    batch: Batch
    teacher: Array  # f[B,T,V] the target's logits
    # (state, depth) -> (logits f[B,P,V_d], state)
    step: Callable[[Any, Any], tuple[Array, Any]]
    state: Any = None  # before the first depth
    places: tuple[Array | None, ...] | None = None  # i32[B,P] of each depth; None: all T
    ids: np.ndarray | None = None  # i32[V_d] the token of each logit; None: all tokens
    ahead: int = 2  # how many tokens after its place depth 0 predicts
    first: int = 0  # the depth in a draft of depth 0 here
    # (the target's hidden states f[B,T,D], their logits), where few of these are read: ``few``.
    few: tuple[Array, Callable[[Array], Array]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, P), of the first depth."""
        places = self.places_of(0)
        return self.teacher.shape[:2] if places is None else places.shape

    def places_of(self, depth: Any) -> Array | None:
        """i32[B,P]: the places of a depth; None: all T."""
        return None if self.places is None else self.places[depth]

    def labels(self, depth: Any) -> tuple[Array, Array]:
        """``label`` at the places."""
        tokens, counted = label(self.batch, depth + self.ahead, depth + self.first)
        return self.at(tokens, depth), self.at(counted, depth)

    def teachers(self, depth: Any) -> Array:
        """f[B,P,V]: the target's logits of the tokens that a depth predicts, as constants."""
        values, logits = self.few or (self.teacher, lambda same: same)
        later = self.later(depth + self.ahead - 1, depth, values)
        return jax.lax.stop_gradient(logits(later))

    def at(self, values: Array, depth: Any) -> Array:
        """[B,P,...]: values [B,T,...] at the places of a depth."""
        places = self.places_of(depth)
        return values if places is None else at(values, places)

    def later(self, by: Any, depth: Any, values: Array) -> Array:
        """[B,P,...]: values [B,T,...] at ``by`` tokens after the places of a depth.

        Beyond the end the last entry, where no label counts.
        """
        size, places = values.shape[1], self.places_of(depth)
        if places is None:
            return ahead(values, by, size)
        return at(values, jnp.minimum(places + by, size - 1))

    def number_of_labels(self, depths: int) -> Array:
        """i32[]: what a loss of so many depths divides each of them by.

        The number of labels of the first depth. With ``Batch.depths`` the depths have different
        labels, and the number is that of all together.
        """
        every = range(1 if self.batch.depths is None else depths)
        return functools.reduce(jnp.add, (self.labels(d)[1].sum() for d in every))

    def along(self, depth: int) -> Texts:
        """What an ``Along`` gives; ``places`` are all."""
        state, vocab_size = self.state, self.teacher.shape[-1]
        for d in range(depth):
            logits, state = self.step(state, d)
            logits = spread(self.ids, logits, vocab_size)
            yield self.labels(d)[0], logits, self.teachers(d)


def training(
    loss: Callable, start: Callable, along: Along, plan: Plan, facts: Any, **more: Any
) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes.

    ``facts`` as in ``Training``; ``more`` are arguments of ``_foresee.forecasts``.
    """
    forecasts = _foresee.forecasts(along, plan, **more)
    return Training(loss=loss, start=start, **forecasts, facts=facts)


def segments_of(batch: Batch) -> Array | None:
    """i32[B,T]: the documents of all tokens but the last; None: one in each row."""
    return None if batch.segments is None else batch.segments[:, :-1]


def layout_of(batch: Batch) -> Layout:
    """How all tokens but the last attend to each other inside their documents."""
    rows, size = batch.tokens.shape
    segments = segments_of(batch)
    return tree.chain_layout(rows, size - 1) if segments is None else tree.segments(segments)


def among_first(count: int, batch: Batch) -> Array:
    """bool[B,T]: the first ``count`` places of each document."""
    return layout_of(batch).depth < count


def layout_behind(text: Layout, places: Array, steps: Array, among: Array) -> Layout:
    """The layout of T entries of a text, and R entries behind the entries ``places`` i32[B,R].

    An entry behind a place sees what this sees, and of the others those of ``among`` bool[R,R].
    It is ``steps`` i32[R] positions after its place.
    """
    before = jnp.take_along_axis(text.visible, places[..., None], 1)
    among = jnp.broadcast_to(among, (len(places), *among.shape))
    depth = jnp.take_along_axis(text.depth, places, 1) + steps
    return Layout(
        jnp.concatenate([before, among], 2),
        jnp.concatenate([text.depth, depth], 1).astype(jnp.int32),
    )


def output(target: LM, params: Params, batch: Batch) -> Output:
    """The target's output for all tokens but the last; from ``Batch.features`` if it has them.

    ``params`` are the target's.
    """
    if batch.features is None:
        return lm.forward(target, params, batch.tokens[:, :-1], segments_of(batch))
    assert target.embed is not None and target.unembed is not None
    # Features may be stored in fewer bits than the model computes in.
    dtype = jax.eval_shape(target.embed, params, batch.tokens).dtype
    stored = jax.tree.map(lambda x: x.astype(dtype), batch.features)
    return Output(target.unembed(params, stored.hidden), stored.hidden, tuple(stored.taps))


def few(
    target: LM, params: Params, out: Output, places: Array | None, depths: int
) -> tuple[Array, Callable[[Array], Array]] | None:
    """``Drafts.few`` if drafts at ``places`` read fewer logits than the text has; otherwise None.

    ``out.logits`` are not computed then. ``params`` are the target's.
    """
    if places is None or places.shape[1] * depths >= out.hidden.shape[1]:
        return None
    return None if target.unembed is None else (out.hidden, Bound(target.unembed, params))


def ahead(x: Array, by: Any, size: int) -> Array:
    """x[:, s + by] for s below ``size``; beyond the end the last entry, where no label counts."""
    return jnp.take(x, jnp.minimum(jnp.arange(size) + by, x.shape[1] - 1), axis=1)


def at(values: Array, places: Array) -> Array:
    """values [B,T,...] at ``places`` i32[B,P]: [B,P,...]."""
    return jnp.take_along_axis(values, places.reshape(*places.shape, *(1,) * (values.ndim - 2)), 1)


def every_place(rows: int, size: int) -> Array:
    """i32[B,T]: all places."""
    return jnp.broadcast_to(jnp.arange(size), (rows, size))


def random_places(key: Array, batch: Batch, ahead: int, depths: int, most: int) -> Array:
    """i32[B,P]: different places of each row at random, all where there are fewer than ``most``.

    First those with a label (``labelled``), then the others.
    """
    counted = labelled(batch, ahead, depths)
    turn = jax.random.uniform(key, counted.shape) + ~counted
    return jnp.argsort(turn, 1)[:, :most].astype(jnp.int32)


def labelled(batch: Batch, ahead: int, depths: int) -> Array:
    """bool[B,T]: places at which a draft of so many depths has a label of depth 0.

    ``ahead`` as in ``Drafts``. With ``Batch.depths``: a label of any depth.
    """
    counted = [label(batch, ahead + d, d)[1] for d in range(1 if batch.depths is None else depths)]
    return functools.reduce(jnp.logical_or, counted)


def in_pieces(compute: Callable[[Array], Array], size: int) -> Array:
    """[B,T,...]: what ``compute`` gives for all places, ``PLACES`` of them i32[P] at a time."""
    pieces = -(-size // PLACES)
    places = jnp.minimum(jnp.arange(pieces * PLACES), size - 1).reshape(pieces, PLACES)
    found = jnp.moveaxis(jax.lax.map(compute, places), 0, 1)  # [B,pieces,P,...]
    return found.reshape(len(found), pieces * PLACES, *found.shape[3:])[:, :size]


def of_output(target: LM | None, batch: Batch) -> Batch:
    """The batch with ``Batch.output``, if features are read of a target with an encoder.

    At the places of a source the features are the encoder's. The first draft is made from the last
    of them, after which the start token is pending; no draft begins from the others.
    """
    if target is None or target.encoder is None:
        return batch
    start = jnp.argmax(batch.tokens == target.encoder.start, -1)
    return batch.replace(output=start.astype(jnp.int32))


def check_length(batch: Batch, least: int, why: str, instead: str = "") -> None:
    """Raises UserError for texts of fewer than ``least`` tokens without their first one.

    The message begins with ``why``; ``instead`` is what else than a longer text would be right.
    """
    if batch.tokens.shape[1] <= least:
        raise UserError(f"{why}; raise train.length to {least} or more{instead}")


def check_whole(name: str, batch: Batch) -> None:
    """Raises UserError for labels of single depths, which the drafter ``name`` cannot learn."""
    if batch.depths is not None:
        raise UserError(
            f"{name} learns whole blocks, not the depths of single tokens; give "
            "online.positions='emitted'"
        )


def label(batch: Batch, by: Any, depth: Any = None) -> tuple[Array, Array]:
    """The label i32[B,T] of each feature, ``by`` tokens ahead, and whether it counts bool[B,T].

    It counts inside the text and the document of the feature; with ``Batch.depths`` only where it
    is for this ``depth`` of a draft (None: whatever its depth); with ``Batch.output`` only where a
    draft can begin.
    """
    size = batch.tokens.shape[1] - 1
    counted = jnp.broadcast_to(jnp.arange(size) + by <= size, (batch.tokens.shape[0], size))
    if batch.labelled is not None:
        counted &= ahead(batch.labelled, by, size)
    if batch.segments is not None:
        counted &= ahead(batch.segments, by, size) == batch.segments[:, :-1]
    if batch.depths is not None and depth is not None:
        counted &= ahead(batch.depths, by, size) == depth
    if batch.output is not None:
        # The feature at s has the pending token s + 1.
        counted &= jnp.arange(size) + 1 >= batch.output[:, None]
    return ahead(batch.tokens, by, size), counted
