"""From a configuration to the objects that decode: target, drafter, rule, prompts. Every mistake is found here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from specjax import accept, drafters, sampling
from specjax.bench import Job, Method
from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf
from specjax.types import ModelParams

STDLIB = "stdlib"  # the named prompt set: held-out lines of the embedded corpus


class Prompt(NamedTuple):
    """One prompt, as text and as token ids."""

    text: str
    ids: list[int]


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
    ``config.num_prompts`` of them; 0 = all.

    Raises UserError for neither or both, a missing file, a line without the key, an empty prompt.
    """
    if bool(config.prompt) == bool(config.prompts):
        raise UserError("give either config.prompt (one text) or config.prompts (a .txt or .jsonl file, or stdlib)")
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if config.prompts == STDLIB:
        return _held_out(config, target)
    texts = [config.prompt] if config.prompt else _read(Path(config.prompts).expanduser())
    prompts = []
    for number, text in enumerate(texts[: config.num_prompts or None], 1):
        ids = tokenizer.encode(text).ids
        if not text.strip() or not ids:
            raise UserError(f"prompt {number} is empty; a prompt needs at least one token")
        prompts.append(Prompt(text, ids))
    if not prompts:
        raise UserError(f"{config.prompts} has no prompts; give at least one")
    return prompts


def _held_out(config: Config, target: hf.Loaded) -> list[Prompt]:
    from specjax.train import data  # only here: TFDS takes a second to import

    assert target.tokenizer is not None
    folder = config.data_dir or str(Path(target.directory).parent / "data")
    texts = [text for _, text in data.load_texts(folder, "test")]
    ids = data.held_out_prompts(texts, target.tokenizer, config.num_prompts or 32, config.prompt_tokens, config.seed)
    return [Prompt(target.tokenizer.decode(i), i) for i in ids]


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"config.prompts: {path} cannot be read ({error.strerror}); give a file, or stdlib") from None
    except UnicodeDecodeError:
        raise UserError(f"config.prompts: {path} is not UTF-8 text") from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f'config.prompts: {path} line {number} is no JSON object with a "prompt" text')
        prompts.append(prompt)
    return prompts


def method(target: hf.Loaded, keys: dict, rule: str, seed: int, label: str = "") -> Method:
    """A drafter with its rule and parameters; ``keys`` hold its name, keys of value None are not set."""
    keys = {k: v for k, v in keys.items() if v is not None}
    name = keys.pop("name", label)
    drafter = drafters.make(name, target.lm, **keys)
    params = ModelParams(target.params, drafter.init_params(jax.random.key(seed)))
    return Method(label or name, drafter, accept.load(rule), params)


def job(config: Config, target: hf.Loaded, prompts: Sequence[Prompt], temperature: float, batch_size: int) -> Job:
    """What is decoded, under which settings. Raises UserError for settings out of range and texts that do not fit."""
    for name, value in (
        ("batch_size", batch_size),
        ("max_new_tokens", config.max_new_tokens),
        ("repeats", config.repeats),
    ):
        if value < 1:
            raise UserError(f"config.{name} is {value}; it must be at least 1")
    settings = {**config.sampling.to_dict(), "temperature": temperature}
    sampling.make_sampling(1, **settings)
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
        repeats=config.repeats,
    )
