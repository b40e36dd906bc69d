"""Ctrl-C and SIGTERM end the process in every mode, and what was measured is written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from commandline import BENCH, ROOT

from specjax.run import chat, replay
from specjax.run import process as run_process

# Of the two seconds that are promised; tests run on busy machines.
BOUND = 15.0
# The main thread is in a compiled program that does not end.
STUCK = """
import jax
from specjax.run import process
process.install()
stuck = jax.jit(lambda n: jax.lax.while_loop(lambda x: x != 1, lambda x: (x + 2) % n, 0))
print("begun", flush=True)
stuck(1000).block_until_ready()
"""
# SIGINT is not ignored, as it is in what a shell runs in the background.
DEFAULT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def started(*command):
    """A process of Python."""
    return subprocess.Popen(
        [sys.executable, "-c", DEFAULT, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, number):
    """(exit status, stderr, seconds) after a signal."""
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err, time.monotonic() - began


def test_a_bench_drops_what_it_has_not_compiled(target, tmp_path):
    """Three lookups, of which most are still queued; without a terminal it says what it does."""
    keys = [f"--config.target={target}", "--config.prompt=def add", "--config.max_new_tokens=64"]
    keys += ["--methods=prompt_lookup,suffix,sam", f"--workdir={tmp_path / 'out'}"]
    process = started("-m", "specjax.run", BENCH, *keys)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "compiling" in line)
    # The first line comes after 10 seconds: a slow machine is at the traces then.
    assert re.search(r" s  (temperature 0, batch 1: compiling|compiling traces), \d of \d: ", line)
    assert (tmp_path / "out").is_dir()
    status, err, seconds = ended(process, signal.SIGINT)
    assert status == 130 and err == f"specjax: {run_process.MESSAGE}\n"
    assert seconds < BOUND
    assert not (tmp_path / "out").exists()  # nothing was measured


def test_a_compiled_program_does_not_hold_the_process():
    process = started("-c", STUCK)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(2)  # until it is compiled
    status, err, seconds = ended(process, signal.SIGTERM)
    assert status == 143 and err == f"specjax: {run_process.MESSAGE}\n"
    assert run_process.GRACE <= seconds < BOUND


def interrupted(module, name, monkeypatch, calls):
    """Makes the function raise after some calls."""
    real, made = getattr(module, name), []

    def call(*args, **keys):
        if len(made) == calls:
            raise run_process.Terminated
        made.append(1)
        return real(*args, **keys)

    monkeypatch.setattr(module, name, call)


def test_replay_writes_the_methods_that_are_done(cli, tmp_path, monkeypatch):
    trace = {"id": "a", "category": "x", "prompt_ids": [1, 2, 3], "output_ids": [1, 2, 3, 1]}
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    interrupted(replay, "_rows", monkeypatch, 1)
    keys = [f"--config={ROOT}/configs/replay.py", f"--config.traces={tmp_path / 'traces.jsonl'}"]
    status, out, err, workdir = cli(*keys, "--methods=prompt_lookup,sam")
    assert status == 143 and "interrupted" in err and "prompt_lookup" in out
    results = json.loads((workdir / "results.json").read_text())
    assert {row["method"] for row in results["rows"]} == {"prompt_lookup"}
    assert results["unfinished"] is True


@pytest.mark.slow
def test_chat_writes_the_answers_that_are_complete(cli, target, tmp_path, monkeypatch):
    question = {"question_id": 1, "category": "x", "turns": ["def add", "def sub"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    interrupted(chat, "_answer", monkeypatch, 1)
    keys = [f"--config={ROOT}/configs/chat.py", f"--config.target={target}"]
    keys += [f"--config.prompts={tmp_path / 'q.jsonl'}", "--config.chat=plain"]
    status, _, err, workdir = cli(*keys, "--config.max_new_tokens=4")
    assert (status, err) == (143, f"specjax: {run_process.MESSAGE}\n")
    results = json.loads((workdir / "results.json").read_text())
    assert len(results["texts"]) == 1 and results["unfinished"] is True
