"""Reads a configuration once: every value checked, and held in one plain frozen object.

Nothing below ``specjax.run`` and the training recipes sees a configuration itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import accept, control, drafters, registry
from specjax.bench.methods import MethodChoice
from specjax.checks import one_of, whole
from specjax.config import Config, given
from specjax.data.prompts import PromptSource
from specjax.errors import UserError
from specjax.run import beam_keys, decoding_keys, online_keys
from specjax.run.beam_keys import BeamOptions
from specjax.run.online_keys import OnlineOptions
from specjax.run.overrides import label_of

FREE = ("again",)  # keys that change no result
DTYPES = ("", "float32", "bfloat16", "float16")  # of config.dtype


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What only mode bench reads."""

    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # (0,): prompts as they are
    repeats: int
    show_trace: bool
    trace_prompts: int | None  # None: one if there is a report
    trace_tokens: int
    report: bool
    proof: tuple[str, ...]  # files of ``proofs.write``


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """What only mode replay reads."""

    recording: str
    skip_bad: bool
    num_traces: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration of any mode but train."""

    target: str
    dtype: str  # of the target's parameters; "": float32 on CPUs, bfloat16 elsewhere
    methods: Mapping[str, MethodChoice]  # label -> method
    sampling: Mapping[str, Any]  # arguments of ``sampling.make_sampling``
    batch_size: int
    max_new_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]  # texts that end an output
    verify_widths: tuple[int, ...] | None  # as in ``step.speculative_step``
    mesh: str  # as in ``sharding.make_mesh``; "": one device
    seed: int
    prompts: PromptSource
    record: str  # a file to write the outputs to; "": none
    bench: BenchOptions
    replay: ReplayOptions
    online: OnlineOptions | None  # None: another mode
    beams: BeamOptions | None  # None: no beam search
    config_json: str  # the text of config.json
    sources: tuple[str, ...]  # files of drafters and rules that are not part of specjax
    again: bool  # measure a finished bench again

    @property
    def measured(self) -> dict:
        """What the measurements depend on: the configuration, and the files of own methods."""
        config = {k: v for k, v in json.loads(self.config_json).items() if k not in FREE}
        return config | {"sources": list(self.sources)}


def resolve(config: Config) -> Settings:
    """The settings of a configuration. Raises UserError; no model and no file is read."""
    if not 0 <= config.seed < 2**32:
        raise UserError(f"config.seed is {config.seed}; it must be in 0..{2**32 - 1}")
    dtype = config.get("dtype") or ""
    one_of("config.dtype", dtype, DTYPES)
    _check_rule("config.accept", config.accept, given(config.get("accept_keys")))
    grid = config.get("grid") or {}
    _check_grid(config, grid)
    chosen = methods(config)
    for label, choice in chosen.items():
        _check_rule(f"config.grid.methods.{label}.accept", choice.rule, choice.rule_keys)
        drafters.check(**choice.drafter)
    _check_warm(config, chosen.values())
    _check_mode(config)
    _check_accept_keys(config, chosen.values())
    return Settings(
        target=config.target,
        dtype=dtype,
        methods=chosen,
        sampling=config.sampling.to_dict(),
        batch_size=config.batch_size,
        max_new_tokens=config.max_new_tokens,
        ignore_eos=config.get("ignore_eos", False),
        stop=decoding_keys.stops(config),
        verify_widths=decoding_keys.widths(config.get("verify_widths", "auto")),
        mesh=decoding_keys.mesh(config),
        seed=config.seed,
        prompts=_prompt_source(config, grid),
        record=config.get("record", ""),
        bench=BenchOptions(
            temperatures=tuple(
                map(float, grid.get("temperatures") or (config.sampling.temperature,))
            ),
            batch_sizes=tuple(grid.get("batch_sizes") or (config.batch_size,)),
            contexts=tuple(grid.get("contexts") or (0,)),
            repeats=config.get("repeats", 1),
            show_trace=config.get("show_trace", False),
            trace_prompts=config.get("trace_prompts"),
            trace_tokens=config.get("trace_tokens", 0),
            report=config.get("report", True),
            proof=tuple(config.get("proof") or ()),
        ),
        replay=ReplayOptions(
            recording=config.get("traces", ""),
            skip_bad=config.get("skip_bad", False),
            num_traces=config.get("num_traces", 0),
            vocab_size=config.get("vocab_size", 0),
        ),
        online=online_keys.read(config),
        beams=beam_keys.read(config),
        config_json=config.to_json_best_effort(indent=2) + "\n",
        sources=_sources(chosen.values()),
        again=bool(config.get("again", False)),
    )


def methods(config: Config) -> dict[str, MethodChoice]:
    """Label -> method: those of ``config.grid.methods`` if there are any, else ``config.drafter``.

    The rule is ``config.accept`` with ``config.accept_keys``, unless a method of the grid has its
    own ``accept`` (and ``accept_keys``); an empty name is the recommended rule for the drafter.
    ``config.grid.gammas`` and ``config.grid.models`` replace every method that takes such a key by
    one method per value. Raises UserError for ``accept_keys`` without ``accept``, and for gammas or
    models if no method takes the key.
    """
    grid = config.get("grid")
    several = grid.methods.to_dict() if grid and grid.methods else {}
    shared = given(config.get("accept_keys"))
    chosen = {}
    for label, keys in (several or {config.drafter.name: config.drafter.to_dict()}).items():
        if not isinstance(keys, Mapping):
            raise UserError(
                f"config.grid.methods.{label} is {keys!r}; it must hold the keys of a drafter"
            )
        keys, rule, rule_keys = {"name": label} | given(keys), config.accept, shared
        if several and "accept" in keys:
            rule, rule_keys = keys.pop("accept"), given(keys.pop("accept_keys", None))
        elif several and given(keys.pop("accept_keys", None)):
            raise UserError(
                f"method {label} has accept_keys and no rule of its own; give it accept as well"
            )
        if registry.is_import(keys["name"]) and label == label_of(keys["name"]):
            label = keys["name"]
        chosen[label] = MethodChoice(keys, rule, rule_keys, bool(keys.pop("warm", False)))
    for values, key, name in (("gammas", "gamma", "gamma {}"), ("models", "model", "{}")):
        if wanted := (grid or {}).get(values):
            chosen = _one_per_value(chosen, values, key, name, tuple(wanted))
    return chosen


def _one_per_value(
    chosen: dict[str, MethodChoice], values: str, key: str, name: str, wanted: tuple
) -> dict[str, MethodChoice]:
    """Each method that takes ``key``, once per value; the others unchanged. Raises UserError."""
    if len({str(value) for value in wanted}) != len(wanted):
        raise UserError(f"config.grid.{values} contains a value twice; give each once")
    tails = [Path(value).name if key == "model" else value for value in wanted]
    tails = list(wanted) if len(set(tails)) != len(tails) else tails
    result = {}
    for label, choice in chosen.items():
        # A method that contains others has their keys in ``drafters``; those are not replaced.
        if key not in registry.keys_of(drafters.load(choice.drafter["name"])):
            result[label] = choice
            continue
        for value, tail in zip(wanted, tails, strict=True):
            changed = choice._replace(drafter=choice.drafter | {key: value})
            result[f"{label}, {name.format(tail)}"] = changed
    if result.keys() == chosen.keys():
        raise UserError(
            f"config.grid.{values} is given, and no method takes the key {key!r}; leave it out"
        )
    return result


def _sources(chosen: Collection[MethodChoice]) -> tuple[str, ...]:
    """The files of the drafters and rules that are named as "my_module:make"."""
    names = [choice.rule for choice in chosen]
    groups: list[Any] = [choice.drafter for choice in chosen]
    while groups:
        group = groups.pop()
        names += [value for key, value in group.items() if key == "name"]
        groups += [value for value in group.values() if isinstance(value, Mapping)]
    return tuple(registry.sources(names))


def _check_rule(key: str, name: str, keys: dict) -> None:
    """Raises UserError unless ``name`` is "" without keys, or a rule that takes the keys."""
    if name:
        accept.load(name, **keys)
    elif keys:
        raise UserError(
            f"accept_keys.{next(iter(keys))} is a key of a rule, and {key} is empty; name the rule"
        )


def _check_grid(config: Config, grid: Any) -> None:
    for temperature in [config.sampling.temperature, *grid.get("temperatures", ())]:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise UserError(f"temperature is {temperature!r}; it must be a number")
        decoding_keys.check({**config.sampling.to_dict(), "temperature": temperature})
    for batch_size in [config.batch_size, *grid.get("batch_sizes", ())]:
        whole("batch size", batch_size, 1)
    for name in ("temperatures", "batch_sizes", "contexts", "prompts"):
        values = list(grid.get(name) or ())
        if len({float(f"{v:g}") if isinstance(v, float) else v for v in values}) != len(values):
            raise UserError(f"config.grid.{name} contains a value twice; give each once")
    for gamma in grid.get("gammas", ()):
        whole("a draft length in config.grid.gammas", gamma, 1)
    for context in grid.get("contexts", ()):
        whole("a context length in config.grid.contexts", context, 1)


def _check_mode(config: Config) -> None:
    """Checks the keys of the modes that decode prompts, without a model."""
    if config.mode not in ("generate", "chat", "bench", "online"):
        return
    if config.mode == "bench" and config.get("record"):
        raise UserError("config.record is for mode generate; leave it out")
    least_of = {"max_new_tokens": 1, "repeats": 1, "trace_prompts": 0, "trace_tokens": 0}
    for name, least in least_of.items():
        value = config.get(name)
        if value is not None and value < least:
            raise UserError(f"config.{name} is {value}; it must be at least {least}")


def _check_warm(config: Config, chosen: Sequence[MethodChoice] | Any) -> None:
    extra, warm = config.get("warm_prompts", 0), sum(choice.warm for choice in chosen)
    # A profile may be measured on them too.
    profiled = any(control.wants_profile(choice.drafter.get("control")) for choice in chosen)
    if (warm and not extra) or (extra and not warm and not profiled) or extra < 0:
        raise UserError(
            f"config.warm_prompts is {extra}, and {warm} methods have warm=True; "
            "a bench needs both or none"
        )


def _check_accept_keys(config: Config, chosen: Sequence[MethodChoice] | Any) -> None:
    shared = given(config.get("accept_keys"))
    if shared and all((c.rule, c.rule_keys) != (config.accept, shared) for c in chosen):
        raise UserError(
            "config.accept_keys are keys of config.accept, and every method of config.grid.methods "
            "has a rule of its own; give the keys there"
        )


def _prompt_source(config: Config, grid: Any) -> PromptSource:
    names = tuple(grid.get("prompts") or ()) or (config.get("prompts", ""),)
    return PromptSource(
        text=config.get("prompt", ""),
        names=names,
        kind=config.get("prompt_kind", "auto"),
        chat=config.get("chat") or "",
        max_prompt_tokens=config.get("max_prompt_tokens", 0),
        num_prompts=config.get("num_prompts", 0),
        prompt_tokens=config.get("prompt_tokens", 1),
        warm_prompts=config.get("warm_prompts", 0),
        data_dir=config.get("data_dir", ""),
        seed=config.seed,
    )
