"""Several processes on the loopback address: the text of one process, and what ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commandline import BENCH, GENERATE
from ports import free_port

from specjax import sharding

ROOT = Path(__file__).parents[2]
WORDS = "w1 w2 w3\nw4\nw5 w6 w1 w2\nw7 w1\nw3 w3 w3\n"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(WORDS)
    return path


def slurm_step(job: str, process: int, processes: int) -> dict[str, str]:
    """The variables of a process that SLURM has started; {} without a job."""
    values = {"JOB_ID": job, "STEP_NODELIST": "localhost", "STEP_NUM_NODES": 1}
    values |= {"NTASKS": processes, "PROCID": process, "LOCALID": process}
    return {f"SLURM_{key}": str(value) for key, value in values.items()} if job else {}


class Runs:
    """The same command in several processes, each with fake devices.

    ``slurm`` is the number of a job in which they run; "": they get a coordinator.
    """

    def __init__(
        self,
        folder: Path,
        devices: int,
        keys: list[list[str]],
        where: Sequence[Path | None] = (),
        slurm: str = "",
    ):
        flags = os.environ.get("XLA_FLAGS", "")
        flags += f" --xla_force_host_platform_device_count={devices}"
        environment = {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        several = []
        if slurm:
            several = ["--distributed"]
        elif len(keys) > 1:
            several = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={len(keys)}"]
        self.errors = [folder / f"{number}.err" for number in range(len(keys))]
        self.outputs = [folder / f"{number}.out" for number in range(len(keys))]
        self.started = [
            subprocess.Popen(
                [sys.executable, "-m", "specjax.run", *own]
                + several
                + [f"--process={number}"] * bool(several and not slurm),
                env=os.environ | environment | slurm_step(slurm, number, len(keys)),
                cwd=where[number] if where else None,
                stdout=self.outputs[number].open("w"),
                stderr=self.errors[number].open("w"),
            )
            for number, own in enumerate(keys)
        ]

    def wait(self, seconds: float = 120) -> list[int]:
        """The exit statuses. All processes are killed after so many seconds."""
        end = time.monotonic() + seconds
        try:
            for each in self.started:
                each.wait(max(0.1, end - time.monotonic()))
        finally:
            for each in self.started:
                each.kill()
        return [each.returncode for each in self.started]

    def printed(self, number: int) -> str:
        """What a process printed, without the lines of JAX's communication library."""
        lines = re.sub(r"\[Gloo\][^:\n]*(: \d+)?", "", self.outputs[number].read_text())
        return lines.strip()

    def error(self, number: int) -> str:
        """What a process wrote to stderr; lines of JAX's communication library may be in it."""
        return self.errors[number].read_text()


def generate(target, prompts, folder: Path, mesh: str, **keys) -> list[str]:
    """The arguments of mode generate."""
    settings = {
        "target": target,
        "prompts": prompts,
        "batch_size": 4,
        "max_new_tokens": 12,
        "sampling.temperature": 0.8,
        "mesh": mesh,
        "record": folder / "record.jsonl",
    } | keys
    return [
        GENERATE,
        f"--workdir={folder}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]


def texts(tmp_path, target, prompts, processes: int, devices: int, mesh: str) -> str:
    logs, folder = tmp_path / f"logs {processes}-{mesh}", tmp_path / f"{processes}-{mesh}"
    logs.mkdir()  # the processes make the workdir
    keys = generate(target, prompts, folder, mesh, record=tmp_path / f"{mesh}.jsonl")
    runs = Runs(logs, devices, [keys] * processes)
    assert runs.wait() == [0] * processes, runs.errors[0].read_text()
    assert "5 prompts" in runs.printed(0)
    assert [runs.printed(number) for number in range(1, processes)] == [""] * (processes - 1)
    assert (folder / "results.json").is_file()
    return (tmp_path / f"{mesh}.jsonl").read_text()


@pytest.mark.parametrize(
    ("processes", "devices", "mesh"),
    [
        (2, 1, "data:2"),
        pytest.param(2, 2, "data:4", marks=pytest.mark.slow),
        pytest.param(4, 1, "data:2,tensor:2", marks=pytest.mark.slow),  # matrices across processes
        pytest.param(4, 2, "data:4,tensor:2", marks=pytest.mark.slow),
        pytest.param(2, 1, "tensor:2", marks=pytest.mark.slow),
    ],
)
def test_processes_write_the_text_of_one(tmp_path, target, prompts, processes, devices, mesh):
    alone = texts(tmp_path, target, prompts, 1, 1, "")
    assert texts(tmp_path, target, prompts, processes, devices, mesh) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "slurm"), [(0, ""), (1, ""), (2, ""), (0, "4061"), (2, "4062")])
def test_the_death_of_one_ends_the_others(tmp_path, target, prompts, victim, slurm):
    keys = generate(target, prompts, tmp_path, "data:-1", batch_size=3, max_new_tokens=100)
    runs = Runs(tmp_path, 1, [keys] * 3, slurm=slurm)
    while not all("Gloo" in output.read_text() for output in runs.outputs):  # they are connected
        assert all(each.poll() is None for each in runs.started)
        time.sleep(0.1)
    runs.started[victim].send_signal(signal.SIGKILL)
    began = time.monotonic()
    statuses = runs.wait(30)
    assert time.monotonic() - began < 10
    for number, status in enumerate(statuses):
        if number == victim:
            assert status == -signal.SIGKILL
        elif victim == 0 and status == -signal.SIGABRT:  # JAX noticed it outside of an exchange
            assert "another task died" in runs.error(number)
        else:
            assert status == 2
            line = "has ended before its work was done; the same commands resume the run"
            assert line in runs.error(number)
    assert not (tmp_path / "record.jsonl").exists() and not (tmp_path / "results.json").exists()


@pytest.mark.slow
def test_processes_of_a_slurm_job(tmp_path, target, prompts):
    """JAX finds the numbers and the coordinator; no flag but --distributed is given."""
    alone = texts(tmp_path, target, prompts, 1, 1, "")
    keys = generate(target, prompts, tmp_path, "data:2", batch_size=4)
    runs = Runs(tmp_path, 1, [keys] * 2, slurm="4060")
    assert runs.wait() == [0, 0], runs.error(0)
    assert (tmp_path / "record.jsonl").read_text() == alone
    assert not runs.printed(1)


@pytest.mark.slow
def test_other_prompts_in_one_process(tmp_path, target, prompts):
    first, second = tmp_path / "1", tmp_path / "2"
    for folder, text in ((first, WORDS), (second, WORDS.replace("w4", "w2"))):
        folder.mkdir()
        (folder / "prompts.txt").write_text(text)
    keys = generate(target, "prompts.txt", tmp_path / "out", "data:2", batch_size=2)
    runs = Runs(tmp_path, 1, [keys, keys], [first, second])
    assert runs.wait() == [2, 2]
    assert "the text of the prompts of process 1 is not that of process 0" in runs.error(0)


@pytest.mark.slow
def test_another_configuration_or_a_mistake_in_one_process(tmp_path, target, prompts):
    keys = generate(target, prompts, tmp_path, "data:2", batch_size=2)
    runs = Runs(tmp_path, 1, [keys, [*keys, "--config.seed=1"]])
    assert runs.wait() == [2, 2]
    assert "of process 1 is not that of process 0: seed is 1 there and 0" in runs.error(0)
    missing = [each.replace(str(prompts), str(tmp_path / "none.txt")) for each in keys]
    runs = Runs(tmp_path, 1, [missing, missing])
    assert runs.wait() == [2, 2]
    assert any("none.txt" in runs.error(number) for number in (0, 1))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--process=1", "--processes=2"], "without a coordinator"),
        (["--distributed", "--coordinator=a:1"], "give one of the two"),
        (["--coordinator=a:1", "--config.mesh="], "give config.mesh, such as data:-1"),
        (["--coordinator=nowhere"], "it must be host:port"),
    ],
)
def test_wrong_flags(cli, target, keys, message):
    status, _, error, _ = cli(GENERATE, f"--config.target={target}", "--config.mesh=data:-1", *keys)
    assert status == 2 and message in error


def test_flags_of_a_file_count(cli, target, tmp_path):
    path = tmp_path / "flags"
    path.write_text("--coordinator=nowhere\n")
    status, _, error, _ = cli(
        GENERATE, f"--config.target={target}", "--config.mesh=data:-1", f"--flagfile={path}"
    )
    assert status == 2 and "it must be host:port" in error


def test_a_chat_takes_one_process(cli, target):
    status, _, error, _ = cli(
        f"--config={ROOT}/configs/chat.py", f"--config.target={target}", "--coordinator=127.0.0.1:9"
    )
    assert status == 2 and "mode chat runs in one process" in error


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (GENERATE, "data:2", "needs 2 devices, and there are 1"),
        (GENERATE, "rows:1", "with the axes data, fsdp, tensor"),
        (BENCH, "tensor:64", "needs 64 devices"),
    ],
)
def test_wrong_meshes_of_a_run(cli, target, config, mesh, message):
    status, _, error, workdir = cli(
        config, f"--config.target={target}", "--config.prompt=def", f"--config.mesh={mesh}"
    )
    assert status == 2 and message in error and not workdir.exists()


CONFIG = """
from configs import bench


def get_config():
    config = bench.get_config()
    config.grid.methods = {
        "lookup": {"name": "prompt_lookup", "gamma": 3},
        "warm": {"name": "token_recycling", "warm": True},
        "model": {"name": "draft_model", "model": "DRAFT", "gamma": 2},
        "goodput": {"name": "prompt_lookup", "gamma": 3, "control": "goodput"},
    }
    config.warm_prompts = 2
    config.num_prompts = 4
    config.repeats = 1
    config.trace_prompts = 1
    return config
"""


# A mesh, and the number of processes that have its devices.
MESHES = (("", 1), ("data:2,tensor:2", 1), ("data:4", 2), ("data:2,tensor:2", 2))


@pytest.mark.slow
def test_a_bench_on_a_mesh_has_the_counts_of_one_device(tmp_path, target, draft, prompts):
    prompts.write_text(WORDS + "w9 w1\nw2\n")
    (tmp_path / "configs").mkdir()
    config = tmp_path / "configs" / "own.py"
    config.write_text(CONFIG.replace("DRAFT", draft))
    results = {}
    for mesh, processes in MESHES:
        folder = tmp_path / f"{len(results)}"
        folder.mkdir()
        keys = generate(target, prompts, folder, mesh)[1:]
        keys = [key for key in keys if not key.startswith("--config.record")]
        runs = Runs(folder, 4 // processes, [[f"--config={config}", *keys]] * processes)
        assert runs.wait(360) == [0] * processes, runs.errors[0].read_text()
        assert not any(runs.printed(number) for number in range(1, processes))
        rows = json.loads((folder / "results.json").read_text())["rows"]
        results[mesh, processes] = [
            (row["method"], row["tokens"])
            # The rounds of "goodput" depend on times.
            + ((row["rounds"], row["acceptance_by_depth"]) * (row["method"] != "goodput"))
            for row in rows
        ]
        assert (folder / "trace.jsonl").is_file()
    assert len(results["", 1]) >= 3
    assert all(each == results["", 1] for each in results.values())


@pytest.mark.slow
def test_a_bench_needs_a_process_with_a_whole_part(tmp_path, target, prompts):
    keys = [BENCH, *generate(target, prompts, tmp_path / "out", "tensor:2")[1:-1]]
    runs = Runs(tmp_path, 1, [keys] * 2)
    assert runs.wait(240) == [2, 2]
    line = "take sizes of fsdp and tensor whose product is at most 1, the devices of a process"
    assert all(line in runs.error(number) for number in (0, 1))
    assert not (tmp_path / "out" / "results.json").exists()


def test_training_needs_one_workdir_for_all(tmp_path, target):
    """As on the hosts of a pod, each with a disk of its own: one line, at once."""
    words = tmp_path / "words.txt"
    words.write_text(WORDS * 50)
    train = [f"--config={ROOT}/configs/medusa.py", f"--config.target={target}"]
    train += [f"--config.data.files={words}", "--config.mesh=data:2", "--config.train.steps=2"]
    runs = Runs(tmp_path, 1, [[*train, f"--workdir={tmp_path}/own {n}"] for n in range(2)])
    assert runs.wait() == [2, 2]
    line = "process 1 does not see what process 0 writes into"
    assert all(line in runs.error(number) for number in (0, 1))
    assert not list(tmp_path.rglob("own*/*"))


@pytest.mark.slow
def test_sigterm_ends_a_process_that_is_connected(tmp_path, target, prompts):
    """JAX takes the signal when it connects, and only notes it."""
    keys = generate(target, prompts, tmp_path, "data:-1", batch_size=2, max_new_tokens=100)
    runs = Runs(tmp_path, 1, [keys] * 2)
    while not all("Gloo" in output.read_text() for output in runs.outputs):
        assert all(each.poll() is None for each in runs.started)
        time.sleep(0.1)
    runs.started[0].send_signal(signal.SIGTERM)
    assert runs.wait(30) == [143, 2] and "interrupted" in runs.error(0)


def test_a_signal_is_kept_and_then_given_to_the_handler_of_before(monkeypatch, capfd):
    """Which here returns: then the process is left all the same."""
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as error, sharding.Preemption() as preemption:
            assert not preemption.reached()
            signal.raise_signal(signal.SIGTERM)
            assert preemption.reached() and not got
            assert "the run is saved after the next step" in capfd.readouterr().err
            preemption.end()
        assert error.value.code == 143 and got == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
        # A second signal does not wait for a step; one after the last step is not lost.
        with pytest.raises(SystemExit), sharding.Preemption():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit), sharding.Preemption():
            signal.raise_signal(signal.SIGTERM)
        assert len(got) == 3
        # An error says more than the signal.
        with pytest.raises(ValueError, match="other"), sharding.Preemption():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("other")
        # The terminal is gone.
        with pytest.raises(SystemExit), sharding.Preemption(), monkeypatch.context() as closed:
            closed.setattr("sys.stderr", None)
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with sharding.Preemption() as preemption:
            signal.raise_signal(signal.SIGTERM)
            assert not preemption.reached()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, mine)
        with ThreadPoolExecutor(1) as other:  # only the main thread handles signals
            other.submit(sharding.Preemption().__enter__).result()
        assert signal.getsignal(signal.SIGTERM) is mine
        # A handler that is not Python's: Python cannot put it back.
        monkeypatch.setattr(signal, "getsignal", lambda number: None)
        with sharding.Preemption() as preemption:
            assert preemption._before == signal.SIG_DFL
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_sigterm_in_training_saves_and_ends_with_143(tmp_path, target):
    """One host of two is warned; a second signal does not wait for the step."""
    words = tmp_path / "words.txt"
    words.write_text(WORDS * 400)
    train = [f"--config={ROOT}/configs/medusa.py", f"--config.target={target}"]
    train += [f"--config.data.files={words}", "--config.mesh=data:2", "--config.examine.prompts=0"]
    train += ["--config.train.steps=100000", "--config.train.batch_size=4"]
    train += ["--config.train.length=16"]
    log = tmp_path / "run" / "metrics.jsonl"
    for signals in (1, 2):
        runs = Runs(tmp_path, 1, [[*train, f"--workdir={tmp_path}/run"]] * 2)
        before = log.read_text() if log.exists() else ""
        while not log.exists() or log.read_text() == before:
            assert all(each.poll() is None for each in runs.started)
            time.sleep(0.1)
        for _ in range(signals):
            runs.started[1].send_signal(signal.SIGTERM)
            time.sleep(0.2)
        if signals == 1:
            assert runs.wait(60) == [143, 143]
            assert "is saved; the same command goes on" in runs.error(0)
        else:
            assert runs.wait(60)[1] == 143
