"""The compiled programs of a bench: made when needed, released where memory maps run out.

On a CPU every compiled program adds hundreds of memory maps to the process, and Linux allows 65,530
of them by default. A grid of many methods needs more; the compiler then ends the process.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import jax

from specjax.bench import measuring
from specjax.bench.measuring import Report
from specjax.bench.passes import Job, Method

MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
SHARE = 0.9  # of the allowed maps that may be used


def maps() -> int:
    """The memory maps of this process; 0 where that is not known."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def most_maps() -> float:
    """How many maps may be used."""
    return SHARE * int(MOST_MAPS.read_text()) if MOST_MAPS.exists() else float("inf")


class Programs:
    """The programs of some methods, for jobs of any shape."""

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods
        self._shapes: set[tuple[int, int]] = set()
        self._before = maps()  # when the programs of the newest shape were not compiled
        self._largest = 0  # maps that one shape added, with what was compiled to check its rows
        # Seconds to trace and compile the loop and the prefill of each method (None: plain).
        self.seconds: dict[str | None, float] = {}

    def warm(self, job: Job, report: Report = lambda _: None) -> None:
        """Compiles what ``measuring.measure`` runs for this job, unless it is there already.

        ``report`` is called with a status message.
        """
        shape = job.batch_size, job.width
        if shape in self._shapes:
            return
        now = maps()
        self._largest = max(self._largest, now - self._before)
        if now + self._largest > most_maps():
            self._release()
            now = maps()
        self._before = now
        for name, seconds in measuring.warm([job], self._methods, report).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._shapes.add(shape)

    def _release(self) -> None:
        """Forgets all compiled programs."""
        jax.clear_caches()
        gc.collect()
        self._shapes.clear()
