"""From a configuration to the objects that decode: target, drafter, rule, prompts. Every mistake is found here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from specjax import accept, drafters, sampling
from specjax.bench.passes import Job, Method
from specjax.config import Config
from specjax.data.prompts import PromptSet
from specjax.errors import UserError
from specjax.models import hf
from specjax.types import ModelParams


class Choice(NamedTuple):
    """One method of a configuration."""

    drafter: dict  # its keys, "name" among them
    rule: str
    rule_keys: dict
    warm: bool = False  # whether it learns from other prompts before it is measured


def load_target(config: Config) -> hf.Loaded:
    """The target model of ``config.target``. Raises UserError if there is none, or it has no tokenizer."""
    if not config.target:
        raise UserError(
            "config.target is empty; give a Hugging Face style directory or a trained run's workdir"
        )
    loaded = hf.load(config.target)
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.directory} has no tokenizer.json; text needs one")
    return loaded


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
    for name in ("temperatures", "batch_sizes", "contexts", "prompts"):
        values = list(grid.get(name) or ())
        if len({float(f"{v:g}") if isinstance(v, float) else v for v in values}) != len(values):
            raise UserError(f"config.grid.{name} holds a value twice; give each once")
    for context in grid.get("contexts", ()):
        if isinstance(context, bool) or not isinstance(context, int) or context < 1:
            raise UserError(f"config.grid.contexts has {context!r}; it must be a whole number >= 1")
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
    if shared and all(
        (choice.rule, choice.rule_keys) != (config.accept, shared) for choice in chosen
    ):
        raise UserError(
            "config.accept_keys are keys of config.accept, and every method of config.grid.methods has a rule of its own; "
            "give them there"
        )


def methods(config: Config) -> dict[str, Choice]:
    """Label -> method: of ``config.grid.methods`` if there are any, else ``config.drafter``.

    The rule is ``config.accept`` with ``config.accept_keys``, unless a method of the grid brings its own ``accept``, and
    ``accept_keys`` for it. ``config.grid.gammas`` and ``config.grid.models`` make several of every method that takes such a
    key, one for each value. Raises UserError for keys without a rule, and for such values that no method takes.
    """
    grid = config.get("grid")
    several = grid.methods.to_dict() if grid and grid.methods else {}
    chosen = {}
    for label, keys in (several or {config.drafter.name: config.drafter.to_dict()}).items():
        if not isinstance(keys, Mapping):
            raise UserError(
                f"config.grid.methods.{label} is {keys!r}; give it the keys of a drafter"
            )
        keys, rule, rule_keys = (
            {"name": label} | _given(keys),
            config.accept,
            _given(config.get("accept_keys")),
        )
        if several and "accept" in keys:
            rule, rule_keys = keys.pop("accept"), _given(keys.pop("accept_keys", None))
        elif several and _given(keys.pop("accept_keys", None)):
            raise UserError(
                f"method {label} has accept_keys and no rule of its own; give it accept as well"
            )
        chosen[label] = Choice(keys, rule, rule_keys, bool(keys.pop("warm", False)))
    for values, key, name in (("gammas", "gamma", "gamma {}"), ("models", "model", "{}")):
        if wanted := (grid or {}).get(values):
            chosen = _each(chosen, values, key, name, tuple(wanted))
    return chosen


def _each(
    chosen: dict[str, Choice], values: str, key: str, name: str, wanted: tuple
) -> dict[str, Choice]:
    """Every method once for each value of the key, if it takes the key. Raises UserError."""
    if len({str(value) for value in wanted}) != len(wanted):
        raise UserError(f"config.grid.{values} holds a value twice; give each once")
    tails = [Path(value).name if key == "model" else value for value in wanted]
    tails = list(wanted) if len(set(tails)) != len(tails) else tails
    found = {}
    for label, choice in chosen.items():
        # A method that is made of others has their keys inside.
        if key not in inspect.signature(drafters.load(choice.drafter["name"]).make).parameters:
            found[label] = choice
            continue
        for value, tail in zip(wanted, tails, strict=True):
            found[f"{label}, {name.format(tail)}"] = choice._replace(
                drafter=choice.drafter | {key: value}
            )
    if found.keys() == chosen.keys():
        raise UserError(
            f"config.grid.{values} is given, and no method takes the key {key!r}; leave it out"
        )
    return found


def _given(keys: Mapping | None) -> dict:
    """The keys that have a value, in keys of keys as well."""
    inner = {k: _given(v) if hasattr(v, "items") else v for k, v in (keys or {}).items()}
    return {k: v for k, v in inner.items() if v is not None and v != {}}


def temperatures(config: Config) -> list[float]:
    """``config.grid.temperatures``, or the one of ``config.sampling``."""
    return [
        float(t)
        for t in (config.get("grid") or {}).get("temperatures") or (config.sampling.temperature,)
    ]


def method(target: hf.Loaded, choice: Choice, config: Config, label: str = "") -> Method:
    """A drafter with its rule and parameters. Raises UserError, also for a rule or a temperature that does not fit it."""
    drafter = drafters.make(target=target.lm, **choice.drafter)
    rule = accept.load(choice.rule, **choice.rule_keys)
    accept.check_pair(drafter, rule)
    if drafter.greedy_only and any(temperatures(config)):
        raise UserError(
            f"drafter {drafter.name} means something at temperature 0 only; set config.sampling.temperature=0"
        )
    params = ModelParams(target.params, drafter.init_params(jax.random.key(config.seed)))
    if choice.warm and drafter.learn is None:
        raise UserError(
            f"drafter {drafter.name} keeps nothing from one text to the next; leave warm out"
        )
    return Method(label or drafter.name, drafter, rule, params, choice.warm)


def job(
    config: Config, target: hf.Loaded, chosen: PromptSet, temperature: float, batch_size: int
) -> Job:
    """What is decoded, under which settings. Raises UserError for settings out of range and texts that do not fit."""
    repeats, prompts = config.get("repeats", 1), chosen.prompts
    for name, value in (("max_new_tokens", config.max_new_tokens), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"config.{name} is {value}; it must be at least 1")
    if batch_size > len(prompts):
        raise UserError(
            f"the batch size is {batch_size} and there are {len(prompts)} prompts; give more, or lower it"
        )
    settings = {**config.sampling.to_dict(), "temperature": temperature}
    longest, room = max(len(p.ids) for p in prompts), target.config.max_positions
    if longest + config.max_new_tokens > room:
        raise UserError(
            f"the longest prompt has {longest} tokens, with config.max_new_tokens = {config.max_new_tokens} that is "
            f"{longest + config.max_new_tokens}, and the model has {room} positions; shorten one of them, or let "
            "config.max_prompt_tokens cut prompts"
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
        name=chosen.name,
        categories=[p.category for p in prompts],
        spell=None if target.tokenizer is None else target.tokenizer.decode,
    )
