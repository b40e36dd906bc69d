"""Corrections of a block's logits by the tokens drafted before, and its confidence.

A block is one pass, so its logits u_k at depth k do not know the draft's tokens. A correction is
cheap and runs from left to right; x_k is the token at depth k, x_0 the pending one, h_k the output
at the place that predicts x_k, r a row of a table, and s a state.

- "markov" (DSpark, 2607.05147, section 3.2): u_k + W2 r(x_(k-1)).
- "gated": u_k + W2 (g * r), g = sigmoid(W_g [h_k ; r]).
- "rnn": [gate ; candidate ; out] = W_j [s ; r ; h_k], s' = sigmoid(gate) s + (1 - sigmoid(gate))
  tanh(candidate), u_k + W2 tanh(out).
- "gru" (Domino, 2605.29707): s' = GRU(s, e(x_(k-1))) with the target's embedding e, without biases,
  u_k + W2 SiLU(W1 [h_k ; s']).
- "selector" (DFlash 2): of the C tokens with the largest u_k, and of no others,
  u_k(v) + <r(x_(k-1)) * W h_k, b(v)>, with a row b(v) for each token.
- "refiner" (xPress, 2608.02438): a_k = W_in [W_h h_k ; W_g g ; r(x_(k-1))], g the mean over all
  places of the block; c_k = a_k + the sum over places j <= k of m_kj * a_j; u_k + W2 (c_k +
  MLP(c_k)). The pending token's place is the first one, with the token before it. xPress resolves
  a block in a fixed number of passes, each after the tokens of the one before; the draft here is
  the one that no further pass changes, which as many passes as it has tokens always reach.

The confidence (DSpark, section 3.3) is sigmoid(w [h_k ; r(x_(k-1))] + b), without r for other
corrections. It is known before x_k is drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models.layers import affine, in_float32, matmul
from specjax.models.transformer_config import TransformerConfig
from specjax.types import Array, ModelParams, Params

CONTEXTS = ("shared", "mixed")
CORRECTIONS = ("none", "markov", "gated", "rnn", "gru", "selector", "refiner")


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The static facts of a block drafter; D is the width of the target too."""

    config: TransformerConfig  # of its layers; ``hidden_size`` is D
    taps: tuple[int, ...]  # layers of the target that it reads
    positions: int  # K, how many tokens it was trained to draft
    vocab: int
    context: str = "shared"  # one of CONTEXTS
    causal: bool = False  # whether a token of the block attends only to those before it
    causal_sliding: bool = False  # whether that holds in the layers with a window
    anchor: bool = False  # whether the pending token's place predicts, and so each place the next
    correction: str = "none"  # one of CORRECTIONS
    rank: int = 0  # R, of the correction
    state: int = 0  # G, the width of the GRU
    plain: int = 0  # how many first tokens the GRU does not correct
    candidates: int = 0  # C, of the selector
    expansion: int = 0  # width of the refiner's MLP, as a multiple of R
    conv: int = 0  # places that a convolution reads; 0: there is none
    conv_group: int = 1  # channels with the same change of their kernels
    confidence: bool = False
    mask_id: int | None = None  # the token at the masked places; None: an embedding of its own
    head: int | None = None  # V_d, of an LM head of its own; None: the target's
    sure_of_token: bool = True  # whether the confidence reads the token before ("markov")

    @property
    def causal_layers(self) -> list[bool]:
        """Of each layer, whether a token of the block attends only to those before it."""
        config = self.config
        windows = map(config.window, range(config.num_layers))
        return [self.causal or (self.causal_sliding and window is not None) for window in windows]

    @property
    def markov(self) -> bool:
        """Whether the correction is one of DSpark's."""
        return self.correction in ("markov", "gated", "rnn")

    @property
    def drafted(self) -> int:
        """V_d: how many tokens it has logits for."""
        return self.vocab if self.head is None else self.head

    @property
    def first(self) -> int:
        """The place of a block that predicts the first token."""
        return 0 if self.anchor else 1

    def fed(self, tokens: int) -> int:
        """The places of a block that drafts so many tokens."""
        return tokens + self.first


class Given(NamedTuple):
    """What a correction reads at one depth; leading dimensions [...] are free."""

    tokens: Array  # i32[...] the token before
    hidden: Array  # [...,D] the output at the place that predicts
    logits: Array  # f[...,V_d] the block's own
    depth: Any  # of the token that is predicted, from 0


class Corrected(NamedTuple):
    """One depth after its correction."""

    logits: Array  # f[...,V_d]
    state: Array  # [...,S]
    confidence: Array | None  # f32[...] before the sigmoid; None: there is none
    factor: Array | None = None  # [...,R] of a selector, for the rows of candidates


def state_width(shape: BlockShape) -> int:
    """S; 0: there is no state."""
    # The refiner's has a row for each place, and one for the mean.
    refiner = (shape.fed(shape.positions) + 1) * shape.rank
    return {"rnn": shape.rank, "gru": shape.state, "refiner": refiner}.get(shape.correction, 0)


def shapes(shape: BlockShape) -> dict[str, Any]:
    """The shapes of the parameters, a nested dict."""
    width, rank, vocab = shape.config.hidden_size, shape.rank, shape.drafted
    own: dict[str, Any] = {}
    if shape.markov:
        own["markov"] = {"table": (shape.vocab, rank), "out": {"kernel": (rank, vocab)}}
    if shape.correction == "gated":
        own["markov"]["gate"] = {"kernel": (width + rank, rank), "bias": (rank,)}
    if shape.correction == "rnn":
        own["markov"]["joint"] = {"kernel": (2 * rank + width, 3 * rank), "bias": (3 * rank,)}
    if shape.correction == "gru":
        own["gru"] = {"w": (width, 3 * shape.state), "u": (shape.state, 3 * shape.state)}
        own["prefix"] = {
            "in": {"kernel": (width + shape.state, rank)},
            "out": {"kernel": (rank, vocab)},
        }
    if shape.correction == "selector":
        tables = {"before": (shape.vocab, rank), "after": (vocab, rank)}
        own["selector"] = {**tables, "hidden": {"kernel": (width, rank)}}
    if shape.correction == "refiner":
        places, inner = shape.fed(shape.positions), rank * shape.expansion
        maps = {"hidden": (width, rank), "mean": (width, rank), "in": (3 * rank, rank)}
        maps |= {"gate": (rank, inner), "up": (rank, inner), "down": (inner, rank)}
        maps["readout"] = (rank, vocab)
        own["refiner"] = {name: {"kernel": size} for name, size in maps.items()}
        own["refiner"] |= {"table": (shape.vocab, rank), "mix": (rank, places, places)}
    if shape.confidence:
        read = width + (rank if shape.markov and shape.sure_of_token else 0)
        own["confidence"] = {"kernel": (read, 1), "bias": (1,)}
    return own


def new(shape: BlockShape, key: Array) -> Params:
    """New parameters: normal with standard deviation 0.02; the last map and biases are zeros.

    So training begins with the block's own logits. As published, the selector has no zeros, and the
    refiner those of its mixture of places.
    """
    leaves, tree = jax.tree.flatten_with_path(shapes(shape), is_leaf=lambda x: isinstance(x, tuple))
    keys, params = jax.random.split(key, max(len(leaves), 1)), []
    for own, (path, size) in zip(keys, leaves, strict=False):
        names = [entry.key for entry in path]
        zero = names[-1] in ("bias", "mix") or "out" in names or "confidence" in names
        drawn = 0.02 * jax.random.normal(own, size, jnp.float32)
        params.append(jnp.zeros_like(drawn) if zero else drawn)
    return jax.tree.unflatten(tree, params)


def sizes_of(params: Params) -> dict[str, int]:
    """The keys of convolutions and of a refiner that parameters show."""
    layer = params.get("layers", {}).get("0", {})
    found, conv = {"conv": 0}, layer.get("attention_conv")
    if conv is not None:
        taps, (width, change) = np.shape(conv["base"])[1], np.shape(conv["project"]["kernel"])
        found = {"conv": taps, "conv_group": width * 2 * taps // change}
    if "refiner" in params:
        rank, inner = np.shape(params["refiner"]["gate"]["kernel"])
        found["expansion"] = inner // rank
    return found


def begin(
    shape: BlockShape, params: ModelParams, state: Array, outputs: Array, token: Array
) -> Array:
    """The state [...,S] before the first token, from zeros.

    ``outputs`` [...,F,D] of all places of the block, ``token`` i32[...] before the pending one.
    """
    if shape.correction != "refiner":
        return state
    own, rows = params.draft["refiner"], _rows(shape, state)
    mean = matmul(outputs.mean(-2), own["mean"]["kernel"]).astype(state.dtype)
    rows = rows.at[..., -1, :].set(mean)
    if not shape.anchor:
        rows = rows.at[..., 0, :].set(_refiner_input(shape, own, mean, token, outputs[..., 0, :]))
    return rows.reshape(state.shape)


def step(
    shape: BlockShape,
    embed: Callable[[ModelParams, Array], Array],
    params: ModelParams,
    state: Array,
    given: Given,
) -> Corrected:
    """One depth. ``state`` [...,S] is that of the depth before, zeros at the first."""
    own, (tokens, hidden, logits, depth) = params.draft, given
    row, sure, factor = None, None, None
    if shape.markov:
        row = own["markov"]["table"][jnp.clip(tokens, 0, shape.vocab - 1)]
        change, state = _markov(shape.correction, own["markov"], state, row, hidden)
        logits = logits + change
    elif shape.correction == "gru":
        state = gru(own["gru"], state, embed(params, tokens).astype(state.dtype))
        read = jnp.concatenate([hidden, state.astype(hidden.dtype)], -1)
        inner = jax.nn.silu(matmul(read, own["prefix"]["in"]["kernel"]))
        change = in_float32(matmul(inner, own["prefix"]["out"]["kernel"]))
        logits = jnp.where(jnp.asarray(depth) < shape.plain, logits, logits + change)
    elif shape.correction == "selector":
        factor = selector_factor(shape, own["selector"], given)
        ids = sampling.top(logits, shape.candidates)[1]
        scores = selector_scores(own["selector"], factor, logits, ids)
        # Other tokens have probability 0.
        logits = jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), ids, scores, -1, inplace=False)
    elif shape.correction == "refiner":
        change, state = _refined(shape, own["refiner"], state, given)
        logits = logits + change
    if shape.confidence:
        read = hidden
        if row is not None and shape.sure_of_token:
            read = jnp.concatenate([hidden, row.astype(hidden.dtype)], -1)
        sure = affine(own["confidence"], read)[..., 0]
        sure = sure.astype(jnp.promote_types(sure.dtype, jnp.float32))
    return Corrected(logits, state, sure, factor)


def _markov(kind: str, own: Params, state: Array, row: Array, hidden: Array) -> tuple[Array, Array]:
    """(what is added to the logits, the state)."""
    row = row.astype(hidden.dtype)
    if kind == "gated":
        row = jax.nn.sigmoid(affine(own["gate"], jnp.concatenate([hidden, row], -1))) * row
    elif kind == "rnn":
        read = jnp.concatenate([state.astype(hidden.dtype), row, hidden], -1)
        gate, candidate, out = jnp.split(affine(own["joint"], read), 3, -1)
        gate = jax.nn.sigmoid(gate)
        state = (gate * state + (1 - gate) * jnp.tanh(candidate)).astype(state.dtype)
        row = jnp.tanh(out)
    return in_float32(matmul(row, own["out"]["kernel"])), state


def selector_factor(shape: BlockShape, own: Params, given: Given) -> Array:
    """[...,R]: what the rows of candidates are multiplied with."""
    row = own["before"][jnp.clip(given.tokens, 0, shape.vocab - 1)]
    read = matmul(given.hidden, own["hidden"]["kernel"])
    return row.astype(read.dtype) * read


def selector_scores(own: Params, factor: Array, logits: Array, ids: Array) -> Array:
    """f[...,C]: the logits of the tokens ``ids`` i32[...,C] with the selector's change."""
    change = jnp.einsum("...r,...cr->...c", factor, own["after"][ids].astype(factor.dtype))
    return jnp.take_along_axis(logits, ids, -1) + in_float32(change).astype(logits.dtype)


def _rows(shape: BlockShape, state: Array) -> Array:
    """The refiner's state [...,S] as [...,F+1,R]: a row for each place, and that of the mean."""
    return state.reshape(*state.shape[:-1], -1, shape.rank)


def _refiner_input(
    shape: BlockShape, own: Params, mean: Array, tokens: Array, hidden: Array
) -> Array:
    """[...,R]: a place's part, before the mixture of places."""
    row = own["table"][jnp.clip(tokens, 0, shape.vocab - 1)]
    parts = matmul(hidden, own["hidden"]["kernel"]), mean, row
    read = jnp.concatenate([part.astype(mean.dtype) for part in parts], -1)
    return matmul(read, own["in"]["kernel"]).astype(mean.dtype)


def _refined(shape: BlockShape, own: Params, state: Array, given: Given) -> tuple[Array, Array]:
    """(what is added to the logits, the state)."""
    rows, place = _rows(shape, state), given.depth + shape.first
    x = _refiner_input(shape, own, rows[..., -1, :], given.tokens, given.hidden)
    rows = rows.at[..., place, :].set(x)
    # The rows of later places are zeros, so the mixture reads none of them.
    x = x + jnp.einsum("rj,...jr->...r", own["mix"][:, place].astype(x.dtype), rows[..., :-1, :])
    inner = jax.nn.silu(matmul(x, own["gate"]["kernel"])) * matmul(x, own["up"]["kernel"])
    x = (x + matmul(inner, own["down"]["kernel"])).astype(given.hidden.dtype)
    return in_float32(matmul(x, own["readout"]["kernel"])), rows.reshape(state.shape)


def gru(own: Params, state: Array, x: Array) -> Array:
    """The state [...,G] after x [...,D]: a GRU without biases, in the order of PyTorch's gates."""
    reset, update, new_x = jnp.split(matmul(x, own["w"]), 3, -1)
    reset_s, update_s, new_s = jnp.split(matmul(state, own["u"]), 3, -1)
    reset, update = jax.nn.sigmoid(reset + reset_s), jax.nn.sigmoid(update + update_s)
    candidate = jnp.tanh(new_x + reset * new_s)
    return (1 - update) * candidate + update * state
