"""Training in two processes on the loopback address, each with two fake devices."""

from __future__ import annotations

import signal
import socket
import time

import numpy as np
import pytest
from mesh_cases import python, runs, train
from train_cases import TEXT, close, equal, metrics

from specjax.models import hf
from specjax.train import recipes

CONNECT = """
    import jax
    jax.distributed.initialize("127.0.0.1:{port}", 2, {process})
    from pathlib import Path
    import mesh_cases as m, train_cases as t
    root = Path({root!r})
"""


def start(root, script: str, processes: int = 2) -> list:
    """The processes that run a script, connected."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    texts = [
        CONNECT.format(port=port, process=process, root=str(root)) for process in range(processes)
    ]
    return [python(text + script, devices=2) for text in texts]


def losses(workdir) -> list[float]:
    return [record["loss"] for record in metrics(workdir)]


def wait_for_records(workdir, count: int = 18) -> None:
    """Returns when a run has logged so many steps, or after minutes."""
    log = workdir / "metrics.jsonl"
    for _ in range(8000):
        if log.exists() and len(log.read_text().splitlines()) >= count:
            return
        time.sleep(0.02)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(tmp_path):
    script = """
    params = m.train(root / "two", "fsdp:2,tensor:2", source=m.Parts())
    from specjax.models import hf
    hf.save(root / "model", m.SHAPE, params)
    """
    running = start(tmp_path, script)
    alone = train(tmp_path / "one", "data:1")
    assert [process.wait(200) for process in running] == [0, 0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-6)
    # One process wrote each record, and the model.
    assert [record["step"] for record in metrics(tmp_path / "two")] == list(range(1, 7))
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1
    stored = hf.load(tmp_path / "model").params
    # One process continues what two saved, and changes no bit.
    restored = train(tmp_path / "two", "data:1")
    assert equal(stored, restored)
    assert close(alone, restored, 1e-5)


@pytest.mark.slow
def test_two_killed_processes_resume_bit_identical(tmp_path):
    script = """
    m.train(root / {name!r}, "fsdp:2,tensor:2", {steps}, every=5, ema=0.9)
    """
    straight = start(tmp_path, script.format(name="a", steps=40))
    assert [process.wait(200) for process in straight] == [0, 0]
    running = start(tmp_path, script.format(name="b", steps=40))
    wait_for_records(tmp_path / "b")
    for process in running:
        process.send_signal(signal.SIGKILL)
    assert [process.wait() for process in running] == [-signal.SIGKILL] * 2
    running = start(tmp_path, script.format(name="b", steps=40))
    assert [process.wait(200) for process in running] == [0, 0]
    assert [r["step"] for r in metrics(tmp_path / "b")] == list(range(1, 41))
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    # No step is left: both are restored.
    ended = [train(tmp_path / name, "data:1", 40, every=5, ema=0.9) for name in "ab"]
    assert equal(*ended)


@pytest.mark.slow
@pytest.mark.parametrize("receivers", [(1,), (0, 1)])
def test_two_processes_save_one_step_at_sigterm(tmp_path, receivers):
    """One process of a pod may be warned alone: all save the same step, and it resumes to the same
    bits."""
    script = """
    m.train(root / {name!r}, "fsdp:2,tensor:2", {steps}, every=1000, ema=0.9)
    """  # evaluated, and the best one saved, every third step
    straight = start(tmp_path, script.format(name="a", steps=50))
    running = start(tmp_path, script.format(name="b", steps=50))
    wait_for_records(tmp_path / "b")
    for number in receivers:
        running[number].send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in running] == [-signal.SIGTERM] * 2
    assert [process.wait(200) for process in straight] == [0, 0]
    # The best step is kept beside the last one.
    step = max(int(path.name) for path in (tmp_path / "b" / "checkpoints").iterdir())
    assert 17 < step < 50
    running = start(tmp_path, script.format(name="b", steps=50))
    assert [process.wait(200) for process in running] == [0, 0]
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    ended = [train(tmp_path / name, "data:1", 50, every=1000, ema=0.9) for name in "ab"]
    assert equal(*ended)


RECIPES = """
    from specjax.train import recipes
    for workdir, config in m.runs(root, str(root / "text.txt"), {mesh!r}):
        recipes.run(config, workdir)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,tensor:2", "fsdp:4"])
def test_recipes_in_two_processes(tmp_path, mesh):
    """A target, features and text of it, a draft model and heads."""
    text = str(tmp_path / "text.txt")
    (tmp_path / "text.txt").write_text(TEXT * 2, encoding="utf-8")
    running = start(tmp_path, RECIPES.format(mesh=mesh))
    assert [process.wait(900) for process in running] == [0, 0]
    compared = set()
    for (workdir, config), (alone, single) in zip(
        runs(tmp_path, text, mesh), runs(tmp_path / "alone", text, "data:1"), strict=False
    ):
        # What is finished is only read, although the mesh is another one.
        config.mesh = ""
        two, one = recipes.run(config, workdir), recipes.run(single, alone)
        for name in one.keys() & {"heldout_loss", "heldout_alpha", "tokens", "rows", "records"}:
            assert two[name] == pytest.approx(one[name], rel=1e-4), (workdir.name, name)
            compared.add(name)
    assert len(compared) == 5 - (mesh == "fsdp:4")
