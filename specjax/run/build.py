"""Builds what a run decodes with: the target, the methods, and the job of each setting."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from specjax import sharding
from specjax.bench import methods as methods_lib
from specjax.bench import passes
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method
from specjax.data.prompts import PromptSet
from specjax.drafters.files import probe
from specjax.errors import TooLong, UserError
from specjax.logit_maps import grammar
from specjax.models import hf, memory
from specjax.prompt import check_length
from specjax.run.settings import Settings
from specjax.train.display import report


def target(settings: Settings) -> hf.Loaded:
    """The target model. Raises UserError if there is none, or if it has no tokenizer."""
    if not settings.target:
        raise UserError(
            "config.target is empty; give a Hugging Face style directory, a name of the Hub, "
            "a .gguf file or a trained run's workdir"
        )
    devices = mesh(settings)
    how: dict[str, Any] = {"dtype": settings.dtype or None, "weights": settings.weights}
    loaded = hf.load(settings.target, **how, on_host=devices is not None)
    _ = loaded.text_tokenizer  # raises if there is none
    if devices is None:
        return loaded
    return loaded._replace(params=sharding.place_target(devices, loaded.lm, loaded.params))


def computes(dtype: str, weights: str) -> str:
    """What ``auto`` keeps its choices by: the dtype of the parameters, and how they are stored."""
    return " ".join(filter(None, (hf.parameter_dtype(dtype or None).name, weights)))


def check_targets(settings: Settings, target: hf.Loaded) -> None:
    """Reads the configurations and tokenizers of ``config.grid.targets``, and no weights.

    Raises UserError for one that cannot be read, or that has other tokens than ``target``.
    """
    for label in settings.grid.targets:
        path = hf.resolve(settings.on(label).target)
        config = hf.translated(path, hf.read_config(path), hf.config_from_hf)
        tokenizer = hf.load_tokenizer(path, config.vocab_size)
        same = tokenizer is not None and hf.fingerprint(tokenizer) == target.lm.vocabulary
        if not same or type(config) is not type(target.config):
            raise UserError(
                f"config.grid.targets.{label}, {path}, has other tokens than {target.directory}, "
                "or one of them has an encoder; compare targets of one kind and one tokenizer"
            )


def mesh(settings: Settings) -> Mesh | None:
    """The devices that decode; None: one. Raises UserError for a mesh that does not fit them."""
    return sharding.make_mesh(settings.mesh) if settings.mesh else None


def rows(settings: Settings, count: int) -> int:
    """The batch size for ``count`` prompts: not more than needed, and the mesh can divide it."""
    parts = 1 if (devices := mesh(settings)) is None else devices.shape[sharding.DATA]
    return min(settings.batch_size, -(-count // parts) * parts)


def methods(
    settings: Settings,
    target: hf.Loaded,
    choices: Mapping[str, MethodChoice] | None = None,
    note: Callable[[str], None] = report,
) -> list[Method]:
    """The methods, in the order of the settings, or of ``choices``. Raises UserError.

    A length of ``config.grid.gammas`` that a method does not have is left out; ``note`` gets a line
    about it, and about methods that take no gamma.
    """
    built, chosen, refused = [], choices or settings.methods, None
    several = any(choice.of_gammas for choice in chosen.values())
    for label, choice in chosen.items():
        try:
            own = choice._replace(drafter=probe.replaced(target, choice.drafter, note))
            method = methods_lib.build(
                target.lm,
                target.params,
                own,
                label=label,
                seed=settings.seed,
                temperatures=settings.temperatures,
            )
        except TooLong as error:
            if not choice.of_gammas:
                raise
            refused = error
            note(f"{label} is left out: {error}")
            continue
        if several and not choice.of_gammas:
            note(f"{label} takes no gamma and is measured once")
        built.append(method)
    if not built and refused is not None:
        raise refused
    if (devices := mesh(settings)) is None:
        return built
    placed = [sharding.place_draft(devices, method.params.draft) for method in built]
    pairs = zip(built, placed, strict=True)
    return [method._replace(params=method.params._replace(draft=draft)) for method, draft in pairs]


def job(
    settings: Settings,
    target: hf.Loaded,
    prompts: PromptSet,
    temperature: float,
    batch_size: int,
    new_tokens: int | None = None,
) -> Job:
    """What is decoded, with which settings; ``new_tokens`` instead of ``settings.max_new_tokens``.

    Raises:
        UserError: settings out of range, more rows than prompts, a text longer than the context, a
            cache that the device's memory does not hold.
    """
    count, devices = len(prompts.prompts), mesh(settings)
    parts = 1 if devices is None else devices.shape[sharding.DATA]
    if batch_size % parts:
        raise UserError(
            f"the batch size is {batch_size}, and config.mesh={settings.mesh} divides it among "
            f"{parts} parts; take a multiple of {parts}"
        )
    if batch_size > -(-count // parts) * parts:
        what = "turns" if any(prompt.turn for prompt in prompts.prompts) else "prompts"
        raise UserError(
            f"the batch size is {batch_size} and there are {count} {what}; give more, or lower it"
        )
    new_tokens = settings.max_new_tokens if new_tokens is None else new_tokens
    longest = max(len(prompt.ids) for prompt in prompts.prompts)
    shorter = ", or let config.max_prompt_tokens cut prompts"
    check_length(longest, new_tokens, target.lm.max_positions, shorter)
    sampling = dataclasses.replace(settings.sampling, temperature=temperature)
    ends, vocab = target.eos_ids, target.lm.vocab_size
    automaton = grammar.of_setting(sampling.grammar, target.lm.token_bytes, vocab, ends)
    built = Job(
        target=target.lm,
        params=target.params,
        prompts=[prompt.ids for prompt in prompts.prompts],
        settings=sampling.arguments(ends, vocab, automaton),
        batch_size=batch_size,
        max_new_tokens=new_tokens,
        eos_id=() if settings.ignore_eos else ends,
        seed=settings.seed,
        repeats=settings.repeats,
        name=prompts.name,
        categories=[prompt.category for prompt in prompts.prompts],
        spell=target.spell,
        verify_widths=settings.verify_widths,
        mesh=devices,
    )
    if devices is None:
        slots = built.width + built.max_new_tokens
        what = f"a cache of {batch_size} rows x {slots} tokens"
        memory.check(passes.cache_bytes(built, slots), what, f"take {memory.LESS}")
    return built


def about(job: Job, chosen: Sequence[Method]) -> str:
    """Where and with what a job decodes: devices, dtype, gigabytes of weights and of a cache.

    The weights are those of the target and of all drafters, each counted once.
    """
    devices = jax.devices()[:1] if job.mesh is None else list(job.mesh.devices.flat)
    held = [job.params, *(method.params.draft for method in chosen)]
    arrays = {id(x): x for x in jax.tree.leaves(held) if hasattr(x, "nbytes")}
    dtypes = Counter({str(x.dtype): 0 for x in arrays.values()})
    for x in arrays.values():
        dtypes[str(x.dtype)] += int(x.nbytes)
    slots = job.width + job.max_new_tokens
    cache = passes.cache_bytes(job, slots)
    return (
        f"{len(devices)} x {devices[0].device_kind}, {dtypes.most_common(1)[0][0]}, weights "
        f"{dtypes.total() / 1e9:.2f} GB, the target's cache {cache / 1e9:.2f} GB for "
        f"{job.batch_size} x {slots} tokens"
    )


def digest(ids: Sequence[Sequence[int]]) -> str:
    """The SHA-256 of the token ids of some prompts."""
    text = json.dumps([list(map(int, each)) for each in ids])
    return hashlib.sha256(text.encode()).hexdigest()


def check_same_prompts(ids: Sequence[Sequence[int]]) -> None:
    """Raises UserError if another process has other prompts."""
    sharding.check_same("the text of the prompts", {"hash": digest(ids)})
