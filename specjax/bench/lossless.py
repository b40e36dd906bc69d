"""Checks that real outputs are those of the target alone.

Greedy outputs are compared token by token. Sampled outputs pass two statistical tests of the
output law, which need the target's and the draft's probabilities at every token (``compare``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import logit_maps, sampling
from specjax.bench.proofs import Finding
from specjax.models import lm
from specjax.prompt import pack_prompts
from specjax.theory import statistics
from specjax.types import LM, Context, Drafter, ModelParams

# Numbers in one array of probabilities [B,T,V], of which several exist at a time. Larger batches
# are divided, and so are the places of a text where the model has ``LM.unembed``.
MAX_NUMBERS = 2**22
MOST_TEXTS = 8  # in one call of the models


class Comparison(NamedTuple):
    """One entry per output token, in order, f64[tokens]."""

    above: np.ndarray  # target probability of all tokens that are more probable
    tied: np.ndarray  # target probability of the token and of those with the same probability
    preferred: np.ndarray  # 1 where the draft probability of the token is above the target's
    preferred_mass: np.ndarray  # target probability of all tokens of which that is true
    overlap: np.ndarray  # sum of min(target, draft) over the vocabulary; nan without draft probs


class Texts(NamedTuple):
    """Texts that are scored by the models of a pair."""

    target: LM  # its parameters are ``params.target``
    params: ModelParams
    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]
    settings: dict  # arguments of ``sampling.make_sampling``
    drafter: Drafter | None = None
    width: int = 0  # of the longest text, so that several calls share a program; 0: of these


def compare(texts: Texts) -> Comparison:
    """Compares the probabilities at every output token, given the text before it.

    Without ``Drafter.probs`` the last three fields are 0, 0 and nan.
    """
    draft_probs = None if texts.drafter is None else texts.drafter.probs

    def fields(context: Context) -> np.ndarray:
        return np.stack(_compare(texts.target, draft_probs, texts.params, context), -1)

    return Comparison(*np.concatenate(at_tokens(fields, texts)).T)


def at_tokens(call: Callable[[Context], Any], texts: Texts) -> list[np.ndarray]:
    """Per row f64[tokens,...]: of ``call(context)`` [B,T,...] what belongs to each output token.

    Column t belongs to the token at t + 1.
    """
    pairs = list(zip(texts.prompts, texts.outputs, strict=True))
    width = texts.width or max(len(p) + len(o) for p, o in pairs)
    batch = max(1, min(MOST_TEXTS, MAX_NUMBERS // (width * texts.target.vocab_size)))
    result = []
    for start in range(0, len(pairs), batch):
        some = pairs[start : start + batch]
        rows, begins = [[*p, *o] for p, o in some], [len(p) for p, _ in some]
        values = np.asarray(call(pack(rows, begins, batch, width, texts.settings)), np.float64)
        result += [values[i, len(p) - 1 : len(p) + len(o) - 1] for i, (p, o) in enumerate(some)]
    return result


def pack(
    rows: list[list[int]], begins: list[int], batch: int, width: int, settings: dict
) -> Context:
    """A context of the texts; ``begins`` are the lengths of their prompts."""
    spare = batch - len(rows)
    tokens, lengths = pack_prompts([*rows, *[[0]] * spare], width)
    how = sampling.make_sampling(batch, **settings)
    how = sampling.after_prompt(how, jnp.asarray([*begins, *[1] * spare]))
    return Context(jnp.asarray(np.maximum(tokens, 0)), lengths, how)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(target, draft_probs, params, context):
    """The fields of ``Comparison`` for every token after the first, f32[B,T-1] each."""
    out = lm.forward(target, params.target, context.tokens)
    draft = None if draft_probs is None else draft_probs(params, context)[:, :-1]
    fields = functools.partial(_fields, context.sampling)
    return _before_tokens(target, params, context, out, fields, draft)


def _before_tokens(target, params, context, out, function, more=None):
    """``function`` of the logits f[B,n,V] before n tokens, these tokens i32[B,n], and ``more``.

    For every token after the first; ``out`` is the target's output. Its logits of all places are
    never computed, except with maps, which depend on the whole text.
    """
    tokens, maps = context.tokens, context.sampling.maps
    if target.unembed is None or maps is not None:
        logits = logit_maps.along_text(maps, out.logits, tokens)
        return function(logits[:, :-1], tokens[:, 1:], more)

    def some(parts):
        hidden, *rest = parts
        return function(target.unembed(params.target, hidden), *rest)

    size = max(1, MAX_NUMBERS // (len(tokens) * target.vocab_size))
    parts = out.hidden[:, :-1], tokens[:, 1:], more
    return _by_pieces(some, parts, min(size, tokens.shape[1] - 1))


def _by_pieces(function, parts, size: int):
    """``function`` of arrays [B,T,...], ``size`` places at a time; it returns arrays [B,T]."""
    length = jax.tree.leaves(parts)[0].shape[1]
    whole = length // size
    cut = lambda x: x[:, : whole * size].reshape(x.shape[0], whole, size, *x.shape[2:])  # noqa: E731
    pieces = jax.tree.map(lambda x: cut(x).swapaxes(0, 1), parts)
    done = jax.lax.map(function, pieces)
    done = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], whole * size), done)
    if whole * size == length:
        return done
    rest = function(jax.tree.map(lambda x: x[:, whole * size :], parts))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), done, rest)


def _fields(how, logits, following, draft):
    """The fields, from logits f[B,T,V] before the tokens ``following`` i32[B,T]."""
    probs = sampling.to_probs(logits, how)
    own = jnp.take_along_axis(probs, following[..., None], -1)
    above = jnp.where(probs > own, probs, 0).sum(-1)
    tied = jnp.where(probs == own, probs, 0).sum(-1)
    if draft is None:
        zeros = jnp.zeros_like(above)
        return above, tied, zeros, zeros, zeros + jnp.nan
    higher = draft > probs
    preferred = jnp.take_along_axis(higher, following[..., None], -1)[..., 0]
    preferred_mass = jnp.where(higher, probs, 0).sum(-1)
    overlap = jnp.minimum(probs, draft).sum(-1)
    return above, tied, preferred.astype(jnp.float32), preferred_mass, overlap


CELLS = 20
LEVEL = 1e-4  # the p-value below which a law check fails
MIN_TOKENS = 20 * CELLS  # with fewer the chi-square test is not valid


def greedy_identity(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Finding:
    """Token-by-token equality with plain greedy decoding."""
    same = sum(list(a) == list(b) for a, b in zip(expected, got, strict=True))
    return Finding("greedy-identity", same == len(expected), f"{same}/{len(expected)} prompts")


def law_check(texts: Texts) -> Finding:
    """Tests whether sampled outputs follow the target's law, at any vocabulary size.

    Needs only the outputs. Two statistics of each token given its prefix have a known distribution
    if the output law is the target's:

    - The target probability of all more probable tokens, plus a uniform fraction of the token's own
      probability, is uniform and independent between tokens (Rosenblatt 1952). A chi-square test
      over 20 cells detects tokens that are too frequent or too rare.
    - Whether the draft probability (``Drafter.probs``) of the token is above its target probability
      is a coin flip with a known chance: the target probability of all such tokens. The sum of the
      differences is a martingale, tested as a normal z. Such tokens become more or less frequent
      with wrong residuals, with tokens that are drawn again after a match, and with ``Draft.probs``
      that are not the distributions of the draws.

    Tokens of target probability 0 are also counted; more than one in a thousand fails the check.

    It does not detect noise reused between rounds, nor biases below about 3 / sqrt(tokens). The
    exact tests of the rules are the proof; this check covers the real model.

    ``passed`` is None if there are too few tokens to decide. A bench (``summaries``) has None too
    if the outputs of a lossy rule show no difference.

    Args:
        texts: without ``Drafter.probs`` only the first test is made.
    """
    tokens = compare(texts)
    total = len(tokens.above)
    if total < MIN_TOKENS:
        return Finding("law", None, f"{total} tokens are too few to tell, p = -")
    values = tokens.above + np.random.default_rng(0).random(total) * tokens.tied
    cells = np.clip((values * CELLS).astype(int), 0, CELLS - 1)
    counts = np.bincount(cells, minlength=CELLS)
    p_value = statistics.chi_square(counts, np.full(CELLS, 1 / CELLS))[2]
    chance = tokens.preferred_mass
    variance = (chance * (1 - chance)).sum()
    # Below that the draft probability is hardly ever above the target's: too few to test.
    if variance > 5:
        z = (tokens.preferred - chance).sum() / math.sqrt(variance)
        p_value = min(1.0, 2 * min(p_value, math.erfc(abs(z) / math.sqrt(2))))  # two tests
    impossible = int((tokens.tied == 0).sum())
    passed = p_value > LEVEL and impossible <= total / 1000
    return Finding("law", passed, f"{total} tokens, {impossible} impossible, p = {p_value:.2g}")


TIES = 2  # ulps: a greedy token whose logit is within them of the largest one is a tie


def argmax_gap(
    texts: Texts, expected: Sequence[Sequence[int]], *, ulps: float = TIES
) -> dict[str, Any]:
    """How far each greedy token is from the largest logit of a plain pass over its whole text.

    A pass over one token and one over several round differently, so in a narrow dtype greedy texts
    can differ where two logits are nearly equal; both are then the target's up to rounding. A gap
    is the largest logit (after the row's maps) minus that of the token, in ulps: of the dtype in
    which the model computes, at the largest logit. The logits themselves are float32.

    Args:
        texts: what was decoded.
        expected: the outputs of plain decoding.
        ulps: a token is a tie up to here.

    Returns:
        "dtype", "ulps", "tokens"; "within" and "identical", the shares of tokens within ``ulps``
        and with the largest logit; "largest_ulps" and "largest", the largest gap in ulps and in
        logits; "different", the number of texts that are not ``expected``; "first_difference",
        {"prompt", "token", "ulps"} of the earliest place where one differs, or None.
    """

    def call(context: Context) -> np.ndarray:
        return np.stack(_gaps(texts.target, texts.params, context), -1)

    values = at_tokens(call, texts)
    gaps = [np.minimum(row[:, 0], np.finfo(np.float32).max) for row in values]
    scaled = [gap / row[:, 1] for gap, row in zip(gaps, values, strict=True)]
    every, units = np.concatenate(gaps), np.concatenate(scaled)
    pairs = enumerate(zip(expected, texts.outputs, strict=True))
    places = [(_common(a, b), i) for i, (a, b) in pairs if list(a) != list(b)]
    first = None
    if places:
        token, prompt = min(places)
        there = scaled[prompt]
        gap = float(there[token]) if token < len(there) else None  # one text ends there
        first = {"prompt": prompt, "token": token, "ulps": gap}
    some = len(units) > 0
    return {
        "dtype": dtype_of(texts.target, texts.params.target),
        "ulps": ulps,
        "tokens": len(units),
        "within": float((units <= ulps).mean()) if some else None,
        "identical": float((every == 0).mean()) if some else None,
        "largest_ulps": float(units.max()) if some else None,
        "largest": float(every.max()) if some else None,
        "different": len(places),
        "first_difference": first,
    }


def dtype_of(target: LM, params: Any) -> str:
    """The dtype in which the target computes."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return str(jax.eval_shape(functools.partial(lm.forward, target), params, tokens).hidden.dtype)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@functools.partial(jax.jit, static_argnums=0)
def _gaps(target, params, context):
    """f32[B,T-1] gap and ulp of every token after the first."""
    out = lm.forward(target, params.target, context.tokens)
    spacing = jnp.asarray(jnp.finfo(out.hidden.dtype).eps, jnp.float32)

    def gaps(logits, following, _):
        best = logits.max(-1)
        own = jnp.take_along_axis(logits, following[..., None], -1)[..., 0]
        return best - own, jnp.ldexp(spacing, jnp.frexp(best)[1] - 1)

    return _before_tokens(target, params, context, out, gaps)


def width_gap(texts: Texts, width: int) -> dict[str, Any]:
    """How far the target's probabilities depend on the number of tokens of a pass.

    Verification has passes over several tokens and plain decoding over one, and they round
    differently. The texts are read both ways, each with a cache of its own. In a narrow dtype this
    distance, and no other, separates the law of speculative decoding from that of plain decoding.

    Args:
        texts: what was decoded, under the settings of sampling.
        width: tokens of a wide pass, at least 1.

    Returns:
        "dtype" in which the model computes, "width", "tokens" of the outputs; "mean" and "largest",
        the total variation between the probabilities before one of these tokens.
    """
    call = functools.partial(_width_gaps, texts.target, width, texts.params)
    every = np.concatenate(at_tokens(call, texts))
    return {
        "dtype": dtype_of(texts.target, texts.params.target),
        "width": width,
        "tokens": len(every),
        "mean": float(every.mean()) if len(every) else None,
        "largest": float(every.max()) if len(every) else None,
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _width_gaps(target, width, params, context):
    """f32[B,T] total variation at every place."""
    wide, narrow = (_by_passes(target, size, params, context) for size in (width, 1))
    return jnp.abs(wide - narrow).sum(-1) / 2


def _by_passes(target, width, params, context):
    """f32[B,T,V] probabilities, by passes over ``width`` tokens.

    The last pass is over the rest of the text.
    """
    batch, length = context.tokens.shape
    whole = length // width * width

    def step(cache, part):
        out, block = target.apply(params.target, part, cache)
        count = jnp.full((batch,), part.shape[1], jnp.int32)
        return target.commit(cache, block, count), out.logits

    parts = context.tokens[:, :whole].reshape(batch, -1, width).swapaxes(0, 1)
    cache, logits = jax.lax.scan(step, target.init_cache(batch, length), parts)
    logits = logits.swapaxes(0, 1).reshape(batch, whole, target.vocab_size)
    rest = context.tokens[:, whole:] if whole < length else context.tokens[:, :1]
    _, more = step(cache, rest)
    logits = jnp.concatenate([logits, more], 1)[:, :length]
    maps = context.sampling.maps
    logits = logits if maps is None else logit_maps.along_text(maps, logits, context.tokens)
    return sampling.to_probs(logits, context.sampling)
