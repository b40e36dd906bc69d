"""Objective features: what the target computes for a text, stored once for training heads.

``<workdir>/features`` holds array_record shards of rows (``data.feature_store``), how often each
token is a label, and manifest.json, which is written last. A killed command resumes with the first
missing shard. ``config.data.features`` reads the directory.
"""

from __future__ import annotations

import functools
import itertools
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import files, sampling, sharding
from specjax.config import Config
from specjax.data import feature_store, packing, token_streams
from specjax.data.feature_store import RecordLayout
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import objectives, update
from specjax.train.display import Meter, report
from specjax.train.placement import place
from specjax.train.recipes import checks, common
from specjax.train.recipes import material as materials
from specjax.train.recipes.material import Text
from specjax.types import LM, Batch

# (texts, the rows of each that are wanted) -> the records of these, in order.
Compute = Callable[[Sequence[Batch], Sequence[Sequence[int]]], list[bytes]]


class Rows(NamedTuple):
    """The rows of one split; they do not change from epoch to epoch.

    The target reads whole texts; each is cut into rows of ``length`` tokens.
    """

    length: int
    text: Callable[[int], Batch]
    parts: list[tuple[int, int]]  # of each row, its text and its place there

    def row(self, number: int) -> Batch:
        """A row without features."""
        text, place = self.parts[number]
        cut = packing.cut(self.text(text), self.length)
        return jax.tree.map(lambda x: x[place : place + 1], cut)


def run(config: Config, workdir: Path) -> dict:
    """Writes the features into ``<workdir>/features``; returns their summary.

    Reads ``config.target``, ``config.seed``, ``config.data``, ``config.features``, ``config.train``
    and ``config.examine``. Writes config.json and plan.json, then the shards, summary.json and the
    manifest. Resumes a killed command; finished features are left unchanged. Raises UserError.
    """
    manifest = workdir / "features" / "manifest.json"
    return common.write_data(config, workdir, manifest, _prepare, ("generated",))


def _prepare(config: Config, workdir: Path) -> common.Data:
    checks.check_features(config)
    target = common.load_target(config)
    if target.lm.encoder is not None:
        raise UserError(
            f"{target.directory} is an encoder-decoder model, and features are stored of decoders "
            "only; train the heads without config.data.features"
        )
    taps = tuple(config.features.taps)
    model = target.lm.with_taps(taps)
    text = materials.read(config, workdir, target.text_tokenizer, target.directory)
    rows, size = _rows(config, text, target.lm.max_positions)
    assert model.width is not None
    stored = config.features.dtype
    documents = bool(text.documents)
    layout = RecordLayout(config.train.length, model.width, taps, stored, documents, True)
    plan = _plan(config, target, text, rows, layout) | {"read": size}
    _check_room(workdir, plan["bytes"])

    def write(folder: Path) -> tuple[dict, dict]:
        report(_sizes(plan, folder))
        compute = _computer(config, target, model, layout)
        vocab_size = target.lm.vocab_size
        totals, counts = _write_shards(folder, layout, plan, rows, compute, vocab_size)
        if sharding.is_first():
            with files.replacing(folder / feature_store.COUNTS) as fresh, open(fresh, "wb") as file:
                np.save(file, counts)
        return _summary(plan, totals), {"shards": totals}

    return common.Data(write, plan)


def _rows(config: Config, text: Text, positions: int | None) -> tuple[dict[str, Rows], int]:
    """The rows of both splits, and how many tokens the target reads at once.

    Documents as they are packed in the first epoch of training on them; of a stream all tokens. A
    row begins with the last token of the row before. Rows without a label are left out. Raises
    UserError for too little text.
    """
    length, most = config.train.length, config.features.rows
    size = min(config.features.text, positions or config.features.text)
    if text.streams:
        size = min(size, *(len(each) - 1 for each in text.streams.values()))
    number = max(size // length, 1)
    size, count = number * length, config.train.batch_size * config.train.eval_batches
    texts = -(-count // number)
    if text.streams:
        stream = text.streams["train"]
        token_streams.Batches(stream, 1, length)  # raises if it is too short
        train = functools.partial(_cut, stream, size), (len(stream) - 1) // size
        held_out = token_streams.held_out_batches(text.streams["valid"], 1, size, texts)
    else:
        context, documents = size // 2, text.documents["train"]
        packed = packing.Packed(documents, 1, size, config.seed, context)
        train = packed.batch, packed.rows
        held_out = packing.held_out(text.documents["valid"], 1, size, texts, context)
        if line := packing.about_windows(documents, size, context):
            report(line)
    return {
        "train": _labelled(*train, length, most),
        "valid": _labelled(held_out.__getitem__, len(held_out), length, count),
    }, size


def _labelled(text: Callable[[int], Batch], count: int, length: int, most: int) -> Rows:
    """The rows of ``count`` texts that have a label, at most ``most`` (0: all)."""
    parts = []
    for number in range(count):
        labels, mask = objectives.labels_of(packing.cut(text(number), length))
        mask = np.ones(labels.shape, bool) if mask is None else np.asarray(mask)
        parts += [(number, int(place)) for place in np.flatnonzero(mask.any(1))]
    return Rows(length, text, parts[: most or None])


def _cut(stream: np.ndarray, length: int, number: int) -> Batch:
    # Any: a NumPy array, which is moved to the devices later.
    row: Any = stream[None, number * length : (number + 1) * length + 1]
    return Batch(row)


def _plan(
    config: Config, target: hf.Loaded, text: Text, rows: dict[str, Rows], layout: RecordLayout
) -> dict:
    """Everything that the shards depend on: a resumed command must have the same plan."""
    size, counts = layout.record.itemsize, {split: len(each.parts) for split, each in rows.items()}
    return {
        "format": f"specjax {feature_store.NAME}",
        "schema": feature_store.SCHEMA,
        "target": {"name": config.target, "sha256": common.fingerprint(target)},
        "tokenizer": hf.fingerprint(target.text_tokenizer),
        "text": text.digest,
        **layout._asdict(),
        "taps": list(layout.taps),
        "precision": config.train.precision,
        # Sums are rounded differently in a batch of another size.
        "batch_size": config.train.batch_size,
        "seed": config.seed,
        "rows": counts,
        "bytes_per_token": layout.bytes_per_token,
        "bytes": sum(counts.values()) * size,
        "shard_rows": max(1, config.features.shard_megabytes * 10**6 // size),
        "prompts": {"tokens": config.examine.prompt_tokens, "ids": text.prompts},
    }


def _check_room(workdir: Path, needed: int) -> None:
    """Raises UserError if the disk has too little room for the bytes that are not yet there."""
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    there = sum(path.stat().st_size for path in workdir.glob("features/*.array_record"))
    free = shutil.disk_usage(existing).free
    if needed - there > free:
        raise UserError(
            f"the features take {_bytes(needed - there)} more and {existing} has {_bytes(free)}; "
            "store fewer rows (config.features.rows) or in fewer bits (config.features.dtype)"
        )


def _sizes(plan: dict, folder: Path) -> str:
    """One line: what is stored, and how large it becomes."""
    vectors = 1 + len(plan["taps"])
    each = "1 vector" if vectors == 1 else f"{vectors} vectors"
    return (
        f"features of {plan['rows']['train']:,} rows and {plan['rows']['valid']:,} held-out rows "
        f"of {plan['length']:,} tokens: {plan['bytes_per_token']:,} bytes per token ({each} of "
        f"{plan['width']:,} {plan['dtype']}), {_bytes(plan['bytes'])} in {folder}"
    )


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 10**3:.1f} kB"


def _computer(config: Config, target: hf.Loaded, model: LM, layout: RecordLayout) -> Compute:
    """The target's features of texts, of about as many tokens at once as a step of training has."""
    placement, length = place(config.mesh), layout.length
    params = placement.put_params(update.cast(target.params, config.train.precision))

    def cut(x: jax.Array, axis: int) -> jax.Array:
        """[B,...,n*length,...] -> [B*n,...,length,...]: those of ``packing.cut``."""
        parts = x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1)
        return parts.reshape(-1, *parts.shape[2:])

    def forward(params: Any, _: Any, batch: Batch) -> tuple[jax.Array | None, ...]:
        out = objectives.output_of(model, params, batch)
        stacked = jnp.stack([out.hidden, *out.taps], 1)
        bits = feature_store.in_bits(stacked, layout.dtype)
        teacher = jax.nn.logsumexp(out.logits, -1), sampling.argmax(out.logits)
        return (
            *jax.tree.map(lambda x: cut(x, 2), bits),
            *jax.tree.map(lambda x: cut(x, 1), teacher),
        )

    features = jax.jit(placement.gathering(forward))

    def parts(texts: Sequence[Batch]) -> Iterator[tuple[Batch, Any]]:
        size = max(config.train.batch_size * length // (texts[0].tokens.shape[1] - 1), 1)
        size = -(-size // placement.parts) * placement.parts
        for start in range(0, len(texts), size):
            chosen = list(texts[start : start + size])
            # All batches have the same shape: one compiled program.
            whole = jax.tree.map(
                lambda *each: np.concatenate(each), *chosen, *[chosen[0]] * (size - len(chosen))
            )
            yield packing.cut(whole, length), features(params, {}, placement.batch(whole))

    def compute(texts: Sequence[Batch], wanted: Sequence[Sequence[int]]) -> list[bytes]:
        number = (texts[0].tokens.shape[1] - 1) // length
        numbers = np.array([i * number + j for i, each in enumerate(wanted) for j in each])
        found: list[bytes] = []
        done, waiting = 0, None
        # The device computes a batch while the one before is turned into records.
        for part in itertools.chain(parts(texts), [None]):
            if waiting is not None:
                rows, values = waiting[0], sharding.fetch(waiting[1])
                count = len(rows.tokens)
                kept = numbers[(numbers >= done) & (numbers < done + count)] - done
                chosen = jax.tree.map(operator.itemgetter(kept), (rows, *values))
                found += feature_store.records(layout, *chosen)
                done += count
            waiting = part
        return found

    return compute


def _write_shards(
    folder: Path,
    layout: RecordLayout,
    plan: dict,
    rows: dict[str, Rows],
    compute: Compute,
    vocab_size: int,
) -> tuple[dict[str, dict], np.ndarray]:
    """Writes the missing shards.

    Returns file name -> rows and bytes, of all shards; and how often each token id is a label of
    the train split's rows, i64[vocab_size].
    """
    size, totals, counts = plan["shard_rows"], {}, np.zeros(vocab_size, np.int64)
    with Meter("the target reads", sum(plan["rows"].values())) as meter:
        for split, each in rows.items():
            count = len(each.parts)
            for number, start in enumerate(range(0, count, size)):
                chosen = [each.row(index) for index in range(start, min(start + size, count))]
                path = folder / feature_store.name_of(split, number, -(-count // size))
                if feature_store.is_finished(path, layout, chosen):
                    meter.skip(len(chosen))
                else:
                    texts: dict[int, list[int]] = {}
                    for text, place in each.parts[start : start + size]:
                        texts.setdefault(text, []).append(place)
                    records = compute([each.text(text) for text in texts], list(texts.values()))
                    if sharding.is_first():
                        feature_store.write(path, records)
                    meter.add(len(chosen), len(chosen) * layout.length, 0)
                stored = path.stat().st_size if sharding.is_first() else 0
                totals[path.name] = {"rows": len(chosen), "bytes": stored}
                if split == "train":
                    labels = np.concatenate([_labels(row) for row in chosen])
                    counts = counts + np.bincount(labels, minlength=vocab_size)
    return totals, counts


def _labels(row: Batch) -> np.ndarray:
    """The tokens of a row that are labels, i32[n]."""
    labels, mask = objectives.labels_of(row)
    return np.asarray(labels).reshape(-1) if mask is None else np.asarray(labels)[mask]


def _summary(plan: dict, totals: dict[str, dict]) -> dict:
    rows = plan["rows"]
    return {
        "rows": rows["train"],
        "held_out_rows": rows["valid"],
        "tokens": sum(rows.values()) * plan["length"],
        "bytes_per_token": plan["bytes_per_token"],
        "bytes": plan["bytes"],
        "bytes_on_disk": sum(facts["bytes"] for facts in totals.values()),
        "shards": len(totals),
    }
