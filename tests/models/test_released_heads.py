"""Head files of other programs: the results of PyTorch's modules, and every released format."""

from __future__ import annotations

import json

import numpy as np
import pytest
from head_file_cases import A, C, D, F, V, assert_same, file_of, fill, linear, rewrite, write_heads
from safetensors.numpy import load_file, save_file

from specjax.drafters.files import head_files
from specjax.errors import UserError

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def medusa_module(torch, heads, layers):
    """The official heads. As there, the multiplied list makes all blocks of a head one module."""

    class Block(torch.nn.Module):
        def __init__(self, conditions=0):
            super().__init__()
            self.linear = torch.nn.Linear(D * (conditions + 1), D)
            if conditions:
                self.res_connection = torch.nn.Linear(D * (conditions + 1), D)

        def forward(self, x):
            skip = self.res_connection(x) if hasattr(self, "res_connection") else x
            return skip + torch.nn.functional.silu(self.linear(x))

    def head(_):
        return torch.nn.Sequential(*([Block()] * layers), torch.nn.Linear(D, V, bias=False))

    return Block, torch.nn.ModuleList(map(head, range(heads)))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_of_pytorch(torch, tmp_path, shared):
    """Released .pt heads: sizes from the tensors, transposed kernels, detection of equal blocks."""
    Block, heads = medusa_module(torch, 5, 3)
    if not shared:
        heads[4][1] = Block()
    torch.save(heads.state_dict(), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": "lmsys/x"})
    )
    head = head_files.read(tmp_path, "medusa")
    assert (head.config["medusa_num_heads"], head.config["medusa_num_layers"]) == (5, 3)
    assert (head.config["hidden_size"], head.config["vocab_size"]) == (D, V)
    assert head.config["tied"] is shared and head.config["base_model_name_or_path"] == "lmsys/x"
    x = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    for i, module in enumerate(heads):
        expected, hidden = module(torch.from_numpy(x)).detach().numpy(), x
        for j in range(3):
            block = {key: np.asarray(value[i, j]) for key, value in head.params["block"].items()}
            hidden = hidden + silu(hidden @ block["kernel"] + block["bias"])
        np.testing.assert_allclose(
            hidden @ np.asarray(head.params["head"]["kernel"][i]), expected, atol=1e-5
        )


def test_hydra_of_pytorch(torch, tmp_path):
    """Released Hydra++: dropout between the blocks, a repeated module, a whole Llama as prefix."""
    Block, _ = medusa_module(torch, 0, 0)
    prefix = {
        "embed_tokens.weight": torch.zeros(V, D),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
        "layers.0.self_attn.q_proj.weight": torch.randn(A, D),
        "layers.0.self_attn.k_proj.weight": torch.randn(C, D),
        "layers.0.self_attn.v_proj.weight": torch.randn(C, D),
        "layers.0.self_attn.o_proj.weight": torch.randn(D, A),
        "layers.0.mlp.gate_proj.weight": torch.randn(F, D),
        "layers.0.mlp.up_proj.weight": torch.randn(F, D),
        "layers.0.mlp.down_proj.weight": torch.randn(D, F),
        "layers.0.input_layernorm.weight": torch.randn(D),
        "layers.0.post_attention_layernorm.weight": torch.randn(D),
        "norm.weight": torch.randn(D),
    }
    state = {f"prefix_embeding_layer.{name}": tensor for name, tensor in prefix.items()}
    modules = []
    for i in range(3):
        drop, repeated = torch.nn.Dropout(0.2), Block()
        modules.append(torch.nn.Sequential(drop, Block(i + 1), *([drop, repeated] * 3)))
        last = torch.nn.Sequential(drop, torch.nn.Linear(D, V))
        state |= {
            f"hydra_mlp.{i}.{name}": tensor for name, tensor in modules[-1].state_dict().items()
        }
        state |= {f"hydra_lm_head.{i}.{name}": tensor for name, tensor in last.state_dict().items()}
        modules[-1] = torch.nn.Sequential(modules[-1], last).eval()
    torch.save(state, tmp_path / "hydra_lm_head.pt")
    head = head_files.read(tmp_path, "hydra")
    assert (head.config["hydra_num_heads"], head.config["hydra_num_layers"]) == (3, 4)
    assert head.config["tied"] is True and head.config["hydra_head_arch"] == "prefix-mlp"
    for i, module in enumerate(modules):
        x = np.random.default_rng(i).normal(size=(2, (i + 2) * D)).astype(np.float32)
        expected, mine = module(torch.from_numpy(x)).detach().numpy(), head.params["mlp"][str(i)]

        def apply(x, mine):
            return x @ np.asarray(mine["kernel"]) + np.asarray(mine["bias"])

        hidden = apply(x, mine["skip"]) + silu(apply(x, mine["in"]))
        for j in range(3):
            hidden = hidden + silu(apply(hidden, mine["blocks"][str(j)]))
        mine = head.params["head"][str(i)]
        np.testing.assert_allclose(apply(hidden, mine), expected, atol=1e-5)
    got = head.params["prefix"]["attention"]["o"]["kernel"]
    np.testing.assert_array_equal(got, prefix["layers.0.self_attn.o_proj.weight"].numpy().T)
    np.testing.assert_array_equal(
        head.params["prefix"]["norm"]["scale"], prefix["norm.weight"].numpy()
    )


def test_medusa_in_a_merged_model(tmp_path):
    """Shards with the heads in the second; only the backbone's own tensors are ignored."""
    params = write_heads(tmp_path / "heads", "medusa")
    tensors = {
        f"medusa_head.{name}": x for name, x in load_file(file_of(tmp_path / "heads")).items()
    }
    backbone = {
        name: np.zeros((2, 2), np.float32) for name in ("model.norm.weight", "lm_head.weight")
    }
    path = tmp_path / "merged"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000}))
    shards = {
        "model-00001-of-00002.safetensors": backbone,
        "model-00002-of-00002.safetensors": tensors,
    }
    for file, part in shards.items():
        save_file(part, path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = head_files.read(path, "medusa")
    assert_same(head.params, params)
    assert head.config["vocab_size"] == V and head.config["model_type"] == "medusa"
    save_file(
        {**tensors, "other.weight": backbone["lm_head.weight"]},
        path / "model-00002-of-00002.safetensors",
    )
    with pytest.raises(
        UserError, match="1 tensors that are not of medusa heads, first other.weight"
    ):
        head_files.read(path, "medusa")
    (path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model-00001-of-00002.safetensors"):
        head_files.read(path, "medusa")


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_medusa_heads_of_vllm(tmp_path, prefix, bias):
    params = fill({"block": linear(2, 3, D, D), "head": {"kernel": (2, D, V)}})
    tensors = {}
    for i in range(2):
        for j in range(3):
            tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = np.ascontiguousarray(
                params["block"]["kernel"][i, j].T
            )
            if bias:
                tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = params["block"]["bias"][i, j]
        tensors[f"{prefix}lm_heads.{i}.weight"] = np.ascontiguousarray(
            params["head"]["kernel"][i].T
        )
    if not bias:
        params["block"]["bias"] = np.zeros_like(params["block"]["bias"])

    def store(**more):
        save_file(tensors | more, tmp_path / "model.safetensors")

    store()
    assert_same(head_files.read(tmp_path, "medusa").params, params)
    store(**{f"{prefix}token_map": np.arange(3)})
    assert_same(head_files.read(tmp_path, "medusa").params, params)
    store(**{f"{prefix}token_map": np.arange(V)})
    with pytest.raises(UserError, match=f"heads for the {V} tokens of its token_map"):
        head_files.read(tmp_path, "medusa")
    del tensors[f"{prefix}lm_heads.1.weight"]
    store()
    with pytest.raises(UserError, match="lacks 1 of .* first lm_heads.1.weight"):
        head_files.read(tmp_path, "medusa")
    (tmp_path / "config.json").write_text(json.dumps({"original_lm_head": True}))
    assert "head" not in head_files.read(tmp_path, "medusa").params


def test_tied_speculators(tmp_path):
    """The copies in a tied speculator are optional; stages that differ are never tied."""
    once = write_heads(tmp_path / "tied", "tied speculator")
    path = tmp_path / "full"
    params = {"emb": np.repeat(once["emb"], 4, 0), "proj_in": once["proj_in"]}
    params |= {"ln": {key: np.repeat(x, 4, 0) for key, x in once["ln"].items()}}
    params |= {
        name: {str(i): once[name]["0"] for i in range(count)}
        for name, count in (("head", 4), ("proj", 3))
    }
    head_files.write(path, "mlp_speculator", params, {"scale_input": True})
    assert_same(head_files.read(path, "mlp_speculator").params, params)

    def reconfigure(**changes):
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | changes))

    reconfigure(tie_weights=True, n_predict=9)
    head = head_files.read(path, "mlp_speculator")
    assert_same(head.params, once)
    assert (
        head.config["n_predict"] == 4
        and head.config["tie_weights"] is True
        and head.config["scale_input"] is True
    )
    rewrite(
        path, lambda tensors: {name.removeprefix("speculator."): x for name, x in tensors.items()}
    )
    assert_same(head_files.read(path, "mlp_speculator").params, once)
    rewrite(path, lambda tensors: tensors | {"ln.3.bias": tensors["ln.3.bias"] + 1})
    head = head_files.read(path, "mlp_speculator")
    assert head.config["tie_weights"] is False and head.params["emb"].shape[0] == 4
    (tmp_path / "tied" / "config.json").unlink()
    with pytest.raises(
        UserError, match="n_predict is None; config.json must give the number of tied stages"
    ):
        head_files.read(tmp_path / "tied", "mlp_speculator")
