"""Reads the tensors in files of ``torch.save``, without PyTorch and without running their code.

A checkpoint is an uncompressed zip: ``data.pkl`` is a pickle that names storages, and each storage
is an entry of raw bytes. A pickle is a program. Here it may build dicts and tensors; every other
name and every other instruction is refused.

Source: torch/serialization.py and torch/_utils.py, PyTorch 1.6 to 2.13.
"""

from __future__ import annotations

import collections
import io
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from specjax.errors import UserError

# The dtypes of storage classes, such as FloatStorage.
_STORAGES = {
    "Float": np.float32,
    "Half": np.float16,
    "BFloat16": ml_dtypes.bfloat16,
    "Double": np.float64,
    "Long": np.int64,
    "Int": np.int32,
    "Short": np.int16,
    "Char": np.int8,
    "Byte": np.uint8,
    "Bool": np.bool_,
}
# Later dtypes, without storage classes; their tensors use UntypedStorage.
_LATER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
_BYTES = np.dtype(np.uint8)
# Characters of a name. A name joins the keys of nested dicts; a small file can nest many long keys.
_LONGEST = 1000
# What PyTorch uses for dicts of tensors, in every protocol. Others are dangerous: BYTEARRAY8 and
# LONG4 reserve memory unchecked, the EXT family and INST run code, NEWOBJ and OBJ make objects.
_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE "
    "SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL REDUCE "
    "BUILD BINPERSID"
)
_CODES = [getattr(pickle, name)[0] for name in _INSTRUCTIONS.split()]


class _Storage(NamedTuple):
    values: np.ndarray  # [n] of the storage's dtype; bytes for UntypedStorage


def load(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors of a (nested) state dict in a file of ``torch.save``: joined keys -> array.

    The keys of nested dicts are joined by dots.
    The arrays are read-only views of the memory-mapped file; tensors that share a storage share
    memory. Shapes and dtypes are those of the tensors, bfloat16 and float8 from ``ml_dtypes``.

    Raises UserError: the format before PyTorch 1.6, a damaged or truncated file, a pickle with
    anything but dicts of tensors.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            start = file.read(4)
            if not start.startswith(b"PK"):
                old = start.startswith(b"\x80")
                kind = "in the format before PyTorch 1.6" if old else "no PyTorch checkpoint"
                raise UserError(f"{path} is {kind}; convert it to safetensors")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with zipfile.ZipFile(path) as archive:
            return _flatten(path, _Reader(_Archive(path, mapped, archive)).load())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    except zipfile.BadZipFile:
        raise UserError(f"{path} is damaged or cut short; copy it again") from None
    except UserError:
        raise
    except Exception as error:  # a broken pickle can raise any error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} is damaged ({reason}); copy it again") from None


class _Archive:
    """The entries of a zip as views of the file, with their sizes and checksums verified."""

    def __init__(self, path: Path, mapped: mmap.mmap, archive: zipfile.ZipFile):
        names = [name for name in archive.namelist() if f"/{name}".endswith("/data.pkl")]
        if len(names) != 1:
            raise UserError(
                f"{path} is no PyTorch checkpoint; a checkpoint is a zip file with one data.pkl, "
                f"and this one has {len(names)}"
            )
        self.path, self._mapped, self._archive = path, mapped, archive
        self._root = names[0].removesuffix("data.pkl")
        self.program = bytes(self.read("data.pkl"))
        named = self._root + "byteorder" in archive.namelist()
        if named and bytes(self.read("byteorder")) != b"little":
            raise UserError(
                f"{path} was written on a big-endian machine; convert it to safetensors there"
            )

    def read(self, name: str) -> memoryview:
        """The bytes of an entry."""
        info = self._archive.getinfo(self._root + name)
        header = self._mapped[info.header_offset : info.header_offset + 30]
        if len(header) < 30 or header[:4] != b"PK\3\4":
            raise zipfile.BadZipFile
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        stop = start + info.file_size
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not stored or info.flag_bits & 1:
            raise UserError(
                f"{self.path}: {info.filename} is compressed or encrypted, "
                "which PyTorch never does; save it again with torch.save"
            )
        view = memoryview(self._mapped)[start:stop]
        if len(view) != info.file_size or zlib.crc32(view) != info.CRC:
            raise UserError(
                f"{self.path} is damaged ({info.filename} does not match its checksum); "
                "copy it again"
            )
        return view


def _refuse(reader: _Reader) -> None:
    raise UserError(
        f"{reader.archive.path} is not a plain dict of tensors; convert it to safetensors"
    )


class _Reader(pickle._Unpickler):
    """The standard library's unpickler in Python (the one in C lets a file reserve any memory)."""

    def __init__(self, archive: _Archive):
        super().__init__(io.BytesIO(archive.program))
        self.archive, self._storages = archive, {}
        self._globals = {
            # The pickle then sets one key after the other.
            ("collections", "OrderedDict"): lambda: collections.OrderedDict(),
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_bytes,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, requires_grad, hooks: tensor,
            ("torch.storage", "UntypedStorage"): _BYTES,
        }
        dtypes = {f"{name}Storage": dtype for name, dtype in _STORAGES.items()}
        dtypes |= {name: getattr(ml_dtypes, name, name) for name in _LATER}
        self._globals |= {("torch", name): np.dtype(own) for name, own in dtypes.items()}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._globals:
            function = " ".join(f"{module}.{name}".split())  # a name may contain line feeds
            raise UserError(
                f"{self.archive.path} would run {function} when it is read; "
                "do not load it, and get the heads from another source"
            )
        return self._globals[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid  # the fourth is the device it was on
        typed = isinstance(dtype, np.dtype) and type(key) is str and type(count) is int
        if kind != "storage" or not typed:
            raise ValueError("not a storage")
        if key not in self._storages:
            self._storages[key] = self.archive.read(f"data/{key}")
        if len(self._storages[key]) != count * dtype.itemsize:
            raise ValueError(f"storage {key} does not have the size that the pickle gives")
        return _Storage(np.frombuffer(self._storages[key], dtype))

    def _build(self) -> None:
        """Drops the state of an object; a state dict has one, the versions of its modules."""
        self.stack.pop()  # type: ignore[attr-defined]
        if not isinstance(self.stack[-1], collections.OrderedDict):  # type: ignore[attr-defined]
            _refuse(self)

    # Only strings may be keys: hashing a pair of twice the same pair of twice ... takes 2^n steps.

    def _setitem(self) -> None:
        _check_strings(self.stack[-2:-1])  # type: ignore[attr-defined]
        self.load_setitem()  # type: ignore[attr-defined]

    def _setitems(self) -> None:
        # The stack since the mark: key, value, key, value, ...
        _check_strings(self.stack[::2])  # type: ignore[attr-defined]
        self.load_setitems()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = dict.fromkeys(pickle._Unpickler.dispatch, _refuse)
    dispatch |= {code: pickle._Unpickler.dispatch[code] for code in _CODES}
    dispatch |= {pickle.BUILD[0]: _build, pickle.SETITEM[0]: _setitem}
    dispatch |= {pickle.SETITEMS[0]: _setitems}


def _check_strings(keys: Iterable[Any]) -> None:
    if any(type(key) is not str for key in keys):
        raise ValueError("a dict has keys that are not strings")


def _tensor(
    storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None
) -> np.ndarray:
    if not isinstance(storage, _Storage) or type(size) is not tuple or type(stride) is not tuple:
        raise ValueError("a tensor does not consist of a storage, a size and strides")
    values, numbers = storage.values, (offset, *size, *stride)
    if len(size) != len(stride) or any(type(x) is not int or x < 0 for x in numbers):
        raise ValueError("a tensor has an invalid size")
    if 0 in size:
        return np.empty(size, values.dtype)
    count, last = 1, offset
    for length, step in zip(size, stride, strict=True):
        count, last = count * length, last + (length - 1) * step
    # The first check keeps the view inside the storage. The second refuses a huge tensor that
    # repeats a few bytes (stride 0).
    if last >= len(values) or count > len(values):
        raise ValueError("a tensor reaches beyond its storage")
    steps = [step * values.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(values[offset:], size, steps, writeable=False)


def _tensor_of_bytes(
    storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None
) -> np.ndarray:
    if not isinstance(storage, _Storage) or not isinstance(dtype, np.dtype):
        raise ValueError("a tensor has an invalid dtype")
    return _tensor(_Storage(storage.values.view(dtype)), offset, size, stride)


def _flatten(path: Path, value: Any) -> dict[str, np.ndarray]:
    """A nested dict as a flat dict, keys joined by dots. Raises UserError for other contents."""
    tensors: dict[str, np.ndarray] = {}
    queue, seen = collections.deque([("", value)]), set()
    while queue:
        name, value = queue.popleft()
        if len(name) > _LONGEST:
            raise UserError(
                f"{path} has a name of {len(name)} characters; at most {_LONGEST} are read"
            )
        named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if isinstance(value, np.ndarray) and name and name not in tensors:
            tensors[name] = value
        elif isinstance(value, dict) and named and id(value) not in seen:
            seen.add(id(value))  # a dict may contain itself
            queue += [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
        else:
            what = f"the value of {name!r}" if name else "it"
            raise UserError(
                f"{path} is no state dict ({what} is neither a tensor nor a dict of tensors); "
                "save only its tensors"
            )
    return tensors
