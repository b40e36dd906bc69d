"""``generate_text`` and ``stream_text``: from prompts or chats to texts, with any method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, drafters, logit_maps, registry, rng, sampling, tree
from specjax.bench import metrics
from specjax.bench.passes import Method
from specjax.checks import number, whole, yes_or_no
from specjax.errors import UserError
from specjax.generation import auto, stops
from specjax.generation.loading import Choice, Model
from specjax.generation.stops import Cut
from specjax.logit_maps import grammar
from specjax.models import layers, memory
from specjax.prompt import check_length, check_logprobs, make_prefill, of_text
from specjax.sampling import Sampling, after_prompt
from specjax.sharding import states
from specjax.types import LM, SAMPLED, DecodeState, Drafter, ModelParams, Params

# The packed prompts and the room for new tokens are multiples of so many tokens wide, so that few
# programs are compiled: the number of new tokens is data within its class.
WIDTH = 64
_SETTINGS = {
    *inspect.signature(sampling.make_sampling).parameters,
    *inspect.signature(logit_maps.make).parameters,
} - {"batch", "maps", "temperature", "vocab_size"}
_GAMMA = 'drafter={"name": NAME, "gamma": N}'
# Names of settings in other libraries -> what they are here.
_ELSEWHERE = {
    "assistant_model": "load(DIR, draft=DRAFT_DIR)",
    "do_sample": "temperature, where 0 is greedy",
    "eos_token_id": "the model's own, or ignore_eos",
    "gamma": _GAMMA,
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_assistant_tokens": _GAMMA,
    "num_beams": "beam_search",
    "num_return_sequences": "n",
    "num_speculative_tokens": _GAMMA,
    "prompt_lookup_num_tokens": 'drafter={"name": "prompt_lookup", "gamma": N}',
    "stop_strings": "stop",
    "streamer": "stream_text",
}


class Completion(NamedTuple):
    """One text."""

    prompt: int  # number of its prompt
    sample: int  # number among the samples of its prompt
    text: str  # without the stop string
    tokens: list[int]  # the new ones, up to the one that ends the text
    finish: str  # "eos", "stop" (a stop string) or "length"
    logprobs: list[float] | None  # of the tokens; None: not wanted


class Generated(NamedTuple):
    """The texts, prompt by prompt, and what they cost."""

    completions: list[Completion]
    # Tokens per round of a row, the target's own included; what a stop string cut off counts too.
    tau: float
    counts: metrics.Counts
    drafter: str  # its name

    @property
    def texts(self) -> list[str]:
        """The text of each completion."""
        return [each.text for each in self.completions]


def generate_text(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: Choice = None,
    accept: str = "",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: bool | str = False,
    seed: int = 0,
    batch_size: int | None = None,
    ignore_eos: bool = False,
    chat: str = "",
    params: Params | None = None,
    warm: bool = False,
    **settings: Any,
) -> Generated:
    """Continues texts, or answers chats.

    Args:
        model: of ``load``.
        prompts: one or several: a text, the turns of a chat ({"role", "content"}), or token ids.
        drafter, accept: the method, see ``Model.method``. An L1 rule (every default) leaves the law
            of the texts unchanged. None without a rule: what ``tune`` kept for this model, if it
            kept something. "auto": that, or plain decoding.
        max_new_tokens: the longest text, in tokens.
        temperature: 0 is greedy.
        stop: texts; a text ends before the first of them.
        n: samples of each prompt. Sample i of a prompt is the same for every ``n`` above i.
        logprobs: whether to return the log-probability of each token: True by the model's own
            logits, "sampled" by the distribution of which it was drawn.
        seed: of the noise. A text depends on the seed and the numbers of its prompt and sample.
        batch_size: rows that are decoded together; None: all.
        ignore_eos: whether texts go on after the end-of-sequence token.
        chat: the template of chats: "" is the model's own; see ``data.chat.load``.
        params: parameters of the target in the place of the model's, of equal shapes and dtypes:
            nothing is compiled again. None: the model's.
        warm: whether the drafter learns from these texts, for later calls with ``warm`` and this
            model: what it keeps has a fixed shape. Text passes from one prompt to others.
        settings: further ones of ``sampling.make_sampling``: top_k, top_p, min_p, penalties, bans
            (one value for all rows). ``end_ids`` are the model's unless they are given.
            ``grammar``: what texts match; see ``logit_maps.grammar.of_setting``.

    Raises:
        UserError: wrong arguments, a text longer than the model's positions, several greedy
            samples.
        NonFiniteLogits: a model gave NaN or infinite logits.
        OutOfMemory: the memory of the device is full.
    """
    if whole("n", n, 1) > 1 and temperature == 0:
        raise UserError(f"n is {n} and the temperature 0: all samples would be equal; raise it")
    how = (max_new_tokens, temperature, stop, logprobs, seed, ignore_eos, params, settings)
    ids = encode(model, prompts, chat)
    rows = [_Row(prompt, i, j) for i, prompt in enumerate(ids) for j in range(n)]
    size = len(rows) if batch_size is None else min(whole("batch_size", batch_size, 1), len(rows))
    run = _run(model, drafter, accept, size, *how, warm)
    with memory.errors():
        return _all(run, rows, rng.sample_keys(seed, len(ids), n), size)


def stream_text(
    model: Model,
    prompt: Prompt,
    *,
    drafter: Choice = None,
    accept: str = "",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    ignore_eos: bool = False,
    chat: str = "",
    params: Params | None = None,
    **settings: Any,
) -> Iterator[str]:
    """The text of ``generate_text`` for one prompt, in pieces, as it is written.

    Arguments and errors are those of ``generate_text``; the call reads the prompt. A piece may
    belong to several tokens: it has whole characters, and nothing of a stop string.
    """
    how = (max_new_tokens, temperature, stop, False, seed, ignore_eos, params, settings)
    run = _run(model, drafter, accept, 1, *how)
    _ = model.tokenizer  # raises UserError if there is none
    ids = encode(model, prompt, chat)
    if (count := len(ids)) > 1:
        raise UserError(f"stream_text takes one prompt, and {count} were given; call it for each")
    keys, sizes = rng.sample_keys(seed, 1, 1), _sizes(run, ids)
    row = _Row(ids[0], 0, 0)
    with memory.errors():
        state = _begin(run, [row], 1, 1, keys, sizes)
    return _stream(run, row, state)


def _stream(run: _Run, row: _Row, state: DecodeState) -> Iterator[str]:
    text = stops.Row(run.model.lm.continued(row.ids), run.model.decode, run.stops)
    method, seen, sent, done = run.method, len(row.ids), 0, False
    while not done:
        # One round of the program that ``generate_text`` runs.
        pair = method.pair(run.model.lm)
        with memory.errors():
            state, _ = decode.generate(*pair, state, max_steps=1, eos_id=run.eos)
        [new] = decode.outputs(state, [seen])
        seen, ended = seen + len(new), bool(state.done[0])
        done = text.add(new, last=ended) or ended
        known = text.cut().text if done else text.settled
        if len(known) > sent:
            yield known[sent:]
        sent = max(sent, len(known))


def _run(
    model: Model,
    drafter: Choice,
    accept: str,
    rows: int,
    max_new_tokens: int,
    temperature: float,
    stop: str | Sequence[str],
    logprobs: bool | str,
    seed: int,
    ignore_eos: bool,
    params: Params | None,
    settings: dict[str, Any],
    warm: bool = False,
) -> _Run:
    """The checked arguments of ``generate_text``."""
    whole("max_new_tokens", max_new_tokens, 1)
    number("temperature", temperature, ">= 0", lambda x: x >= 0)
    whole("seed", seed, 0, 2**32 - 1)
    check_logprobs(logprobs)
    yes_or_no("ignore_eos", ignore_eos)
    yes_or_no("warm", warm)
    _check_settings(settings)
    if drafter == auto.AUTO or (drafter is None and not accept):
        draft = "" if model.draft is None else model.draft.directory
        where, kept = model.target.directory, None
        if where:
            dtype = layers.dtype_of(model.params).name
            kept = auto.known(where, draft, rows, temperature > 0, dtype)
        # Without a name, a draft model that was not measured drafts as before.
        if kept is not None and (drafter is not None or bool(kept.draft) == bool(draft)):
            drafter, accept = kept.drafter, accept or kept.accept
        elif drafter is not None:
            drafter = drafters.PLAIN
    method = model.method(drafter, accept, temperature=temperature, warm=warm)
    if params is not None:
        _check_params(params, model.params)
        method = method._replace(params=method.params._replace(target=params))
    stops_of_texts = stops.check(stop)
    if stops_of_texts and model.target.tokenizer is None:
        raise UserError("stop strings need a tokenizer, and the model has none; leave them out")
    # -1 is no token: the same number of ids runs the same program.
    eos = (-1,) * len(model.eos_ids) if ignore_eos else model.eos_ids
    ends = {"end_ids": model.eos_ids} if settings.get("min_new_tokens") else {}
    how = {"temperature": temperature, "vocab_size": model.lm.vocab_size, **ends, **settings}
    how["grammar"] = grammar.of_setting(
        how.get("grammar"), model.lm.token_bytes, model.lm.vocab_size, model.eos_ids
    )
    return _Run(model, method, how, max_new_tokens, stops_of_texts, logprobs, eos)


def _check_params(params: Params, like: Params) -> None:
    """Raises UserError for parameters of other names, shapes or dtypes."""
    found, known = tree.shown(params), tree.shown(like)
    differing = [name for name in {**known, **found} if found.get(name) != known.get(name)]
    if differing or jax.tree.structure(params) != jax.tree.structure(like):
        name = differing[0] if differing else "the tree"
        raise UserError(
            f"params has {found.get(name, 'nothing')} at {name}, and the model "
            f"{known.get(name, 'nothing')}; give parameters of the model's form"
        )


def _all(run: _Run, rows: list[_Row], keys: jax.Array, size: int) -> Generated:
    """The completions of all rows, ``size`` at a time."""
    sizes = _sizes(run, [row.ids for row in rows])
    # A batch has whole prompts, each of which is read once, or samples of single prompts.
    samples = sum(row.prompt == rows[0].prompt for row in rows)
    samples = samples if samples <= size else 1
    size -= size % samples
    completions, counts = [], []
    for start in range(0, len(rows), size):
        # The last part is filled up with rows that are finished from the start.
        numbers = [*range(start, min(start + size, len(rows)))]
        count, more = len(numbers), size - len(numbers)
        numbers += [*range(samples)] * (more // samples)
        filled = [rows[number] for number in numbers]
        whole_batch = numbers == [*range(len(rows))]
        own_keys = keys if whole_batch else _taken(keys, np.asarray(numbers))
        new, own = _decode(run, filled, count, samples, own_keys, sizes)
        completions += new
        counts.append(own)
    total = metrics.total(counts)
    tau = total.tokens / max(total.rounds, 1)
    return Generated(completions, tau, total, run.method.drafter.name)


@jax.jit
def _taken(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    return keys[numbers]


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UserError for unknown settings, and for a value per row: rows are made here."""
    for name, value in settings.items():
        if name not in _SETTINGS:
            here = _ELSEWHERE.get(name)
            own = list(inspect.signature(generate_text).parameters)[2:-1]
            own = [each for each in [*own, *sorted(_SETTINGS)] if each != name]
            here = f"; here it is {here}" if here else registry.nearest(name, own)
            here = here or f"; it has {', '.join(own)}"
            raise UserError(f"there is no setting {name!r}{here}")
        rows = value if isinstance(value, list | tuple) else ()
        own = any(each is None or isinstance(each, Mapping) for each in rows)
        depth = 0 if value is None or isinstance(value, Mapping | str) else _depth(value)
        if own or depth > (name in ("banned", "end_ids", "logit_bias")):
            raise UserError(
                f"{name} has a value for each row; generate_text takes one for all texts, "
                "and prefill takes a value per row"
            )


def _depth(value: Any) -> int:
    """The number of dimensions; lists of several lengths have one for each level."""
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value), default=0)
    return np.ndim(value)


class _Row(NamedTuple):
    """One text to be written."""

    ids: list[int]
    prompt: int
    sample: int


class _Run(NamedTuple):
    """What all batches share."""

    model: Model
    method: Method
    settings: dict
    max_new_tokens: int
    stops: tuple[str, ...]
    logprobs: bool | str
    eos: tuple[int, ...]


def _sizes(run: _Run, ids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The width of the packed prompts, and the longest text that the buffers have room for.

    Raises UserError for a text that is too long.
    """
    longest, new, most = max(map(len, ids)), run.max_new_tokens, run.model.lm.max_positions
    check_length(longest, new, most)
    width, room = (-(-size // WIDTH) * WIDTH for size in (longest, new))
    # Not beyond the positions of the models for the sake of padding.
    training, given = run.method.drafter.training, run.model.draft
    models = (run.model.lm, given and given.lm, training and training.model)
    bounds = [each.max_positions for each in models if each and each.max_positions]
    max_len = max(longest + new, min([width + room, *bounds]))
    return min(width, max_len), max_len


def _decode(
    run: _Run, rows: list[_Row], count: int, samples: int, keys: jax.Array, sizes: tuple[int, int]
) -> tuple[list[Completion], metrics.Counts]:
    """The completions of the first ``count`` rows of a batch, and their counts.

    ``samples`` neighbours have one prompt; ``sizes`` of ``_sizes``.
    """
    if run.method.warm:
        run = _with_memory(run, rows, count, samples, keys, sizes)
    model, method = run.model, run.method
    state = _begin(run, rows, count, samples, keys, sizes)
    before = np.asarray(state.length).tolist()
    loop = (*method.pair(model.lm), state, [row.ids for row in rows])
    state, records, cuts = stops.decode_until(
        *loop, stop=run.stops, decode_ids=model.decode, max_steps=run.max_new_tokens, eos_id=run.eos
    )
    if method.warm:
        model.learn(method, state, before)
    counts = metrics.count(records, [i < count for i in range(len(rows))], method.drafter.longest)
    return _completions(run, rows[:count], state, cuts), counts


def _with_memory(run: _Run, *batch: Any) -> _Run:
    """The run with what its drafter learnt; at first that is nothing, in the shape of the rest."""
    learnt = run.model.learnt(run.method)
    if learnt is None:
        state = _begin(run, *batch)
        learnt = run.model.learn(run.method, state, np.asarray(state.length).tolist())
    params = run.method.params._replace(draft=learnt)
    return run._replace(method=run.method._replace(params=params))


def _begin(
    run: _Run, rows: list[_Row], count: int, samples: int, keys: jax.Array, sizes: tuple[int, int]
) -> DecodeState:
    """The state before the first round; the arguments are those of ``_decode``."""
    model, method, prompts = run.model, run.method, [row.ids for row in rows]
    width, max_len = sizes
    packed, lengths = decode.pack_prompts(prompts[::samples], width)
    new = np.where(np.arange(len(rows)) < count, run.max_new_tokens, 0)
    limit = jnp.asarray(np.asarray([len(ids) for ids in prompts]) + new, jnp.int32)
    settings = sampling.make_sampling(len(rows), **run.settings)
    given = (model.lm, method.drafter, method.params, packed, lengths, keys, samples)
    state = prefill(*given, max_len=max_len, limit=limit, sampling=settings)
    if run.logprobs:
        # The prompts are read by the same program, with and without.
        zeros = np.zeros(state.tokens.shape, np.float32)
        state = state.replace(logprobs=zeros, sampled_logprobs=run.logprobs == SAMPLED)
    return state


def _completions(
    run: _Run, rows: list[_Row], state: DecodeState, cuts: list[Cut]
) -> list[Completion]:
    lengths = [len(row.ids) for row in rows]
    # Rows that fill up the batch have no text.
    every = [*lengths, *[0] * (len(cuts) - len(rows))]
    tokens = decode.outputs(state, every)
    values = decode.logprobs(state, every) if run.logprobs else None
    result = []
    for i, row in enumerate(rows):
        cut, end = cuts[i], cuts[i].tokens
        own = tokens[i][:end]
        finish = "eos" if own and own[-1] in run.eos else "length"
        finish = finish if cut.stop is None else "stop"
        logprobs = None if values is None else values[i][:end]
        result.append(Completion(row.prompt, row.sample, cut.text, own, finish, logprobs))
    return result


# A text to continue, the turns of a chat, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def encode(model: Model, prompts: Prompt | Sequence[Prompt], chat: str = "") -> list[list[int]]:
    """The token ids of each prompt; for a model with an encoder, sources and their start token.

    Raises UserError for a prompt that is empty or of another form.
    """
    several = _several(prompts)
    if chat and not any(_is_chat(each) for each in several):
        raise UserError(
            f"chat is {chat!r}, and no prompt is a chat; leave it out, or give turns: "
            '[{"role": "user", "content": ...}]'
        )
    return [_encode(model, each, chat, i) for i, each in enumerate(several)]


def _is_chat(prompt: Any) -> bool:
    turns = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return turns and all(isinstance(turn, Mapping) for turn in prompt)


def _several(prompts: Any) -> list:
    prompts = _python(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(f"the prompts are {prompts!r}; give a text, token ids, a chat, or several")
    if not prompts:
        raise UserError("there is no prompt; give at least one")
    return [prompts] if isinstance(prompts[0], Mapping | int) else list(prompts)


def _python(value: Any) -> Any:
    """Arrays and their numbers as lists and numbers of Python, also in lists and tuples."""
    if hasattr(value, "tolist"):
        return np.asarray(value).tolist()
    return [_python(each) for each in value] if isinstance(value, list | tuple) else value


def _encode(model: Model, prompt: Any, chat: str, number: int) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids = model.tokenizer.encode(prompt).ids
        except TypeError:  # of a tokenizer, for what UTF-8 cannot write
            raise UserError(
                f"prompt {number} is {prompt!r}, which UTF-8 cannot write; leave out half pairs"
            ) from None
    elif _is_chat(prompt):
        # Imported here because it needs Jinja.
        from specjax.data import chat as chats

        if not model.target.directory:
            raise UserError("chats need a model that was read from files; give texts or token ids")
        template = chats.load(chat, model.target.directory, model.tokenizer)._replace(date=None)
        text = chats.render(template, prompt, add_generation_prompt=True)
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    else:
        if not isinstance(prompt, Sequence) or any(type(token) is not int for token in prompt):
            raise UserError(
                f"prompt {number} is {prompt!r}; it must be a text, token ids, or the turns of a "
                "chat"
            )
        ids = list(prompt)
    if not ids:
        raise UserError(f"prompt {number} is empty; a prompt needs at least one token")
    if isinstance(prompt, str) or _is_chat(prompt):
        return of_text(model.lm, ids, f"prompt {number}")
    return model.lm.prompt(ids)


def prefill(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    samples: int,
    *,
    max_len: int,
    sampling: Sampling,
    limit: jax.Array,
) -> DecodeState:
    """``decode.prefill`` of B prompts, for ``samples`` rows each, which are neighbours.

    The arguments are those of ``decode.prefill``. ``prompt`` and ``lengths`` have B rows; ``keys``
    (of ``rng.sample_keys``), ``sampling``, ``limit`` and the state have B * ``samples``. The
    drafter begins with the settings of the first sample.

    Raises:
        UserError: as ``decode.prefill``, and for a drafter with an array that belongs to no row.
    """
    rest = (limit, keys, sampling)
    firsts = rest if samples == 1 else _firsts(rest, samples)
    options = (target, drafter, max_len)
    arrays = (prompt, lengths, *firsts)
    state = make_prefill(*options)(params, *arrays)
    if samples == 1:
        return state
    axes = _axes(options, *states.abstract((params, arrays)))
    return _repeated(state, samples, axes, rest)


@functools.partial(jax.jit, static_argnums=1)
def _firsts(values: Any, samples: int) -> Any:
    return jax.tree.map(lambda x: x[::samples], values)


@functools.lru_cache(maxsize=64)
def _axes(options: tuple, leaves: tuple, treedef: Any) -> tuple[int | None, ...]:
    """The axis of each leaf of a state that has its rows. Kept: finding them traces a prefill."""
    params, arrays = jax.tree.unflatten(treedef, leaves)
    why = "its state cannot be repeated for several samples of a prompt; take n=1"
    return states.row_axes(options[1], make_prefill(*options), params, arrays, why)[0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _repeated(
    state: DecodeState, samples: int, axes: tuple[int | None, ...], rest: tuple
) -> DecodeState:
    """The state with ``samples`` rows for each; ``rest``: their limits, keys and settings."""
    rows = jnp.repeat(jnp.arange(state.length.shape[0]), samples)
    leaves, treedef = jax.tree.flatten(state)
    pairs = zip(leaves, axes, strict=True)
    taken = [leaf if axis is None else jnp.take(leaf, rows, axis) for leaf, axis in pairs]
    state = jax.tree.unflatten(treedef, taken)
    # Copies: the state will be donated, and the caller's arrays must stay valid.
    limit, keys, settings = jax.tree.map(jnp.copy, rest)
    settings = after_prompt(settings, state.length)
    return state.replace(keys=keys, limit=limit, sampling=settings, done=state.length >= limit)
