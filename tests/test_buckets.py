"""Files and workdirs in a bucket: fsspec's store in memory takes its place."""

from __future__ import annotations

import signal
from pathlib import Path

import fsspec
import pytest
from commandline import ROOT, TEXT, save
from train_cases import metrics

from specjax import files, run
from specjax.data import progress
from specjax.errors import UserError
from specjax.files import buckets
from specjax.models import hf
from specjax.train import loop


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty bucket, and an empty cache folder."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_copy_is_what_the_bucket_has_now(store, tmp_path, monkeypatch):
    store.pipe({"/b/m/config.json": b"one", "/b/m/x/y.txt": b"two", "/b/m/checkpoints/3/a": b"-"})
    copy = buckets.local("memory://b/m")
    assert contents(copy) == {"config.json": "one", "x/y.txt": "two"}
    untouched = (copy / "x" / "y.txt").stat().st_mtime_ns
    store.pipe("/b/m/config.json", b"1st")  # of the same size
    store.pipe("/b/m/z.txt", b"three")
    assert buckets.local("memory://b/m/") == copy
    assert contents(copy) == {"config.json": "1st", "x/y.txt": "two", "z.txt": "three"}
    assert (copy / "x" / "y.txt").stat().st_mtime_ns == untouched
    store.rm_file("/b/m/x/y.txt")
    (copy / "z.txt").unlink()  # removed by hand
    assert contents(buckets.local("memory://b/m")) == {"config.json": "1st", "z.txt": "three"}
    # A file alone does not bring its neighbours, and does not remove them.
    alone = buckets.local("memory://b/m/z.txt")
    assert alone.read_text() == "three" and (copy / "config.json").exists()
    store.pipe({"/b/n/one.txt": b"1", "/b/n/two.txt": b"2"})
    assert contents(buckets.local("memory://b/n/one.txt").parent) == {"one.txt": "1"}
    assert buckets.local(tmp_path) == tmp_path
    assert not any(map(buckets.is_address, ("C://x", "https://x/y", "memory:///x", "a gs://b")))
    # A copy that was edited, and a fetch that failed.
    alone.write_text("edited")
    assert buckets.local("memory://b/m/z.txt").read_text() == "three"
    store.pipe({"/b/m/0.txt": b"0", "/b/m/9.txt": b"9"})
    real = type(store).get_file

    def failing(self, there, here, **keys):
        if there.endswith("9.txt"):
            raise OSError("the line is dead")
        real(self, there, here, **keys)

    monkeypatch.setattr(type(store), "get_file", failing)
    with pytest.raises(UserError, match="the line is dead"):
        buckets.local("memory://b/m")
    monkeypatch.undo()
    store.rm_file("/b/m/0.txt")
    assert set(contents(buckets.local("memory://b/m"))) == {"config.json", "z.txt", "9.txt"}


@pytest.mark.parametrize("name", ["/tmp/x", "a/../../x"])
def test_a_name_that_leaves_the_folder_is_refused(store, name):
    store.pipe({"/b/d/one": b"1", f"/b/d/{name}": b"2"})
    with pytest.raises(UserError, match="which is no name in a folder"):
        buckets.local("memory://b/d")


def test_files_that_are_not_of_the_run_stay_in_the_bucket(store):
    store.pipe({"/b/run/.gitignore": b"x", "/b/run/notes-tmp.txt": b"y", "/b/run/a": b"z"})
    folder = buckets.begin("memory://b/run")
    assert contents(folder) == {"notes-tmp.txt": "y", "a": "z"}
    assert buckets.local("memory://b/run") == folder
    (folder / "a").unlink()
    buckets.end(folder)
    assert sorted(store.find("/b/run")) == ["/b/run/.gitignore", "/b/run/notes-tmp.txt"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://b/none", "memory://b/none cannot be read or written .*no such file or folder"),
        ("gs://b/none", "gs://b/none needs another package.*gcsfs|gs://b/none cannot be read"),
    ],
)
def test_what_is_not_there_is_one_line(store, address, message):
    for read in (hf.resolve, buckets.local):
        with pytest.raises(UserError, match=message) as error:
            read(address)
        assert "\n" not in str(error.value)
    assert not (files.cache_folder() / "buckets").exists()


def keys(workdir, text, steps):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
    sizes |= {"num_kv_heads": 1, "vocab_size": 300, "max_positions": 64}
    values = {f"model.{key}": value for key, value in sizes.items()}
    values |= {"train.steps": steps, "train.batch_size": 2, "train.length": 16}
    values |= {"train.checkpoint_every": 100, "train.log_every": 1, "data.files": text}
    given = [f"--config.{key}={value}" for key, value in values.items()]
    return ["specjax", f"--config={ROOT}/configs/pretrain.py", f"--workdir={workdir}", *given]


def test_a_run_in_a_bucket_goes_on_on_another_machine(store, tmp_path, monkeypatch, capfd):
    """Ended by SIGTERM after a step without a checkpoint; text and result are in the bucket too."""
    text = "memory://b/text.txt"
    store.pipe("/b/text.txt", (TEXT * 200).encode())
    assert run.main(keys("memory://b/straight", text, 8)) == 0

    def ended(self):
        raise KeyboardInterrupt

    # As ``run.process`` ends it; ``end`` would raise the signal in the process of the tests.
    reached = loop.sharding.Preemption.reached
    monkeypatch.setattr(loop.sharding.Preemption, "end", ended)
    steps = []

    def warned(self):
        steps.append(1)
        if len(steps) == 5:
            signal.raise_signal(signal.SIGTERM)
        return reached(self)

    monkeypatch.setattr(loop.sharding.Preemption, "reached", warned)
    # The machine is gone before the end: a checkpoint is in the bucket when it is complete.
    with monkeypatch.context() as gone:
        gone.setattr(buckets, "end", lambda folder: buckets._workdirs.pop(folder))
        assert run.main(keys("memory://b/run", text, 8)) == 130
    assert "sent to memory://b/run" in capfd.readouterr().out
    there = store.find("/b/run/checkpoints")
    assert "/b/run/checkpoints/5/checksums.json" in there
    assert not any("tmp" in name for name in there)
    monkeypatch.setattr(loop.sharding.Preemption, "reached", reached)
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "another"))
    assert run.main(keys("memory://b/run", text, 8)) == 0
    assert "resuming from step 5 of 8" in capfd.readouterr().err
    tensors = [store.cat(f"/b/{name}/model/model.safetensors") for name in ("run", "straight")]
    assert tensors[0] == tensors[1]
    assert [each["step"] for each in metrics(buckets.local("memory://b/run"))] == list(range(1, 9))
    # It is decoded with, and what it writes is sent too.
    decode = [f"--config={ROOT}/configs/generate.py", "--config.target=memory://b/run"]
    decode += ["--config.prompts=memory://b/text.txt", "--config.num_prompts=2"]
    decode += ["--config.max_new_tokens=4", "--workdir=memory://b/out"]
    assert run.main(["specjax", *decode]) == 0
    assert store.exists("/b/out/results.json")
    # A bench is finished only if its files in the bucket are those of before.
    stamps = progress.named_files({"prompts": "memory://b/text.txt"})
    store.pipe("/b/text.txt", (TEXT * 201).encode())
    assert stamps and progress.named_files({"prompts": "memory://b/text.txt"}) != stamps
    store.pipe("/b/text.txt", (TEXT * 200).encode())
    # A finished run is only read; a mistake writes nothing.
    before = store.find("/b/run", detail=True)
    assert run.main(keys("memory://b/run", text, 8)) == 0
    assert {k: v["created"] for k, v in store.find("/b/run", detail=True).items()} == {
        k: v["created"] for k, v in before.items()
    }
    assert run.main([*keys("memory://b/wrong", text, 8), "--config.train.length=0"]) == 2
    assert not store.exists("/b/wrong")


def test_a_model_of_a_bucket_is_loaded(store, tmp_path):
    for path in Path(save(tmp_path / "model")).iterdir():
        store.pipe(f"/b/model/{path.name}", path.read_bytes())
    loaded = hf.load("memory://b/model")
    assert loaded.tokenizer is not None and "buckets" in loaded.directory


def test_of_half_a_checkpoint_the_checksums_come_last(store, monkeypatch):
    folder = buckets.begin("memory://b/run")
    for name in ("1/aaa", "1/checksums.json", "1/zzz", ".hidden", "2.orbax-checkpoint-tmp/x"):
        (folder / "checkpoints" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints" / name).write_text(name)
    sent, put = [], type(store).put_file

    def noted(self, here, there, **keys):
        sent.append(there)
        put(self, here, there, **keys)

    monkeypatch.setattr(type(store), "put_file", noted)
    buckets.send(folder / "checkpoints")
    names = [name.removeprefix("/b/run/checkpoints/") for name in sent]
    assert names == ["1/aaa", "1/zzz", "1/checksums.json"]
    (folder / "checkpoints" / "1" / "aaa").unlink()
    assert buckets.end(folder) == "memory://b/run"
    assert not store.exists("/b/run/checkpoints/1/aaa")
    buckets.send(folder)  # of no workdir any more


def test_paths_in_a_workdir_are_addresses_in_what_is_stored(store):
    """So that another machine, with another cache folder, sees the same configuration."""
    folder = buckets.begin("memory://b/run")
    value = {"target": f"{folder}/draft", "files": [f"{folder}/a,{folder}/b"], "steps": 3}
    expected = {"target": "memory://b/run/draft", "steps": 3}
    expected["files"] = ["memory://b/run/a,memory://b/run/b"]
    assert buckets.addressed(value) == expected
    buckets.end(folder)
    assert buckets.addressed(value) == value


def test_what_cannot_be_in_a_bucket_is_refused(store, cli, target):
    store.pipe("/b/p.txt", b"def add")
    keys = [f"--config={ROOT}/configs/generate.py", f"--config.target={target}"]
    keys += ["--config.prompts=memory://b/p.txt", "--config.record=memory://b/r.jsonl"]
    status, _, err, _ = cli(*keys)
    assert status == 2 and "memory://b/r.jsonl is in a bucket; name a file of this machine" in err


def test_a_path_with_a_null_character_is_refused():
    with pytest.raises(UserError, match="it has a null character"):
        buckets.local("a\0b")
