"""Features that are stored once: what is written, resuming, training from them, wrong stores."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import close, equal, small_config

from specjax import drafters
from specjax.data import feature_store, packing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.train import placement, recipes
from specjax.train.recipes import material

T, ROWS, READ = 32, 4, 64


def features_config(target, text_file, **changes):
    config = importlib.import_module("configs.features").get_config()
    config.target, config.data.files = str(target), text_file
    config.train.update({"batch_size": ROWS, "length": T, "eval_batches": 2})
    config.examine.update({"prompts": 4, "prompt_tokens": 6})
    config.features.update({"dtype": "float32", "shard_megabytes": 1, "text": 200})
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="module")
def written(target_run, text_file, tmp_path_factory):
    """(workdir of a float32 store of a stream, its summary, the lines that were printed)."""
    workdir, lines = tmp_path_factory.mktemp("runs") / "features", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.train.recipes.features.report", lines.append)
        summary = recipes.run(
            features_config(target_run[0], text_file, features__taps=(0,)), workdir
        )
    return workdir, summary, lines


@pytest.fixture(scope="module")
def alone(target_run, text_file, tmp_path_factory):
    """The workdir of a store in which the target read each row alone, as without a store."""
    workdir = tmp_path_factory.mktemp("runs") / "features"
    recipes.run(features_config(target_run[0], text_file, features__text=T), workdir)
    return workdir


def heads_config(target, store, name="medusa", **changes):
    changes = {"target": str(target), "data__features": str(store), **changes}
    return small_config(name, **changes, train__steps=5, train__eval_every=5)


def gathered(target, store, **changes):
    config, loaded = heads_config(target, store, **changes), hf.load(target)
    return material.gather(config, Path(target), loaded.tokenizer, loaded.directory)


def test_what_is_written(target_run, written, text_file):
    """The features are those of a pass over READ tokens, the rows are the whole text."""
    (workdir, summary, lines), target = written, hf.load(target_run[0], dtype=jnp.float32)
    store = feature_store.FeatureStore(workdir)
    config = features_config(target_run[0], text_file)
    text = material.read(config, workdir, target.tokenizer, target.directory)
    stream, rows = text.streams["train"], store.size("train")
    whole = store.read("train", range(rows), (0,))
    assert rows == (len(stream) - 1) // T and whole.labelled is None and whole.segments is None
    np.testing.assert_array_equal(whole.tokens[:, 1:].ravel(), stream[1 : rows * T + 1])
    np.testing.assert_array_equal(
        store.counts, np.bincount(stream[1 : rows * T + 1], minlength=320)
    )
    forward = jax.jit(lambda t: lm.forward(target.lm.with_taps((0,)), target.params, t))
    held_out = (len(text.streams["valid"]) - 1) // T
    spaced = np.linspace(0, held_out - 1, 8).astype(int)
    for split, count, numbers in (("train", rows, range(rows)), ("valid", held_out, spaced)):
        for place in (0, 5, len(numbers) - 1):
            # The target read two rows at once; the last ones end with the stream.
            first = min(numbers[place] // 2 * 2, count - 2)
            read = text.streams[split][first * T : first * T + READ]
            out = jax.tree.map(lambda x: np.asarray(x[0]), forward(np.stack([read, read])))
            own = slice((numbers[place] - first) * T, (numbers[place] - first + 1) * T)
            found = store.read(split, [place], (0,)).features
            np.testing.assert_allclose(found.hidden[0], out.hidden[own], atol=1e-6)
            np.testing.assert_allclose(found.taps[0][0], out.taps[0][own], atol=1e-6)
            total = np.log(np.exp(out.logits[own]).sum(-1))
            np.testing.assert_allclose(found.total[0], total, atol=1e-5)
            np.testing.assert_array_equal(found.best[0], out.logits[own].argmax(-1))
    # Two vectors of 32 numbers of 4 bytes, and two numbers; a row also has its tokens.
    assert summary["bytes_per_token"] == 264 and summary["held_out_rows"] == 8
    assert summary["bytes"] == (rows + 8) * (T * 264 + (T + 1) * 4)
    assert summary["shards"] == 1 + -(-rows // store.manifest["shard_rows"]) > 2
    # array_record works in blocks of 64 KiB.
    assert 0 <= summary["bytes_on_disk"] - summary["bytes"] < 2 * 65536 * summary["shards"]
    assert f"{rows:,} rows and 8 held-out rows of 32 tokens: 264 bytes per token" in lines[0]
    assert f"(2 vectors of 32 float32), {summary['bytes'] / 1e6:.1f} MB in {workdir}" in lines[0]


def test_batches_are_a_function_of_the_step(target_run, written):
    found = gathered(target_run[0], written[0]).tapped((0,))
    assert found.tapped(()).batches.batch(0).features.taps == ()
    source, rows = found.batches, feature_store.FeatureStore(written[0]).size("train")
    steps = -(-rows // ROWS)
    order = np.concatenate([source.numbers(step) for step in range(2 * steps)])
    for start in (0, rows):  # every row once in an epoch
        assert sorted(order[start : start + rows]) == list(range(rows))
    assert order[:rows].tolist() != order[rows : 2 * rows].tolist() != list(range(rows))
    again = gathered(target_run[0], written[0]).tapped((0,))
    assert equal(source.batch(3), again.batches.batch(3))
    assert not equal(source.batch(3), source.batch(4))
    assert len(found.held_out) == 2 and len(list(found.held_out)) == 2
    assert len(found.prompts) == 4 and found.digest == again.digest
    np.testing.assert_array_equal(found.counts, again.counts)


def test_several_stores_are_one(target_run, written, tmp_path):
    """The rows of the second come after those of the first, in both splits."""
    one, two = feature_store.FeatureStore(written[0]), tmp_path / "two"
    shutil.copytree(written[0], two)
    both = feature_store.FeatureStore(written[0], two)
    rows, held_out = one.size("train"), one.size("valid")
    assert (both.size("train"), both.size("valid")) == (2 * rows, 2 * held_out)
    numbers = [rows + 3, 0, 2 * rows - 1, rows, rows - 1]
    wanted = one.read("train", [3, 0, rows - 1, 0, rows - 1], (0,))
    assert equal(both.read("train", numbers, (0,)), wanted)
    last = both.read("valid", [2 * held_out - 1], (0,))
    assert equal(last, one.read("valid", [held_out - 1], (0,)))
    np.testing.assert_array_equal(both.counts, 2 * one.counts)
    found = gathered(target_run[0], f"{written[0]}, {two}")
    assert found.batches.store.size("train") == 2 * rows and found.digest == both.digest
    assert found.digest != one.digest
    manifest = json.loads((two / "features" / "manifest.json").read_text())
    (two / "features" / "manifest.json").write_text(json.dumps(manifest | {"dtype": "bfloat16"}))
    with pytest.raises(UserError, match="have other targets, layers, dtypes or lengths"):
        gathered(target_run[0], f"{written[0]},{two}")


def test_a_killed_command_is_resumed(target_run, written, text_file, tmp_path, monkeypatch):
    """The finished shard is kept, and all files are those of a run that was not killed."""
    config, write = features_config(target_run[0], text_file, features__taps=(0,)), []

    def killed(path, rows):
        if write:
            raise KeyboardInterrupt
        write.append(path)
        original(path, rows)

    original = feature_store.write
    monkeypatch.setattr(feature_store, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        recipes.run(config, tmp_path / "f")
    with pytest.raises(UserError, match="f has no manifest.json; build the features"):
        feature_store.FeatureStore(tmp_path / "f")
    kept = write[0].stat()
    monkeypatch.setattr(feature_store, "write", original)
    changed = features_config(target_run[0], text_file, features__dtype="float8")
    with pytest.raises(UserError, match=r"dtype was 'float32', is 'float8'"):
        recipes.run(changed, tmp_path / "f")
    summary = recipes.run(config, tmp_path / "f")
    assert write[0].stat().st_mtime_ns == kept.st_mtime_ns and summary == written[1]
    for path in (written[0] / "features").iterdir():
        assert path.read_bytes() == (tmp_path / "f" / "features" / path.name).read_bytes(), path
    assert recipes.run(config, tmp_path / "f") == summary  # finished: nothing is done


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float8", marks=pytest.mark.slow)])
def test_documents(target_run, text_file, tmp_path, dtype):
    """Packed documents keep labels and segments; a pass reads each alone, from its first token."""
    changes = {"data__packing": "documents", "features__dtype": dtype, "features__rows": 12}
    whole, lines = Path(text_file).read_text(encoding="utf-8"), []
    for start in range(0, 6000, 60):  # every third text is long
        text = whole[start : start + (600 if start % 180 == 0 else 40)]
        lines.append(json.dumps({"text": text}))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = features_config(target_run[0], str(tmp_path / "texts.jsonl"), **changes)
    summary = recipes.run(config, tmp_path / "f")
    assert (
        summary["rows"] == 12
        and summary["bytes_per_token"] == {"float32": 136, "float8": 44}[dtype]
    )
    target = hf.load(target_run[0], dtype=jnp.float32)
    store = feature_store.FeatureStore(tmp_path / "f")
    batch = store.read("train", range(12))
    labels = batch.labelled[:, 1:] & (batch.segments[:, 1:] == batch.segments[:, :-1])
    stored = np.bincount(batch.tokens[:, 1:][labels], minlength=320)
    np.testing.assert_array_equal(store.counts, stored)
    assert batch.labelled.any() and not batch.labelled.all() and batch.segments.max() >= 1
    documents = material.read(config, tmp_path, target.tokenizer, target.directory).documents
    forward = jax.jit(functools.partial(lm.forward, target.lm, target.params))
    rows, features = [], []
    # Documents that fit into a row stay whole; longer ones are read READ tokens at once.
    for long, room in ((False, T), (True, READ)):
        own = [each for each in documents["train"] if (len(each.ids) > T + 1) == long]
        packed = packing.Packed(own, 1, room, config.seed, room // 2)
        for number in range(packed.rows):
            text = packed.batch(number)
            out = forward(text.tokens[:, :-1], text.segments[:, :-1])
            hidden = np.asarray(out.hidden).reshape(-1, T, out.hidden.shape[-1])
            cut = packing.cut(text, T)
            # Rows without a label are left out.
            kept = (cut.labelled[:, 1:] & (cut.segments[:, 1:] == cut.segments[:, :-1])).any(1)
            rows.append(jax.tree.map(lambda x, kept=kept: x[kept], cut))
            features.append(hidden[kept])
    rows = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    chosen = np.linspace(0, len(rows.tokens) - 1, 12).astype(int)
    assert equal(batch.replace(features=None), jax.tree.map(lambda x: x[chosen], rows))
    hidden = np.concatenate(features)[chosen]
    error = np.abs(np.asarray(batch.features.hidden, np.float32) - hidden)
    error /= np.abs(hidden).max(-1, keepdims=True)
    assert error.max() < (1e-6 if dtype == "float32" else 0.04)


def gradient_of(drafter, params, target_params, batch):
    loss = jax.jit(jax.value_and_grad(drafter.training.loss, has_aux=True))
    (value, _), gradient = loss(params, target_params, batch, jax.random.key(0))
    return value, gradient


def test_the_loss_from_stored_features(target_run, alone):
    """The loss and its gradient are those of a run of the target, also with fewer bits nearly."""
    target = hf.load(target_run[0], dtype=jnp.float32)
    drafter = drafters.make("medusa", target.lm, heads=1)
    params = drafter.training.start(target.params, jax.random.key(0))
    batches = gathered(target_run[0], alone).tapped(()).batches
    batch = batches.batch(0)
    some = jax.tree.map(lambda leaf: leaf[[1]], batch)  # what a process with one row reads
    assert jax.tree.all(jax.tree.map(np.array_equal, batches.part(0, [1]), some))
    expected = gradient_of(drafter, params, target.params, batch.replace(features=None))
    assert close(gradient_of(drafter, params, target.params, batch), expected, 1e-6)
    values = jnp.asarray(batch.features.hidden)[:, None]
    for dtype, least, most in (("bfloat16", 1e-7, 1e-2), ("float8", 1e-5, 5e-2)):
        layout = feature_store.RecordLayout(T, values.shape[-1], (), dtype, False)
        bits, scales = feature_store.in_bits(values, dtype)
        scales = None if scales is None else np.asarray(scales)
        raw = feature_store.records(layout, batch, np.asarray(bits), scales)
        fewer = feature_store.batch_of(layout, raw, ())
        value, _ = gradient_of(drafter, params, target.params, fewer)
        assert least < abs(float(value / expected[0]) - 1) < most, dtype


def test_a_draft_vocabulary_needs_no_other_logits(target_run, written):
    """The loss, its gradient and metrics with the stored log-sum-exp and best token."""
    target = hf.load(target_run[0], dtype=jnp.float32)
    ids = np.arange(0, 320, 9)
    drafter = drafters.make("eagle3", target.lm, taps="0", draft_ids=ids)
    batch = feature_store.FeatureStore(written[0]).read("train", range(4), (0,))
    params = drafter.training.start(target.params, jax.random.key(0))
    loss = functools.partial(drafter.training.loss, steps=1)
    both = jax.value_and_grad(loss, has_aux=True)
    args = params, target.params, batch, jax.random.key(0)
    without = batch.replace(features=batch.features.replace(total=None, best=None))
    runs = [
        jax.jit(both).lower(params, target.params, each, args[3]).compile()
        for each in (batch, without)
    ]
    found, expected = runs[0](*args), runs[1](params, target.params, without, args[3])
    assert close(found, expected, 1e-5)
    # Of 320 tokens 36 are in the draft vocabulary.
    costs = [run.cost_analysis()["flops"] for run in runs]
    assert costs[1] - costs[0] > 0.8 * 2 * 4 * T * 32 * (320 - 36)


def test_stores_of_before_have_no_teacher(written, tmp_path):
    """Their manifest does not name it; the record has the fields of then."""
    shutil.copytree(written[0] / "features", tmp_path / "features")
    path = tmp_path / "features" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["teacher"]
    path.write_text(json.dumps(manifest))
    layout = feature_store.FeatureStore(tmp_path).layout
    assert not layout.teacher and layout.record.names == ("tokens", "values")


def test_features_are_refused_where_the_target_runs_on_the_rows(target_run, written, tmp_path):
    """Its distribution would be that without the text before the row."""
    for name, keys in (
        ("pass", {}),
        ("early_exit", {"drafter__adapter": "none", "drafter__head": "own"}),
    ):
        config = heads_config(target_run[0], written[0], name, **keys)
        with pytest.raises(UserError, match=f"data.features are not enough for {name}"):
            recipes.run(config, tmp_path / name)


def test_batches_are_read_in_parts(target_run, written):
    """A process reads its own rows alone; a batch has the number of its step, whatever its loss."""
    source = gathered(target_run[0], written[0]).batches
    assert isinstance(source, placement.Divided) and source.batch_size == ROWS
    part = source.part(3, [2, 0])
    np.testing.assert_array_equal(part.tokens, source.batch(3).tokens[[2, 0]])
    fetched = placement.place().fetch(source, 3)
    np.testing.assert_array_equal(fetched.step, [3] * ROWS)
    np.testing.assert_array_equal(fetched.tokens, source.batch(3).tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_training_from_stored_features(target_run, alone, tmp_path, monkeypatch, name):
    """The parameters are those of a run of the target over the same batches; also resumed."""
    keys = {"train__checkpoint_every": 3, "examine__prompts": 0, "optimiser__warmup": 0.0}
    keys["optimiser__schedule"] = "constant"
    config = heads_config(target_run[0], alone, name, **keys)
    shorter = heads_config(target_run[0], alone, name, **keys)
    shorter.train.steps = 3
    recipes.run(config, tmp_path / "whole")
    recipes.run(shorter, tmp_path / "resumed")
    recipes.run(config, tmp_path / "resumed")
    read = feature_store.FeatureStore.read

    def without(self, *args):
        return read(self, *args).replace(features=None)

    monkeypatch.setattr(feature_store.FeatureStore, "read", without)
    recipes.run(config, tmp_path / "direct")
    whole, resumed, direct = (
        head_files.read(tmp_path / run, name, dtype=jnp.float32).params
        for run in ("whole", "resumed", "direct")
    )
    assert equal(whole, resumed) and close(whole, direct, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_training_in_fewer_bits(target_run, written, text_file, tmp_path, dtype):
    config = features_config(target_run[0], text_file, features__dtype=dtype)
    recipes.run(config, tmp_path / "f")
    losses = []
    for store, run in ((written[0], "a"), (tmp_path / "f", "b")):
        changes = {"examine__prompts": 0, "train__precision": "float32"}
        result = recipes.run(heads_config(target_run[0], store, **changes), tmp_path / run)
        losses.append(result["heldout_loss"])
    assert 0 < abs(losses[1] / losses[0] - 1) < 0.02, losses


def test_wrong_stores_are_refused(target_run, written, text_file, tmp_path):
    target, store = target_run[0], written[0]

    def refused(message, **changes):
        config = heads_config(changes.pop("target", target), store, **changes)
        with pytest.raises(UserError, match=message) as caught:
            recipes.run(config, tmp_path / "never")
        assert "\n" not in str(caught.value) and not (tmp_path / "never").exists()

    other = tmp_path / "other"
    shutil.copytree(target / "model", other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config + "\n")
    refused("and config.target is another model; store those of this target", target=str(other))
    refused(
        "config.train.length is 16, and the rows of .* have 32 tokens; give 32", train__length=16
    )
    refused("has 8 held-out rows, fewer than one batch of 16", train__batch_size=16)
    refused("fewer than one batch of 9999", train__batch_size=9999)
    refused("asks for 9 prompts of 6 tokens, and .* has 4 of 6; ask for these", examine__prompts=9)
    refused("config.data names files and features; give one of them", data__files=text_file)
    refused(
        "config.data.packing belongs to plain text, and features are", data__packing="documents"
    )
    refused("which only objective heads reads, without config.joint", joint=True)
    with pytest.raises(UserError, match=r"reads the target's layers \[0, 3\], and .* has the taps"):
        gathered(target, store).tapped((0, 3))
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)
    path = min((damaged / "features").glob("train-*.array_record"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    stored = feature_store.FeatureStore(damaged)
    with pytest.raises(UserError, match="is damaged .*; remove .* and store the features again"):
        stored.read("train", range(stored.manifest["shard_rows"]))


def test_wrong_settings_are_refused(target_run, text_file, tmp_path, monkeypatch):
    def refused(message, **changes):
        with pytest.raises(UserError, match=message) as caught:
            config = features_config(changes.pop("target", target_run[0]), text_file, **changes)
            recipes.run(config, tmp_path / "never")
        assert "\n" not in str(caught.value) and not (tmp_path / "never").exists()

    refused("dtype is 'float16'; it must be one of float32", features__dtype="float16")
    refused(r"taps are \(4,\); layers are numbered 0..0", features__taps=(4,))
    refused(r"config.features.taps is \(0, 0\); give each value once", features__taps=(0, 0))
    refused(r"config.features.taps is 'low'; it must be a whole number", features__taps=("low",))
    refused("config.features.rows is -1; it must be a whole number >= 0", features__rows=-1)
    refused("config.train.length 4096 is beyond the target's 64 positions", train__length=4096)
    refused("config.target is empty", target="")
    refused(
        "config.data.features is what this objective writes", data__files="", data__features="x"
    )
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    refused("the features take .* MB more and .* has 10.0 kB; store fewer rows")
    (tmp_path / "model").mkdir()
    with pytest.raises(
        UserError, match=r"holds a training run \(model\), which this would overwrite"
    ):
        recipes.run(features_config(target_run[0], text_file), tmp_path)
