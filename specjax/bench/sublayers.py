"""What a draft without some sublayers costs, and how often its tokens are accepted: for a search.

The acceptance is measured on text that the target wrote, by one pass of the target over the text
(once) and one of the draft for each set. A sublayer is left out by zeros in its last map, so all
sets share one compiled program; the pass takes as long for every set, and the cost of a set is a
share of the weights instead of a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, theory
from specjax.drafters.self_speculation import _skip_text
from specjax.drafters.self_speculation._skip_sets import Skips
from specjax.errors import UserError
from specjax.types import LM, Params, Sublayers

# The last map of a sublayer: (module, map).
LAST = {"attention": "o", "mlp": "down"}


class Shares(NamedTuple):
    """The share of a decoding step's weights that each sublayer reads; with ``rest`` they sum to 1.

    At batch 1 and for short texts a step takes as long as its weights take to be read.
    """

    attention: np.ndarray  # f64[L]
    mlp: np.ndarray  # f64[L]
    rest: float  # the LM head

    def cost(self, skips: Skips) -> float:
        """c: the time of a draft step over that of a target step."""
        left = self.rest + self.attention.sum() + self.mlp.sum()
        for each, numbers in zip((self.attention, self.mlp), skips, strict=True):
            left -= each[[*numbers]].sum()
        return float(left)


def shares(params: Mapping[str, Any], active: float = 1.0) -> Shares:
    """The shares of a decoder's parameters. ``active``: the share of its experts that a token uses.

    Raises UserError for parameters of another form.
    """
    layers = _layers(params)
    attention, mlp = (
        np.array([_size(layer[kind]) for layer in layers], np.float64) for kind in LAST
    )
    for index, layer in enumerate(layers):
        if "router" in layer["mlp"]:
            mlp[index] *= active
    head = _size(params.get("head", params["embed"]))
    total = attention.sum() + mlp.sum() + head
    return Shares(attention / total, mlp / total, float(head / total))


def _layers(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameters of the layers in order. Raises UserError."""
    try:
        layers = [layer for _, layer in sorted(params["layers"].items(), key=lambda x: int(x[0]))]
        for layer in layers:
            for kind, last in LAST.items():
                layer[kind][last]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            "the target's parameters are not those of a decoder of specjax.models; give such a "
            "target"
        ) from None
    return layers


def _size(part: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(part))


def without(params: Any, attention: jax.Array, mlp: jax.Array) -> Any:
    """The parameters with zeros in the last map of the sublayers whose entry f[L] is 0, not 1."""
    layers = {}
    for index, layer in params["layers"].items():
        changed = dict(layer)
        for kind, keep in (("attention", attention), ("mlp", mlp)):
            last, own = LAST[kind], keep[int(index)]
            scaled = jax.tree.map(lambda x: x * own.astype(x.dtype), changed[kind][last])  # noqa: B023
            changed[kind] = {**changed[kind], last: scaled}
        layers[index] = changed
    return {**params, "layers": layers}


class Texts(NamedTuple):
    """Rows of text that the target wrote."""

    tokens: np.ndarray  # i32[B,T] prompt and output, padded with 0
    counted: np.ndarray  # bool[B,T] places after which the target wrote a token


def texts(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], width: int) -> Texts:
    """One row per conversation, of its last ``width`` tokens. Raises UserError."""
    tokens = np.zeros((len(prompts), width), np.int32)
    counted = np.zeros(tokens.shape, bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = [*prompt, *output][-width:]
        tokens[row, : len(ids)] = ids
        first = max(len(ids) - len(output) - 1, 0)
        counted[row, first : len(ids) - 1] = True
    if not counted.any():
        raise UserError("the texts have no token that follows another one; give longer texts")
    return Texts(tokens, counted)


class Acceptance:
    """The acceptance rate of sets on texts, alpha of the first draft token.

    At temperature 0 the share of places at which draft and target prefer the same token; otherwise
    the mean overlap of their probabilities (``theory.acceptance_rate``). Later tokens of a draft
    read the draft's own keys and values of the tokens before them, which this leaves out.
    """

    def __init__(self, target: LM, params: Params, rows: Texts, temperature: float):
        _layers(params)
        assert target.layers is not None
        self._params, self._rows, layers = params, rows, tuple(range(target.layers))
        every = Sublayers(layers, layers)
        settings = sampling.make_sampling(1, temperature)

        def read(params: Any, tokens: jax.Array) -> tuple[Any, Any]:
            out, block = target.apply(params, tokens[None], target.init_cache(1, 0))
            return block, sampling.to_probs(out.logits, settings)[0]

        def score(params: Any, row: Any, attention: jax.Array, mlp: jax.Array) -> jax.Array:
            tokens, counted, block, probs = row
            own = without(params, attention, mlp)
            out = _skip_text.draft(target, every, own, tokens[None], block)
            draft = sampling.to_probs(out.logits, settings)[0]
            # In greedy rows both are one-hot.
            return jnp.where(counted, jnp.minimum(probs, draft).sum(-1), 0).sum()

        def total(params: Any, rows: Any, attention: jax.Array, mlp: jax.Array) -> jax.Array:
            return jax.lax.map(lambda row: score(params, row, attention, mlp), rows).sum()

        tokens, counted = map(jnp.asarray, rows)
        prepare = jax.jit(lambda params, rows: jax.lax.map(functools.partial(read, params), rows))
        block, probs = prepare(params, tokens)
        self._read, self._total = (tokens, counted, block, probs), jax.jit(total)
        self._layers = target.layers

    def __call__(self, skips: Skips) -> float:
        """alpha in [0, 1]."""
        masks = np.ones((2, self._layers), np.float32)
        masks[0, [*skips.attention]] = 0
        masks[1, [*skips.mlp]] = 0
        value = self._total(self._params, self._read, *jnp.asarray(masks))
        return min(float(value) / int(self._rows.counted.sum()), 1.0)


def predicted(
    alpha: float, cost: float, longest: int, verify: theory.Verify | None = None
) -> tuple[float, int]:
    """(speed-up, gamma): the best number of draft tokens from 1 to ``longest``, also if it loses.

    ``verify`` as in ``theory.walltime_improvement``.
    """
    values = [
        (theory.walltime_improvement(alpha, gamma, cost, verify), -gamma)
        for gamma in range(1, longest + 1)
    ]
    best, gamma = max(values)
    return best, -gamma
