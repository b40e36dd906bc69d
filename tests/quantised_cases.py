"""Weights of 8 bits: directories, made byte by byte, with the values that they stand for."""

from __future__ import annotations

import json

import hf_cases
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from specjax.models import hf, layers

# 42 is no multiple of the four integers of a word; q and o are square.
CONFIG = hf_cases.shaped("llama", intermediate_size=42)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32", "bfloat16": "BF16"}
DTYPES |= {"float8_e4m3fn": "F8_E4M3", "float16": "F16", "uint8": "U8"}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
WEIGHTS |= {"group_size": None, "dynamic": False, "actorder": None, "block_structure": None}


def stated(format="pack-quantized", group=None, weights=None, **more):
    """A quantization_config."""
    own = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    own |= {"weights": WEIGHTS | (weights or {})} | (group or {})
    base = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    base |= {"kv_cache_scheme": None, "quantization_status": "compressed"}
    return base | {"config_groups": {"group_0": own}} | more


def write(path, values):
    """A safetensors file, byte by byte."""
    header, data = {}, b""
    for name, array in values.items():
        place = [len(data), len(data := data + array.tobytes())]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": [*array.shape]}
        header[name]["data_offsets"] = place
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def packed(q):
    """int32[rows, words]: column c is byte c % 4, from the lowest, of word c // 4, plus 128."""
    words = np.zeros((len(q), -(-q.shape[1] // 4)), np.int64)
    for row, column in np.ndindex(*q.shape):
        words[row, column // 4] += (int(q[row, column]) + 128) << 8 * (column % 4)
    return words.astype(np.uint32).view(np.int32)


# name -> quantization_config, dtype of the scales, scales per row
FORMS = {
    "packed": (stated(), jnp.bfloat16, True),
    "int8": (stated("int-quantized"), jnp.float32, True),
    "naive": (stated("naive-quantized"), jnp.float16, True),
    "one scale": (stated("int-quantized", weights={"strategy": "tensor"}), jnp.float32, False),
    "float8": (stated("float-quantized", weights={"type": "float"}), jnp.bfloat16, True),
    "one scale of float8": (
        stated("float-quantized", weights={"type": "float", "strategy": "tensor"}),
        jnp.float32,
        False,
    ),
}


def both(folder, form, change=lambda values: values):
    """(a quantised directory, one with its values in float32)."""
    config, scales, by_row = FORMS[form]
    plain, quantised = folder / "plain", folder / "quantised"
    hf.save(plain, CONFIG, hf_cases.random_params(CONFIG))
    hf.save(quantised, CONFIG, hf_cases.random_params(CONFIG))
    hf_cases.reconfigure(quantised, quantization_config=config)
    rng, stored = np.random.default_rng(0), {}
    expected = load_file(plain / "model.safetensors")
    for name, array in list(expected.items()):
        module, shape = name.removesuffix(".weight"), array.shape
        if not module.endswith(MATRICES):
            stored[name] = array
            continue
        scale = rng.uniform(0.001, 0.01, (shape[0] if by_row else 1, 1)).astype(scales)
        if config["format"] == "float-quantized":
            q = rng.normal(0, 40, shape).astype(jnp.float8_e4m3fn)
        else:
            q = rng.integers(-128, 128, shape).astype(np.int8)
        for row, column in np.ndindex(*shape):
            factor = np.float32(scale[row if by_row else 0, 0])
            expected[name][row, column] = np.float32(q[row, column]) * factor
        if config["format"] == "pack-quantized":
            stored[f"{module}.weight_packed"] = packed(q)
            stored[f"{module}.weight_shape"] = np.array(shape, np.int64)
        else:
            stored[name] = q
        stored[f"{module}.weight_scale"] = scale if by_row else scale[0]
    hf_cases.rewrite(plain, lambda _: expected)
    write(quantised / "model.safetensors", change(stored))
    return quantised, plain


def tensors_of(path):
    """Every tensor of a file that ``write`` made."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    kinds = {short: name for name, short in DTYPES.items()}
    result = {}
    for name, facts in json.loads(data[8 : 8 + size]).items():
        begin, end = (8 + size + place for place in facts["data_offsets"])
        array = np.frombuffer(data[begin:end], jnp.dtype(kinds[facts["dtype"]]))
        result[name] = array.reshape(facts["shape"])
    return result


def in_int8(params):
    """The parameters, with the kernels that ``hf.load(weights="int8")`` rounds as ``Int8``."""
    leaves = flatten_dict(jax.tree.map(np.asarray, params))
    rounded = {
        path: layers.Int8.of(leaf) if layers.in_int8(path) else leaf
        for path, leaf in leaves.items()
    }
    return jax.tree.map(jnp.asarray, unflatten_dict(rounded))


def as_floats(params):
    """The parameters with products in the place of ``Int8``."""
    is_int8 = lambda x: isinstance(x, layers.Int8)  # noqa: E731
    product = lambda x: jnp.asarray(np.asarray(x.values) * np.asarray(x.scale))  # noqa: E731
    return jax.tree.map(lambda x: product(x) if is_int8(x) else x, params, is_leaf=is_int8)
