"""Files of PyTorch: tensors are read bit for bit, no code is run, bad files give one clear line."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from specjax.errors import UserError
from specjax.models import torch_pickle

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("protocol", [2, 4])
def test_reads_what_torch_wrote(torch, tmp_path, protocol):
    base = torch.arange(24.0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    state = {
        "whole": base.reshape(4, 6),
        "transposed": base.reshape(4, 6).t(),
        "sliced": base.reshape(4, 6)[1:3, ::2],
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1)[1:],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "nested": {"model": model.state_dict(), "deeper": {"x": base[3:5]}},
    }
    kinds = "float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64"
    state["kinds"] = {
        kind: torch.tensor([1, 0, 3]).to(getattr(torch, kind)) for kind in kinds.split()
    }
    torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
    got = torch_pickle.load(tmp_path / "x.pt")
    expected = {".".join(path): tensor for path, tensor in flatten_dict(state).items()}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        tensor = tensor.detach()
        bf16 = tensor.dtype == torch.bfloat16
        values = (
            tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if bf16 else tensor.numpy()
        )
        assert got[name].dtype == values.dtype and got[name].shape == values.shape, name
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    assert np.shares_memory(got["whole"], got["sliced"]), "a shared storage was read twice"


class Evil:
    """An object whose pickle runs a command."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def archive(path, program: bytes, entries=(), compress=zipfile.ZIP_STORED):
    """A checkpoint with the pickle ``program``."""
    with zipfile.ZipFile(path, "w", compress) as file:
        for name, data in {"data.pkl": program, **dict(entries)}.items():
            file.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_is_run(tmp_path, protocol):
    mark = tmp_path / "mark"
    state = OrderedDict(weight=Evil(mark))
    path = archive(tmp_path / "x.pt", pickle.dumps(state, protocol=protocol))
    with pytest.raises(
        UserError, match="would run posix.system when it is read|not a plain dict of tensors"
    ):
        torch_pickle.load(path)
    inst = archive(tmp_path / "inst.pt", b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.")
    with pytest.raises(UserError, match="would run|convert it to safetensors"):
        torch_pickle.load(inst)
    assert not mark.exists()


def tensor_program(size, stride, offset=0, count=4, storage="FloatStorage", key="0", build=b""):
    """The pickle of {"x": a tensor}, as PyTorch writes it."""

    def numbers(values):
        return b"(" + b"".join(pickle.dumps(v, 2)[2:-1] for v in values) + b"t"

    text = [pickle.dumps(x, 2)[2:-1] for x in ("x", "storage", key, "cpu")]
    name, word, key, cpu = (x[: x.index(b"q")] if b"q" in x[-2:] else x for x in text)
    pid = (
        b"("
        + word
        + b"ctorch\n"
        + storage.encode()
        + b"\n"
        + key
        + cpu
        + pickle.dumps(count, 2)[2:-1]
        + b"tQ"
    )
    arguments = (
        b"("
        + pid
        + pickle.dumps(offset, 2)[2:-1]
        + numbers(size)
        + numbers(stride)
        + b"\x89N"
        + b"t"
    )
    return b"\x80\x02}" + name + b"ctorch._utils\n_rebuild_tensor_v2\n" + build + arguments + b"Rs."


def test_tensors_stay_within_their_storage(tmp_path):
    data = {"data/0": np.arange(4, dtype=np.float32).tobytes()}
    good = archive(tmp_path / "good.pt", tensor_program((2, 2), (2, 1)), data)
    np.testing.assert_array_equal(torch_pickle.load(good)["x"], [[0, 1], [2, 3]])
    hostile = {
        "too long": tensor_program((5,), (1,)),
        "beyond the end": tensor_program((2,), (1,), offset=3),
        "a wide stride": tensor_program((2,), (2**62,)),
        "backwards": tensor_program((2,), (-1,), offset=1),
        "a negative size": tensor_program((-2,), (1,)),
        "before the beginning": tensor_program((2,), (1,), offset=-1),
        "a repeated byte": tensor_program((2**40,), (0,)),
        "a huge empty one": tensor_program((0, 2**62), (1, 1)),
        "too many axes": tensor_program((1,) * 100, (1,) * 100),
        "ragged": tensor_program((2, 2), (1,)),
        "a size that is not whole": tensor_program((2.0,), (1,)),
        "a storage with a wrong count": tensor_program((2,), (1,), count=2**40),
        "another type": tensor_program((2,), (1,), storage="DoubleStorage"),
        "a missing storage": tensor_program((2,), (1,), key="1"),
        "a changed function": tensor_program((2,), (1,), build=b"}b"),
        "a huge number in the memo": b"\x80\x02}r\xff\xff\xff\x7f"
        + b"\x96"
        + b"\xff" * 7
        + b"\x00.",
        "a loop": b"\x80\x02}q\x00X\x01\x00\x00\x00xh\x00s.",
        "a number": pickle.dumps({"epoch": 3}, 2),
        "a list": pickle.dumps([], 2),
        "lines in a name": b"\x80\x04\x8c\x03a\nb\x8c\x03c\nd\x93.",
        "cut short": tensor_program((2,), (1,))[:-9],
        "not a pickle": b"hello",
        "empty": b"",
    }
    for name, program in hostile.items():
        path = archive(tmp_path / "x.pt", program, data)
        with pytest.raises(UserError) as caught:
            torch_pickle.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), name


def test_small_hostile_files_are_refused_quickly(tmp_path):
    """60 nested pairs, each of twice the same pair: hash and repr take 2^60 steps without signals.

    A long key in many nested dicts must not become as many long names.
    """
    bomb = b"N" + b"q\x00h\x00\x86" * 60
    numbers = b"K\x00(K\x04t(K\x01t\x89N"
    untyped = (
        b"(X\x07\x00\x00\x00storagectorch.storage\nUntypedStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
    )
    long = b"X" + (1 << 16).to_bytes(4, "little") + b"k" * (1 << 16)
    programs = {
        "a key": b"}" + bomb + b"Ns.",
        "keys": b"}(X\x01\x00\x00\x00xN" + bomb + b"Nu.",
        "a storage": untyped.replace(b"X\x01\x00\x00\x000", bomb) + b".",
        "a size of a storage": untyped.replace(b"K\x10", bomb) + b".",
        "a type": b"ctorch._utils\n_rebuild_tensor_v3\n(" + untyped + numbers + bomb + b"tR.",
        "pairs": b"ccollections\nOrderedDict\n]" + bomb + b"N\x86a\x85R.",
        "names": b"}" + long + b"q\x01" + b"}h\x01" * 20000 + b"N" + b"s" * 20001 + b".",
    }
    paths = [
        str(archive(tmp_path / f"{name}.pt", b"\x80\x02" + program, {"data/0": bytes(16)}))
        for name, program in programs.items()
    ]
    script = """
        import sys
        from specjax.errors import UserError
        from specjax.models import torch_pickle
        for path in sys.argv[1:]:
            try:
                torch_pickle.load(path)
            except UserError as error:
                print("refused", error)
        """
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", textwrap.dedent(script), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(programs), lines
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith("refused") and path in line and len(line) < 1000


def test_files_that_are_not_checkpoints(tmp_path):
    path, program = tmp_path / "x.pt", tensor_program((4,), (1,))
    data = {"data/0": bytes(16)}

    def refused(match):
        with pytest.raises(UserError, match=match):
            torch_pickle.load(path)

    refused("cannot be read")
    path.write_bytes(pickle.dumps({"x": 1}))
    refused("before PyTorch 1.6; convert it to safetensors")
    path.write_bytes(b"")
    refused("no PyTorch checkpoint")
    whole = archive(path, program, data).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("damaged or cut short")
    path.write_bytes(whole.replace(bytes(16), b"\1" + bytes(15)))
    refused("does not match its checksum")
    archive(path, program, data, zipfile.ZIP_DEFLATED)
    refused("compressed")
    archive(path, program, {**data, "byteorder": b"big"})
    refused("big-endian")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello", "world")
    refused("no PyTorch checkpoint")
