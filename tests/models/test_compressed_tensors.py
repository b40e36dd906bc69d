"""Directories with weights of 8 bits: the values are integers (or float8) times their scale."""

from __future__ import annotations

import json

import hf_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_cases import FORMS, both, stated, tensors_of, write

from specjax.bench import provenance
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.sources import compressed_tensors, tensors


@pytest.mark.fast
@pytest.mark.parametrize("form", FORMS)
def test_values(form, tmp_path):
    """To the last bit those of a loop in NumPy; in bfloat16 rounded once."""
    quantised, plain = both(tmp_path, form)
    assert hf.load(quantised).config == hf.load(plain).config
    for dtype in (None, "bfloat16"):
        expected = hf.load(plain, dtype=dtype).params
        hf_cases.assert_same(hf.load(quantised, dtype=dtype).params, expected)
        assert {x.dtype for x in jax.tree.leaves(expected)} == {jnp.dtype(dtype or "float32")}


@pytest.mark.fast
@pytest.mark.parametrize("form", ["packed", "float8"])
def test_rows_are_read_in_parts(form, tmp_path, monkeypatch):
    quantised, plain = both(tmp_path, form)
    monkeypatch.setattr(tensors, "CHUNK", 700)
    hf_cases.assert_same(hf.load(quantised).params, hf.load(plain).params)


def test_a_scale_in_another_file(tmp_path):
    quantised, plain = both(tmp_path, "float8")
    whole = quantised / "model.safetensors"
    scales = [name for name in tensors_of(whole) if name.endswith("_scale")]
    stored = tensors_of(whole)
    write(quantised / "model-1.safetensors", {n: a for n, a in stored.items() if n not in scales})
    write(quantised / "model-2.safetensors", {name: stored[name] for name in scales})
    whole.unlink()
    index = {name: f"model-{1 + (name in scales)}.safetensors" for name in stored}
    file = quantised / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    hf_cases.assert_same(hf.load(quantised).params, hf.load(plain).params)


def test_what_results_record(tmp_path):
    quantised, plain = both(tmp_path, "float8")
    model = hf.load(quantised)
    facts = provenance.target(model.params, name="", directory=model.directory)
    assert facts["source"] == "directory" and facts["dequantised_from"] == "float8_e4m3fn"
    assert provenance.target({}, name="", directory=plain)["dequantised_from"] is None
    # What is saved has no quantisation.
    hf.save(tmp_path / "saved", model.config, model.params)
    hf_cases.assert_same(hf.load(tmp_path / "saved").params, model.params)
    assert hf.origin(tmp_path / "saved").dequantised_from == ()


REFUSED = {
    "another program": ({"quant_method": "awq", "bits": 4}, "'awq' is not supported"),
    "fp8 of transformers": ({"quant_method": "fp8"}, "'fp8' is not supported"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes'"),
    "no object": ("gptq", "'gptq' is not supported"),
    "a list": ([1], "is not supported"),
    "no format": (stated(None), "with format None"),
    "another format": (stated("marlin-24"), "with format 'marlin-24'"),
    "another format of a group": (stated(group={"format": "nvfp4-pack-quantized"}), "'nvfp4-pack"),
    "not compressed": (stated(quantization_status="frozen"), "quantization_status 'frozen'"),
    "a cache": (stated(kv_cache_scheme={"num_bits": 8}), "with kv_cache_scheme"),
    "a rotation": (stated(transform_config={"config_groups": {}}), "with transform_config"),
    "sparse": (stated(sparsity_config={"format": "sparse-24-bitmask"}), "with sparsity_config"),
    "no groups": (stated(config_groups={}), "without config_groups"),
    "no weights": (stated(group={"weights": None}), "group_0 of no weights"),
    "activations": (stated(group={"input_activations": {"num_bits": 8}}), "with input_activations"),
    "outputs": (stated(group={"output_activations": {"num_bits": 8}}), "with output_activations"),
    "4 bits": (stated(weights={"num_bits": 4}), "with num_bits 4 in group_0"),
    "asymmetric": (stated(weights={"symmetric": False}), "with symmetric False"),
    "groups of columns": (
        stated(weights={"strategy": "group", "group_size": 128}),
        "with group_size 128",
    ),
    "blocks": (stated(weights={"strategy": "block"}), "with strategy 'block'"),
    "a block": (stated(weights={"block_structure": [128, 128]}), "with block_structure"),
    "dynamic": (stated(weights={"dynamic": True}), "with dynamic True"),
    "an order": (stated(weights={"actorder": "weight"}), "with actorder 'weight'"),
    "another type": (stated(weights={"type": "nf"}), "with type 'nf'"),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", REFUSED)
def test_other_quantisations_are_refused_by_name(case):
    config, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        hf.config_from_hf(hf_cases.hf_keys("llama", quantization_config=config))
    assert "\n" not in str(caught.value) and "quantization_config" in str(caught.value)
    assert "8 bits" in str(caught.value)


Q = "model.layers.0.self_attn.q_proj."
GATE = "model.layers.1.mlp.gate_proj."


def without(name):
    return lambda values: {each: array for each, array in values.items() if each != name}


def replaced(name, array):
    return lambda values: values | {name: array}


WRONG = {
    "no scale": ("int8", without(Q + "weight_scale"), "q_proj.weight is stored as I8"),
    "no scale of words": ("packed", without(Q + "weight_scale"), "weight_packed has no scale"),
    "a scale alone": ("int8", without(Q + "weight"), "lacks model.*q_proj.weight; a quantised"),
    "a scale of columns": (
        "int8",
        replaced(GATE + "weight_scale", np.ones((1, 32), np.float32)),
        r"weight_scale is \[1, 32\] of F32, expected \[42, 1\]",
    ),
    "one scale for rows": (
        "int8",
        replaced(GATE + "weight_scale", np.ones(1, np.float32)),
        r"weight_scale is \[1\] of F32, expected \[42, 1\]",
    ),
    "rows of a single scale": (
        "one scale",
        replaced(GATE + "weight_scale", np.ones((42, 1), np.float32)),
        r"expected \[1\] of F32, BF16 or F16 \(strategy tensor\)",
    ),
    "integers as scales": (
        "int8",
        replaced(GATE + "weight_scale", np.ones((42, 1), np.int8)),
        "of I8, expected .* of F32, BF16 or F16",
    ),
    "a zero point": (
        "int8",
        replaced(GATE + "weight_zero_point", np.zeros((42, 1), np.int8)),
        "gate_proj.weight_zero_point is not supported",
    ),
    "an order of columns": (
        "packed",
        replaced(GATE + "weight_g_idx", np.zeros(32, np.int32)),
        "gate_proj.weight_g_idx is not supported",
    ),
    "a scale of activations": (
        "float8",
        replaced(GATE + "input_scale", np.ones(1, np.float32)),
        "gate_proj.input_scale is not supported",
    ),
    "no shape": ("packed", without(GATE + "weight_shape"), "lacks .*gate_proj.weight_shape"),
    "another shape": (
        "packed",
        replaced(GATE + "weight_shape", np.array([42, 28], np.int64)),
        r"weight_shape is \[42, 28\], and .*weight_packed is \[42, 8\]; the columns are 4 to",
    ),
    "columns that are not there": (
        "packed",
        replaced(GATE + "weight_shape", np.array([42, 31], np.int64)),
        r"gate_proj.weight is \[42, 31\], expected \[42, 32\]",
    ),
    "another type than stated": (
        "float8",
        replaced(GATE + "weight", np.ones((42, 32), np.int8)),
        r"gate_proj.weight is \[42, 32\] of I8, and quantization_config states .* F8_E4M3",
    ),
    "float8 in words": (
        "float8",
        lambda values: replaced(GATE + "weight_packed", np.ones((42, 8), np.int32))(
            without(GATE + "weight")(values)
        ),
        "of I32, and quantization_config states a matrix of float8, which is not packed",
    ),
    "bytes without signs": (
        "int8",
        replaced(GATE + "weight", np.ones((42, 32), np.uint8)),
        r"of U8, and quantization_config states a matrix of I8",
    ),
    "a matrix in float32 with a scale": (
        "int8",
        replaced(GATE + "weight", np.ones((42, 32), np.float32)),
        "of F32, and quantization_config states a matrix of I8",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_refused(case, tmp_path):
    form, change, message = WRONG[case]
    quantised, _ = both(tmp_path, form, change)
    with pytest.raises(UserError, match=message) as caught:
        hf.load(quantised)
    assert "\n" not in str(caught.value) and str(quantised) in str(caught.value)


@pytest.mark.fast
def test_quantised_tensors_need_a_statement(tmp_path):
    quantised, _ = both(tmp_path, "int8")
    hf_cases.reconfigure(quantised, quantization_config=None)
    with pytest.raises(UserError, match="weight_scale|stored as I8"):
        hf.load(quantised)


MATRIX = compressed_tensors._Matrix
INTEGERS, VALUES = MATRIX._integers, tensors.Safetensors.get_tensor


def scales(change):
    """Changes the scales of a matrix that are read."""

    def get_tensor(self, name, dtype=None, values=None):
        array = VALUES(self, name, dtype, values)
        return change(array) if name.endswith("_scale") else array

    return tensors.Safetensors, "get_tensor", get_tensor


def integers(change):
    return MATRIX, "_integers", lambda self, rows: change(INTEGERS(self, rows))


def by_columns(self, name, dtype=None):
    """A scale for each column of a square matrix."""
    right = GET(self, name, dtype)
    if self._rows != self._columns:
        return right
    file, stored = self._scale
    scale = np.asarray(file.get_tensor(stored), np.float32)
    return (right / scale * scale.T).astype(right.dtype)


GET = MATRIX.get_tensor
MUTANTS = {
    "the scale of the next row": scales(lambda scale: np.roll(scale, 1, axis=0)),
    "the scale of the first row": scales(lambda scale: 0 * scale + scale[:1]),
    "a scale of columns": (MATRIX, "get_tensor", by_columns),
    "the scale is left out": scales(np.ones_like),
    "the scale divides": scales(lambda scale: (1 / scale.astype(np.float32)).astype(scale.dtype)),
    "bytes without signs": integers(lambda q: q + 128),
    "an offset of 127": integers(lambda q: q + 1),
    "words from the highest byte": (
        MATRIX,
        "_integers",
        lambda self, rows: INTEGERS(self, np.asarray(rows).byteswap()),
    ),
    "the first scales for every part": (
        tensors.Safetensors,
        "get_tensor",
        lambda self, name, dtype=None, values=None: VALUES(
            self, name, dtype, values and (lambda rows, begin: values(rows, 0))
        ),
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name, tmp_path, monkeypatch):
    quantised, plain = both(tmp_path, "packed")
    expected = hf.load(plain).params
    monkeypatch.setattr(*MUTANTS[name])
    monkeypatch.setattr(tensors, "CHUNK", 700)
    with pytest.raises(AssertionError):
        hf_cases.assert_same(hf.load(quantised).params, expected)
