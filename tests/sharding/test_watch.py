"""Processes that watch each other: how they meet, finish and fail, without any computation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import importlib.util, types
# Only the file itself: importing the package takes seconds.
package = types.ModuleType("specjax")
package.__path__ = [sys.argv[1] + "/specjax"]
sys.modules["specjax"] = package
spec = importlib.util.spec_from_file_location("watch", sys.argv[1] + "/specjax/sharding/watch.py")
watch = importlib.util.module_from_spec(spec)
sys.modules["watch"] = watch
spec.loader.exec_module(watch)
from specjax.errors import UserError

port, processes, process, how = *map(int, sys.argv[2:5]), sys.argv[5]
try:
    watch.start("127.0.0.1", port, processes, process, 10)
except UserError as error:
    print(error)
    sys.exit(3)
if how == "fail":
    time.sleep(0.5)
    print("my own error")
    watch.fail(4)
elif how == "exit":
    time.sleep(0.5)
    watch.os._exit(5)
elif how == "sleep":
    time.sleep(60)
else:
    watch.finish()
    print("finished")
"""
ROOT = Path(__file__).parents[2]


def run(
    how: list[str], numbers: list[int] | None = None, total: int = 0
) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each process."""
    port = free_port()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                SCRIPT,
                *map(str, (ROOT, port, total or len(how), number, each)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, each in zip(numbers or range(len(how)), how, strict=True)
    ]
    try:
        printed = [each.communicate(timeout=30) for each in started]
    finally:
        for each in started:
            each.kill()
    return [
        (each.returncode, *(part.strip() for part in parts))
        for each, parts in zip(started, printed, strict=True)
    ]


@pytest.mark.parametrize("_", range(3))  # the order in which they end differs
def test_all_finish(_):
    assert [status for status, _, _ in run(["finish"] * 3)] == [0, 0, 0]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("how", "status"), [("fail", 4), ("exit", 5)])
@pytest.mark.parametrize("others", ["sleep", "finish"])
def test_one_that_fails_ends_the_others(bad, how, status, others):
    """Also those that have finished, while the bad one still writes."""
    done = run([how if number == bad else others for number in range(3)])
    for number, (code, printed, error) in enumerate(done):
        if number == bad:
            assert code == status and not error
        else:
            assert code == 2 and "finished" not in printed
            assert "has ended before its work was done" in error and "\n" not in error


def test_numbers_that_do_not_fit():
    done = run(["finish"] * 3, [0, 1, 1], total=3)
    assert [status for status, _, _ in done] == [3, 3, 3]
    assert all("process 1 was started twice" in printed for _, printed, _ in done)
