"""The install cell of the notebooks: what it installs, and specjax beside the pins of Colab."""

from __future__ import annotations

import csv
import fnmatch
import glob
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy
import pytest

import specjax

ROOT = Path(__file__).parent.parent
BOOK = json.loads((ROOT / "colab" / "quickstart.ipynb").read_text(encoding="utf-8"))
CELL = "".join(next(each for each in BOOK["cells"] if each["cell_type"] == "code")["source"])
JAX = importlib.metadata.version("jax")
CUDA12, CUDA13 = "jax-cuda12-plugin", "jax-cuda13-plugin"


@pytest.fixture
def execute(monkeypatch):
    """Executes the cell in this process, and runs no command.

    Returns the cell's names, and the list of the commands; later commands are added to it.
    """

    def execute(driver="", plugins=None, files=(), environment=None):
        commands, version = [], importlib.metadata.version
        plugins = plugins or {}

        def run(command, **keys):
            if command[0] != "nvidia-smi":
                commands.append(command)
            return SimpleNamespace(stdout=driver, returncode=0)

        def fake_version(name):
            if name in (CUDA12, CUDA13):
                if name not in plugins:
                    raise importlib.metadata.PackageNotFoundError(name)
                return plugins[name]
            return version(name)

        for name in [name for name in os.environ if name.startswith(("COLAB_", "TPU_", "JAX_"))]:
            monkeypatch.delenv(name)
        for name, value in (environment or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(shutil, "which", lambda name: name if driver else None)
        monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(files, pattern))
        monkeypatch.setattr(importlib.metadata, "version", fake_version)
        names = {}
        exec(compile(CELL, "cell", "exec"), names)
        return names, commands

    return execute


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", "-q", *arguments]


NEW, OLD = "580.65.06\n", "550.54.15\n"
TPU = {"TPU_ACCELERATOR_TYPE": "v5e-1"}
CHOICES = {
    "cuda12 of another version": ({"driver": NEW, "plugins": {CUDA12: "0.7.2"}}, "GPU", "cuda12"),
    "cuda13 of another version": ({"driver": NEW, "plugins": {CUDA13: "0.7.2"}}, "GPU", "cuda13"),
    "cuda12 of jax's version": ({"driver": NEW, "plugins": {CUDA12: JAX}}, "GPU", None),
    "cuda13 of jax's version": ({"driver": NEW, "plugins": {CUDA13: JAX}}, "GPU", None),
    "no plugin, driver 580": ({"driver": NEW}, "GPU", "cuda13"),
    "no plugin, driver 550": ({"driver": OLD}, "GPU", "cuda12"),
    "two GPUs": ({"driver": OLD + OLD}, "GPU", "cuda12"),
    "GPU and vfio": ({"driver": OLD, "files": ["/dev/vfio/0"]}, "GPU", "cuda12"),
    "no driver": ({"driver": "NVIDIA-SMI has failed\n"}, None, None),
    "a plugin and no GPU": ({"plugins": {CUDA12: "0.7.2"}}, None, None),
    "accel": ({"files": ["/dev/accel0"]}, "TPU", "tpu"),
    "vfio with a number": ({"files": ["/dev/vfio/vfio", "/dev/vfio/0"]}, "TPU", "tpu"),
    "vfio only": ({"files": ["/dev/vfio/vfio"]}, None, None),
    "TPU by its variable": ({"environment": TPU}, "TPU", "tpu"),
    "JAX_PLATFORMS=cpu": ({"environment": TPU | {"JAX_PLATFORMS": "cpu"}}, "TPU", None),
    "nothing": ({}, None, None),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", CHOICES)
def test_the_package_of_the_accelerator(execute, case):
    machine, device, extra = CHOICES[case]
    names, commands = execute(**machine)
    assert names["DEVICE"] == device
    assert commands == ([pip(f"jax[{extra}]=={JAX}")] if extra else [])
    assert names["BACKEND"] == jax.default_backend()


@pytest.mark.fast
@pytest.mark.parametrize("module", [numpy, jax])
def test_a_package_that_was_imported_too_early(execute, monkeypatch, module):
    monkeypatch.setattr(module, "__version__", "0.1")
    with pytest.raises(RuntimeError, match=rf"{module.__name__} was .*Runtime > Restart session"):
        execute()


@pytest.mark.fast
def test_sources(execute, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names, commands = execute()
    for wheel in ("folder/specjax-1.whl", "https://example.org/specjax-1.whl"):
        names["install"](wheel)
        assert commands.pop() == pip(wheel) and not commands
    with pytest.raises(RuntimeError, match="no folder 'drive/specjax'"):
        names["install"]("drive/specjax")
    Path("drive/specjax").mkdir(parents=True)
    names["install"]("drive/specjax")
    assert commands.pop() == pip("-e", "drive/specjax") and not commands
    assert sys.path[0] == str(tmp_path / "drive/specjax")
    Path("specjax-repository").mkdir()  # as a clone of an earlier run
    names["install"]("git@example.org:specjax")
    assert commands.pop() == pip("-e", "specjax-repository") and not commands
    Path("specjax-repository").rmdir()
    with pytest.raises(RuntimeError, match="no folder 'specjax-repository'"):  # not really cloned
        names["install"]("git+https://example.org/specjax")
    clone = ["git", "clone", "--depth=1", "https://example.org/specjax", "specjax-repository"]
    assert commands == [clone]


@pytest.mark.fast
def test_the_printed_line(execute, monkeypatch, capsys):
    names, _ = execute()
    monkeypatch.undo()  # commands run from here on
    multiply = names["multiply"]
    names["PRODUCT"] = "print('a note'); print('gpu'); print('2 x NVIDIA L4, specjax 1')"
    assert multiply("GPU") == "gpu"
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 x NVIDIA L4, specjax 1, jax {JAX}, jaxlib ")
    assert printed.count("\n") == 1
    names["PRODUCT"] = "import sys; print('cpu\\n1 x cpu'); print('no CUDA', file=sys.stderr)"
    assert multiply("GPU") == "cpu"
    second = "No accelerator is used. jax does not use the GPU of this machine. no CUDA"
    assert capsys.readouterr().out.splitlines()[1] == second
    assert multiply(None) == "cpu"
    assert capsys.readouterr().out.splitlines()[1] == "No accelerator is used."
    names["PRODUCT"] = "raise ValueError('no memory')"
    with pytest.raises(RuntimeError, match=r"ValueError: no memory\n.*Runtime > Restart session"):
        multiply(None)


# Colab's images --------------------------------------------------------------------------------


def python_of_colab() -> str:
    """The interpreter of Colab's version, from PATH or from pyenv. Skips the test without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    paths = [shutil.which("python3.12"), *sorted(pyenv.glob("versions/3.12*/bin/python3.12"))]
    for path in filter(None, paths):
        # A command of pyenv exists also where pyenv has not chosen that version.
        if subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return str(path)
    pytest.skip("there is no python3.12")


def pins(runtime: str) -> list[str]:
    lines = (ROOT / "tests" / "colab_pins.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    pins = [f"{row['package']}=={row[runtime]}" for row in rows if row[runtime]]
    # The image for GPUs has the same TensorFlow (600 MB) and protobuf as that for CPUs.
    return [pin for pin in pins if runtime != "gpu" or not pin.startswith("tensorflow==")]


# Prints the requirements of these packages, and of those that they need, which are not met.
UNMET = """
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement

todo, seen = [Requirement(text) for text in sys.argv[1:]], set()
while todo:
    this = todo.pop()
    if str(this) in seen:
        continue
    seen.add(str(this))
    try:
        found = version(this.name)
    except PackageNotFoundError:
        print(this, "is not installed")
        continue
    if not this.specifier.contains(found, prereleases=True):
        print(this, "but there is", found)
    for text in requires(this.name) or ():
        each = Requirement(text)
        extras = ("", *this.extras)
        if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras):
            todo.append(each)
assert len(seen) > 50, seen
"""

# The command line, a decode, a configuration, and the embedded corpus, which TFDS builds: it
# imports TensorFlow and protobuf of the image.
USE = """
import jax
import specjax as sj
from specjax import accept, drafters, run, testing
from specjax.data import corpora

config, _ = run.parse(["specjax.run", "--config=configs/quickstart.py:train"])
target = testing.tabular(8)
drafter = drafters.make("prompt_lookup", target)
params = sj.ModelParams(testing.random_table(0, 8), drafter.init_params(jax.random.key(0)))
prompt, lengths = sj.pack_prompts([[5, 1, 2, 5, 3, 1]])
keys = {"max_len": 14, "limit": lengths + 8, "sampling": sj.make_sampling(1)}
state = sj.prefill(target, drafter, params, prompt, lengths, sj.row_keys(0, 1), **keys)
state, _ = sj.generate(target, drafter, accept.load("chain"), params, state, max_steps=8)
sj.check(state)
[tokens] = sj.outputs(state, lengths)
print(len(tokens), len(corpora.load_texts("corpus", "test")) > 10)
"""


# Each image takes two to four minutes, and the one for GPUs 6 GB of disk.
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["cpu", "gpu", "tpu"])
def test_the_cell_in_the_images_of_colab(tmp_path, runtime):
    """On a fresh image, with a wheel for the CPU and with the folder of the repository elsewhere.

    The image for GPUs takes 6 GB of disk, most of it the CUDA libraries that jax demands.
    """
    if (free := shutil.disk_usage(tmp_path).free) < 10e9:
        pytest.skip(f"there are {free / 1e9:.0f} GB of free disk, and 10 are needed")
    work, image, bin = tmp_path / "work", tmp_path / "image", tmp_path / "bin"
    work.mkdir()
    bin.mkdir()
    hidden = ("PYTHON", "JAX_", "XLA_", "TPU_", "COLAB_", "VIRTUAL_ENV", "SPECJAX_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    # "0" means --no-compile, which saves time.
    environment |= {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "PIP_NO_COMPILE": "0"}
    python = str(image / "bin" / "python")

    def run(*command: str, check: bool = True) -> subprocess.CompletedProcess:
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
        assert not (check and done.returncode), done.stdout + done.stderr
        return done

    def version(package: str) -> str:
        code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        return run(python, "-c", code, package, check=False).stdout.strip()

    try:
        run(python_of_colab(), "-m", "venv", str(image))
        install = (python, "-m", "pip", "install", "-q", "--no-deps")
        if (done := run(*install, *pins(runtime), check=False)).returncode:
            pytest.skip(f"pip cannot install the pins: {done.stderr.strip().splitlines()[-1:]}")
        source = str(ROOT)
        if runtime == "cpu":
            run(python, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={bin}", source)
            [source] = map(str, bin.glob("specjax-*.whl"))
        elif runtime == "gpu":
            (bin / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\n")
            (bin / "nvidia-smi").chmod(0o755)
        else:
            environment |= TPU
        environment["SPECJAX_SOURCE"] = source
        printed = run(python, "-c", CELL).stdout
        print(printed)

        jax_version = version("jax")
        plugins = {name: version(name) for name in (CUDA12, CUDA13, "jax-cuda12-pjrt", "libtpu")}
        extra, expected = {
            "cpu": ("", {}),
            "gpu": ("[cuda12]", {CUDA12: jax_version, "jax-cuda12-pjrt": jax_version}),
            "tpu": ("[tpu]", {"libtpu": plugins["libtpu"]}),
        }[runtime]
        assert {name: found for name, found in plugins.items() if found} == expected
        assert run(python, "-c", UNMET, "specjax", f"jax{extra}").stdout == ""
        line = rf"\d+ x (.+), specjax {specjax.__version__}, jax {jax_version}, jaxlib [\d.]+"
        for name in [name for name in (CUDA12, "libtpu") if name in expected]:
            line += f", {name} {plugins[name]}"
        [device] = re.findall(rf"(?m)^{line}$", printed)
        assert (device == "cpu") == ("No accelerator is used." in printed)
        environment["JAX_PLATFORMS"] = "cpu"
        used = run(python, "-c", USE).stdout
        assert used.splitlines()[-1] == "8 True"
    finally:
        shutil.rmtree(tmp_path)
