"""The weights of a .gguf file, under the names and in the form of a Hugging Face style directory.

llama.cpp stores three things in another form: the rows of q and k of Llama are reordered for
interleaved rotary pairs, the norms of Gemma are 1 + w, and matrices may be quantised. Each is
undone for the rows that are read, so no tensor is in memory twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models import families
from specjax.models.sources import gguf_config, gguf_file, tensors

# Names of llama.cpp -> the modules of a decoder, whose names ``families`` has.
_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
_LAYER = {
    "attn_norm": "attention_norm",
    **{f"attn_{part}": f"attention.{part}" for part in ("q", "k", "v", "q_norm", "k_norm")},
    "attn_output": "attention.o",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    **{f"ffn_{part}": f"mlp.{part}" for part in ("gate", "up", "down")},
    "post_ffw_norm": "mlp_post_norm",
}
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


class Tensors:
    """The tensors of a .gguf file, with the methods of an open safetensors file.

    Raises UserError for a tensor that the architecture does not have, or of a type that cannot be
    read.
    """

    def __init__(self, path: Path):
        self._file = gguf_file.read(path)
        names = [name for name in self._file.tensors if name not in gguf_config.FACTORS]
        self._names = {hf_name(self._file, name): name for name in names}
        kinds = {self._file.tensors[name].kind for name in names} - _DTYPES.keys()
        self._readers = {kind: gguf_file.dequantiser(path, kind) for kind in kinds}

    def keys(self) -> list[str]:
        """The names, as in a Hugging Face style directory."""
        return list(self._names)

    def shape_of(self, name: str) -> tuple[list[int], str]:
        """The shape and the type of a tensor; a quantised one has the type F32."""
        stored = self._file.tensors[self._names[name]]
        return list(stored.shape), stored.kind if stored.kind in gguf_file.PLAIN else "F32"

    def get_tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """A tensor as ``dtype``; None is float16 for tensors of that type, float32 for others."""
        own = self._names[name]
        stored = self._file.tensors[own]
        dtype = np.dtype(dtype or _DTYPES.get(stored.kind, np.float32))
        result = np.empty(stored.shape, dtype)
        order = self._order(own)
        gemma = self._file.architecture.startswith("gemma")
        less = 1.0 if gemma and own.endswith("norm.weight") else 0.0
        for begin, end in tensors.chunks(stored.shape):
            rows = self._rows(stored, begin, end)
            places = slice(begin, end) if order is None else order[begin:end]
            result[places] = rows - less if less else rows
        return result

    def _rows(self, stored: gguf_file.Stored, begin: int, end: int) -> np.ndarray:
        # Reading, unlike mapping, leaves no page of the file in memory.
        count = (end - begin) * stored.row_bytes
        start = stored.offset + begin * stored.row_bytes
        data = np.fromfile(self._file.path, np.uint8, count, offset=start)
        if data.size != count:
            raise UserError(f"{self._file.path} became shorter while it was read; copy it again")
        if stored.kind in _DTYPES:
            rows = data.view(_DTYPES[stored.kind])
        else:
            rows = self._readers[stored.kind](data.reshape(end - begin, stored.row_bytes))
        return rows.reshape(end - begin, *stored.shape[1:])

    def _order(self, name: str) -> np.ndarray | None:
        """Where the rows of q or k of Llama go; None: they are in order."""
        match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
        if self._file.architecture != "llama" or match is None:
            return None
        config = gguf_config.of_file(self._file)
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        rows = np.arange(self._file.tensors[name].shape[0])
        # Row (head, i, j) of the file is row (head, j, i) of the directory; j is 0 or 1.
        return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def hf_name(file: gguf_file.GgufFile, name: str) -> str:
    """The name of a tensor in a Hugging Face style directory. Raises UserError for others."""
    names = families.FAMILIES[gguf_config.family_of(file).model_type].names
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is not None:
        number, part, leaf = match.groups()
        module = (_TOP if number is None else _LAYER).get(part)
        if module is not None and module in names:
            front = "" if number is None else f"{names['layers']}.{number}."
            return f"{front}{names[module]}.{leaf}"
    raise UserError(
        f"{file.path} has the tensor {name}, which is not understood for the architecture "
        f"{file.architecture}"
    )
