"""EAGLE and ReDrafter files of other programs: every dialect of config.json."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from eagle_file_cases import (
    IDS,
    LLAMA3,
    PUBLISHED,
    SPECFORGE,
    SPECULATORS,
    D,
    H,
    V,
    W,
    assert_refused,
    released_eagle,
    released_eagle3,
    released_layer,
    store,
)
from safetensors.numpy import save_file

from specjax.drafters.files import head_files

pytestmark = pytest.mark.fast
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


# The files of the authors -------------------------------------------------------------------------


def test_eagle_of_pytorch(torch, tmp_path):
    """pytorch_model.bin with the names of the authors; the concatenation is [token ; feature]."""
    fc = torch.nn.Linear(2 * D, D)
    tensors = released_layer("layers.0", norms=())
    state = {name: torch.from_numpy(x) for name, x in tensors.items()}
    state |= {f"fc.{name}": x for name, x in fc.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"vocab_size": 3}))
    head = head_files.read(tmp_path, "eagle")
    assert head.config["vocab_size"] is None, "no tensor shows it"
    assert head.config["rope_theta"] == 500000.0 and head.config["head_dim"] == H
    token, feature = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    expected = fc(torch.from_numpy(np.concatenate([token, feature]))).detach().numpy()
    kernel, bias = (np.asarray(head.params["fc"][name]) for name in ("kernel", "bias"))
    np.testing.assert_allclose(
        token @ kernel[:D] + feature @ kernel[D:] + bias, expected, atol=1e-5
    )
    layer = head.params["layers"]["0"]
    assert set(layer) == {"attention", "mlp_norm", "mlp"}
    got = layer["attention"]["o"]["kernel"]
    np.testing.assert_array_equal(got, tensors["layers.0.self_attn.o_proj.weight"].T)


def test_eagle3_of_pytorch(torch, tmp_path):
    tensors = released_eagle3()
    torch.save({k: torch.from_numpy(x) for k, x in tensors.items()}, tmp_path / "pytorch_model.bin")
    config = {k: x for k, x in PUBLISHED.items() if k != "rope_theta"} | {"draft_vocab_size": W}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = head_files.read(tmp_path, "eagle3")
    assert "taps" not in head.config, "the authors' files do not name the layers"
    assert head.config["read_as"] == {
        "dialect": "published",
        "layer_ids": "not in the file",
        "norm_output": "not in the file",
    }
    assert head.config["rope_theta"] == 10000.0, "the authors' base, never the target's"
    assert head.config["norm_output"] is False and head.config["norm_before_residual"] is False
    assert (head.config["vocab_size"], head.config["target_hidden_size"]) == (V, D)
    np.testing.assert_array_equal(head.config["draft_ids"], IDS)
    first = head.params["layers"]["0"]
    np.testing.assert_array_equal(
        first["token_norm"]["scale"], tensors["midlayer.input_layernorm.weight"]
    )
    np.testing.assert_array_equal(
        first["feature_norm"]["scale"], tensors["midlayer.hidden_norm.weight"]
    )
    assert first["attention"]["q"]["kernel"].shape[0] == 2 * D
    np.testing.assert_array_equal(head.params["head"]["kernel"], tensors["lm_head.weight"].T)


def test_redrafter_of_pytorch(torch, tmp_path):
    """The authors' module and the parameters give the same logits."""
    width = 12

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return x + torch.nn.functional.silu(self.linear(x))

    class Drafter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.input_proj = torch.nn.Linear(2 * D, width)
            last = torch.nn.Linear(width, V, bias=False)
            self.lm_head = torch.nn.Sequential(Block(), Block(), last)
            self.rnn_u, self.rnn_w = torch.nn.Linear(D, D), torch.nn.Linear(D, D, bias=False)

    module = Drafter()
    save_file(
        {k: x.numpy() for k, x in module.state_dict().items()}, tmp_path / "model.safetensors"
    )
    config = {"model_type": "recurrent_drafting_drafter", "hidden_size": D, "vocab_size": V}
    config |= {"exit_dim": width, "num_draft_layers": 2, "rnn": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = head_files.read(tmp_path, "redrafter")
    assert head.config["hidden_size"] == D and head.config["num_draft_layers"] == 2

    def linear(part, x):
        part = {key: np.asarray(value) for key, value in part.items()}
        return x @ part["kernel"] + part.get("bias", 0)

    def silu(x):
        return x / (1 + np.exp(-x))

    feature, state, token = np.random.default_rng(0).normal(size=(3, D)).astype(np.float32)
    p = head.params
    new = silu(linear(p["rnn"]["w"], token) + linear(p["rnn"]["u"], state))
    x = linear(p["input_proj"], np.concatenate([feature, new]))
    for i in range(2):
        x = x + silu(linear(p["block"][str(i)], x))
    with torch.no_grad():
        t = [torch.from_numpy(value) for value in (feature, state, token)]
        s = torch.nn.functional.silu(module.rnn_w(t[2]) + module.rnn_u(t[1]))
        expected = module.lm_head(module.input_proj(torch.cat([t[0], s]))).numpy()
    np.testing.assert_allclose(linear(p["head"], x), expected, atol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rnn": False}))
    assert_refused("rnn is false, and the tensors have a recurrent layer", tmp_path, "redrafter")
    assert_refused("has redrafter heads; give a directory of eagle heads", tmp_path, "eagle")


# The dialects -------------------------------------------------------------------------------------


def test_specforge(tmp_path):
    """An embedding, and default maps of ones and zeros, in a head of all tokens."""
    tensors = released_eagle3(maps=False)
    rng = np.random.default_rng(0)
    tensors["lm_head.weight"] = rng.normal(size=(V, D)).astype(np.float32)
    tensors |= {"t2d": np.ones(V, np.bool_), "d2t": np.zeros(V, np.int64)}
    tensors["embed_tokens.weight"] = rng.normal(size=(V, D)).astype(np.float32)
    head = head_files.read(store(tmp_path, tensors, SPECFORGE | {"draft_vocab_size": V}), "eagle3")
    assert "draft_ids" not in head.config and head.config["vocab_size"] == V
    assert head.params["embed"]["embedding"].shape == (V, D)
    assert head.config["taps"] == [1, 4, 7]
    assert head.config["read_as"]["layer_ids"] == "outputs of layers"


def test_speculators(tmp_path):
    config = copy.deepcopy(SPECULATORS)
    layer = config["transformer_layer_config"]
    # The newer spelling of transformers 5.
    layer["rope_parameters"] = {"rope_theta": layer.pop("rope_theta"), **LLAMA3}
    head = head_files.read(store(tmp_path, released_eagle3("layers.0"), config), "eagle3")
    assert head.config["rope_theta"] == 500000.0 and head.config["rope_scaling"] == LLAMA3
    assert head.config["taps"] == [1, 4, 7], "entries of hidden_states are larger by 1"
    assert head.config["norm_before_residual"] is True and head.config["norm_output"] is False
    assert head.config["base_model_name_or_path"] == "some/target"
    assert head.config["hidden_size"] == D
    # What equals the defaults of transformers is not in the file.
    tensors = released_eagle3("layers.0", qk_norm=True)
    config["transformer_layer_config"] = {"model_type": "qwen3", "vocab_size": V}
    head = head_files.read(store(tmp_path / "b", tensors, config), "eagle3")
    assert (head.config["head_dim"], head.config["num_attention_heads"]) == (H, 4)
    assert head.config["rope_theta"] == 10000.0 and head.config["rms_norm_eps"] == 1e-6
    q_norm = head.params["layers"]["0"]["attention"]["q_norm"]["scale"]
    np.testing.assert_array_equal(q_norm, tensors["layers.0.self_attn.q_norm.weight"])
    # 32 attention heads are a default of transformers too.
    config["transformer_layer_config"] = {"vocab_size": V}
    assert_refused(
        "cannot be split into attention heads",
        store(tmp_path / "c", released_eagle3("layers.0"), config),
    )


def test_vllm_and_a_prefix(tmp_path):
    """Flat keys of vLLM, and programs that put "model." in front of the names."""
    tensors = {
        f"model.{k}" if k[:2] in ("fc", "mi", "no") else k: x for k, x in released_eagle3().items()
    }
    tensors["model.midlayer.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    config = PUBLISHED | {"architectures": ["Eagle3LlamaForCausalLM"], LAYER_IDS: [1, 4, 7]}
    head = head_files.read(store(tmp_path, tensors, config | {"norm_output": True}), "eagle3")
    assert head.config["taps"] == [0, 3, 6] and head.config["norm_output"] is True
    tensors["norm.weight"] = tensors["model.norm.weight"]
    assert_refused('tensors with and without "model." in front', store(tmp_path, tensors, config))


@pytest.mark.parametrize(
    ("ids", "taps", "note"),
    [
        ([1, 46, 90], [1, 46, 90], "outputs of layers"),
        ([2, 47, 91], [1, 46, 90], "entries of hidden_states"),
        ([24, 30, 36], [23, 29, 35], "entries of hidden_states"),
    ],
)
def test_layer_ids_of_two_conventions(tmp_path, ids, taps, note):
    """In "LlamaForCausalLMEagle3" a list that begins with 1 numbers outputs of layers."""
    config = SPECFORGE | {"eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True}}
    head = head_files.read(store(tmp_path, released_eagle3(), config), "eagle3")
    assert head.config["taps"] == taps and head.config["read_as"]["layer_ids"] == note
    config = SPECULATORS | {LAYER_IDS: ids}
    head = head_files.read(store(tmp_path, released_eagle3("layers.0"), config), "eagle3")
    assert head.config["taps"] == [i - 1 for i in ids]


def test_norm_output_has_two_meanings(tmp_path):
    old = store(tmp_path / "old", released_eagle3(), SPECFORGE | {"norm_output": True})
    head = head_files.read(old, "eagle3")
    assert head.config["norm_output"] is False
    assert head.config["read_as"]["norm_output"].startswith("true is plain EAGLE-3 (SpecForge")
    stated = SPECFORGE | {"norm_output": True, "specjax": {"norm_output": True}}
    head = head_files.read(store(tmp_path / "stated", released_eagle3(), stated), "eagle3")
    assert head.config["norm_output"] is True
    for config, first in ((SPECULATORS, "layers.0"), (PUBLISHED, "midlayer")):
        new = store(tmp_path / "new", released_eagle3(first), config | {"norm_output": True})
        head = head_files.read(new, "eagle3")
        assert head.config["norm_output"] is True
        assert head.config["read_as"]["norm_output"] == "true recycles the normed state"


def test_biases_of_qwen2(tmp_path):
    """Biases of q, k and v only: that of o is zero."""
    tensors = released_eagle(bias="qkv")
    head = head_files.read(store(tmp_path, tensors, PUBLISHED), "eagle")
    attention = head.params["layers"]["0"]["attention"]
    np.testing.assert_array_equal(attention["q"]["bias"], tensors["layers.0.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(attention["o"]["bias"], np.zeros(D))
    assert head.config["attention_bias"] is True
