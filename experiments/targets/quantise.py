"""Writes a .gguf file again with its matrices in another type, such as Q8_0.

    PYTHONPATH=. python experiments/targets/quantise.py MODEL.gguf Q8_0 MODEL-Q8_0.gguf

Matrices whose rows are no whole number of blocks become F16. Needs the package gguf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    import gguf

    source, kind, out = argv
    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    fields = dict(reader.fields)
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            kinds = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), *kinds)
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        elif values.shape[-1] % block:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            stored = gguf.quants.quantize(values, wanted)
            writer.add_tensor(tensor.name, stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
