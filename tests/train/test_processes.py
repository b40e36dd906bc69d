"""Training in other processes: on two devices, and killed at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from train_cases import MODES, equal, metrics, noisy_loss, rewrite, train

ROOT = Path(__file__).parents[2]


def _python(script: str, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | environment
    # TensorBoard's writer would import PyTorch, which takes seconds.
    script = 'import sys; sys.modules["torch"] = None\n' + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", script], env=environment)


@pytest.mark.slow
def test_two_devices_give_the_parameters_of_one(tmp_path):
    script = f"""
        import jax, pytest, train_cases as t
        from pathlib import Path
        from specjax.errors import UserError
        root = Path({str(tmp_path)!r})
        options = {{"loss": t.noisy_loss, "accumulate": 2, "ema": 0.9, "rewrite": t.rewrite}}
        one = t.train(root / "1", 6, devices=tuple(jax.local_devices()[:1]), **options)
        two = t.train(root / "2", 6, **options)
        assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(two))
        assert t.close(one, two)
        straight, losses = t.metrics(root / "1"), t.metrics(root / "2")
        assert losses[-1]["heldout_loss"] == pytest.approx(straight[-1]["heldout_loss"], abs=1e-5)
        message = "4 rows cannot be divided among 4 parts .accumulate. on 2 devices"
        with pytest.raises(UserError, match=message):
            t.train(root / "x", accumulate=4)
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    assert _python(script, XLA_FLAGS=flags).wait(120) == 0


def test_a_run_killed_while_it_saves_resumes(tmp_path):
    options = {"loss": noisy_loss, "rewrite": rewrite, "ema": 0.9}
    # From before the first file is written to after the last.
    moment = np.random.default_rng(time.time_ns()).uniform(0, 0.03)
    script = f"""
        import os, signal, threading
        import train_cases as t
        from pathlib import Path
        from specjax.train.checkpoint import Checkpoints
        begin = Checkpoints.save
        def save(self, step, *rest):
            if step == 12:
                threading.Timer({moment}, os.kill, (os.getpid(), signal.SIGKILL)).start()
            begin(self, step, *rest)
        Checkpoints.save = save
        options = dict(loss=t.noisy_loss, rewrite=t.rewrite, ema=0.9)
        t.train(Path({str(tmp_path / "b")!r}), 2000, **options)
    """
    assert _python(script).wait(120) == -signal.SIGKILL
    straight = train(tmp_path / "a", **options)
    assert equal(train(tmp_path / "b", **options), straight), moment
    steps = [record["step"] for record in metrics(tmp_path / "b")]
    assert steps == [record["step"] for record in metrics(tmp_path / "a")]
    assert not list((tmp_path / "b" / "checkpoints").glob("*tmp*"))


def test_sigterm_saves_the_next_step(tmp_path):
    """As a preempted machine gets it: no checkpoint was due, and nothing is computed twice."""
    options = {"loss": noisy_loss, "rewrite": rewrite, "ema": 0.9}
    script = f"""
        import os, signal
        import train_cases as t
        from pathlib import Path
        from specjax.train import loop
        fetch = loop._Run._fetch_ahead
        def fetched(self, step, *rest):
            if step == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            return fetch(self, step, *rest)
        loop._Run._fetch_ahead = fetched
        options = dict(loss=t.noisy_loss, rewrite=t.rewrite, ema=0.9)
        t.train(Path({str(tmp_path / "b")!r}), 20, checkpoint_every=100, **options)
    """
    assert _python(script).wait(120) == -signal.SIGTERM  # the handler of before
    saved = [int(path.name) for path in (tmp_path / "b" / "checkpoints").iterdir()]
    assert max(saved) == 10 and (tmp_path / "b" / "checkpoints" / "10" / "checksums.json").exists()
    straight = train(tmp_path / "a", 20, checkpoint_every=100, **options)
    assert equal(train(tmp_path / "b", 20, checkpoint_every=100, **options), straight)
    steps = [record["step"] for record in metrics(tmp_path / "b")]
    assert steps == [record["step"] for record in metrics(tmp_path / "a")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_process_resumes_bit_identical(tmp_path, mode):
    script = f"""
        import train_cases as t
        from pathlib import Path
        options = {{"loss": t.noisy_loss, "checkpoint_every": 5}}
        t.train(Path({str(tmp_path / "b")!r}), 600, **options, **t.MODES[{mode!r}])
    """
    options = {"loss": noisy_loss} | MODES[mode]
    straight = train(tmp_path / "a", 600, checkpoint_every=300, **options)
    log, reached = tmp_path / "b" / "metrics.jsonl", 0
    for kill in range(4):
        process, before = _python(script), reached
        while reached <= before + 4 and process.poll() is None:  # until it has logged twice
            time.sleep(0.02)
            lines = log.read_text().splitlines() if log.exists() else []
            reached = max([before, *(json.loads(line)["step"] for line in lines[:-1])])
        time.sleep(0.037 * kill)  # in a step, in a save, or while a line is written
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert equal(train(tmp_path / "b", 600, checkpoint_every=5, **options), straight)
    steps = [record["step"] for record in metrics(tmp_path / "b")]
    assert steps == [record["step"] for record in metrics(tmp_path / "a")]
