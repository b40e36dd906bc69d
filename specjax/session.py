"""From a configuration to the objects that decode: target, drafter, rule, prompts. Every mistake is found here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from specjax import accept, drafters, jsonl, sampling
from specjax.bench import Job, Method
from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf
from specjax.types import ModelParams

STDLIB = "stdlib"  # the named prompt set: held-out lines of the embedded corpus


class Choice(NamedTuple):
    """One method of a configuration."""

    drafter: dict  # its keys, "name" among them
    rule: str
    rule_keys: dict
    warm: bool = False  # whether it learns from other prompts before it is measured


class Prompt(NamedTuple):
    """One prompt, as text and as token ids."""

    text: str
    ids: list[int]
    category: str | None = None  # of the line in a .jsonl file that has one: kept for recordings


def load_target(config: Config) -> hf.Loaded:
    """The target model of ``config.target``. Raises UserError if there is none, or it has no tokenizer."""
    if not config.target:
        raise UserError("config.target is empty; give a Hugging Face style directory or a trained run's workdir")
    loaded = hf.load(config.target)
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.directory} has no tokenizer.json; text needs one")
    return loaded


def read_prompts(config: Config, target: hf.Loaded) -> list[Prompt]:
    """``config.prompt`` (one text), or ``config.prompts``: a .txt file (a prompt per line), a .jsonl file with a "prompt"
    key, or the set "stdlib" (held-out Python code, ``config.prompt_tokens`` tokens each). At most
    ``config.num_prompts`` of them; 0 = all, of "stdlib" 32. ``config.warm_prompts`` further ones come at the end.

    Raises UserError for neither or both, a missing file, a line without the key, an empty prompt.
    """
    for name, least in (("num_prompts", 0), ("prompt_tokens", 1)):
        if config[name] < least:
            raise UserError(f"config.{name} is {config[name]}; it must be at least {least}")
    if bool(config.prompt) == bool(config.prompts):
        raise UserError("give either config.prompt (one text) or config.prompts (a .txt or .jsonl file, or stdlib)")
    tokenizer = target.tokenizer
    assert tokenizer is not None
    extra = config.get("warm_prompts", 0)
    if config.prompts == STDLIB:
        return _held_out(config, target, (config.num_prompts or 32) + extra)
    count = config.num_prompts + extra if config.num_prompts else None
    texts = [(config.prompt, None)] if config.prompt else _read(Path(config.prompts).expanduser())
    prompts = []
    for number, (text, category) in enumerate(texts[:count], 1):
        try:
            text.encode()
        except UnicodeEncodeError:  # a command line in another encoding
            raise UserError(f"prompt {number} is not UTF-8 text") from None
        ids = tokenizer.encode(text).ids
        if not text.strip() or not ids:
            raise UserError(f"prompt {number} is empty; a prompt needs at least one token")
        prompts.append(Prompt(text, ids, category))
    if not prompts:
        raise UserError(f"{config.prompts} has no prompts; give at least one")
    if len(prompts) <= extra:
        raise UserError(f"there are {len(prompts)} prompts, and config.warm_prompts takes {extra} of them; give more")
    return prompts


def _held_out(config: Config, target: hf.Loaded, count: int) -> list[Prompt]:
    from specjax.train import data  # only here: TFDS takes a second to import

    assert target.tokenizer is not None
    beside = Path(target.directory).parent / "data"
    if not config.data_dir and not beside.is_dir():
        raise UserError("config.prompts=stdlib: no corpus lies beside the target; give config.data_dir to build it in")
    folder = config.data_dir or str(beside)
    texts = [text for _, text in data.load_texts(folder, "test")]
    ids = data.held_out_prompts(texts, target.tokenizer, count, config.prompt_tokens, config.seed)
    return [Prompt(target.tokenizer.decode(i), i) for i in ids]


def _read(path: Path) -> list[tuple[str, str | None]]:
    """(text, category) of every prompt of a file."""
    where = f"config.prompts: {path}"
    text = jsonl.read(path, where)
    if path.suffix != ".jsonl":
        return [(line, None) for _, line in jsonl.lines(text)]
    found = [(each["prompt"], each.get("category")) for each in jsonl.objects(text, "prompt", where)]
    return [(prompt, category if isinstance(category, str) else None) for prompt, category in found]


def check(config: Config) -> None:
    """Checks what can be checked before any model is there. Raises UserError."""
    if not 0 <= config.seed < 2**32:
        raise UserError(f"config.seed is {config.seed}; it must be in 0..{2**32 - 1}")
    accept.load(config.accept, **_given(config.get("accept_keys")))
    grid = config.get("grid") or {}
    for temperature in [config.sampling.temperature, *grid.get("temperatures", ())]:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise UserError(f"temperature is {temperature!r}; it must be a number")
        sampling.make_sampling(1, **{**config.sampling.to_dict(), "temperature": temperature})
    for batch_size in [config.batch_size, *grid.get("batch_sizes", ())]:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch size is {batch_size!r}; it must be a whole number >= 1")
    chosen = methods(config).values()
    for choice in chosen:
        accept.load(choice.rule, **choice.rule_keys)
        drafters.check(**choice.drafter)
    extra = config.get("warm_prompts", 0)
    if any(choice.warm for choice in chosen) != (extra > 0) or extra < 0:
        raise UserError(
            f"config.warm_prompts is {extra}, and {sum(c.warm for c in chosen)} methods have warm=True; "
            "a bench needs both or none"
        )
    shared = _given(config.get("accept_keys"))
    if shared and all((choice.rule, choice.rule_keys) != (config.accept, shared) for choice in chosen):
        raise UserError(
            "config.accept_keys are keys of config.accept, and every method of config.grid.methods has a rule of its own; "
            "give them there"
        )


def methods(config: Config) -> dict[str, Choice]:
    """Label -> method: of ``config.grid.methods`` if there are any, else ``config.drafter``.

    The rule is ``config.accept`` with ``config.accept_keys``, unless a method of the grid brings its own ``accept``, and
    ``accept_keys`` for it. Raises UserError for such keys without a rule.
    """
    grid = config.get("grid")
    several = grid.methods.to_dict() if grid and grid.methods else {}
    chosen = {}
    for label, keys in (several or {config.drafter.name: config.drafter.to_dict()}).items():
        if not isinstance(keys, Mapping):
            raise UserError(f"config.grid.methods.{label} is {keys!r}; give it the keys of a drafter")
        keys, rule, rule_keys = {"name": label} | _given(keys), config.accept, _given(config.get("accept_keys"))
        if several and "accept" in keys:
            rule, rule_keys = keys.pop("accept"), _given(keys.pop("accept_keys", None))
        elif several and _given(keys.pop("accept_keys", None)):
            raise UserError(f"method {label} has accept_keys and no rule of its own; give it accept as well")
        chosen[label] = Choice(keys, rule, rule_keys, bool(keys.pop("warm", False)))
    return chosen


def _given(keys: Mapping | None) -> dict:
    """The keys that have a value, in keys of keys as well."""
    inner = {k: _given(v) if hasattr(v, "items") else v for k, v in (keys or {}).items()}
    return {k: v for k, v in inner.items() if v is not None and v != {}}


def method(target: hf.Loaded, choice: Choice, seed: int, label: str = "") -> Method:
    """A drafter with its rule and parameters. Raises UserError, also for a rule that does not fit the drafter."""
    drafter = drafters.make(target=target.lm, **choice.drafter)
    rule = accept.load(choice.rule, **choice.rule_keys)
    accept.check_pair(drafter, rule)
    params = ModelParams(target.params, drafter.init_params(jax.random.key(seed)))
    if choice.warm and drafter.learn is None:
        raise UserError(f"drafter {drafter.name} keeps nothing from one text to the next; leave warm out")
    return Method(label or drafter.name, drafter, rule, params, choice.warm)


def job(config: Config, target: hf.Loaded, prompts: Sequence[Prompt], temperature: float, batch_size: int) -> Job:
    """What is decoded, under which settings. Raises UserError for settings out of range and texts that do not fit."""
    repeats = config.get("repeats", 1)
    for name, value in (("max_new_tokens", config.max_new_tokens), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"config.{name} is {value}; it must be at least 1")
    if batch_size > len(prompts):
        raise UserError(f"the batch size is {batch_size} and there are {len(prompts)} prompts; give more, or lower it")
    settings = {**config.sampling.to_dict(), "temperature": temperature}
    longest, room = max(len(p.ids) for p in prompts), target.config.max_positions
    if longest + config.max_new_tokens > room:
        raise UserError(
            f"the longest prompt has {longest} tokens, with config.max_new_tokens = {config.max_new_tokens} that is "
            f"{longest + config.max_new_tokens}, and the model has {room} positions; shorten one of them"
        )
    return Job(
        target=target.lm,
        params=target.params,
        prompts=[p.ids for p in prompts],
        settings=settings,
        batch_size=batch_size,
        max_new_tokens=config.max_new_tokens,
        eos_id=() if config.ignore_eos else target.config.eos_token_id,
        seed=config.seed,
        repeats=repeats,
    )
