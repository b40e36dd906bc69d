"""Language models as pure functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from specjax.errors import UserError

Array = jax.Array
Params = Any  # a pytree of arrays; for models a plain nested dict


class Cache(Protocol):
    """What a model remembers between blocks: any pytree with these two members."""

    @property
    def length(self) -> Array: ...  # i32[B] tokens committed, per row

    def replace(self, **changes: Any) -> Any: ...


class Output(NamedTuple):
    """The result of one forward pass. The compiler removes the parts that are not used."""

    logits: Array  # f32[B,T,V]
    hidden: Array  # [B,T,E] the vector that the LM head multiplies
    taps: tuple[Array, ...] = ()  # [B,T,E] each: hidden states after the requested layers


class Sublayers(NamedTuple):
    """A part of a decoder: the layers whose attention and whose feed-forward part are computed.

    A sublayer that is left out passes its input on. Embeddings, last norm and head belong to every
    part.
    """

    attention: tuple[int, ...]  # ascending
    mlp: tuple[int, ...]  # ascending


class LowerLayers(struct.PyTreeNode):
    """What the first layers of a model have computed for the first P tokens of a block."""

    hidden: Array  # [B,P,E] the output of the last of these layers
    block: Any  # arrays [B,P,...]: the block of ``LM.part`` with these layers
    count: int = struct.field(pytree_node=False)  # how many layers, from 1 to all


class Encoder(NamedTuple):
    """How a model reads a source text before it writes: the encoder of an encoder-decoder model.

    The text of such a model is the source, ``start``, and what it writes: a prompt is a source and
    the start token (and perhaps a beginning of the output), and drafters see the whole text. No
    source contains the start token, so the first one in a text ends its source. Every token of the
    source counts in lengths and in positions: ``cache.length == length - 1``, as for any model.
    """

    start: int
    # (params, tokens i32[B,L], count i32[B], cache) -> (Output, cache): reads the first count[b]
    # tokens, a source, into an empty cache, whose length is then ``count``. ``Output.hidden`` is
    # the encoder's output; logits and taps are empty.
    read: Callable[..., tuple[Output, Any]]
    # The model's ``T5Config``, for drafters that begin with its encoder. None: it is no T5 model.
    config: Any = None


class LM(NamedTuple):
    """A language model as pure functions: a target, or the inner model of a drafter.

    ``init_cache(batch, slots)`` gives an empty cache; ``slots`` may be 0. ``apply(params, tokens
    i32[B,T], cache, layout=None, block=None) -> (Output, block)`` scores T tokens after the
    committed text and changes nothing. It returns what the model computed for them (keys and
    values), the *block*: a pytree of arrays [B,T,...]. ``layout`` is a ``tree.Layout`` (None: a
    chain). The argument ``block`` has the tokens of the same block that earlier calls were fed, so
    a drafter can grow a tree level by level (``tree.join``, ``tree.put``). ``commit(cache, block,
    count i32[B], path i32[B,M] | None) -> cache`` appends the tokens at ``path[:count]`` of the
    block (None: 0, 1, 2, ...) to the committed text.

    ``embed(params, tokens[...]) -> [...,E]`` and ``unembed(params, hidden[...,E]) -> f32[...,V]``
    are the first and the last map of the model. Heads that share them, or start as copies of
    them, need both.
    """

    init_cache: Callable[[int, int], Any]
    apply: Callable[..., tuple[Output, Any]]
    commit: Callable[..., Any]
    vocab_size: int
    max_positions: int | None = None  # None: unbounded
    vocabulary: str | None = None  # fingerprint of the tokenizer's vocabulary; None: not available
    name: str = "lm"
    width: int | None = None  # E
    embed: Callable[[Params, Array], Array] | None = None
    unembed: Callable[[Params, Array], Array] | None = None
    layers: int | None = None  # how many layers can be tapped, numbered from 0
    # (layer numbers) -> ``apply`` with these ``Output.taps``; equal numbers give the same function.
    # None: the model has no hidden states to tap.
    tapping: Callable[[tuple[int, ...]], Callable[..., tuple[Output, Any]]] | None = None
    # The smallest sliding window of a layer; None: all layers read the whole text.
    window: int | None = None
    # The model of these sublayers: it has the parameters and reads the cache of the whole model,
    # taps have the numbers of its layers, and blocks have the layers ``Sublayers.attention`` alone;
    # they are not committed. Equal arguments give the same functions. None: it has no parts.
    part: Callable[[Sublayers], LM] | None = None
    # (params, tokens i32[B,T], cache) -> for each layer the ``cache.Queries`` of T tokens after the
    # committed text. None: it has no queries.
    queries: Callable[..., tuple[Any, ...]] | None = None
    # (params, output of a layer [...,E]) -> [...,E]: what the LM head would multiply if this layer
    # were the last one. None: the model has no such norm.
    last_norm: Callable[[Params, Array], Array] | None = None
    # ``apply`` with more tokens than the vocabulary: its first argument is (params, rows [L,E]),
    # and the ids from ``vocab_size`` on have these rows as embeddings. Equal models have the same
    # function. None: the model takes no embeddings.
    extended: Callable[..., tuple[Output, Any]] | None = None
    # (layer numbers) -> ``apply`` that goes on from what the first layers have computed: its first
    # argument is (params, ``LowerLayers``), and it takes no ``block``. The first layers are
    # computed for the other tokens alone. The taps are those of ``tapping``, or the model's own for
    # no numbers. None: it cannot go on from a layer.
    above: Callable[[tuple[int, ...]], Callable[..., tuple[Output, Any]]] | None = None
    # Its ``TransformerConfig``, for drafters that have further layers of its kind. None: it is no
    # decoder of ``specjax.models``.
    decoder: Any = None
    # Of a model that reads its prompt with an encoder. None: it continues the prompt.
    encoder: Encoder | None = None
    # ``models.token_bytes.TokenBytes``: the bytes of each token, for pairs with two vocabularies.
    # None: not available.
    token_bytes: Any = None

    def prompt(self, ids: Sequence[int], most: int | None = None) -> list[int]:
        """The prompt of a text: of an encoder-decoder model the source and its start token.

        ``most``: how many tokens the prompt may have, the first ones of the text; None: any number.
        """
        if self.encoder is None or self.encoder.start in (kept := list(ids[:most])):
            return list(ids[:most])
        # Of a source that is too long, the last token is dropped.
        return [*kept[: None if most is None else most - 1], self.encoder.start]

    def continued(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt that the output continues; with an encoder those after the start
        token, a given beginning of the output."""
        ids = list(prompt)
        if self.encoder is None:
            return ids
        return ids[ids.index(self.encoder.start) + 1 :] if self.encoder.start in ids else []

    def with_taps(self, layers: tuple[int, ...]) -> LM:
        """The model with the output hidden states of ``layers`` in ``Output.taps``.

        Raises UserError if it has none, or not these.
        """
        if self.tapping is None:
            raise UserError(
                f"hidden states of layers {list(layers)} of {self.name} are needed, and it gives "
                "none; take a model with hidden states"
            )
        # ``extended`` has the taps of this model, and not these.
        return self._replace(apply=self.tapping(layers), extended=None)

    def with_part(self, sublayers: Sublayers) -> LM:
        """The model of these sublayers (``part``).

        Raises UserError if it has no parts, or not these.
        """
        if self.part is None:
            raise UserError(
                f"a draft with a part of the layers of {self.name} is asked for, and it does not "
                "give its layers; take a decoder of specjax.models"
            )
        return self.part(sublayers)

    def with_lower(self, layers: tuple[int, ...] = ()) -> LM:
        """The model that goes on from ``LowerLayers`` (``above``), with these taps.

        Raises UserError if it cannot.
        """
        if self.above is None:
            raise UserError(
                f"a pass that goes on from the first layers of {self.name} is asked for, and it "
                "cannot begin above a layer; take a decoder of specjax.models"
            )
        return self._replace(apply=self.above(layers))

    def changed(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> LM:
        """The model with ``change(apply)`` in the place of each function that is an ``apply``.

        Its parts are not changed.
        """

        def each(make: Callable | None) -> Callable | None:
            # Equal numbers give the same function.
            return make and functools.cache(lambda layers: change(make(layers)))

        return self._replace(
            apply=change(self.apply),
            tapping=each(self.tapping),
            extended=self.extended and change(self.extended),
            above=each(self.above),
        )

    def no_output(self, batch: int) -> Output:
        """The output for no tokens."""
        return Output(
            jnp.zeros((batch, 0, self.vocab_size)), jnp.zeros((batch, 0, self.width or 0))
        )


class ModelParams(NamedTuple):
    """Parameters of the pair. A drafter gets both: heads and early exits read the target's."""

    target: Params
    draft: Params = {}  # noqa: RUF012  (an empty pytree; never mutated)
