"""Builds what a run decodes with: the target, the methods, and the job of each setting."""

from __future__ import annotations

from jax.sharding import Mesh

from specjax import sharding
from specjax.bench import methods as methods_lib
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method
from specjax.data.prompts import PromptSet
from specjax.errors import UserError
from specjax.models import hf
from specjax.run import decoding_keys
from specjax.run.resolve import Settings


def target(settings: Settings) -> hf.Loaded:
    """The target model. Raises UserError if there is none, or if it has no tokenizer."""
    if not settings.target:
        raise UserError(
            "config.target is empty; give a Hugging Face style directory, a name of the Hub, "
            "a .gguf file or a trained run's workdir"
        )
    devices = mesh(settings)
    loaded = hf.load(settings.target, dtype=settings.dtype or None, on_host=devices is not None)
    if loaded.tokenizer is None:
        raise UserError(f"{loaded.directory} has no tokenizer (tokenizer.json); text needs one")
    if devices is None:
        return loaded
    return loaded._replace(params=sharding.place_target(devices, loaded.lm, loaded.params))


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
    temperatures: tuple[float, ...],
    choices: dict[str, MethodChoice] | None = None,
) -> list[Method]:
    """The methods, in the order of the settings, or of ``choices``. Raises UserError."""
    built = [
        methods_lib.build(
            target.lm,
            target.params,
            choice,
            label=label,
            seed=settings.seed,
            temperatures=temperatures,
        )
        for label, choice in (choices or settings.methods).items()
    ]
    if (devices := mesh(settings)) is None:
        return built
    return [
        method._replace(
            params=method.params._replace(draft=sharding.place_draft(devices, method.params.draft))
        )
        for method in built
    ]


def job(
    settings: Settings,
    target: hf.Loaded,
    prompts: PromptSet,
    temperature: float,
    batch_size: int,
) -> Job:
    """What is decoded, with which settings.

    Raises:
        UserError: settings out of range, more rows than prompts, a text longer than the context.
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
    longest = max(len(prompt.ids) for prompt in prompts.prompts)
    total, positions = longest + settings.max_new_tokens, target.config.longest_text
    if total > positions:
        raise UserError(
            f"the longest prompt has {longest} tokens, with config.max_new_tokens = "
            f"{settings.max_new_tokens} that is {total}, and the model has {positions} positions; "
            "shorten one of them, or let config.max_prompt_tokens cut prompts"
        )
    return Job(
        target=target.lm,
        params=target.params,
        prompts=[prompt.ids for prompt in prompts.prompts],
        settings=decoding_keys.complete({**settings.sampling, "temperature": temperature}, target),
        batch_size=batch_size,
        max_new_tokens=settings.max_new_tokens,
        eos_id=() if settings.ignore_eos else target.config.eos_token_id,
        seed=settings.seed,
        repeats=settings.bench.repeats,
        name=prompts.name,
        categories=[prompt.category for prompt in prompts.prompts],
        spell=None if target.tokenizer is None else target.tokenizer.decode,
        verify_widths=settings.verify_widths,
        mesh=devices,
    )
