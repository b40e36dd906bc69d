"""The memory that loading takes beside the parameters: measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import gguf_cases
import jax
import jax.numpy as jnp
import pytest
from commandline import ROOT
from marks import by_default

import specjax as sj
from specjax import decode
from specjax.errors import OutOfMemory
from specjax.models import hf, memory
from specjax.run import build

MOST = 1.3  # peak memory while loading, as a multiple of the parameters
DIRECTORY, FILE = "SPECJAX_TEST_CHAT_MODEL", "SPECJAX_TEST_CHAT_GGUF"  # of a real model
MEASURE = """
import contextlib, ctypes, sys
import jax, jax.numpy as jnp
with contextlib.suppress(ImportError):
    import gguf
from specjax.models import hf
from specjax.run import build

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

# What is imported and started by the first load is not memory of the model.
hf.load(sys.argv[3], dtype=sys.argv[2])
# Pages of libraries must stay resident: taken back before and read again, they would count as new.
ctypes.CDLL(None).mlockall(1)  # MCL_CURRENT; not allowed everywhere
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew
model = hf.load(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(model.params)
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
# getrusage would count the memory of the process that started this one.
print((resident("VmHWM") - before) / weights, weights)
"""
# The matrix of embeddings is a third of the model.
LARGE = {
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 16_000,
}
CASES = [("directory", "float32"), ("gguf", "float32"), ("untied", "float32")]


def ratio(path, dtype, folder) -> tuple[float, int]:
    """The peak memory of loading over that of the parameters, and the latter in bytes.

    Where memory cannot be locked, pages that the kernel took back and that are read again count
    as new memory. This only adds to the result, so it is the smallest one of up to three processes.
    """
    config = gguf_cases.config_of("llama")
    small = gguf_cases.write_directory(folder / "small", config, gguf_cases.tensors_of(config))
    arguments = [str(path), dtype, str(small)]
    results = []
    while len(results) < 3 and min(results, default=(MOST + 1, 0))[0] > MOST:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        times, weights = done.stdout.split()
        results.append((float(times), int(weights)))
    return min(results)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("source", "dtype"), by_default(CASES, CASES[:1]))
def test_a_model_of_100_megabytes(source, dtype, tmp_path):
    config = gguf_cases.config_of("llama-untied" if source == "untied" else "llama") | LARGE
    tensors = gguf_cases.tensors_of(config)
    path = tmp_path / "m.gguf"
    if source == "gguf":
        pytest.importorskip("gguf")
        gguf_cases.write_gguf(path, config, tensors, "Q8_0")
    else:
        path = gguf_cases.write_directory(tmp_path / "m", config, tensors)
    times, weights = ratio(path, dtype, tmp_path)
    assert weights > 96e6
    assert times <= MOST, times


@pytest.mark.slow
@pytest.mark.parametrize("variable", [DIRECTORY, FILE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model(variable, dtype, tmp_path):
    """The environment variables name a chat model, as a directory and as a .gguf file."""
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no model")
    times, _ = ratio(os.environ[variable], dtype, tmp_path)
    assert times <= MOST, times


class Device:
    """A device with so much memory free, of 1 MB."""

    device_kind = "Small GPU"

    def __init__(self, free: int):
        self.free = free

    def memory_stats(self):
        return {"bytes_limit": 1_000_000, "bytes_in_use": 1_000_000 - self.free}


def test_what_the_device_cannot_hold_is_one_line(target, cli, tmp_path, monkeypatch):
    """The parameters, and then the cache of many rows."""
    params = hf.load(target, dtype="float32").params
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(size)])
    hf.load(target, dtype="float32")
    keys = [f"--config={ROOT}/configs/generate.py", f"--config.target={target}"]
    keys += [f"--config.prompts={tmp_path / 'prompts.txt'}", "--config.dtype=float32"]
    keys += ["--config.max_new_tokens=100"]
    rows = 2048
    (tmp_path / "prompts.txt").write_text("w1 w2\n" * rows)
    status, _, err, workdir = cli(*keys, f"--config.batch_size={rows}")
    assert status == 2 and err.count("\n") == 1 and not workdir.exists()
    assert f"a cache of {rows} rows x " in err and "take fewer rows (batch_size)" in err
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(size - 1)])
    hf.load(target, dtype="bfloat16")
    hf.load(target, dtype="float32", on_host=True)
    with pytest.raises(OutOfMemory, match="^target in float32 needs .* and Small GPU has") as error:
        hf.load(target, dtype="float32")
    assert "\n" not in str(error.value)


def test_a_full_memory_is_one_line():
    line = "the memory of the device is full .Out of memory allocating [0-9]+ bytes.; take fewer"
    with pytest.raises(OutOfMemory, match=line) as error, memory.errors():
        jnp.zeros(1 << 44).block_until_ready()
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="else"), memory.errors():
        raise RuntimeError("something else")


def test_a_memory_that_is_full_later_is_one_line(target, cli, tmp_path, monkeypatch):
    """While a text is streamed, and on the command line."""
    model = sj.load(target, dtype="float32")
    pieces = sj.stream_text(model, "def add", max_new_tokens=4)

    def full(*args, **keys):
        raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\nmore")

    monkeypatch.setattr(decode, "generate", full)
    with pytest.raises(OutOfMemory, match="full .Ran out of memory in memory space hbm.; take"):
        next(pieces)
    monkeypatch.setattr(build, "target", full)
    keys = [f"--config={ROOT}/configs/generate.py", f"--config.target={target}"]
    status, _, err, _ = cli(*keys, "--config.prompt=def add")
    assert status == 2 and err.startswith("specjax: the memory of the device is full (Ran out")
