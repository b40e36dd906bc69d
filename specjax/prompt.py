"""From prompts to the state of a decode loop: packing, argument checks, and the prefill.

The names of this module are also in ``specjax.decode``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax import checks, logit_maps, tree
from specjax import sampling as sampling_lib
from specjax.errors import UserError
from specjax.sampling import Sampling
from specjax.types import LM, SAMPLED, Accept, Context, DecodeState, Drafter, ModelParams, Output

# Arguments of the loops -> their type, and how one is made.
_KINDS = {
    "target": (LM, "models.hf.load(DIR).lm"),
    "drafter": (Drafter, "drafters.make(NAME, target)"),
    "accept": (Accept, "accept.load(NAME)"),
    "params": (ModelParams, "ModelParams(target's, drafter's)"),
    "state": (DecodeState, "prefill(target, drafter, ...)"),
    "sampling": (Sampling, "sampling.make_sampling(rows, ...)"),
}


def pack_prompts(
    prompts: Sequence[Sequence[int]], width: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Right-pads token lists: (i32[B,P], lengths i32[B]).

    Raises:
        UserError: an empty batch, an empty prompt, one longer than ``width``, or no token.
    """
    if not len(prompts):
        raise UserError("there is no prompt; give at least one")
    rows = [np.asarray(ids) for ids in prompts]
    for row, ids in enumerate(rows):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UserError(f"prompt {row} is {checks.shown(prompts[row])}; it must be token ids")
    sizes = list(map(len, rows))
    if 0 in sizes:
        raise UserError(f"prompt {sizes.index(0)} is empty; a prompt needs at least one token")
    longest = max(sizes)
    width = width or longest
    if width < longest:
        raise UserError(f"a prompt has {longest} tokens and the buffer {width}; make it wider")
    packed = np.full((len(prompts), width), -1, np.int32)
    for row, ids in enumerate(rows):
        if abs(wrong := ids[np.abs(ids).argmax()]) > np.iinfo(np.int32).max:
            raise UserError(f"prompt {row} has the token id {wrong}, which is no int32")
        packed[row, : len(ids)] = ids
    return jnp.asarray(packed), jnp.asarray(sizes, jnp.int32)


def of_text(model: LM, ids: Sequence[int], what: str) -> list[int]:
    """``LM.prompt`` of the token ids of a text; ``what`` begins the message.

    Raises UserError for a text with the start token of an encoder-decoder model: the source would
    end there.
    """
    if model.encoder is not None and model.encoder.start in ids:
        raise UserError(
            f"{what} has the token {model.encoder.start}, with which the decoder of {model.name} "
            "begins its output; take it out of the text"
        )
    return model.prompt(ids)


def feed(
    model: LM, params, tokens: jax.Array, count: jax.Array, cache, chunk: int = 256
) -> tuple[Output, object]:
    """Feeds the first ``count[b]`` of tokens i32[B,L] to an empty cache, ``chunk`` at a time.

    Returns the ``Output`` of all L tokens and the cache. The logits are empty ([B,0,V]): they are
    never computed, so a long prompt needs no [B,L,V] array. A model with an encoder reads the
    source in one pass; there each tap is the encoder's output.
    """
    batch, size = tokens.shape
    if model.encoder is not None:
        return _read_source(model, params, tokens, count, cache)

    def block(cache, piece, start, before=None):
        out, computed = model.apply(params, piece, cache if before is None else before)
        # A row that ends inside or before this block stops there.
        cache = model.commit(cache, computed, jnp.clip(count - start, 0, piece.shape[1]))
        return cache, (out.hidden, out.taps)

    # A prompt of one token is pending: no token is fed.
    if size == 0:
        _, parts = jax.eval_shape(lambda: block(cache, jnp.zeros((batch, 1), jnp.int32), 0))
        hidden, taps = jax.tree.map(lambda x: jnp.zeros((batch, 0, *x.shape[2:]), x.dtype), parts)
        return Output(jnp.zeros((batch, 0, model.vocab_size)), hidden, taps), cache
    # The first tokens have nothing before them, so no slot is read.
    empty, first = model.init_cache(batch, 0), min(chunk, size)
    cache, part = block(cache, tokens[:, :first], 0, empty)
    pieces, whole = [part], (size - first) // chunk
    if whole:
        rest = tokens[:, first : first + whole * chunk]
        stacked = rest.reshape(batch, whole, chunk).swapaxes(0, 1)
        step = lambda cache, xs: block(cache, *xs)  # noqa: E731
        cache, parts = jax.lax.scan(step, cache, (stacked, first + jnp.arange(whole) * chunk))
        unstack = lambda x: x.swapaxes(0, 1).reshape(batch, whole * chunk, *x.shape[3:])  # noqa: E731
        pieces.append(jax.tree.map(unstack, parts))
    if (size - first) % chunk:
        start = first + whole * chunk
        cache, part = block(cache, tokens[:, start:], start)
        pieces.append(part)
    hidden, taps = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *pieces)
    return Output(jnp.zeros((batch, 0, model.vocab_size)), hidden, taps), cache


def _read_source(
    model: LM, params, tokens: jax.Array, count: jax.Array, cache
) -> tuple[Output, object]:
    """``feed`` of a model with an encoder: the source at once, and what follows token by token.

    Raises UserError for a prompt without a source.
    """
    assert model.encoder is not None
    batch, size = tokens.shape
    if not size:
        raise UserError(
            f"the prompt of {model.name} is one token; it must be a source text and then the "
            f"decoder's start token {model.encoder.start} (LM.prompt)"
        )
    first = (tokens == model.encoder.start) & (jnp.arange(size) < count[:, None])
    source = jnp.where(first.any(1), jnp.argmax(first, 1), count).astype(jnp.int32)
    out, cache = model.encoder.read(params, tokens, source, cache)

    def one(cache):
        token = jnp.take_along_axis(tokens, cache.length[:, None], 1, mode="clip")
        new, block = model.apply(params, token, cache)
        more = (cache.length < count).astype(jnp.int32)
        return (new.hidden, new.taps), model.commit(cache, block, more)

    def written(carry):
        parts, cache = carry
        # A row that has all its tokens writes nothing.
        place = jnp.where(cache.length < count, cache.length, size)
        new, cache = one(cache)
        put = lambda whole, x: whole.at[jnp.arange(batch), place].set(x[:, 0], mode="drop")  # noqa: E731
        return jax.tree.map(put, parts, new), cache

    parts = jax.tree.map(lambda x: out.hidden.astype(x.dtype), tree.shapes(one, cache)[0])
    lacking = lambda carry: (carry[1].length < count).any()  # noqa: E731
    (hidden, taps), cache = jax.lax.while_loop(lacking, written, (parts, cache))
    return Output(out.logits, hidden, taps), cache


def prefill(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    *,
    max_len: int,
    sampling: Sampling | None = None,
    limit: jax.Array | None = None,
    chunk: int = 256,
    logprobs: bool | str = False,
) -> DecodeState:
    """Reads the prompts and makes the state that the loops carry.

    Args:
        target, drafter: static; the same objects again do not recompile.
        params: the pair's parameters.
        prompt: i32[B,P], right-padded; of a target with an encoder as ``LM.prompt`` makes it.
        lengths: i32[B], each in 1..P.
        keys: key[B] from ``rng.row_keys``.
        max_len: longest text, prompt included; sizes every buffer.
        sampling: settings per row; None = temperature 1.
        limit: i32[B] length at which a row stops, at most ``max_len`` (the default).
        chunk: tokens of the prompt fed in one pass.
        logprobs: whether the loops fill ``DecodeState.logprobs``: True by the target's own logits,
            "sampled" by the distribution of which tokens are drawn (``sampling``, with its maps).

    Raises:
        UserError: arrays that have not one entry for each row; a prompt that is empty, longer than
            ``max_len``, as long as it where there is no ``limit``, or has ids outside the
            vocabulary; ``max_len`` beyond the model's positions; a draft longer than its sliding
            window; settings made for another vocabulary; a target with an encoder, and a prompt
            that has no source or no start token after it.
    """
    check_kinds(params=params)
    max_len, chunk = checks.whole("max_len", max_len, 1), checks.whole("chunk", chunk, 1)
    arrays = checked(target, drafter, prompt, lengths, limit, keys, sampling, max_len)
    check_logprobs(logprobs)
    static = {"max_len": max_len, "chunk": chunk, "logprobs": logprobs}
    return _prefill(target, drafter, params, *arrays, **static)


@functools.lru_cache(maxsize=256)
def make_prefill(
    target: LM, drafter: Drafter, max_len: int, chunk: int = 256, logprobs: bool | str = False
) -> Callable[..., DecodeState]:
    """``prefill`` of parameters and the arrays of ``checked``; equal for equal arguments."""
    static = {"max_len": max_len, "chunk": chunk, "logprobs": logprobs}

    def make(params, prompt, lengths, limit, keys, sampling):
        settings = {"limit": limit, "sampling": sampling, **static}
        return prefill(target, drafter, params, prompt, lengths, keys, **settings)

    return make


def check_kinds(**arguments: object) -> None:
    """Raises UserError for an argument of the loops that has another type."""
    for name, value in arguments.items():
        kind, made = _KINDS[name]
        if not isinstance(value, kind):
            given = repr(value) if isinstance(value, str) else checks.shown(value)
            raise UserError(f"{name} is {given}; it must be of type {kind.__name__}: {made}")


def checked(
    target: LM, drafter: Drafter, prompt, lengths, limit, keys, sampling, max_len: int
) -> tuple:
    """(prompt, lengths, limit, keys, sampling) of ``prefill``, with its defaults and checks."""
    check_kinds(target=target, drafter=drafter)
    _check_rows(prompt, lengths, limit, keys, sampling)
    check_window(target, drafter)
    limit = check_prefill(target, prompt, lengths, limit, max_len)
    if sampling is None:
        sampling = sampling_lib.make_sampling(prompt.shape[0])
    logit_maps.check(sampling.maps, target.vocab_size)
    return prompt, lengths, limit, keys, sampling


def _check_rows(prompt, lengths, limit, keys, sampling) -> None:
    """Raises UserError for an argument of ``prefill`` that has not one entry for each row."""
    right, rows = check_prompt(prompt, lengths), prompt.shape[0]
    if limit is not None and np.ndim(limit):
        _check_integers("limit", limit, 1, right, rows)
    is_array = isinstance(keys, jax.Array)
    are_keys = is_array and jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not are_keys or keys.shape != (rows,):
        raise UserError(
            f"keys are {checks.shown(keys)}, and the prompt has {rows} rows; "
            "rng.row_keys(seed, rows) makes a key for each row"
        )
    if sampling is None:
        return
    check_kinds(sampling=sampling)
    if {x.shape[:1] for x in jax.tree.leaves(sampling.replace(maps=None))} != {(rows,)}:
        raise UserError(
            f"sampling is for {sampling.temperature.size} rows, and the prompt has {rows}; "
            f"sampling.make_sampling({rows}, ...) makes settings for each row"
        )


def check_prompt(prompt, lengths) -> str:
    """Raises UserError for other arrays than ``pack_prompts`` gives; what an array of rows is."""
    _check_integers("prompt", prompt, 2, "integers [B,P]: decode.pack_prompts(prompts)")
    right = f"integers [{len(prompt)}], one for each row of the prompt"
    _check_integers("lengths", lengths, 1, right, len(prompt))
    return right


def _check_integers(name: str, value, axes: int, right: str, rows: int | None = None) -> None:
    """Raises UserError unless ``value`` is an array of integers with so many axes, and rows."""
    good = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer)
    if not good or value.ndim != axes or (rows is not None and len(value) != rows):
        raise UserError(f"{name} is {checks.shown(value)}; it must be {right}")


def check_length(longest: int, new: int, positions: int | None, advice: str = "") -> None:
    """Raises UserError if a prompt and ``new`` more tokens do not fit into a model's positions."""
    if positions is not None and longest + new > positions:
        raise UserError(
            f"the longest prompt has {longest} tokens, with max_new_tokens = {new} that is "
            f"{longest + new}, and the model has {positions} positions; shorten one of them{advice}"
        )


def check_window(model: LM, drafter: Drafter) -> None:
    """Raises UserError if a draft and the pending token are longer than a window of the model."""
    if model.window is not None and drafter.longest + 1 > model.window:
        raise UserError(
            f"a draft of {drafter.name} has up to {drafter.longest} tokens after the pending one, "
            f"and the smallest sliding window of {model.name} has {model.window} positions; draft "
            f"at most {model.window - 1} tokens"
        )


def check_logprobs(value: object) -> None:
    """Raises UserError for an argument ``logprobs`` that does not exist."""
    if not isinstance(value, bool) and value != SAMPLED:
        raise UserError(f"logprobs is {value!r}; it must be True, False or {SAMPLED!r}")


def check_prefill(
    target: LM, prompt: jax.Array, lengths: jax.Array, limit: jax.Array | None, max_len: int
) -> jax.Array:
    """Checks the arguments of ``prefill``; returns the limits, i32[B]. Raises UserError."""
    batch, width = prompt.shape
    if target.max_positions is not None and max_len > target.max_positions:
        raise UserError(
            f"prompt and new tokens need {max_len} positions, "
            f"and the model has {target.max_positions}; shorten them"
        )
    if width > max_len:
        raise UserError(
            f"the prompt has {width} tokens and max_len is {max_len}; it must be at least {width}"
        )
    if limit is None:
        limit = jnp.full((batch,), max_len, jnp.int32)
        if not isinstance(lengths, Tracer) and int(np.asarray(lengths).max()) == max_len:
            raise UserError(
                f"max_len is {max_len}, the length of a prompt; it must be at least {max_len + 1}"
            )
    limit = jnp.broadcast_to(jnp.asarray(limit, jnp.int32), (batch,))
    if not any(isinstance(array, Tracer) for array in (prompt, lengths, limit)):
        _check_prompt(target, np.asarray(prompt), np.asarray(lengths), np.asarray(limit), max_len)
    return limit


def _check_prompt(
    target: LM, prompt: np.ndarray, lengths: np.ndarray, limit: np.ndarray, max_len: int
) -> None:
    """Raises UserError for lengths, limits and ids that do not fit, or a source without a start."""
    width, vocab = prompt.shape[1], target.vocab_size
    if (wrong := (lengths < 1) | (lengths > width)).any():
        row = int(np.argmax(wrong))
        raise UserError(f"prompt {row} has length {lengths[row]}; it must be in 1..{width}")
    if (limit > max_len).any():
        raise UserError(f"limit is {limit.max()}; it must be at most max_len, which is {max_len}")
    inside = np.arange(width) < lengths[:, None]
    if (wrong := inside & ((prompt < 0) | (prompt >= vocab))).any():
        row, at = np.argwhere(wrong)[0]
        token = prompt[row, at]
        raise UserError(f"prompt {row} has the token id {token}; ids must be in 0..{vocab - 1}")
    if target.encoder is None:
        return
    start = target.encoder.start
    begins = (prompt == start) & inside
    if (wrong := ~begins.any(1) | begins[:, 0]).any():
        raise UserError(
            f"prompt {int(np.argmax(wrong))} is no source text with the start token of the decoder "
            f"of {target.name} after it, {start}; LM.prompt makes it of a source text"
        )


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("max_len", "chunk", "logprobs"))
def _prefill(
    target, drafter, params, prompt, lengths, limit, keys, sampling, *, max_len, chunk, logprobs
):
    batch, width = prompt.shape
    # Copies: the state will be donated, and the caller's arrays must stay valid.
    lengths, limit, keys, sampling = jax.tree.map(jnp.copy, (lengths, limit, keys, sampling))
    sampling = sampling_lib.after_prompt(sampling, lengths)
    # A block of nodes + 1 starts at the pending token, at most at max_len - 1.
    slots = max_len + drafter.nodes
    tokens = jnp.full((batch, slots + 1), -1, jnp.int32)
    real = jnp.arange(width) < lengths[:, None]
    tokens = tokens.at[:, :width].set(jnp.where(real, prompt, -1))
    cache = target.init_cache(batch, slots)
    target = drafter.tapped(target)
    out, cache = feed(target, params.target, tokens[:, : width - 1], lengths - 1, cache, chunk)
    newest = jnp.maximum(lengths - 2, 0)[:, None, None]
    taps = tuple(_last_tap(tap, newest) for tap in out.taps)
    done = lengths >= limit
    how = sampling_lib.for_draft(sampling)
    context = Context(tokens[:, :width], lengths, how, cache, taps, done, limit)
    return DecodeState(
        tokens=tokens,
        length=lengths,
        limit=limit,
        done=done,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        draft=drafter.init(params, context, out, slots),
        keys=keys,
        round=jnp.zeros((), jnp.int32),
        sampling=sampling,
        taps=taps,
        logprobs=jnp.zeros((batch, slots + 1), jnp.float32) if logprobs else None,
        sampled_logprobs=logprobs == SAMPLED,
        made_for=drafter.tag,
    )


def _last_tap(tap: jax.Array, newest: jax.Array) -> jax.Array:
    """[B,E]: the tap [B,T,E] of the newest token that was fed, or zeros if none was (T = 0)."""
    if not tap.shape[1]:
        return jnp.zeros((tap.shape[0], tap.shape[2]), tap.dtype)
    return jnp.take_along_axis(tap, newest, 1)[:, 0]
