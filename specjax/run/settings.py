"""The keys of a configuration of the modes that decode, declared once.

``read`` makes ``Settings`` of a configuration. From Python the same object is made of its
keys, as ``run.measure`` does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, config_dict

from specjax import accept, control, declare, drafters, registry, sampling, sharding
from specjax import config as config_lib
from specjax.bench.methods import MethodChoice
from specjax.checks import whole
from specjax.config import Config, given
from specjax.data.prompts import PromptSource
from specjax.declare import free, group, key
from specjax.drafters import objectives
from specjax.errors import UserError
from specjax.generation import stops
from specjax.logit_maps import Automaton
from specjax.models import hf
from specjax.train import settings as train_settings
from specjax.train.settings import OnlineKeys, OptimiserKeys, Training

_MOST = 1 << 22  # no vocabulary has so many tokens


class SamplingKeys(declare.Keys, owner="config.sampling."):
    """config.sampling: the arguments of ``sampling.make_sampling``, which checks the values."""

    temperature: Any = key(0.0, "0: greedy")
    top_k: Any = key(0, "how many of the most probable tokens are kept; 0: all")
    top_p: Any = key(1.0, "the most probable tokens with this much probability are kept; 1: all")
    min_p: Any = key(0.0, "the least probability of a token, as a share of the best one's")
    repetition_penalty: Any = key(
        1.0,
        "of prompt and output: positive logits are divided by it, negative ones multiplied; 1: off",
    )
    presence_penalty: Any = key(0.0, "subtracted once from the logits of tokens of the output")
    frequency_penalty: Any = key(0.0, "subtracted for each occurrence in the output")
    min_new_tokens: Any = key(0, "the least number of new tokens before an end-of-sequence token")
    banned: Any = key((), "ids of tokens that are never emitted")
    logit_bias: Any = key("", '"12:-1.5,30:2": ids, and what is added to their logits')
    grammar: str = key(
        "", "what the output must match: a regular expression, or a .json file with a JSON schema"
    )

    def check(self) -> None:
        biased, banned = self.bias(), self.banned or ()
        if not isinstance(banned, tuple | list) or any(type(each) is not int for each in banned):
            raise UserError(f"config.sampling.banned is {banned!r}; it must hold token ids")
        for name, ids in (("banned", banned), ("logit_bias", biased)):
            if max([*ids, 0]) >= _MOST:
                value = getattr(self, name)
                raise UserError(f"{self.OWNER}{name} is {value!r}; no vocabulary has such an id")
        # A vocabulary in which a token stays and another one ends a text.
        size = max([*banned, *biased, 0]) + 3
        arguments = self.arguments((size - 1,), size)
        # Traced: a program that connects processes must not have started a backend.
        jax.eval_shape(lambda: sampling.make_sampling(1, **arguments))

    def bias(self) -> dict[int, float]:
        """The number for each id of ``logit_bias``. Raises UserError."""
        value = self.logit_bias
        if isinstance(value, Mapping):
            return dict(value)
        try:
            pairs = [each.split(":") for each in str(value).split(",")] if value else []
            result = {int(token): float(number) for token, number in pairs}
            if len(result) < len(pairs) or min(result, default=0) < 0:
                raise ValueError
        except ValueError:
            raise UserError(
                f"config.sampling.logit_bias is {value!r}; it must have the form '12:-1.5,30:2': a "
                "token id and what is added to its logit, each id once"
            ) from None
        return result

    def arguments(
        self, end_ids: tuple[int, ...], vocab_size: int, automaton: Automaton | None = None
    ) -> dict[str, Any]:
        """The arguments of ``make_sampling`` for a target. Raises UserError.

        ``automaton``: of the key ``grammar``, which needs the target's tokens.
        """
        result = dataclasses.asdict(self) | {"grammar": automaton, "logit_bias": self.bias()}
        if self.min_new_tokens:
            if not end_ids:
                raise UserError(
                    "config.sampling.min_new_tokens is given, and the model names no "
                    "end-of-sequence token that could wait; leave it out"
                )
            result["end_ids"] = end_ids
        if self.banned or result["logit_bias"] or automaton:
            result["vocab_size"] = vocab_size
        return result


class BeamKeys(declare.Keys, owner="config.beams."):
    """config.beams: beam search at temperature 0, without an acceptance rule."""

    EARLY = {"false": False, "true": True, "never": "never"}  # noqa: RUF012  (never mutated)

    count: int = key(0, "beams; 0: no beam search", least=0)
    returned: int = key(1, "hypotheses that are printed, the best ones", least=1)
    length_penalty: float = key(
        1.0, "a hypothesis of n tokens is divided by n to this power: above 0 favours long ones"
    )
    early_stopping: str = key(
        "false",
        '"false": a text ends when its best beam, if it ended now, would be worse than all '
        'finished ones; "never": if it ended at the best length; "true": with as many finished '
        "ones as beams",
        choices=("false", "true", "never"),
    )
    draft: int = key(0, "beams of the draft model; 0: as many", least=0)

    def check(self) -> None:
        if not self.count:
            for each in declare.keys_of(BeamKeys):
                if (value := getattr(self, each.name)) != each.default:
                    raise UserError(
                        f"config.beams.{each.name} is {value!r} and config.beams.count is 0, which "
                        "is no beam search; set config.beams.count to the number of beams"
                    )
        elif self.count == 1:
            raise UserError(
                "config.beams.count is 1, which is greedy decoding; leave it out, or take at least "
                "2"
            )
        elif self.returned > self.count:
            raise UserError(
                f"config.beams.returned is {self.returned} and config.beams.count {self.count}; "
                "return at most all beams"
            )
        elif 0 < self.draft < self.count:
            raise UserError(
                f"config.beams.draft is {self.draft} and config.beams.count {self.count}; a draft "
                "has at least as many beams as the target"
            )


class GridKeys(declare.Keys, owner="config.grid."):
    """config.grid: values that replace the single value of a bench."""

    methods: Mapping[str, Any] = free(
        "label -> keys of a drafter, instead of config.drafter; a method may have its own accept "
        "and accept_keys. --methods=suffix,prompt_lookup makes it"
    )
    temperatures: tuple[float, ...] = key(
        (), "instead of config.sampling.temperature", least=0, once=True
    )
    batch_sizes: tuple[int, ...] = key((), "instead of config.batch_size", least=1, once=True)
    prompts: tuple[str, ...] = key((), "instead of config.prompts", once=True)
    contexts: tuple[int, ...] = key(
        (),
        "lengths in tokens: prompts are cut to their first tokens; shorter prompts are left out",
        least=1,
        once=True,
    )
    new_tokens: tuple[int, ...] = key((), "instead of config.max_new_tokens", least=1, once=True)
    gammas: tuple[int, ...] = key(
        (),
        "every method that takes gamma is measured once with each length that it can have",
        least=1,
        once=True,
    )
    models: tuple[str, ...] = key(
        (),
        "directories of draft models: every method that takes a model is measured once with each",
        once=True,
    )
    targets: Mapping[str, Any] = free(
        "label -> target, dtype and weights, which have the values of config if they are left out: "
        "further targets with the tokens of config.target. Every method is measured with each, and "
        "each is compared with config.target. configs/compare_targets.py makes it"
    )


MODES = ("generate", "chat", "bench", "replay", "online")


def widths(value: Any) -> tuple[int, ...] | None:
    """``config.verify_widths``: "auto", "full", or numbers separated by commas."""
    if value is None or isinstance(value, tuple):  # read before
        return value
    if value in ("auto", "full"):
        return None if value == "auto" else ()
    try:
        result = tuple(int(each) for each in str(value).split(","))
    except ValueError:
        result = (0,)
    if min(result) < 1:
        raise UserError(
            f"config.verify_widths is {value!r}; it must be 'auto', 'full', or whole numbers >= 1 "
            "separated by commas, such as '1,5,11'"
        )
    return result


class Settings(declare.Keys, owner="config."):
    """The keys of all modes that decode; ``KEYS`` says which of them a mode has."""

    mode: str = key("generate", "what is done", choices=MODES)
    target: str = key(
        "",
        "a Hugging Face style directory, a name of the Hub, a .gguf file, or a trained run's "
        "workdir. replay: the recorded model, optional, of which no weights are read",
    )
    dtype: str = key(
        "",
        "of the target: float32, bfloat16, float16; empty: float32 on CPUs, float16 on GPUs "
        "without bfloat16, else bfloat16",
        choices=("", "float32", "bfloat16", "float16"),
    )
    weights: str = key(
        "",
        "int8: the matrices of the target's layers are rounded to 8 bits with a scale for each "
        "output channel and stay so in memory; empty: they have the dtype",
        choices=hf.WEIGHTS,
    )
    drafter: Mapping[str, Any] = free(
        'the name of a drafter, or of a function of your own: my_module:make; "none" is plain '
        'decoding, "auto" (generate and chat) what configs/auto.py kept for the model'
    )
    accept: str = key(
        "",
        "a rule that fits the drafter, or a function of your own: my_module:make. Empty: chain for "
        "chains, deterministic for deterministic trees, recursive for sampled ones, and match for "
        "plain decoding",
    )
    accept_keys: Mapping[str, Any] = free("keys of config.accept; only lossy rules have keys")
    sampling: SamplingKeys = group(SamplingKeys)
    prompt: str = key("", "one text")
    prompts: str = key(
        "",
        'or a file: .txt (one prompt per line), .jsonl with a "prompt" key, Spec-Bench, MT-bench, '
        "HumanEval, GSM8K, MBPP or SPEED-Bench as published (.gz and .xz, and .parquet); "
        '"speed_bench:FILE" states the kind; or "stdlib"',
    )
    prompt_kind: str = key(
        "auto",
        "kind of the file, if its first line does not show it: see specjax/data/prompt_files.py",
    )
    chat: str = key(
        "auto",
        'chat template for prompts of files that are no texts to be continued: "auto", the '
        "model's own if it has one; \"own\", the model's; others: see specjax/data/chat.py; "
        "empty: none",
    )
    max_prompt_tokens: int = key(
        0,
        "longer prompts keep this many tokens: the beginning-of-text token, if the tokenizer has "
        "one, and the last ones (of an encoder-decoder model the first ones of the source); 0: no "
        "limit",
        least=0,
    )
    num_prompts: int = key(
        0,
        "largest number of prompts, evenly from the categories of a file; a conversation counts "
        'once, and each of its turns is decoded. 0: all, of "stdlib" 32',
        least=0,
    )
    prompt_tokens: int = key(
        64, '"stdlib": the length of each, with its beginning-of-text token', least=1
    )
    data_dir: str = key(
        "", '"stdlib": where the corpus was built; empty: the data folder of the target\'s run'
    )
    max_new_tokens: int = key(
        128, "of every prompt; replay: every output is cut there, 0: all of it", least=0
    )
    record: str = key("", "a .jsonl file to write the outputs to, for configs/replay.py")
    ignore_eos: bool = key(False, "whether texts go on after an end-of-sequence token")
    stop: tuple[str, ...] = key(
        (),
        "texts that end an output, such as \"('\\n\\n',)\": it ends before the first of them. What "
        "was decoded after it is dropped, but counted in tau and in tokens per second",
        parse=stops.check,
    )
    beams: BeamKeys = group(BeamKeys)
    batch_size: int = key(
        1, "prompts decoded together; replay: it changes the time, not the results", least=1
    )
    verify_widths: Any = key(
        "auto",
        'how many tokens a round verifies: "auto", the smallest of a few widths that covers the '
        'longest draft of its rows; "full", always the whole draft; or widths such as "1,5,11". In '
        "a batch the width depends on all rows, so the last bits of a row's logits may depend on "
        "the others",
        parse=widths,
    )
    mesh: str = key(
        "",
        'devices, such as "data:4,tensor:2": rows are divided among 4 parts, and matrices and '
        'caches among 2 devices each; "data:-1" takes all devices for rows. Empty: one device',
    )
    seed: int = key(0, "of the noise", least=0, most=2**32 - 1)
    # bench
    repeats: int = key(1, "interleaved passes, of which the median counts", least=1)
    warm_prompts: int = key(
        0,
        "further prompts that drafters with warm=True learn from before they are measured",
        least=0,
    )
    show_trace: bool = key(False, "print one continuation, coloured by the origin of each token")
    trace_prompts: int | None = key(
        None,
        "number of prompts traced for the report, with every method and temperature; 0: no "
        "overlap is computed either; None: one with a report, none without",
        least=0,
    )
    trace_tokens: int = key(
        0, "new tokens of a traced continuation; at least config.max_new_tokens", least=0
    )
    report: bool = key(True, "report.html and plots/; without it no overlap is computed either")
    again: bool = key(False, "measure again although the same bench is finished")
    keep: bool = key(
        False, "keep the fastest method of each setting for drafter.name=auto, see configs/auto.py"
    )
    proof: tuple[str, ...] = key(
        (),
        "files that specjax.bench.proofs.write made of reports of testing.check_drafter and "
        'check_accept: a drafter or a rule of one\'s own is then "L1 proven" in the tables',
    )
    grid: GridKeys = group(GridKeys)
    # replay
    traces: str = key("", "the recording")
    skip_bad: bool = key(
        False, "leave bad lines out and list them, instead of stopping at the first"
    )
    num_traces: int = key(0, "largest number of conversations, from the start; 0: all", least=0)
    vocab_size: int = key(
        0,
        "of the recorded model; 0: that of config.target, or else the largest recorded id + 1",
        least=0,
    )
    # online
    online: OnlineKeys = group(OnlineKeys)
    loss: Mapping[str, Any] = free("keys of the drafter's loss")
    optimiser: OptimiserKeys = group(OptimiserKeys)
    # of the configuration itself
    config_json: str = key("", "the configuration's text", python=True)

    def check(self) -> None:
        if self.mesh:
            sharding.parse(self.mesh)
        if self.keep and self.mesh:
            raise UserError(
                f"config.keep is given and config.mesh is {self.mesh!r}; what is kept is for one "
                "device, so leave one of them out"
            )
        if self.mode != "replay":
            whole("config.max_new_tokens", self.max_new_tokens, 1)
        if self.mode == "online":
            self.online.check_stream(self.batch_size)
        for temperature in self.grid.temperatures:
            dataclasses.replace(self.sampling, temperature=temperature)
        for label in self.grid.targets:
            self.on(label)
        if self.grid.targets and self.keep:
            raise UserError("config.keep is for config.target alone; leave config.grid.targets out")

    def on(self, label: str) -> Settings:
        """The settings with the target ``label`` of the grid. Raises UserError for wrong keys."""
        keys = self.grid.targets[label]
        own = given(keys) if isinstance(keys, Mapping) else {}
        if not own or own.keys() - set(TARGET):
            raise UserError(
                f"config.grid.targets.{label} is {keys!r}; it must hold some of the keys "
                f"{', '.join(TARGET)}"
            )
        return dataclasses.replace(self, grid=dataclasses.replace(self.grid, targets={}), **own)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those of the grid, or the single one."""
        return tuple(map(float, self.grid.temperatures or (self.sampling.temperature,)))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those of the grid, or the single one."""
        return self.grid.batch_sizes or (self.batch_size,)

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Those of the grid, or the single number."""
        return self.grid.new_tokens or (self.max_new_tokens,)

    @property
    def source(self) -> PromptSource:
        """Which prompts are read."""
        names = ("max_prompt_tokens", "num_prompts", "prompt_tokens", "warm_prompts")
        own = {name: getattr(self, name) for name in (*names, "chat", "data_dir", "seed")}
        files = self.grid.prompts or (self.prompts,)
        return PromptSource(text=self.prompt, names=files, kind=self.prompt_kind, **own)

    @functools.cached_property
    def methods(self) -> Mapping[str, MethodChoice]:
        """Label -> method: those of ``config.grid.methods`` if there are any, else
        ``config.drafter``.

        The rule is ``config.accept`` with ``config.accept_keys``, unless a method of the grid has
        its own ``accept`` (and ``accept_keys``); an empty name is the recommended rule for the
        drafter. ``config.grid.gammas`` and ``config.grid.models`` replace every method that takes
        such a key by one method per value. Raises UserError for ``accept_keys`` without ``accept``,
        and for gammas or models if no method takes the key.
        """
        several, shared = self.grid.methods, given(self.accept_keys)
        chosen: dict[str, MethodChoice] = {}
        each: Mapping[str, Any] = several or {str(self.drafter.get("name")): self.drafter}
        for label, keys in each.items():
            if not isinstance(keys, Mapping):
                raise UserError(
                    f"config.grid.methods.{label} is {keys!r}; it must hold the keys of a drafter"
                )
            own: dict[str, Any] = {"name": label} | given(keys)
            rule, rule_keys = self.accept, shared
            if several and "accept" in own:
                rule, rule_keys = own.pop("accept"), given(own.pop("accept_keys", None))
            elif several and given(own.pop("accept_keys", None)):
                raise UserError(
                    f"method {label} has accept_keys and no rule of its own; give it accept as well"
                )
            if registry.is_import(own["name"]) and label == label_of(own["name"]):
                label = own["name"]
            chosen[label] = MethodChoice(own, rule, rule_keys, bool(own.pop("warm", False)))
        for values, name, text in (("gammas", "gamma", "gamma {}"), ("models", "model", "{}")):
            if wanted := getattr(self.grid, values):
                chosen = _one_per_value(chosen, values, name, text, wanted)
        return chosen

    @property
    def sources(self) -> tuple[str, ...]:
        """The files of the drafters and rules that are named as "my_module:make"."""
        names = [choice.rule for choice in self.methods.values()]
        for choice in self.methods.values():
            keys: dict[Any, Any] = flatten_dict(choice.drafter)
            names += [value for path, value in keys.items() if path[-1] == "name"]
        return tuple(registry.sources(names))

    @property
    def measured(self) -> dict:
        """What the measurements depend on: the configuration, and the files of own methods."""
        return lasting(json.loads(self.config_json)) | {"sources": list(self.sources)}

    def check_methods(self) -> None:
        """Raises UserError for methods and rules whose keys are wrong, or that are not used."""
        _check_rule("config.accept", self.accept, given(self.accept_keys))
        chosen = self.methods.values()
        for label, choice in self.methods.items():
            _check_rule(f"config.grid.methods.{label}.accept", choice.rule, choice.rule_keys)
            drafters.check(**choice.drafter)
        extra, warm = self.warm_prompts, sum(choice.warm for choice in chosen)
        controls = [choice.drafter.get("control") for choice in chosen]
        # A profile may be measured on them too.
        profiled = any(map(control.wants_profile, controls))
        if (warm and not extra) or (extra and not warm and not profiled):
            raise UserError(
                f"config.warm_prompts is {extra}, and {warm} methods have warm=True; "
                "a bench needs both or none"
            )
        if not extra and any(map(control.wants_policies, controls)):
            raise UserError(
                "config.warm_prompts is 0, and the controller 'ltd' is fitted to prompts that are "
                "not measured; give at least 16"
            )
        if profiled and self.grid.targets:
            raise UserError(
                "a controller's profile is measured for one target; leave config.grid.targets out"
            )
        shared = given(self.accept_keys)
        if shared and all((c.rule, c.rule_keys) != (self.accept, shared) for c in chosen):
            raise UserError(
                "config.accept_keys are keys of config.accept, and every method of "
                "config.grid.methods has a rule of its own; give the keys there"
            )

    def check_beams(self) -> None:
        """Raises UserError for keys that beam search would ignore."""
        if self.accept or given(self.accept_keys):
            raise UserError(
                f"config.accept is {self.accept!r} and beam search has no acceptance rule: a step "
                "is accepted if all beams of the target are among the draft's; leave it out"
            )
        for each in declare.keys_of(SamplingKeys):
            if (value := getattr(self.sampling, each.name)) != each.default:
                raise UserError(
                    f"config.sampling.{each.name} is {value!r}, and beam search takes the model's "
                    f"own probabilities; set it to {each.default!r}, or leave config.beams out"
                )
        for name, value in (("stop", self.stop), ("mesh", self.mesh)):
            if value:
                raise UserError(
                    f"config.{name} is {value!r}, which beam search does not support; leave it out"
                )
        if self.verify_widths is not None:
            raise UserError(
                "config.verify_widths is given, which beam search does not support; leave it out"
            )
        [choice] = self.methods.values()
        keys = {name: value for name, value in choice.drafter.items() if name != "name" and value}
        name = choice.drafter["name"]
        if name not in ("none", "draft_model"):
            raise UserError(
                f"config.drafter.name is {name!r}, and its drafts are no beams; take draft_model "
                "for speculative beams, or none for plain ones"
            )
        own = ("model", "gamma") if name == "draft_model" else ()
        if unused := [each for each in keys if each not in own]:
            raise UserError(
                f"config.drafter.{unused[0]} has no effect on beam search; leave it out"
                + (" (config.beams.draft is the number of the draft's beams)" if own else "")
            )
        if name == "none" and self.beams.draft:
            raise UserError(
                f"config.beams.draft is {self.beams.draft} and there is no draft model; name one: "
                "config.drafter.name=draft_model and config.drafter.model"
            )


def read(config: Config) -> Settings:
    """The settings of a configuration. Raises UserError; no model and no file is read."""
    own = {name: config[name] for name in config if name not in STAGES}
    text = config.to_json_best_effort(indent=2) + "\n"
    result = config_lib.read(Settings, own, config_json=text)
    for name in own:
        if name not in _groups(result.mode) and getattr(result, name) != getattr(Settings(), name):
            raise UserError(foreign(name, result.mode))
    result.check_methods()
    if result.beams.count:
        result.check_beams()
    return result


def decoding(mode: str, **values: Any) -> Config:
    """The configuration of a mode that decodes; ``values`` replace defaults."""
    usual = {"mode": mode, "drafter": drafter("none"), "accept_keys": _empty(accept.keys())}
    return config_lib.group(Settings, KEYS[mode], **usual | values)


def drafter(name: str, **values: Any) -> Config:
    """The keys of all drafters; None: the default in the drafter's file in specjax/drafters."""
    types = drafters.keys() | {"warm": bool}
    return _empty(types, {"name": name, "drafters": ConfigDict()} | values)


def training(objective: str, **values: Any) -> Config:
    """The configuration of an objective of training; ``values`` replace defaults."""
    return config_lib.group(Training, train_settings.KEYS[objective], objective=objective, **values)


def trained(name: str, **values: Any) -> Config:
    """The keys of the drafter ``name`` alone; None: its default."""
    return _empty(types_of(drafters.load(name)), {"name": name} | values)


def draft_model(name: str) -> Config:
    """The keys with which objective distill trains the draft model of the method ``name``."""
    how = objectives.distilled(name)
    assert how is not None
    keys = config_lib.group(how.keys)
    keys.name = name
    return keys


def types_of(module: Any) -> dict[str, type]:
    """The keys of a method that a command line can give, with their types."""
    keys = registry.keys_of(module).values()
    return {key.name: key.type for key in keys if not key.facts.python and key.name != "drafters"}


def _empty(types: Mapping[str, type], values: Mapping[str, Any] | None = None) -> Config:
    """A group whose keys have ``values``, or types alone."""
    result = ConfigDict({"name": ""} if values else None)
    for name, kind in types.items():
        result[name] = config_dict.placeholder(kind)
    result.update(values or {})
    return result


def foreign(name: str, mode: str) -> str:
    """What a message says about a key of other modes."""
    modes = [mode for mode in MODES if name in _groups(mode)]
    kind = "modes" if len(modes) > 1 else "mode"
    return f"config.{name} is for {kind} {' and '.join(modes)}, not for mode {mode}; leave it out"


def _groups(mode: str) -> set[str]:
    """The keys and groups of keys of a mode."""
    return {name.partition(".")[0] for name in KEYS[mode]}


def lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that change results."""
    return {key: value for key, value in config.items() if key not in FREE}


def label_of(name: str) -> str:
    """The label of the drafter ``name``: a setting of the command line contains no ":" and "."."""
    return re.sub(r"\W", "_", name)


TARGET = ("target", "dtype", "weights")  # keys of a target of the grid
FREE = ("again",)  # keys that change no result
STAGES = ("prepare", "stages")  # what runs first

_METHOD = ("mode", "target", "drafter", "accept", "accept_keys", "sampling", "seed")
_PROMPTS = (
    *("prompt", "prompts", "prompt_kind", "chat", "max_prompt_tokens", "num_prompts"),
    *("max_new_tokens", "ignore_eos", "dtype", "verify_widths"),
)
_ALL_PROMPTS = (*_PROMPTS, "prompt_tokens", "data_dir")  # with those of the corpus
_BATCHES = (*_METHOD, *_ALL_PROMPTS, "weights", "batch_size", "mesh")
# Mode -> its keys.
KEYS = {
    "generate": (*_BATCHES, "record", "stop", "beams"),
    "chat": (*_METHOD, *_PROMPTS, "weights", "record", "stop"),
    "bench": (
        *(*_BATCHES, "repeats", "warm_prompts", "show_trace", "trace_prompts", "trace_tokens"),
        *("report", "again", "keep", "proof", "grid"),
    ),
    "replay": (
        *("mode", "target", "drafter", "accept", "accept_keys", "sampling.temperature"),
        *("max_new_tokens", "seed", "batch_size", "traces", "skip_bad", "num_traces"),
        *("vocab_size", "grid.methods"),
    ),
    "online": (*_METHOD, *_ALL_PROMPTS, "batch_size", "report", "online", "loss", "optimiser"),
}


def _one_per_value(
    chosen: dict[str, MethodChoice], values: str, name: str, text: str, wanted: Collection[Any]
) -> dict[str, MethodChoice]:
    """Each method that takes the key ``name``, once per value; the others unchanged.

    ``build.methods`` leaves out the lengths that a method does not have. Raises UserError.
    """
    tails = [Path(value).name if name == "model" else value for value in wanted]
    tails = list(wanted) if len(set(tails)) != len(tails) else tails
    result = {}
    for label, choice in chosen.items():
        # A method that contains others has their keys in ``drafters``; those are not replaced.
        if name not in registry.keys_of(drafters.load(choice.drafter["name"])):
            result[label] = choice
            continue
        choice = choice._replace(of_gammas=choice.of_gammas or name == "gamma")
        for value, tail in zip(wanted, tails, strict=True):
            keys = choice.drafter | {name: value}
            result[f"{label}, {text.format(tail)}"] = choice._replace(drafter=keys)
    if result.keys() == chosen.keys():
        raise UserError(
            f"config.grid.{values} is given, and no method takes the key {name!r}; leave it out"
        )
    return result


def _check_rule(where: str, name: str, keys: dict) -> None:
    """Raises UserError unless ``name`` is "" without keys, or a rule that takes the keys."""
    if name:
        accept.load(name, **keys)
    elif keys:
        raise UserError(
            f"accept_keys.{next(iter(keys))} is a key of a rule, and {where} is empty; name the "
            "rule"
        )
