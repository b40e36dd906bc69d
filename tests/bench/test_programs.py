"""Programs are compiled when a job needs them, and released where memory maps run out."""

from __future__ import annotations

import functools
import time

import pytest

from specjax.bench import measuring
from specjax.bench.passes import Job
from specjax.run import cells


def job(batch, width):
    return Job(None, None, [[0] * width], {}, batch, 4, (), 0, 1)  # pyright: ignore


def test_released_before_the_limit(monkeypatch):
    """Each shape adds 400 maps; 1000 are allowed, so a third shape needs a release."""
    used, log = [100], []

    def warm(jobs, methods, report):
        log.append(jobs[0].batch_size)
        used[0] += 400
        return {"one": 1.5, None: 0.5}

    monkeypatch.setattr(measuring, "warm", warm)
    monkeypatch.setattr(measuring, "maps", lambda: used[0])
    monkeypatch.setattr(measuring, "most_maps", lambda: 1000)
    monkeypatch.setattr(measuring.jax, "clear_caches", lambda: used.__setitem__(0, 100))
    made = measuring.Programs([])
    for size in (1, 1, 8, 1, 8):
        made.warm(job(size, 3))
    assert log == [1, 8] and used == [900]
    made.warm(job(4, 3))
    made.warm(job(1, 3))
    made.warm(job(4, 3))
    assert log[2:] == [4, 1] and used == [900]
    assert made.seconds == {"one": 6.0, None: 2.0}


def test_other_lengths_of_outputs_are_other_programs(monkeypatch):
    log = []
    monkeypatch.setattr(
        measuring, "warm", lambda jobs, *_: log.append(jobs[0].max_new_tokens) or {}
    )
    made = measuring.Programs([])
    for most in (4, 8, 4):
        made.warm(job(1, 3)._replace(max_new_tokens=most))
    assert log == [4, 8]


def test_this_process_has_maps():
    assert 0 <= measuring.maps() < measuring.most_maps()


def test_cells_of_one_shape_follow_each_other():
    shapes = [(1, 3), (8, 3), (1, 3), (8, 3), (1, 5)]
    grid = [cells.Cell(job(*shape), None, [], "", True) for shape in shapes]  # pyright: ignore
    assert cells._by_shape(grid) == [0, 2, 1, 3, 4]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_has_not_begun_is_dropped(monkeypatch, error):
    """With one thread: the second task may have begun when the first one fails."""
    monkeypatch.setattr(measuring.os, "cpu_count", lambda: 1)
    begun, told = [], []

    def run(number):
        begun.append(number)
        time.sleep(0.2)
        if number == 0:
            raise error

    tasks = [(f"task {n}", functools.partial(run, n)) for n in range(6)]
    with pytest.raises(error):
        measuring.together(tasks, "compiling", told.append)
    time.sleep(0.5)
    assert begun in ([0], [0, 1])
    assert told[0] == "compiling, 1 of 6: task 0"


def test_freed_memory_goes_back_after_each_task(monkeypatch):
    measuring._trim()  # on this system it runs
    trims = []
    monkeypatch.setattr(measuring, "_trim", lambda: trims.append(1))
    measuring.together([("", int)] * 3, "compiling")
    assert len(trims) == 3
