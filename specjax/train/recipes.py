"""What ``config.mode = "train"`` does: from a configuration to a model or head directory (or to text and tables).

A run is resumed by the command that started it, and a finished one is left alone: ``<workdir>/model`` appears last, all
at once, and with it nothing more is to do.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from specjax import drafters
from specjax.config import Config
from specjax.data import shards, token_streams
from specjax.errors import UserError
from specjax.models import head_files, hf, lm
from specjax.models.transformer import TransformerConfig
from specjax.train import (
    examine,
    generated,
    initial,
    lookup_data,
    loop,
    objectives,
    optimise,
    sources,
)
from specjax.train.checkpoint import check_same
from specjax.train.display import say
from specjax.train.sources import Material
from specjax.types import LM, Batch, Drafter, ModelParams

_FREE = (
    "log_every",
    "eval_every",
    "checkpoint_every",
    "resume_changed",
)  # may differ between a run and its resumption
RANKS = 10  # choices of a head whose accuracy is measured


class _Run(NamedTuple):
    """What differs between the objectives."""

    loss: objectives.Loss
    params: Any  # to begin with
    target_params: Any
    material: Material
    save: Callable[[Any, dict], None]  # writes <workdir>/model, and adds to the summary
    target: str | None = None  # fingerprint of its files
    examine: Callable[[Any], dict[str, float]] | None = None
    rewrite: loop.Rewrite | None = None


def run(config: Config, workdir: str | Path) -> dict:
    """Trains what ``config`` describes into ``workdir`` and gives its summary; resumes, or returns at once if finished.

    Writes config.json first, then checkpoints and metrics.jsonl, at last summary.json and the model directory.
    """
    if config.objective in lookup_data.OBJECTIVES:
        return lookup_data.run(config, workdir)
    if config.objective == "generate":
        return generated.generate(config, workdir)
    began = time.monotonic()
    workdir, resolved = Path(workdir).expanduser(), json.loads(config.to_json())
    prepare = {"pretrain": _pretrain, "distill": _distill, "heads": _heads}.get(config.objective)
    if prepare is None:
        known = ", ".join(("pretrain", "distill", "heads", "generate", *lookup_data.OBJECTIVES))
        raise UserError(f"config.objective is {config.objective!r}; it must be one of {known}")
    initial.check(config)
    optimiser = optimise.optimiser(**config.optimiser, steps=config.train.steps)
    before = _before(workdir, config.objective)
    if before is not None:
        finished = (workdir / "model").exists()
        change = config.train.resume_changed and not finished
        check_same(_lasting(before), _lasting(resolved), workdir, say if change else None)
        if finished:
            return shards.read_json(workdir / "summary.json")
    what = prepare(config, workdir)
    train = config.train
    # Only now, when nothing is wrong with what the user asked for.
    with _writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        shards.write_json(workdir / "config.json", resolved)
    passed_on = (
        "steps",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "accumulate",
        "ema",
        "precision",
        "keep",
    )
    params = loop.train(
        what.loss,
        what.params,
        what.target_params,
        what.material.batches,
        optimiser=optimiser,
        workdir=workdir,
        eval_batches=what.material.held_out,
        examine=what.examine,
        rewrite=what.rewrite,
        **{name: train[name] for name in passed_on},
        best=train.best,
        resume_changed=train.resume_changed,
        # The corpus is part of what a resumed run must share, and the target's weights.
        config=_lasting(resolved) | {"corpus": what.material.digest, "target_sha256": what.target},
        seed=config.seed,
    )
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    best = records[-1].get("best_step") if train.keep == "best" else None
    last = next((record for record in records if record["step"] == best), records[-1])
    summary = {
        name: value
        for name, value in last.items()
        if name.startswith("heldout_") or name == "best_step"
    }
    summary |= {
        "steps": train.steps,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    if config.objective == "pretrain" and what.material.tokens_per_byte:
        summary["heldout_bits_per_byte"] = (
            last["heldout_loss"] / math.log(2) * what.material.tokens_per_byte
        )
    summary["seconds"] = time.monotonic() - began
    with _writing(workdir):
        what.save(params, summary)
    return summary


def _pretrain(config: Config, workdir: Path) -> _Run:
    """A decoder of its own: a target, or a draft for ``config.target``, whose tokenizer it then has."""
    initial.check_shape(config.model)
    target = _target(config) if config.target else None
    tokenizer = sources.tokenizer(config, workdir) if target is None else target.tokenizer
    assert tokenizer is not None
    if target is None:
        separator = token_streams.separator_id(tokenizer)
        words = (tokenizer.get_vocab_size(), separator, () if separator is None else (separator,))
    else:
        words = (
            _vocabulary(config, target),
            target.config.bos_token_id,
            target.config.eos_token_id,
        )
    shape = initial.shape(config.model, *words)
    material = sources.gather(
        config, workdir, tokenizer, None if target is None else target.directory
    )
    model = _lm(config, shape)
    look = None if target is None else _examined_draft(config, target, model, material)
    _no_keys(config.loss, "pretrain")
    return _Run(
        objectives.pretrain_loss(model),
        _first(config, shape, hf.fingerprint(tokenizer)),
        {} if target is None else target.params,
        material,
        _saver(workdir, shape, tokenizer),
        None if target is None else generated.fingerprint(target),
        look,
    )


def _distill(config: Config, workdir: Path) -> _Run:
    """A draft model that imitates the target."""
    target = _target(config)
    assert target.tokenizer is not None
    if config.pruned:
        shape, params = initial.pruned(target, config.pruned)
        if config.init:
            raise UserError(
                "config.init and config.pruned are both given; a draft begins with one of them"
            )
    else:
        initial.check_shape(config.model)
        initial.check_positions(config)
        size = _vocabulary(config, target)
        shape = initial.shape(
            config.model, size, target.config.bos_token_id, target.config.eos_token_id
        )
        params = _first(config, shape, hf.fingerprint(target.tokenizer))
    if shape.max_positions < config.train.length:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the draft's {shape.max_positions} positions"
        )
    model = _lm(config, shape)
    loss = _with(objectives.distill_loss, config.loss, target.lm, model)
    material = sources.gather(config, workdir, target.tokenizer, target.directory)
    rewrite = None
    if config.data.on_policy:
        temperature = config.loss.get("temperature", 1.0)
        rewrite = sources.on_policy(
            model, config.data.on_policy, config.data.on_policy_prompt, temperature
        )
    look = _examined_draft(config, target, model, material)
    save, words = _saver(workdir, shape, target.tokenizer), generated.fingerprint(target)
    return _Run(loss, params, target.params, material, save, words, look, rewrite)


def _heads(config: Config, workdir: Path) -> _Run:
    """Heads on the target's features, the target frozen or (``config.joint``) trained beside them."""
    target = _target(config)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    keys = {key: value for key, value in config.drafter.to_dict().items() if value is not None}
    if keys.get("model"):
        raise UserError(
            "config.drafter.model is where finished heads are; to begin with them give config.init"
        )
    if (
        config.init and keys["name"] in head_files.KINDS
    ):  # what the files say of the heads is said of these, too
        keys |= {"model": config.init, "dtype": jnp.float32}
    drafter = drafters.make(target=target.lm, **keys)
    if drafter.training.start is None or drafter.training.loss is None:
        raise UserError(
            f"drafter {drafter.name} has nothing to train; there is {', '.join(head_files.KINDS)}"
        )
    if drafter.longest >= config.train.length:
        raise UserError(
            f"{drafter.longest} heads look beyond config.train.length {config.train.length}; raise it"
        )
    key = jax.random.key(config.seed)
    draft = drafter.init_params(key) if config.init else drafter.training.start(target.params, key)
    if config.joint:
        loss = _with(objectives.joint_loss, config.loss, target.lm, drafter)
        params: Any = {"target": target.params, "draft": draft}
    else:
        known = inspect.signature(drafter.training.loss).parameters
        _no_keys({k: v for k, v in config.loss.items() if k not in known}, drafter.name)
        loss, params = functools.partial(drafter.training.loss, **config.loss.to_dict()), draft
    jax.eval_shape(
        loss, params, target.params, *_probe(config)
    )  # finds what is wrong with the weights of the loss
    material = sources.gather(config, workdir, tokenizer, target.directory)
    look = _examined(config, target.lm, drafter, target, material, moving=config.joint)

    def save(params, summary):
        pair = (
            ModelParams(params["target"], params["draft"])
            if config.joint
            else ModelParams(target.params, params)
        )
        extra = {}
        if material.prompts and drafter.training.ranks is not None:
            extra["accuracy"] = _accuracy(config, target, drafter, pair, material)
        if config.joint:
            hf.save(workdir / "target", target.config, pair.target, tokenizer)
        shards.write_json(workdir / "summary.json", summary)
        base = workdir / "target" if config.joint else Path(config.target)
        facts = {"base_model_name_or_path": base.name, **dict(drafter.training.facts)}
        head_files.write(
            workdir / "model",
            drafter.name,
            jax.device_get(pair.draft),
            facts,
            hf.fingerprint(tokenizer),
            extra,
        )

    return _Run(loss, params, target.params, material, save, generated.fingerprint(target), look)


# --- what the objectives share -----------------------------------------------------------------------------------------


def _target(config: Config) -> hf.Loaded:
    if not config.target:
        raise UserError("config.target is empty; give a model directory or a trained run's workdir")
    target = hf.load(
        config.target, dtype=jnp.float32
    )  # what is trained from it is float32; the loop casts what it reads
    if target.tokenizer is None:
        raise UserError(
            f"{target.directory} has no tokenizer.json; the text to train on cannot be tokenised without"
        )
    if config.train.length > target.config.max_positions:
        raise UserError(
            f"config.train.length {config.train.length} is beyond the target's {target.config.max_positions} positions"
        )
    if config.data.generated:
        other = generated.writer_of(config.data.generated)
        if other not in (None, generated.fingerprint(target)):
            say(
                f"note: {config.data.generated} was written by another model than {target.directory}"
            )
    return target._replace(lm=_lm(config, target.config)._replace(vocabulary=target.lm.vocabulary))


def _lm(config: Config, shape: TransformerConfig) -> LM:
    return lm.from_config(
        shape, jnp.dtype(initial.PRECISIONS[config.train.precision]), remat=config.train.remat
    )


def _first(config: Config, shape: TransformerConfig, vocabulary: str) -> dict:
    if config.init:
        return initial.given(config.init, shape, vocabulary)
    return lm.init_params(shape, jax.random.key(config.seed))


def _vocabulary(config: Config, target: hf.Loaded) -> int:
    size = target.config.vocab_size
    if config.model.vocab_size not in (0, size):
        told = f"config.model.vocab_size is {config.model.vocab_size}, but the target has {size} tokens"
        raise UserError(f"{told}; leave it 0, a draft model shares its target's vocabulary")
    return size


def _examined_draft(config: Config, target: hf.Loaded, model: LM, material: Material):
    model = model._replace(vocabulary=target.lm.vocabulary)
    longest = max(map(len, material.prompts), default=0) + config.examine.new_tokens
    if material.prompts and model.max_positions is not None and longest > model.max_positions:
        raise UserError(
            f"config.examine needs {longest} positions and the draft has {model.max_positions}; lower new_tokens"
        )
    drafter = drafters.make(
        "draft_model", target.lm, model=model, gamma=config.examine.gamma, params={}
    )
    return _examined(config, target.lm, drafter, target, material)


def _examined(
    config: Config,
    model: LM,
    drafter: Drafter,
    target: hf.Loaded,
    material: Material,
    moving: bool = False,
):
    """``loop.train``'s ``examine``: block efficiency on the held-out prompts."""
    if not material.prompts:
        return None
    how = config.examine
    longest = max(map(len, material.prompts)) + how.new_tokens
    if longest > target.config.max_positions:
        raise UserError(
            f"config.examine needs {longest} positions and the target has {target.config.max_positions}; lower new_tokens"
        )
    look = examine.examiner(
        model,
        drafter,
        initial.cast(target.params, config.train.precision),
        material.prompts,
        new_tokens=how.new_tokens,
        temperatures=tuple(how.temperatures),
        eos_id=target.config.eos_token_id,
        seed=config.seed,
        moving=moving,
    )
    return lambda params: look(initial.cast(params, config.train.precision))


def _accuracy(
    config: Config, target: hf.Loaded, drafter: Drafter, pair: ModelParams, material: Material
) -> list:
    """How often each head's choice of each rank is what the target says, on its own continuations of the held-out prompts."""
    how = config.examine
    pair = initial.cast(pair, config.train.precision)
    text = functools.partial(examine.write, target.lm, pair, material.prompts, how.new_tokens)
    written = [text(float(t), target.config.eos_token_id, config.seed) for t in how.temperatures]
    return examine.accuracy(drafter, pair, written, [len(p) for p in material.prompts], RANKS)


def _saver(workdir: Path, shape: TransformerConfig, tokenizer: Tokenizer):
    def save(params, summary):
        shards.write_json(workdir / "summary.json", summary)
        hf.save(workdir / "model", shape, params, tokenizer)

    return save


def _probe(config: Config) -> tuple[Batch, jax.Array]:
    return Batch(jnp.zeros((1, config.train.length + 1), jnp.int32)), jax.random.key(0)


def _with(make: Callable[..., objectives.Loss], keys: Config, *args: Any) -> objectives.Loss:
    """``make(*args, **keys)``. Raises UserError for a key that it does not take."""
    parameters = inspect.signature(make).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        _no_keys(
            {k: v for k, v in keys.items() if k not in known}, make.__name__.removesuffix("_loss")
        )
    return make(*args, **keys.to_dict())


def _no_keys(keys: Any, what: str) -> None:
    if keys:
        raise UserError(f"config.loss.{next(iter(keys))} means nothing to {what}; leave it out")


def _lasting(config: dict) -> dict:
    """The configuration without what may differ between a run and its resumption."""
    train = {name: value for name, value in config["train"].items() if name not in _FREE}
    return config | {"train": train}


def _before(workdir: Path, objective: str) -> dict | None:
    """The configuration of the run in ``workdir``, or None if there is none. Raises UserError if something else is there."""
    others = [path.name for path in workdir.glob("*.safetensors")]
    others += [
        name
        for name in ("generated", *(f"{name}.json" for name in lookup_data.OBJECTIVES.values()))
        if (workdir / name).exists()
    ]
    stored = (
        shards.read_json(workdir / "config.json") if (workdir / "config.json").exists() else None
    )
    if stored is not None and (stored.get("mode"), stored.get("objective")) != ("train", objective):
        others.append("a config.json of another kind")
    if others:
        raise UserError(
            f"{workdir} holds {others[0]}, which is none of this run's; choose another --workdir"
        )
    return stored if any((workdir / name).exists() for name in ("checkpoints", "model")) else None


@contextlib.contextmanager
def _writing(workdir: Path) -> Iterator[None]:
    """Turns what the operating system has against writing into one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror or error}; make room, or choose another --workdir"
        ) from None
