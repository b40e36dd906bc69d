"""Which reading of head files drafts best.

Files leave open what no tensor shows: the numbering of layers, which output is recycled, which
place predicts first, the rotary base. A wrong reading leaves the text as it is and makes tau about
1. Each reading is tried by decoding.
"""

from __future__ import annotations

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
from specjax.drafters.files.codec import Codec
from specjax.drafters.files.head_files import Head
from specjax.errors import UserError
from specjax.models import hf
from specjax.types import LM, ModelParams, Params

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

    changes: dict[str, Any]  # keys of ``Head.config`` with other values than the files give
    tau: float  # tokens per round

    def __str__(self) -> str:
        changed = ", ".join(f"{key}={value}" for key, value in self.changes.items())
        return f"tau {self.tau:.2f}, {changed or 'as in the files'}"


class Probed(NamedTuple):
    """Heads in their best reading, and all readings that were tried."""

    head: Head
    best: Reading
    readings: list[Reading]  # in the order of their trial


def probe(
    target: LM,
    target_params: Params,
    name: str,
    model: str | os.PathLike,
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
    drafter. A reading that the target does not allow is left out.

    Args:
        target, target_params: the model that the heads are made for.
        name: the drafter.
        model: the directory of the heads.
        prompts: token ids; all are decoded as one batch.
        new_tokens: tokens after each prompt.
        temperature: of the text.
        note: gets a line about each reading.
        **keys: further keys of the drafter.

    Raises:
        UserError: heads that cannot be read, or of another target.
    """
    whole("new_tokens", new_tokens, 1)
    codec = codecs.of(name)
    if codec is None or not codec.open:
        raise UserError(
            f"the files of {name} leave no reading open; those that do: {', '.join(_open())}"
        )
    head = head_files.read(model, name, dtype=keys.pop("dtype", None))
    found: dict[str, Reading] = {}

    def tried(changes: dict[str, Any]) -> Reading:
        own = str(sorted(changes.items()))
        if own not in found:
            changed = head._replace(config=head.config | changes)
            drafter = drafters.make(name, target, **keys, model=changed)
            settings = new_tokens, temperature
            found[own] = Reading(changes, _tau(target, target_params, drafter, prompts, *settings))
            note(str(found[own]))
        return found[own]

    best = _search(tried, list(_options(codec, head.config, target)))
    return Probed(head._replace(config=head.config | best.changes), best, list(found.values()))


def _search(
    tried: Callable[[dict[str, Any]], Reading], options: Sequence[tuple[str, Any]]
) -> Reading:
    """The best reading of those that ``probe`` tries. Raises UserError if none is possible."""
    best, problem = Reading({}, 0.0), None

    def better(changes: dict[str, Any]) -> bool:
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


def replaced(
    target: hf.Loaded, keys: Mapping[str, Any], note: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Keys of a drafter, "name" among them, without the key ``probe``.

    Where it was True, ``model`` are the heads in their best reading. ``note`` gets a line for each
    reading and one about the result. Raises UserError.
    """
    own = dict(keys)
    if not own.pop("probe", False):
        return own
    name, model = own.pop("name"), own.pop("model", None)
    if model is None:
        raise UserError(f"{name} has probe and no model; give model, or leave probe out")
    ids = [target.text_tokenizer.encode(text).ids for text in TEXTS]
    found = probe(target.lm, target.params, name, model, ids, note=note, **own)
    note(f"{found.head.directory} is read with {found.best}")
    return own | {"name": name, "model": found.head}


def _open() -> list[str]:
    """The drafters whose files leave a reading open."""
    return [name for name, codec in codecs.every().items() if codec.open]


def _options(codec: Codec, config: dict[str, Any], target: LM) -> Iterator[tuple[str, Any]]:
    """The keys that files leave open, with values that these do not give."""
    for key, values in codec.open.items():
        if key == "rope_theta" and target.inside.decoder is not None:
            values = (*values, float(target.inside.decoder.rope_theta))
        if key == codec.numbered:
            layers = config.get(key) or ()
            values = tuple([layer + by for layer in layers] for by in (-1, 1) if layers)
        for value in dict.fromkeys(map(_fixed, values)):
            value = list(value) if isinstance(value, tuple) else value
            if value != config.get(key):
                yield key, value


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tau(
    target: LM,
    target_params: Params,
    drafter: Any,
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
    _, records = decode.generate(target, drafter, rule, pair, state, max_steps=new_tokens)
    emitted = np.asarray(records.emitted)
    return float(emitted.sum() / np.maximum((emitted > 0).sum(), 1))
