"""Shared by all tests: fast compilation, the data folder, and small models."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

# The tests mostly compile, and none of them measures speed. A persistent compilation cache is not
# used: writing to it has crashed jaxlib 0.10.2 on the CPU.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Fewer kernels, one LLVM module per program, and no threads inside an operation, because each
# worker has about one core. Later versions of jaxlib reject the first of these flags.
OLDEST = version("jaxlib").startswith("0.10.")
if OLDEST:
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    FLAGS += " --xla_cpu_multi_thread_eigen=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # nor by the processes of tests
# No test reads which line of Python made an operation: programs without it are built in less time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# What the user of this machine has kept (``sj.tune``) changes no test.
os.environ["SPECJAX_CACHE"] = tempfile.mkdtemp(prefix="specjax-tests-")
# Traces make many objects that live long: to collect all of them takes seconds and frees little.
gc.set_threshold(100_000, 10, 30)

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
FIRST_TIER = "not slow and not second and not notebooks and not browser"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data; tests that need it are skipped where it is not there."""
    root = os.environ.get("SPECJAX_TEST_DATA", "")
    if not root or not Path(root).is_dir():
        pytest.skip("SPECJAX_TEST_DATA does not name the data folder")
    return Path(root)


@pytest.fixture
def quiet(monkeypatch):
    """A machine without other processes for the studies, which refuse a busy one."""
    from experiments import common

    monkeypatch.setattr(common, "_other_processes", lambda: 0.0)
    monkeypatch.setattr(common, "SAMPLE", 0.0)


@pytest.fixture(scope="session")
def stories(data_dir):
    """stories260K: a real trained Llama."""
    from specjax.models import hf

    return hf.load(data_dir / "models" / "stories260K")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The directory of a random tiny model with a tokenizer."""
    import commandline  # only here: the environment above must be set before jax is imported

    return commandline.save(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Another one with the same tokenizer."""
    import commandline

    return commandline.save(tmp_path_factory.mktemp("models") / "draft", seed=1)


@pytest.fixture
def cli(tmp_path, capsys):
    """Runs the command line in this process: (exit status, stdout, stderr, workdir)."""

    from specjax import run

    def call(*args, workdir=None):
        workdir = workdir or tmp_path / "out"
        status = run.main(["specjax", *args, f"--workdir={workdir}"])
        out, err = capsys.readouterr()
        return status, out, err, Path(workdir)

    return call


def second_tier() -> set[str]:
    """The tests of second_tier.txt, "file::test" with or without a case in brackets."""
    names, file = set(), ""
    for line in (Path(__file__).parent / "second_tier.txt").read_text().splitlines():
        if line.startswith(" "):
            names.add(f"{file}::{line.strip()}")
        elif not line.startswith("#"):
            file = line
    return names


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the second tier, and keeps a file on one worker, because its tests share programs."""
    second = second_tier()
    for item in items:
        named = {item.nodeid, item.nodeid.split("[")[0]} & second
        if named and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.second)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


class Programs:
    """Counts the programs that the first tier compiles, which is most of its time.

    A run of the whole tier fails above the number that CONTRIBUTING.md states. The number does not
    depend on the speed of the machine; it varies a little with the files that a worker gets.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, most: int | None):
        self.most, self.count = most, 0
        import jax.monitoring  # only here, as above

        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_) -> None:
        self.count += event == self.EVENT

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["programs"] = self.count
        elif self.most is not None and self.count > self.most and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_testnodedown(self, node):
        self.count += getattr(node, "workeroutput", {}).get("programs", 0)

    def pytest_terminal_summary(self, terminalreporter):
        line = f"{self.count:,} programs compiled"
        if self.most is not None and self.count > self.most:
            line += (
                f", at most {self.most:,}: move a test to tests/second_tier.txt, or share a shape"
            )
        terminalreporter.write_line(line)


def pytest_configure(config):
    everything = config.args == config.getini("testpaths") and not config.option.keyword
    default = config.option.markexpr == FIRST_TIER and everything
    text = " ".join(CONTRIBUTING.read_text().split())
    stated = re.search(r"compiles at most ([0-9,]+) programs", text)
    most = int(stated[1].replace(",", "")) if stated and default and OLDEST else None
    config.pluginmanager.register(Programs(most), "programs")


MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def _many_memory_maps() -> bool:
    """Whether half of the memory maps that Linux allows a process is in use."""
    if not (MAPS.is_file() and MOST_MAPS.is_file()):
        return True
    with MAPS.open("rb") as file:
        return sum(1 for _ in file) > int(MOST_MAPS.read_text()) // 2


@pytest.fixture(scope="module", autouse=True)
def drop_programs():
    """Drops the compiled programs before they use up the memory maps: XLA would crash then."""
    yield
    if _many_memory_maps():
        import jax

        jax.clear_caches()
