"""The entry points, and what a user sees: the console command, piped output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib

import pytest
from commandline import ROOT
from rich.console import Console

from specjax import accept, drafters, run
from specjax.bench import measuring, passes
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import catalog, command_line, process
from specjax.types import LM, ModelParams


def test_the_console_command_and_the_packaged_configurations():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["specjax"].partition(":")
    assert getattr(sys.modules[module], name) is command_line.command
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "specjax/_packaged/configs"}
    assert catalog.configs_dir() == ROOT / "configs"


@pytest.mark.parametrize("name", ["bench", "configs/bench.py", "bench.py", "configs/bench"])
def test_a_configuration_of_the_package_is_found_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert command_line.find(name) == ROOT / "configs" / "bench.py"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "bench.py").write_text("")
    own = command_line.find("configs/bench.py")
    assert own.resolve() == tmp_path / "configs" / "bench.py"  # a user's own file comes first


def test_settings_without_a_configuration(capsys):
    assert run.main(["specjax", "--config.target=x", "--workdir", "y"]) == 2
    err = capsys.readouterr().err
    assert "no configuration; give --config=configs/<name>.py" in err and err.count("\n") == 1
    assert run.main(["specjax", "--config=benhc"]) == 2
    assert "no configuration file benhc; did you mean bench?" in capsys.readouterr().err


def test_hints_name_the_nested_key(capsys):
    config = f"--config={ROOT}/configs/pretrain.py"
    for argument, hint in (
        ("--config.steps=1", "'steps' in config.steps; did you mean config.train.steps?"),
        ("--config.train.stepz=1", "did you mean steps?"),
        ("--config.learning_rate=1", "did you mean config.optimiser.learning_rate?"),
        ("--config.qqqq=1", "--help with --config=FILE lists the keys"),
    ):
        assert run.main(["specjax", config, argument]) == 2
        err = capsys.readouterr().err
        assert hint in err and err.count("\n") == 1


TRACE = {
    "prompt": "a",
    "rounds": [{"out": [["b", 0, 0], ["c", 0, 1]], "draft": [["b", -1, True], ["x", 0, False]]}],
}


def test_rejected_tokens_are_not_printed_as_text(monkeypatch):
    monkeypatch.setattr(terminal.inputs, "rejected_nodes", lambda one: [["x"]])
    assert terminal.trace(TRACE).plain == "abxc"
    assert terminal.trace(TRACE, rejected=False).plain == "abc"
    assert "rejected" not in terminal.legend(rejected=False).plain.replace("a rejection", "")
    assert not terminal.has_colours(Console(file=io.StringIO()))
    assert terminal.has_colours(
        Console(file=io.StringIO(), force_terminal=True, no_color=False, color_system="standard")
    )


def test_an_error_of_the_system_is_one_line(cli, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr(command_line, "run", full)
    status, _, err, _ = cli(f"--config={ROOT}/configs/generate.py")
    assert status == 2
    assert err == "specjax: file: No space left on device; look after the disk, and run again\n"


def test_two_methods_of_one_name_are_refused():
    drafter = drafters.make("none", LM(None, None, None, 5))
    method = passes.Method("same", drafter, accept.load("chain"), ModelParams({}))
    with pytest.raises(UserError, match="two methods are called 'same'"):
        measuring.measure(None, [method, method])


@pytest.mark.slow
def test_a_wheel_runs_without_a_checkout(tmp_path):
    pytest.importorskip("hatchling")
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wheel = tmp_path / done.stdout.split()[-1]
    environment = {**os.environ, "PYTHONPATH": str(wheel.with_suffix(""))}
    subprocess.run(
        [sys.executable, "-m", "zipfile", "-e", str(wheel), str(wheel.with_suffix(""))], check=True
    )
    listed = subprocess.run(
        [sys.executable, "-m", "specjax.run", "--config=quickstart", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_packaged/configs/quickstart.py" in listed.stdout.replace("\n", "")
    assert "config.stages.target.train.steps" in listed.stdout


@pytest.mark.fast
@pytest.mark.parametrize(
    ("version", "chosen", "keeps"),
    [
        ("0.12.0", None, True),
        ("0.13.1", None, True),
        ("0.10.2", None, False),
        ("0.12.0", "x", False),
    ],
)
def test_compiled_programs_are_kept(monkeypatch, tmp_path, version, chosen, keeps):
    """In the user's cache folder; not with a jaxlib that crashes, nor in place of a user's."""
    set_to = {}
    monkeypatch.setattr(process.jaxlib, "__version__", version)
    monkeypatch.setattr(process.jax.config, "update", set_to.__setitem__)
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", chosen)
    process.keep_programs()
    folders = list(map(str, tmp_path.glob(f"specjax/programs-{version}-*")))
    assert folders == list(set_to.values()) and len(folders) == keeps


@pytest.mark.fast
def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "specjax").write_text("a file")
    monkeypatch.setattr(process.jaxlib, "__version__", "0.12.0")
    monkeypatch.setattr(process.jax.config, "update", None)
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    process.keep_programs()
