"""What ``config.mode = "train"`` does: from a configuration to a model directory (or to tables, see ``build``).

A run is resumed by the command that started it, and a finished one is left alone: ``<workdir>/model`` appears last, all
at once, and with it nothing more is to do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from specjax.config import Config
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer import TransformerConfig
from specjax.train import build, data, loop, objectives
from specjax.train.checkpoint import check_same

_CADENCE = ("log_every", "eval_every", "checkpoint_every")  # may differ between a run and its resumption


class Corpus(NamedTuple):
    """Token streams of the text that a run trains on and is judged by."""

    train: np.ndarray  # i32[n]
    valid: np.ndarray  # i32[m]
    valid_bytes: int


class _Run(NamedTuple):
    """What differs between the objectives."""

    loss: objectives.Loss
    config: TransformerConfig
    target_params: Any
    tokenizer: Tokenizer
    corpus: Corpus


def run(config: Config, workdir: str | Path) -> dict:
    """Trains what ``config`` describes into ``workdir`` and gives its summary; resumes, or returns at once if finished.

    Writes config.json first, then checkpoints and metrics.jsonl, at last summary.json and the model directory.
    """
    if config.objective in build.OBJECTIVES:
        return build.run(config, workdir)
    began = time.monotonic()
    workdir, resolved = Path(workdir).expanduser(), json.loads(config.to_json())
    prepare = {"pretrain": _pretrain, "distill": _distill}.get(config.objective)
    if prepare is None:
        raise UserError(f"config.objective is {config.objective!r}; it must be pretrain, distill, datastore or ngram")
    _check(config)
    optimiser = loop.optimiser(**config.optimiser, steps=config.train.steps)
    if (workdir / "config.json").exists() and any((workdir / name).exists() for name in ("checkpoints", "model")):
        stored = json.loads((workdir / "config.json").read_text())
        check_same(_lasting(stored), _lasting(resolved), workdir)
        if (workdir / "model").exists():
            return json.loads((workdir / "summary.json").read_text())
    what = prepare(config, workdir)
    train, corpus = config.train, what.corpus
    batches = data.Batches(corpus.train, train.batch_size, train.length, config.seed)
    held_out = data.held_out_batches(corpus.valid, train.batch_size, train.length, train.eval_batches)
    # Only now, when nothing is wrong with what the user asked for.
    workdir.mkdir(parents=True, exist_ok=True)
    _write_json(workdir / "config.json", resolved)
    params = loop.train(
        what.loss,
        lm.init_params(what.config, jax.random.key(config.seed)),
        what.target_params,
        batches,
        optimiser=optimiser,
        steps=train.steps,
        workdir=workdir,
        eval_batches=held_out,
        **{name: train[name] for name in _CADENCE},
        # The corpus is part of what a resumed run must share.
        config=_lasting(resolved) | {"corpus": hashlib.sha256(corpus.train.tobytes()).hexdigest()[:16]},
        seed=config.seed,
    )
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    summary = {name: value for name, value in last.items() if name.startswith("heldout_")}
    if config.objective == "pretrain":
        tokens_per_byte = len(corpus.valid) / corpus.valid_bytes
        summary["heldout_bits_per_byte"] = last["heldout_loss"] / math.log(2) * tokens_per_byte
    summary |= {"steps": train.steps, "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    summary["seconds"] = time.monotonic() - began
    _write_json(workdir / "summary.json", summary)
    hf.save(workdir / "model", what.config, params, what.tokenizer)
    return summary


def _pretrain(config: Config, workdir: Path) -> _Run:
    texts = _texts(config, workdir)
    tokenizer = _tokenizer(config, texts["train"])
    separator = data.separator_id(tokenizer)
    ends = () if separator is None else (separator,)
    shape = _shape(config.model, tokenizer.get_vocab_size(), separator, ends)
    loss = objectives.pretrain_loss(lm.from_config(shape))
    return _Run(loss, shape, {}, tokenizer, _corpus(config, workdir, texts, tokenizer))


def _distill(config: Config, workdir: Path) -> _Run:
    if not config.target:
        raise UserError("config.target is empty; give a model directory or a trained run's workdir to distill from")
    target = hf.load(config.target)
    if target.tokenizer is None:
        raise UserError(f"{target.directory} has no tokenizer.json; the text to distill on cannot be tokenised without")
    size = target.config.vocab_size
    if config.model.vocab_size not in (0, size):
        told = f"config.model.vocab_size is {config.model.vocab_size}, but the target has {size} tokens"
        raise UserError(f"{told}; leave it 0, a draft model shares its target's vocabulary")
    shape = _shape(config.model, size, target.config.bos_token_id, target.config.eos_token_id)
    loss = objectives.distill_loss(target.lm, lm.from_config(shape))
    corpus = _corpus(config, workdir, _texts(config, workdir), target.tokenizer)
    return _Run(loss, shape, target.params, target.tokenizer, corpus)


def _check(config: Config) -> None:
    """Finds what is wrong with the numbers before anything is built or written."""
    model, train = config.model, config.train
    if model.family not in ("llama", "gpt2"):
        raise UserError(f"config.model.family is {model.family!r}; it must be 'llama' or 'gpt2'")
    for group, values in (("model", model), ("train", train)):
        for name, value in values.items():
            if isinstance(value, int) and value < 1 and name not in ("vocab_size", "tie_embeddings"):
                raise UserError(f"config.{group}.{name} is {value}; it must be at least 1")
    for whole, part, unit in (("hidden_size", "num_heads", 2), ("num_heads", "num_kv_heads", 1)):
        if model[whole] % (model[part] * unit):  # rotary positions turn pairs
            told = f"config.model.{whole} {model[whole]} is no {'even ' * (unit - 1)}multiple of {part} {model[part]}"
            raise UserError(f"{told}; change one of them")
    if train.length > model.max_positions:
        raise UserError(
            f"config.train.length {train.length} is beyond config.model.max_positions {model.max_positions}"
        )


def _shape(model: Config, vocab_size: int, bos: int | None, eos: tuple[int, ...]) -> TransformerConfig:
    gpt2 = model.family == "gpt2"
    return TransformerConfig(
        **{**model.to_dict(), "vocab_size": vocab_size},
        head_dim=model.hidden_size // model.num_heads,
        attention_bias=gpt2,
        mlp_bias=gpt2,
        bos_token_id=bos,
        eos_token_id=eos,
    )


def _folder(config: Config, workdir: Path) -> Path:
    return Path(config.data.dir).expanduser() if config.data.dir else workdir / "data"


def _texts(config: Config, workdir: Path) -> dict[str, list[str]]:
    """The texts of the train and valid splits, of local files or of the embedded corpus."""
    files = [name.strip() for name in config.data.files.split(",") if name.strip()]
    texts = {}
    for split in ("train", "valid"):
        pairs = data.load_files(files, split) if files else data.load_texts(_folder(config, workdir), split)
        texts[split] = [text for _, text in pairs]
    return texts


def _tokenizer(config: Config, texts: list[str]) -> Tokenizer:
    """The one given, or a new one."""
    size = config.model.vocab_size
    if config.tokenizer:
        path = Path(config.tokenizer).expanduser()
        path = hf.resolve(path) / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"config.tokenizer: {path} is no file; give a tokenizer.json or a directory with one")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"config.tokenizer: {path} is no tokenizer ({error})") from None
        if size not in (0, tokenizer.get_vocab_size()):
            told = f"config.model.vocab_size is {size}, but {path} has {tokenizer.get_vocab_size()} tokens"
            raise UserError(f"{told}; leave it 0")
        return tokenizer
    return data.train_tokenizer(texts, size)


def _corpus(config: Config, workdir: Path, texts: dict[str, list[str]], tokenizer: Tokenizer) -> Corpus:
    folder = _folder(config, workdir) / "tokens"
    train, valid = (data.cached_tokens(tokenizer, texts[split], folder) for split in ("train", "valid"))
    return Corpus(train, valid, sum(len(text.encode()) for text in texts["valid"]))


def _lasting(config: dict) -> dict:
    """The configuration without what may differ between a run and its resumption."""
    train = {name: value for name, value in config["train"].items() if name not in _CADENCE}
    return config | {"train": train}


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
