"""Directories of EAGLE and ReDrafter heads: round trips through every layout, and their keys."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from eagle_file_cases import CASES, IDS, LLAMA3, D, E, F, H, K, Q, V, W, params_of
from head_file_cases import assert_same, fill
from safetensors.numpy import load_file

from specjax import convert_heads
from specjax.drafters.files import codec, decoder_layers, head_files
from specjax.errors import UserError

pytestmark = pytest.mark.fast

ROUND_TRIPS = [
    (name, layout) for name, (kind, _, _) in CASES.items() for layout in codec.of(kind).layouts
]


def same_config(got, expected):
    got, expected = dict(got), dict(expected)
    np.testing.assert_array_equal(got.pop("draft_ids", None), expected.pop("draft_ids", None))
    assert got == expected


def with_bias(params, *layouts):
    """SGLang's fc always has a bias; zeros stand for none."""
    if "sglang" not in layouts or "bias" in params["fc"]:
        return params
    kernel = params["fc"]["kernel"]
    return params | {"fc": {"kernel": kernel, "bias": np.zeros(kernel.shape[1], kernel.dtype)}}


@pytest.mark.parametrize(("name", "layout"), ROUND_TRIPS)
def test_round_trip(tmp_path, name, layout):
    """Parameters bit for bit, and what no tensor shows, in every layout and from one to another."""
    kind, _, config = CASES[name]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        params = params_of(name, dtype)
        extra = {"accuracy": [[0.5, 0.1]], "base_model_name_or_path": "some/model"}
        head_files.write(tmp_path / "a", kind, params, config, "abc", extra, layout=layout)
        head = head_files.read(tmp_path / "a", kind, dtype=dtype)
        assert_same(head.params, with_bias(params, layout))
    for key, value in config.items():
        np.testing.assert_array_equal(head.config[key], value, err_msg=key)
    assert head.config["vocabulary"] == "abc" and head.config["accuracy"] == [[0.5, 0.1]]
    assert head.config["base_model_name_or_path"] == "some/model"
    assert head.config["hidden_size"] == D
    for other in codec.of(kind).layouts:
        convert_heads.convert(tmp_path / "a", tmp_path / other, kind, other)
        again = head_files.read(tmp_path / other, kind, dtype=dtype)
        assert_same(again.params, with_bias(params, layout, other))
        facts = {"taps", "norm_output", "norm_before_residual", "draft_ids", "rope_theta"}
        for key in facts & head.config.keys():
            np.testing.assert_array_equal(again.config[key], head.config[key], err_msg=key)
    files = [load_file(tmp_path / x / "model.safetensors") for x in ("a", layout)]
    assert_same(*files)
    same_config(head_files.read(tmp_path / layout, kind, dtype=dtype).config, head.config)


@pytest.mark.parametrize("name", CASES)
def test_numbers_follow_from_the_tensors(tmp_path, name):
    kind, _, config = CASES[name]
    wrong = config | {"hidden_size": 3, "intermediate_size": 3, "num_hidden_layers": 9}
    head_files.write(tmp_path, kind, params_of(name), wrong)
    got = head_files.read(tmp_path, kind).config
    if kind == "redrafter":
        assert got["exit_dim"] == (5 if "projection" in name or "both" in name else 2 * D)
        assert got["num_draft_layers"] == 2 and got["vocab_size"] == V
        assert got["model_type"] == "recurrent_drafting_drafter"
        assert got["rnn"] is ("sum" not in name and name != "redrafter with a projection")
        return
    assert (got["hidden_size"], got["intermediate_size"]) == (D, F)
    assert (got["num_attention_heads"], got["num_key_value_heads"], got["head_dim"]) == (Q, K, H)
    assert got["num_hidden_layers"] == len(CASES[name][1]["layers"])
    assert got["target_hidden_size"] == (12 if "wider" in name else E)
    shape = decoder_layers.decoder("here", got)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (Q, K, H)
    assert shape.qk_norm is ("Qwen3" in name) and shape.attention_bias is ("biases" in name)
    assert shape.rope_theta == (10000.0 if name == "eagle of Qwen3" else 500000.0)
    assert (shape.rope_scaling is not None) is (got["rope_scaling"] == LLAMA3)


def written(path, name, layout):
    kind, _, config = CASES[name]
    head_files.write(path, kind, params_of(name), config, layout=layout)
    tensors = load_file(path / "model.safetensors")
    return tensors, json.loads((path / "config.json").read_text())


def test_names_of_the_published_layouts(tmp_path):
    tensors, config = written(tmp_path / "1", "eagle of two layers", "")
    assert set(tensors) >= {"fc.weight", "embed_tokens.weight", "layers.1.input_layernorm.weight"}
    assert "layers.0.input_layernorm.weight" not in tensors and "fc.bias" not in tensors
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False
    assert tensors["fc.weight"].shape == (D, 2 * D)
    # With fc.bias there is no key: vLLM and SGLang take true for biases of the attention.
    for layout, name in (("eagle", "LlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")):
        tensors, config = written(tmp_path / layout, "eagle", layout)
        assert "fc.bias" in tensors and "bias" not in config
        assert config["architectures"] == [name] and config["attention_bias"] is False
    tensors, config = written(tmp_path / "sglang", "eagle of two layers", "sglang")
    assert not tensors["fc.bias"].any()

    tensors, config = written(tmp_path / "3", "eagle3", "")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (Q * H, 2 * D)
    assert {"midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight"} <= set(tensors)
    np.testing.assert_array_equal(tensors["d2t"], IDS - np.arange(W))
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), IDS)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 8]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (W, V)
    # vLLM and SGLang take two maps for a part of the vocabulary, and 3 taps for a missing number.
    for layout in codec.of("eagle3").layouts:
        tensors, config = written(tmp_path / layout, "eagle3 of all tokens", layout)
        assert not {"d2t", "t2d"} & set(tensors) and "num_aux_hidden_states" not in config
        _, config = written(tmp_path / layout, "eagle3 with a norm of all taps", layout)
        layers = config.get("transformer_layer_config", config)
        assert layers["num_aux_hidden_states"] == 2
    for name, kind in (("eagle3 of Qwen3", "Qwen3"), ("eagle3", "Llama")):
        _, config = written(tmp_path / "eagle3", name, "eagle3")
        assert config["architectures"] == [f"{kind}ForCausalLM"]


def test_names_of_specforge(tmp_path):
    _, config = written(tmp_path / "a", "eagle3 of all tokens", "specforge")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    ids = "eagle_aux_hidden_state_layer_ids"
    assert config["eagle_config"] == {ids: [1, 3, 6], "use_aux_hidden_state": True}
    # A list that begins with 1 numbers the outputs of layers.
    _, config = written(tmp_path / "b", "eagle3", "specforge")
    assert config["eagle_config"][ids] == [1, 4, 7]


def test_names_of_speculators(tmp_path):
    tensors, config = written(tmp_path / "a", "eagle3.1", "speculators")
    assert {"layers.0.hidden_norm.weight", "fc_norm.2.weight"} <= set(tensors)
    assert not any(name.startswith("midlayer") for name in tensors)
    assert config["speculators_model_type"] == "eagle3" and "hidden_size" not in config
    assert config["transformer_layer_config"]["hidden_size"] == D
    assert config["transformer_layer_config"]["rope_scaling"] == LLAMA3
    switches = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    assert [config[key] for key in switches] == [True, False, True, False]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 8]
    assert config["speculators_config"]["algorithm"] == "eagle3"
    tensors, config = written(tmp_path / "b", "eagle3 with a norm of all taps", "speculators")
    assert "input_norm.weight" in tensors and config["norm_before_fc"] is True
    assert "layers.1.input_layernorm.weight" in tensors
    assert config["eagle_aux_hidden_state_layer_ids"] == [6, 4]


def test_names_of_redrafter(tmp_path):
    tensors, config = written(tmp_path, "redrafter with both", "")
    assert set(tensors) == {
        *("rnn_u.weight", "rnn_u.bias", "rnn_w.weight", "input_proj.weight", "input_proj.bias"),
        *("lm_head.0.linear.weight", "lm_head.0.linear.bias", "lm_head.1.linear.weight"),
        *("lm_head.1.linear.bias", "lm_head.2.weight"),
    }
    assert config["model_type"] == "recurrent_drafting_drafter"
    assert (config["exit_dim"], config["num_draft_layers"], config["rnn"]) == (5, 2, True)


def test_bad_writes_leave_nothing(tmp_path):
    _, shapes, config = CASES["eagle3"]
    params = fill(shapes)

    def refused(match, kind="eagle3", params=params, layout="", **changes):
        changed = {key: x for key, x in (config | changes).items() if x is not None}
        with pytest.raises(UserError, match=match) as caught:
            head_files.write(tmp_path / "new", kind, params, changed, layout=layout)
        assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()

    refused("eagle3 heads have no layout 'published'; there is eagle3, spec", layout="published")
    medusa = {"block": {"kernel": np.zeros((1, 1, D, D)), "bias": np.zeros((1, 1, D))}}
    refused("medusa heads have no layout 'eagle'; leave it out", "medusa", medusa, "eagle")
    refused("not those of eagle heads", "eagle")
    refused(
        r"not those of eagle3 heads \(layers.0.feature_norm",
        params=params | {"layers": {"0": {"attention": params["layers"]["0"]["attention"]}}},
    )
    refused("vocab_size is missing; heads with a draft vocabulary", vocab_size=None)
    refused(
        "draft_ids: the tokens .* must ascend, and 3 is followed by 0",
        draft_ids=IDS[[1, 0, 2, 3, 4, 5]],
    )
    refused("has the token 19, outside the vocabulary of 19", vocab_size=19)
    refused(r"draft_ids has the shape \[5\], and the head gives 6 logits", draft_ids=IDS[:5])
    refused("fc reads 3 taps, and config.json names 5 layers", taps=[1, 2, 3, 4, 5])
    refused("taps is .*; it must be a list of different layer numbers", taps=[1, 1, 2])
    refused("norm_output is 1; it must be true or false", norm_output=1)
    refused(
        "config.json must give num_attention_heads or head_dim",
        num_attention_heads=None,
    )
    refused("head_dim 3 is odd|cannot be split into attention heads", num_attention_heads=5)
    refused("rope type 'yarn' is not supported", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    refused("rms_norm_eps is 'x'", rms_norm_eps="x")
    wide = fill(CASES["eagle3 for a wider target"][1])
    del wide["embed"]
    refused("fc reads 36 values, which are not taps of width 8", params=wide)


def test_the_command(tmp_path, capsys):
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    kind, _, config = CASES["eagle3"]
    params = params_of("eagle3", np.float16)
    head_files.write(source, kind, params, config, layout="specforge")
    options = ["--kind=eagle3", "--layout=speculators"]
    assert convert_heads.main([source, target, *options, "--base_model=my/target"]) == 0
    out = capsys.readouterr().out
    assert "layer_ids: outputs of layers" in out and f"wrote {target}" in out
    head = head_files.read(target, "eagle3", dtype=np.float16)
    assert_same(head.params, params)
    assert head.config["base_model_name_or_path"] == "my/target"
    assert convert_heads.main([source, target, *options, "--norm_output=true"]) == 0
    assert head_files.read(target, "eagle3").config["norm_output"] is True
    capsys.readouterr()

    def refused(match, *argv):
        assert convert_heads.main(argv) == 2
        out, error = capsys.readouterr()
        assert error.startswith("specjax: ") and error.count("\n") == 1 and not out
        assert match in error

    refused("required: source, --kind; usage: python -m specjax.convert_heads")
    refused("invalid choice", source, target, "--kind=medusa2")
    refused("heads of kind 'medusa' have one layout", source, target, "--kind=medusa")
    both = ("--layout=eagle3", "--for=vllm")
    refused("vllm decides the layout", source, target, "--kind=eagle3", *both)
    refused(
        "eagle3 heads have no layout 'redrafter'",
        source,
        str(tmp_path / "c"),
        "--kind=eagle3",
        "--layout=redrafter",
    )
    refused("has eagle3 heads; give a directory of eagle heads", source, target, "--kind=eagle")
    refused("is both source and destination", source, source, "--kind=eagle3")
    refused("norm_output is for eagle3", source, target, "--kind=eagle", "--norm_output=true")
    assert not (tmp_path / "c").exists()
    with pytest.raises(UserError, match="heads of kind 'medusa' have one layout"):
        convert_heads.convert(source, target, "medusa")
