"""Text that the target itself writes: what a draft model should be trained on, for it is what it will have to draft.

The target continues prompts from a corpus with our own speculative decoding; the methods allowed are exact (L1), so the text
has the target's law whichever drafts. It is kept in ``<workdir>/generated``: shards of array_record, one JSON object a record,
and manifest.json, which is written last. A killed command goes on with the first shard that is not there; what a row draws
depends on the seed, the number of its prompt and that of its temperature alone.

Training on it rather than on the corpus: Zhou et al. 2023, DistillSpec (2310.08461).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax import accept, drafters, sampling
from specjax.config import Config
from specjax.data import shards, token_streams
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.models import hf
from specjax.run.resolve import _given
from specjax.train.checkpoint import check_same
from specjax.train.writer import Meter, Writer, make_writer, row_keys, write

SCHEMA = 1
SPLITS = ("train", "valid")
_VALID = 20  # one prompt in so many is of the valid split
_NOT_OURS = {
    "dialogues": "",
    "generated": "",
    "template": "",
    "temperature": None,
    "on_policy": 0.0,
}  # of config.data
_AT_LEAST = {
    "num_prompts": 2,
    "prompt_tokens": 1,
    "new_tokens": 1,
    "batch_size": 1,
    "shard_prompts": 1,
}


class Prompt(NamedTuple):
    """What a text begins with."""

    number: int
    split: str
    ids: list[int]


def generate(config: Config, workdir: str | Path) -> dict:
    """Writes what ``config`` asks for into ``<workdir>/generated`` and gives its summary; resumes, or returns at once if done.

    Reads ``config.target``, ``config.seed``, ``config.data``, ``config.generation``, ``config.drafter`` and ``config.accept``
    (absent: chain). Writes config.json and plan.json first, then the shards, summary.json, at last the manifest. Raises
    UserError.
    """
    workdir, resolved = Path(workdir).expanduser(), json.loads(config.to_json())
    folder = workdir / "generated"
    if any((workdir / other).exists() for other in ("model", "checkpoints")):
        raise UserError(f"{workdir} holds a training run; choose another --workdir")
    if (folder / "manifest.json").exists():
        check_same(shards.read_json(workdir / "config.json"), resolved, workdir)
        return shards.read_json(workdir / "summary.json")
    temperatures = _check(config)
    target = hf.load(config.target)
    writer = make_writer(target, _given(config.drafter), config.get("accept", "chain"), config.seed)
    prompts = _prompts(config, workdir, target)
    plan = _plan(config, target, prompts, temperatures)
    if (folder / "plan.json").exists():
        check_same(shards.read_json(folder / "plan.json"), plan, workdir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shards.write_json(workdir / "config.json", resolved)
        shards.write_json(folder / "plan.json", plan)
        size = config.generation.shard_prompts
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        totals: dict[str, dict] = {}
        with Meter("the target writes", len(prompts) * len(temperatures)) as meter:
            for number, chosen in enumerate(parts):
                path = folder / f"shard-{number:05}-of-{len(parts):05}.array_record"
                records = _kept(path, chosen, temperatures)
                if records is None:
                    records = _shard(config, writer, chosen, temperatures, meter)
                    shards.write(path, records)
                else:
                    meter.skip(len(records))
                totals[path.name] = _count(records) | {"sha256": shards.sha256(path)}
        summary = _summary(totals)
        shards.write_json(workdir / "summary.json", summary)
        shards.write_json(folder / "manifest.json", plan | {"counts": summary, "shards": totals})
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror or error}; choose another --workdir"
        ) from None
    return summary


def load(
    directory: str | Path,
    tokenizer_fingerprint: str,
    split: str,
    temperature: float | None = None,
    labels: str = "all",
) -> list[Document]:
    """The texts of ``split`` ("train", "valid") that ``generate`` wrote, prompt and output, in the order of their prompts.

    ``directory`` is its workdir, or the folder ``generated`` in it; ``temperature`` None takes all of them. ``labels`` says
    what is learnt: "all", or "output" alone. Raises UserError: unfinished, damaged, made with another tokenizer, a split or
    temperature that is not there.
    """
    folder = Path(directory).expanduser()
    folder = folder / "generated" if (folder / "generated").is_dir() else folder
    if labels not in ("all", "output"):
        raise UserError(f"labels is {labels!r}; it must be 'all' or 'output'")
    if split not in SPLITS:
        raise UserError(
            f"there is no split {split!r} of generated text; there is {' and '.join(SPLITS)}"
        )
    if not (folder / "manifest.json").is_file():
        raise UserError(
            f"{folder} has no manifest.json: no generated text, or unfinished; run its command (again)"
        )
    manifest = shards.read_json(folder / "manifest.json")
    if manifest.get("schema") != SCHEMA:
        raise UserError(
            f"{folder} is of format version {manifest.get('schema')!r} and this is {SCHEMA}; make it again"
        )
    if manifest["tokenizer"] != tokenizer_fingerprint:
        raise UserError(
            f"{folder} was made with another tokenizer; generate text with the target of this run"
        )
    there = manifest["sampling"]["temperatures"]
    if temperature is not None and temperature not in there:
        told = ", ".join(f"{each:g}" for each in there)
        raise UserError(f"{folder} has no text of temperature {temperature:g}; it has {told}")
    found = []
    for name, facts in manifest["shards"].items():
        path = folder / name
        if not path.is_file() or shards.sha256(path) != facts["sha256"]:
            raise UserError(
                f"{path} is missing or damaged; remove {folder / 'manifest.json'} and it, and run again"
            )
        for record in shards.read(path):
            if record["split"] == split and temperature in (None, record["temperature"]):
                ids = np.array(record["prompt_ids"] + record["output_ids"], np.int32)
                learnt = np.arange(len(ids)) >= (
                    len(record["prompt_ids"]) if labels == "output" else 0
                )
                found.append(Document(ids, learnt))
    return found


def _check(config: Config) -> list[float]:
    """The temperatures, after everything that can be checked before a model is there."""
    if not config.target:
        raise UserError(
            "config.target is empty; give the model directory of the target that is to write"
        )
    if not 0 <= config.seed < 2**32:
        raise UserError(f"config.seed is {config.seed}; it must be in 0..{2**32 - 1}")
    for name, unset in _NOT_OURS.items():
        if config.data.get(name, unset) != unset:
            told = "prompts are taken from files, tfds or the embedded corpus"
            raise UserError(
                f"config.data.{name} does not belong to objective generate ({told}); leave it out"
            )
    sizes = config.generation
    for name, least in _AT_LEAST.items():
        if sizes[name] < least:
            raise UserError(
                f"config.generation.{name} is {sizes[name]}; it must be at least {least}"
            )
    given = list(sizes.temperatures)
    if not given or any(isinstance(t, bool) or not isinstance(t, int | float) for t in given):
        raise UserError(
            f"config.generation.temperatures is {tuple(given)}; give one number or more, such as (0.0, 1.0)"
        )
    if len(set(given)) < len(given):
        raise UserError(f"config.generation.temperatures is {tuple(given)}; give each once")
    for temperature in given:
        sampling.make_sampling(1, temperature, sizes.top_k, sizes.top_p)
    keys = _given(config.drafter)
    if "name" not in keys:
        raise UserError("config.drafter.name is empty; name a drafter, such as prompt_lookup")
    drafters.check(**keys)
    rule = accept.load(config.get("accept", "chain"))
    if rule.lossless_class != "L1":
        raise UserError(
            f"config.accept={rule.name} is {rule.lossless_class}: the text would not be the target's; take an L1 rule"
        )
    return [float(t) for t in given]


def _prompts(config: Config, workdir: Path, target: hf.Loaded) -> list[Prompt]:
    """The beginnings, at line starts of the corpus: numbered, those of the train split first."""
    sizes, tokenizer = config.generation, target.tokenizer
    if tokenizer is None:
        raise UserError(
            f"{target.directory} has no tokenizer.json; the prompts cannot be tokenised without"
        )
    # Where the tokenizer puts a token before every text, the model knows no text without it.
    start = token_streams.separator_id(tokenizer)
    head = [start] if start is not None and start in tokenizer.encode("").ids else []
    if len(head) + sizes.prompt_tokens + sizes.new_tokens > target.config.max_positions:
        raise UserError(
            f"config.generation asks for {sizes.prompt_tokens} + {sizes.new_tokens} tokens and the model has "
            f"{target.config.max_positions} positions; lower one of them"
        )
    valid = max(1, sizes.num_prompts // _VALID)
    prompts = []
    for split, count in (("train", sizes.num_prompts - valid), ("valid", valid)):
        texts = [text for _, text in token_streams.load(config.data, workdir, split)]
        try:
            chosen = token_streams.held_out_prompts(
                texts, tokenizer, count, sizes.prompt_tokens, config.seed
            )
        except UserError as error:
            raise UserError(
                f"config.generation.num_prompts is {sizes.num_prompts}, {split} split: {error}"
            ) from None
        prompts += [Prompt(len(prompts) + n, split, head + ids) for n, ids in enumerate(chosen)]
    return prompts


def _plan(
    config: Config, target: hf.Loaded, prompts: list[Prompt], temperatures: list[float]
) -> dict:
    """All that the shards are a function of: what a resumed command must share."""
    sizes = config.generation
    assert target.tokenizer is not None
    return {
        "format": "specjax generated text",
        "schema": SCHEMA,
        "target": {"name": config.target, "sha256": fingerprint(target)},
        "tokenizer": hf.fingerprint(target.tokenizer),
        "sampling": {"temperatures": temperatures, "top_k": sizes.top_k, "top_p": sizes.top_p},
        "new_tokens": sizes.new_tokens,
        "batch_size": sizes.batch_size,  # sums are rounded differently in a batch of another size
        "shard_prompts": sizes.shard_prompts,
        "drafter": _given(config.drafter),
        "accept": config.get("accept", "chain"),
        "seed": config.seed,
        "prompts": {
            "sources": token_streams.sources(config.data),
            "tokens": sizes.prompt_tokens,
            "train": sum(prompt.split == "train" for prompt in prompts),
            "valid": sum(prompt.split == "valid" for prompt in prompts),
            "sha256": hashlib.sha256(
                json.dumps([prompt.ids for prompt in prompts]).encode()
            ).hexdigest(),
        },
    }


def _shard(
    config: Config,
    writer: Writer,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    meter: Meter,
) -> list[dict]:
    """The records of a shard: prompt by prompt, and of each the temperatures in their order."""
    sizes, rows = config.generation, {}
    for index, temperature in enumerate(temperatures):
        settings = {"temperature": temperature, "top_k": sizes.top_k, "top_p": sizes.top_p}
        for start in range(0, len(prompts), sizes.batch_size):
            chosen = prompts[start : start + sizes.batch_size]
            keys = row_keys(config.seed, [prompt.number for prompt in chosen], index)
            ids = [prompt.ids for prompt in chosen]
            outputs, rounds = write(writer, ids, keys, settings, sizes.new_tokens, sizes.batch_size)
            for prompt, output, count in zip(chosen, outputs, rounds, strict=True):
                rows[prompt.number, index] = {
                    "prompt": prompt.number,
                    "split": prompt.split,
                    "temperature": temperature,
                    "prompt_ids": prompt.ids,
                    "output_ids": output,
                    "rounds": count,
                }
            meter.add(len(chosen), sum(map(len, outputs)), sum(rounds))
    return [rows[key] for key in sorted(rows)]


def _kept(
    path: Path, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> list[dict] | None:
    """The records of a shard that is finished, or None."""
    try:
        records = shards.read(path) if path.is_file() else []
        made = [
            (record["prompt"], record["temperature"], record["prompt_ids"]) for record in records
        ]
    except (ValueError, KeyError, TypeError):
        return None
    return (
        records if made == [(p.number, t, p.ids) for p in prompts for t in temperatures] else None
    )


def _count(records: Sequence[dict]) -> dict:
    return {
        "records": len(records),
        "tokens": sum(len(record["output_ids"]) for record in records),
        "rounds": sum(record["rounds"] for record in records),
    }


def _summary(made: dict[str, dict]) -> dict:
    total = {
        key: sum(facts[key] for facts in made.values()) for key in ("records", "tokens", "rounds")
    }
    rate = total["tokens"] / total["rounds"] if total["rounds"] else None
    return total | {"tokens_per_round": rate, "shards": len(made)}


def writer_of(directory: str | Path) -> str | None:
    """The fingerprint of the model that wrote the text in ``directory``, or None if nothing is there (yet)."""
    folder = Path(directory).expanduser()
    folder = folder / "generated" if (folder / "generated").is_dir() else folder
    manifest = folder / "manifest.json"
    return shards.read_json(manifest)["target"]["sha256"] if manifest.is_file() else None


def fingerprint(target: hf.Loaded) -> str:
    """SHA-256 over the weight files and config.json of a model directory."""
    folder = Path(target.directory)
    sums = [
        shards.sha256(path)
        for path in (folder / "config.json", *sorted(folder.glob("*.safetensors")))
    ]
    return hashlib.sha256("".join(sums).encode()).hexdigest()
