"""Checkpoints: layer order, damage, the best step, a full disk, changed configurations, saving."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import equal

from specjax import declare
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import checkpoint
from specjax.train import settings as training

ROOT = Path(__file__).parents[2]
fast = pytest.mark.fast
STATE = {
    "w": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32),
    "step": np.int32(0),
}


def _at(step: int) -> dict:
    return jax.tree.map(jnp.asarray, {**STATE, "step": np.int32(step)})


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir())


def test_twelve_layers_keep_their_order(tmp_path):
    config = TransformerConfig("llama", 300, 16, 32, 12, 2, 1, 8, 64)
    random, abstract = np.random.default_rng(0), lm.abstract_params(config)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), abstract
    )
    with checkpoint.Checkpoints(tmp_path, {}) as first:
        first.save(1, params)
    with checkpoint.Checkpoints(tmp_path, {}) as second:
        step, restored = second.restore(abstract)
    assert step == 1 and equal(restored, params)
    module = lm.merge(config, restored)
    for number, layer in enumerate(module.layers):
        assert np.array_equal(
            layer.mlp.up.kernel[...], params["layers"][number]["mlp"]["up"]["kernel"]
        )


def _damage(step: Path, how: str) -> None:
    if how == "no checksums":  # killed between Orbax's rename and ours
        (step / "checksums.json").unlink()
        return
    biggest = max(
        (path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    raw = bytearray(biggest.read_bytes())
    raw[len(raw) // 2] ^= 1  # Orbax itself restores this without an error
    biggest.write_bytes(raw[: len(raw) // 2] if how == "half" else raw)


@fast
@pytest.mark.parametrize("how", ["half", "bit", "no checksums"])
def test_a_damaged_checkpoint_falls_back(tmp_path, how):
    messages: list[str] = []
    with checkpoint.Checkpoints(tmp_path, {}, messages.append) as first:
        for step in (4, 8, 12):
            first.save(step, _at(step))
    assert _steps(tmp_path) == [8, 12]
    _damage(tmp_path / "12", how)
    second = checkpoint.Checkpoints(tmp_path, {}, messages.append)
    step, restored = second.restore(_at(0))
    assert step == 8 and equal(restored, _at(8))
    assert len(messages) == 1 and "12" in messages[0] and "from 8" in messages[0]
    assert "\n" not in messages[0]
    second.save(10, _at(10))  # below the damaged one
    assert second.latest() == 10
    _damage(tmp_path / "8", "bit")
    _damage(tmp_path / "10", how)
    with pytest.raises(UserError, match="undamaged"):
        second.restore(_at(0))
    assert _steps(tmp_path) == [8, 10]  # no checkpoint is removed without a good one


@fast
def test_files_that_are_not_of_a_checkpoint_are_ignored(tmp_path):
    """Such as an editor's backup or a file of the desktop; each is named once."""
    with checkpoint.Checkpoints(tmp_path, {}) as first:
        first.save(4, _at(4))
    for name in (".DS_Store", "4/.DS_Store", "4/config/metadata~", "notes"):
        (tmp_path / name).write_text("x")
    messages: list[str] = []
    with checkpoint.Checkpoints(tmp_path, {}, messages.append) as second:
        step, restored = second.restore(_at(0))
        assert step == 4 and equal(restored, _at(4))
        named = [text.split(" is ")[0] for text in messages]
        assert named == [str(tmp_path / "4" / x) for x in (".DS_Store", "config/metadata~")]
        second.save(8, _at(8))
        assert second.restore(_at(0))[0] == 8


@fast
def test_a_first_save_that_was_killed_is_removed(tmp_path):
    """Killed between Orbax's rename and the checksums: the run starts from the beginning."""
    with checkpoint.Checkpoints(tmp_path, {}) as first:
        first.save(4, _at(4), 1.0)
    _damage(tmp_path / "4", "no checksums")
    messages: list[str] = []
    with checkpoint.Checkpoints(tmp_path, {}, messages.append) as second:
        assert second.restore(_at(0)) is None and second.best() is None
        assert len(messages) == 1 and "checkpoint 4 " in messages[0]
        assert "starts from the beginning" in messages[0] and "\n" not in messages[0]
        second.save(4, _at(5))
        assert second.best() is None
        assert equal(second.restore(_at(0))[1], _at(5))


@fast
@pytest.mark.parametrize(
    "text", [b"", b'{"heldout_loss": ', b"\xff\xfe", b"[]", b'{"heldout_loss": "much"}']
)
def test_damaged_metrics_fall_back(tmp_path, text):
    messages: list[str] = []
    with checkpoint.Checkpoints(tmp_path, {}, messages.append, higher_is_better=True) as first:
        for step in (4, 8):
            first.save(step, _at(step), float(step))
    (tmp_path / "8" / "metrics" / "metrics").write_bytes(text)
    with checkpoint.Checkpoints(tmp_path, {}, messages.append, higher_is_better=True) as second:
        assert second.restore(_at(0))[0] == 4 and second.best() == (4, 4.0)
    assert len(messages) == 1 and "from 4" in messages[0] and _steps(tmp_path) == [4]


@fast
def test_values_of_another_metric_are_not_compared(tmp_path):
    with checkpoint.Checkpoints(tmp_path, {}, metric="heldout_loss") as first:
        first.save(4, _at(4), 0.5)
        first.save(8, _at(8), 3.0)
    tau = {"metric": "heldout_tau_t0", "higher_is_better": True}
    with checkpoint.Checkpoints(tmp_path, {}, **tau) as second:
        assert second.best() is None and second.restore(_at(0))[0] == 8
        second.save(12, _at(12), 1.5)
        second.save(16, _at(16), 1.2)
        second.save(20, _at(20), 1.1)
        assert second.best() == (12, 1.5)
    assert _steps(tmp_path) == [12, 16, 20]
    with checkpoint.Checkpoints(tmp_path, {}, **tau) as third:
        assert third.best() == (12, 1.5)


@fast
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="cannot hold checkpoints .Not a directory") as error:
        checkpoint.Checkpoints(tmp_path / "file" / "checkpoints", {})
    assert "\n" not in str(error.value)


@fast
@pytest.mark.parametrize(("higher", "best"), [(False, 4), (True, 12)])
def test_the_best_is_kept_in_addition_to_the_last_two(tmp_path, higher, best):
    messages: list[str] = []
    values = {4: 1.0, 8: 3.0, 12: 5.0, 16: 2.0, 20: 2.5, 24: None}
    with checkpoint.Checkpoints(tmp_path, {}, messages.append, higher_is_better=higher) as first:
        assert first.best() is None and first.best_with(4, 1.0) == (4, 1.0)
        for step, value in values.items():
            first.save(step, _at(step), value)
        assert first.best() == (best, values[best]) == first.best_with(28, 2.2)
        assert first.best_with(28, values[best]) == (28, values[best])  # of equal ones the newest
    assert _steps(tmp_path) == [best, 20, 24]
    # Read from the files.
    with checkpoint.Checkpoints(tmp_path, {}, messages.append, higher_is_better=higher) as second:
        assert second.restore(_at(0))[0] == 24 and second.best() == (best, values[best])
        assert not messages
        assert equal(second.restore_step(best, _at(0)), _at(best))
    _damage(tmp_path / str(best), "bit")
    with checkpoint.Checkpoints(tmp_path, {}, messages.append, higher_is_better=higher) as third:
        with pytest.raises(UserError, match=f"checkpoint {best} .* is damaged"):
            third.restore_step(best, _at(0))
        assert third.restore(_at(0))[0] == 24 and third.best() == (20, 2.5)
    assert (
        len(messages) == 1 and f"checkpoint {best} " in messages[0] and _steps(tmp_path) == [20, 24]
    )


@fast
def test_a_changed_config_is_named(tmp_path):
    messages: list[str] = []
    state = {"w": jnp.zeros(3)}
    first = checkpoint.Checkpoints(
        tmp_path / "checkpoints", {"lr": 0.1, "model": {"width": 4, "depth": 2}}
    )
    assert first.restore(state) is None
    first.save(1, state)
    first.wait()
    changed = {"lr": 0.1, "model": {"width": 8, "depth": 2}, "new": 1}
    second = checkpoint.Checkpoints(tmp_path / "checkpoints", changed, messages.append)
    with pytest.raises(UserError, match=r"model\.width was 4, is 8, new was None, is 1") as error:
        second.restore(state)
    assert "depth" not in str(error.value)
    assert second.restore(state, resume_changed=True)[0] == 1
    assert len(messages) == 1 and "\n" not in messages[0]
    assert "model.width was 4, is 8, new was None, is 1" in messages[0]
    for other, difference in (
        ({"w": jnp.zeros(4)}, r"w was float32\[3\], is float32\[4\]"),
        ({"w": jnp.zeros(3), "ema": {"w": jnp.zeros(3)}}, r"ema\.w is new"),
        ({}, "w is gone"),
    ):
        with pytest.raises(UserError, match=difference) as error:
            second.restore(other, resume_changed=True)
        assert "\n" not in str(error.value)


@fast
def test_a_save_runs_in_the_background(tmp_path, monkeypatch):
    sums, go = checkpoint.checksums, threading.Event()

    def slow(folder):
        assert go.wait(20)
        return sums(folder)

    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"w": jnp.arange(1 << 18, dtype=jnp.float32), "step": jnp.int32(0)}
    before = jax.tree.map(np.array, state)
    with checkpoint.Checkpoints(tmp_path, {}) as first:
        monkeypatch.setattr(checkpoint, "checksums", slow)
        first.save(1, state)
        for _ in range(20):  # the loop continues in the same memory
            state = advance(state)
        jax.block_until_ready(state)
        assert not (tmp_path / "1" / "checksums.json").exists()
        go.set()
        assert first.latest() == 1
        monkeypatch.undo()
        assert equal(first.restore(state)[1], before)


@fast
def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path, monkeypatch):
    class Manager:
        def __init__(self, manager):
            self._manager = manager

        def __getattr__(self, name):
            return getattr(self._manager, name)

        def save(self, *args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = checkpoint.Checkpoints(tmp_path, {})
    first.save(4, _at(4))
    first.wait()
    first._manager = Manager(first._manager)
    with pytest.raises(
        UserError, match="checkpoint 8 .*No space left on device.*checkpoint 4 is intact"
    ) as error:
        first.save(8, _at(8))
    assert "\n" not in str(error.value)
    first._manager = first._manager._manager

    def full(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first.save(8, _at(8))
    first.wait()
    sums = checkpoint.checksums
    monkeypatch.setattr(
        checkpoint, "checksums", lambda folder: (full if folder.name == "12" else sums)(folder)
    )
    first.save(12, _at(12))
    with pytest.raises(
        UserError, match="checkpoint 12 .*No space left on device.*checkpoint 8 is intact"
    ):
        first.wait()
    first.__exit__(None)
    with checkpoint.Checkpoints(tmp_path, {}, lambda line: None) as second:
        assert second.restore(_at(0))[0] == 8


@fast
def test_what_tensorstore_reports_after_a_failed_save_is_not_printed(tmp_path, monkeypatch):
    printed, late = [], RuntimeError("Event loop is closed")
    hook = lambda unraisable: printed.append(unraisable.exc_value)  # noqa: E731
    monkeypatch.setattr(sys, "unraisablehook", hook)
    other = ValueError("x")
    with checkpoint.Checkpoints(tmp_path, {}):
        for error in (late, other):
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert printed == [other] and sys.unraisablehook is hook


@fast
def test_a_save_that_does_not_end_is_one_line(tmp_path, monkeypatch):
    """A disk of the network that no longer answers."""
    go = threading.Event()
    monkeypatch.setattr(checkpoint, "SAVING", 0.1)
    monkeypatch.setattr(checkpoint.Checkpoints, "_seal", lambda self, step: go.wait(60))
    message = "checkpoint 4 could not be written to .* .not finished after 0.1 s.; look after"
    with pytest.raises(UserError, match=message), checkpoint.Checkpoints(tmp_path, {}) as first:
        first.save(4, _at(4))
    go.set()


def test_a_background_write_that_fails_is_one_line(tmp_path):
    """An error of the system: no file may be larger than 64 kB."""
    script = f"""
        import resource, jax.numpy as jnp
        from specjax.train.checkpoint import Checkpoints
        try:
            with Checkpoints({str(tmp_path)!r}, {{}}) as checkpoints:
                checkpoints.save(4, {{"w": jnp.zeros(30)}})
                checkpoints.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
                checkpoints.save(8, {{"w": jnp.arange(1 << 18) * 7919 % 65521}})
        except ValueError as error:
            print(type(error).__name__, error)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert (
        done.stdout.startswith("UserError checkpoint 8 could not be written")
        and done.stdout.count("\n") == 1
    )
    assert "(File too large); checkpoint 4 is intact" in done.stdout
    with checkpoint.Checkpoints(tmp_path, {}) as second:
        assert second.restore({"w": jnp.ones(30)})[0] == 4
        second.save(8, _at(8))
    assert _steps(tmp_path) == [4, 8]  # the files of the failed save are removed


def test_a_key_that_is_new_since_a_run_began_had_its_default():
    same = {"objective": "heads", "seed": 0, "train": {"steps": 4, "length": 8}}
    before = {"objective": "heads", "train": {"steps": 4}}
    length = declare.defaults(training.Training)["train"]["length"]
    now = same | {"train": {"steps": 4, "length": length}}
    checkpoint.check_same(before, now, "w")
    for changed in (same, now | {"seed": 1}, now | {"unknown": 0}):
        with pytest.raises(UserError, match="holds a run with another config"):
            checkpoint.check_same(before, changed, "w")
