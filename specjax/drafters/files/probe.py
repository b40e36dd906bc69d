"""Which reading of head files drafts best.

Files leave open what no tensor shows: the numbering of layers, which output is recycled, which
place predicts first, the rotary base. A wrong reading leaves the text as it is and makes tau about
1. Each reading is tried by decoding.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, drafters, rng, sampling
from specjax.checks import whole
from specjax.drafters.files import codec as codecs
from specjax.drafters.files import head_files
from specjax.drafters.files.codec import Codec, Config
from specjax.drafters.files.head_files import Head
from specjax.errors import UserError
from specjax.models import hf
from specjax.prompt import of_text
from specjax.types import LM, Drafter, ModelParams, Params

NEW_TOKENS = 64
# What a caller with a tokenizer may give as prompts.
TEXTS = (
    "The history of the city begins",
    "Question: Why is the sky blue?\nAnswer:",
    "def fibonacci(n):\n",
    "Once upon a time there was",
)
# A tau below this is that of heads that are read in a wrong way, or of untrained ones.
LOW = 1.2
# How many times the tau of another reading must be larger: equal readings differ by rounding.
MARGIN = 1.02


class Reading(NamedTuple):
    """One way to read files."""

    changes: Config  # keys of ``Head.config`` with other values than the files give
    tau: float  # tokens per round

    def __str__(self) -> str:
        return f"tau {self.tau:.2f}, {_spelled(self.changes)}"


class Probed(NamedTuple):
    """Heads in their best reading."""

    head: Head
    best: Reading


def probe(
    target: LM,
    target_params: Params,
    name: str,
    model: str | os.PathLike | Head,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    note: Callable[[str], None] = lambda text: None,
    **keys: Any,
) -> Probed:
    """Decodes with heads under each reading that their files leave open (``Codec.open``).

    One key after the other is changed, as long as tau grows. If the best tau is still below
    ``LOW``, all pairs of changes are tried too. ``Probed.head`` can be the key ``model`` of the
    drafter.

    Args:
        target, target_params: the model that the heads are made for.
        name: the drafter.
        model: the heads, or their directory.
        prompts: token ids; all are decoded as one batch.
        new_tokens: tokens after each prompt.
        temperature: of the text.
        note: gets a line about each reading, also about one that the target does not allow.
        **keys: further keys of the drafter.

    Raises:
        UserError: heads that cannot be read, or of another target.
        NonFiniteLogits: of the target.
    """
    whole("new_tokens", new_tokens, 1)
    codec = _open_codec(name)
    dtype = keys.pop("dtype", None)
    head = model if isinstance(model, Head) else head_files.read(model, name, dtype=dtype)
    readings: dict[str, Reading | UserError] = {}

    def made(changes: Config) -> Drafter:
        changed = head._replace(config=head.config | changes)
        return drafters.make(name, target, model=changed, **keys)

    def tried(changes: Config) -> Reading:
        own = str(sorted(changes.items()))
        if own not in readings:
            try:
                tau = _tau(target, target_params, made(changes), prompts, new_tokens, temperature)
                readings[own] = Reading(changes, tau)
                note(str(readings[own]))
            except UserError as error:
                readings[own] = error
                note(f"{_spelled(changes)}: {error}")
        result = readings[own]
        if isinstance(result, UserError):
            raise result
        return result

    best = _search(tried, list(_options(codec, head.config, target, made)))
    return Probed(head._replace(config=head.config | best.changes), best)


def _open_codec(name: str) -> Codec:
    """The codec of files that leave a reading open. Raises UserError."""
    codec = codecs.of(name)
    if codec is None or not codec.open:
        those = ", ".join(each for each, codec in codecs.every().items() if codec.open)
        raise UserError(f"the files of {name} leave no reading open; those that do: {those}")
    return codec


def _search(tried: Callable[[Config], Reading], options: Sequence[tuple[str, Any]]) -> Reading:
    """The best reading of those that ``probe`` tries. Raises UserError if none is possible."""
    best, problem = Reading({}, 0.0), None

    def better(changes: Config) -> bool:
        nonlocal best, problem
        try:
            reading = tried(changes)
        except UserError as error:
            problem = problem or error
            return False
        if reading.tau <= MARGIN * best.tau:
            return False
        best = reading
        return True

    better({})
    while any(better(best.changes | {key: value}) for key, value in options):
        pass
    for (a, x), (b, y) in itertools.combinations(options, 2):
        if a != b and best.tau < LOW:
            better({a: x, b: y})
    if problem is not None and not best.tau:
        raise problem
    return best


def prompts_of(target: hf.Loaded) -> list[list[int]]:
    """Token ids of ``TEXTS``, from a target that reads text. Raises UserError."""
    encode = target.text_tokenizer.encode
    return [of_text(target.lm, encode(text).ids, "a text of the probe") for text in TEXTS]


def replaced(
    target: hf.Loaded, keys: Mapping[str, Any], note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Keys of a drafter, "name" among them, without the key ``probe``.

    Where it was True, ``model`` are the heads in their best reading, which is found once for a
    directory and a target. ``note`` gets a line for each reading and one about the result. Raises
    UserError.
    """
    own = dict(keys)
    if not own.pop("probe", False):
        return own
    name, model = own["name"], own.get("model")
    if not model or isinstance(model, Head):
        raise UserError(f"{name} has probe; give a directory of heads as model, or leave probe out")
    head = head_files.read(model, name, dtype=own.pop("dtype", None))
    place = target.directory, name, f"{head.directory}: {head.config}"
    if place not in _BEST:
        rest = {key: value for key, value in own.items() if key not in ("name", "model")}
        ids = prompts_of(target)
        room = (target.lm.max_positions or NEW_TOKENS) - max(map(len, ids))
        rest["new_tokens"] = max(min(NEW_TOKENS, room), 1)
        found = probe(target.lm, target.params, name, head, ids, note=note, **rest)
        note(f"{head.directory} is read with {found.best}")
        _BEST[place] = found.best.changes
    return own | {"model": head._replace(config=head.config | _BEST[place])}


# (directory of the target, drafter, directory and configuration of heads) -> the changes of the
# best reading.
_BEST: dict[tuple[str, str, str], Config] = {}


def _spelled(changes: Config) -> str:
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or "as in the files"


def _options(
    codec: Codec, config: Config, target: LM, made: Callable[[Config], Drafter]
) -> Iterator[tuple[str, Any]]:
    """The keys that files leave open, with values that these do not give.

    The first value of a key is its meaning where the files do not give it.
    """
    for key, values in codec.open.items():
        usual = values[0] if values else None
        if key == "rope_theta" and target.inside.decoder is not None:
            values = (*values, float(target.inside.decoder.rope_theta))
        if key == codec.numbered:
            usual = config.get(key)
            if usual is None:
                with contextlib.suppress(UserError):
                    usual = list(made({}).taps)
            values = tuple([layer + by for layer in usual] for by in (-1, 1)) if usual else ()
        stated = config.get(key)
        for number, value in enumerate(values):
            if value not in (usual if stated is None else stated, *values[:number]):
                yield key, value


def _tau(
    target: LM,
    target_params: Params,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
) -> float:
    """Tokens per round of decoding; the text does not end at an end-of-sequence token."""
    rule, pair = accept.load(accept.default_rule(drafter)), ModelParams(target_params)
    pair = pair._replace(draft=drafter.init_params(jax.random.key(0)))
    tokens, lengths = decode.pack_prompts(prompts)
    state = decode.prefill(
        *(target, drafter, pair, tokens, lengths),
        rng.row_keys(0, range(len(prompts))),
        max_len=tokens.shape[1] + new_tokens,
        limit=jnp.asarray(lengths) + new_tokens,
        sampling=sampling.make_sampling(len(prompts), temperature),
    )
    state, records = decode.generate(target, drafter, rule, pair, state, max_steps=new_tokens)
    decode.check(state)
    emitted = np.asarray(records.emitted)
    return float(emitted.sum() / np.maximum((emitted > 0).sum(), 1))
