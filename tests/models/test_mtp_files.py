"""Files of multi-token prediction modules: names, whole models, and files that are refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil

import cases
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import convert_heads, drafters, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf, tensor_files
from specjax.models import lm as hf_lm
from specjax.types import ModelParams

VOCAB, WIDTH, LAYERS = 16, 16, 3
FRONTS = {"deepseek": "model.layers.3.", "mimo": "model.mtp_layers.0.", "qwen3": "mtp."}
OWN = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen3": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
LAYER = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


@pytest.fixture(scope="module")
def target():
    return testing.tiny(layers=LAYERS, width=WIDTH, vocab_size=VOCAB)


def drafter_of(target, modules=1, **keys):
    model, params = target
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "qk_norm": True}
    made = cases.random_heads("mtp_module", model, params, modules=modules, **shape, **keys)
    facts = dict(made.training.facts) | {"vocab_size": VOCAB}
    return jax.device_get(made.init_params(None)), facts


def written(target, folder, modules=1, layout="", **keys):
    params, facts = drafter_of(target, modules, **keys)
    head_files.write(folder, "mtp_module", params, facts, layout=layout)
    return params, load_file(folder / "model.safetensors")


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_names_and_the_way_back(target, tmp_path):
    """Exactly the released names; another order of concatenation and other norms are converted."""
    for layout, front in FRONTS.items():
        params, tensors = written(target, tmp_path / layout, 1, layout, recycled="raw")
        layer = f"{front}layers.0." if layout == "qwen3" else front
        names = {f"{front}{name}.weight" for name in OWN[layout]}
        assert set(tensors) == names | {f"{layer}{name}.weight" for name in LAYER}
        kernel = tensors[f"{front}{OWN[layout][2]}.weight"].T
        order = (1, 0) if layout == "mimo" else (0, 1)
        own = np.split(params["modules"]["0"]["fc"]["kernel"], 2)
        np.testing.assert_array_equal(kernel, np.concatenate([own[i] for i in order]))
        by = 1 if layout == "qwen3" else 0
        scale = params["modules"]["0"]["token_norm"]["scale"]
        np.testing.assert_allclose(tensors[f"{front}{OWN[layout][0]}.weight"], scale - by)
        head = head_files.read(tmp_path / layout, "mtp_module")
        assert head.config["hidden_first"] is (layout == "mimo")
        assert (head.config["recycled"], head.config["num_hidden_layers"]) == ("raw", LAYERS)
        made = drafters.make("mtp_module", target[0], model=tmp_path / layout)
        assert dict(made.training.facts)["hidden_first"] is (layout == "mimo")
        # Back to the first layout.
        convert_heads.convert(tmp_path / layout, tmp_path / "back", "mtp_module", "deepseek")
        back = head_files.read(tmp_path / "back", "mtp_module")
        same(back.params, params)
    _, tensors = written(target, tmp_path / "two", 2)
    assert {name.split(".")[2] for name in tensors} == {"3", "4"}


def as_whole_model(folder, config=None, tensors=lambda x: x, modules=2, layout="", target=None):
    """Modules among the tensors of their model, as they are released: no key is ours."""
    params, own = written(target, folder, modules, layout)
    raw = json.loads((folder / "config.json").read_text())
    for key in ("specjax", "hidden_first"):
        raw.pop(key, None)
    model = {"model.embed_tokens.weight": np.zeros((VOCAB, WIDTH), np.float32)}
    model |= {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float32)}
    raw |= {"model_type": "deepseek_v3", "architectures": ["Some"]} | (config or {})
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors(model | own), folder / "model.safetensors")
    return params


def ends(differ=False):
    """Copies of the model's ends in both modules."""
    draw = np.random.default_rng(0)
    table = draw.normal(size=(VOCAB, WIDTH)).astype(np.float32)

    def change(tensors):
        for i in (3, 4):
            tensors[f"model.layers.{i}.embed_tokens.weight"] = table
            tensors[f"model.layers.{i}.shared_head.head.weight"] = table + (differ and i == 4)
        return tensors

    return table, change


@pytest.mark.parametrize("layout", FRONTS)
def test_a_model_with_modules_is_loaded_as_a_target(target, tmp_path, layout):
    """The modules are left to the drafter, also when they are in another shard than their fc."""
    _, params = target
    config = testing.models.tiny_config(layers=LAYERS, width=WIDTH, vocab_size=VOCAB)
    hf.save(tmp_path / "a", config, params)
    _, tensors = written(target, tmp_path / "heads", 1, layout)
    own = load_file(tmp_path / "a" / "model.safetensors")
    fc = {name: x for name, x in tensors.items() if OWN[layout][2] in name}
    (tmp_path / "a" / "model.safetensors").unlink()
    rest = {name: x for name, x in tensors.items() if name not in fc}
    shards = {"x-1.safetensors": own | rest, "x-2.safetensors": fc}
    for name, each in shards.items():
        save_file(each, tmp_path / "a" / name)
    index = {"weight_map": {key: name for name, each in shards.items() for key in each}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    same(hf.load(tmp_path / "a").params, params)
    # A layer too many that is no module is refused as before.
    more = {name.replace("layers.0", f"layers.{LAYERS}"): x for name, x in own.items()}
    save_file(own | more | rest, tmp_path / "a" / "x-1.safetensors")
    index["weight_map"] |= dict.fromkeys(more, "x-1.safetensors")
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    if layout != "deepseek":
        with pytest.raises(UserError, match="tensors too many, first model.layers.3"):
            hf.load(tmp_path / "a")


def test_modules_inside_a_model(target, tmp_path):
    """Its own tensors are not read; switches that no file states are keys; copies of ends."""
    params = as_whole_model(tmp_path / "a", target=target)
    same(head_files.read(tmp_path / "a", "mtp_module").params, params)
    made = drafters.make("mtp_module", target[0], model=tmp_path / "a", recycled="raw")
    assert dict(made.training.facts)["recycled"] == "raw"
    table, change = ends()
    as_whole_model(tmp_path / "b", tensors=change, target=target)
    own = head_files.read(tmp_path / "b", "mtp_module").params
    np.testing.assert_array_equal(own["embed"]["embedding"], table)
    np.testing.assert_array_equal(own["head"]["kernel"], table.T)
    made = drafters.make("mtp_module", target[0], model=tmp_path / "b")
    facts = dict(made.training.facts) | {"vocab_size": VOCAB}
    head_files.write(tmp_path / "c", "mtp_module", own, facts)
    same(head_files.read(tmp_path / "c", "mtp_module").params, own)
    with pytest.raises(UserError, match="mimo has no place for an embedding or a head"):
        head_files.write(tmp_path / "d", "mtp_module", own, facts, layout="mimo")


def test_a_copy_of_the_target_with_modules_inside(target, tmp_path, capsys):
    """Both are read from the copy; for vLLM it is a MiMo, whose attention has biases."""
    model, params = target
    config = testing.models.tiny_config(layers=LAYERS, width=WIDTH, vocab_size=VOCAB)
    hf.save(tmp_path / "target", config, params)
    keys = {"hidden": "raw", "zero_first": True}
    made = cases.random_heads("mtp_module", model, params, **keys)
    facts = dict(made.training.facts) | {"vocab_size": VOCAB}
    own = jax.device_get(made.init_params(None))
    head_files.write(tmp_path / "heads", "mtp_module", own, facts)

    def run(name, *more, into="target"):
        args = [str(tmp_path / "heads"), str(tmp_path / name), "--kind=mtp_module", *more]
        return convert_heads.main([*args, f"--into={tmp_path / into}"])

    assert run("both", "--layout=qwen3") == 0 and run("engine", "--for=vllm") == 0
    for name in ("both", "engine"):
        whole = hf.load(tmp_path / name).params
        if name == "engine":
            for layer in whole["layers"].values():
                for part in "qkv":
                    assert not layer["attention"][part].pop("bias").any()
        same(whole, params)
        heads = head_files.read(tmp_path / name, "mtp_module")
        assert (heads.config["hidden"], heads.config["zero_first"]) == ("raw", True)
        if name == "both":
            same(heads.params, own)
    raw = json.loads((tmp_path / "engine" / "config.json").read_text())
    assert raw["architectures"] == ["MiMoForCausalLM"] and raw["num_nextn_predict_layers"] == 1
    index = json.loads((tmp_path / "engine" / "model.safetensors.index.json").read_text())
    assert index["weight_map"][f"model.layers.{LAYERS - 1}.self_attn.k_proj.bias"]
    # A bias in another shard than its weight is kept.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "engine", again)
    kept = load_file(again / "prediction_modules.safetensors")
    kept = {name: x + 1 for name, x in kept.items() if "mtp_layers" not in name}
    save_file(kept, again / "prediction_modules.safetensors")
    names = {key: x for key, x in index["weight_map"].items() if "mtp_layers" not in key}
    (again / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert run("biased", "--for=vllm", into="again") == 0
    biases = hf.load(tmp_path / "biased").params["layers"][0]["attention"]["q"]["bias"]
    assert (np.asarray(biases) == 1).all()
    # Modules twice, another target, a directory that exists, heads that lie elsewhere.
    other = dataclasses.replace(config, intermediate_size=40)
    hf.save(tmp_path / "other", other, hf_lm.init_params(other, jax.random.key(0)))
    for problem, args in {
        "has heads already (first mtp.": ("new", "--layout=qwen3", "both"),
        "intermediate_size is 40, and that of the modules is": ("new", "--layout=mimo", "other"),
        "both exists; name a new directory": ("both", "--layout=qwen3", "target"),
        "none is no directory": ("new", "--layout=mimo", "none"),
    }.items():
        capsys.readouterr()
        assert run(*args[:2], into=args[2]) == 2
        error = capsys.readouterr().err
        assert problem in error and error.count("\n") == 1 and not (tmp_path / "new").exists()
    # Tensors of 8 bits, and a full disk, while a shard is copied or written.
    eight = shutil.copytree(tmp_path / "target", tmp_path / "eight") / "model.safetensors"
    data = eight.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    one = header["model.norm.weight"]
    header["model.norm.weight"] = one | {"dtype": "F8_E4M3", "shape": [4 * WIDTH]}
    text = json.dumps(header).encode()
    eight.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    assert run("new", "--layout=qwen3", into="eight") == 2
    error = capsys.readouterr().err
    assert "model.norm.weight is stored as F8_E4M3; supported: " in error
    assert error.count("\n") == 1 and not (tmp_path / "new").exists()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = sorted(tmp_path.iterdir())
    for place in (shutil, "copyfile"), (tensor_files, "write"), (convert_heads.files, "write_json"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*place, full)
            assert run("new", "--layout=qwen3") == 2
        error = capsys.readouterr().err
        assert "No space left on device" in error and error.count("\n") == 1, place
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(UserError, match="eagle heads do not lie inside their target; into is for"):
        convert_heads.convert(tmp_path / "heads", tmp_path / "new", "eagle", into=tmp_path)


def added(name, shape=(2, 2)):
    return lambda tensors: tensors | {name: np.zeros(shape, np.float32)}


def removed(name):
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


LAST = "model.layers.4."
REFUSED = {
    "latent attention": (
        {"tensors": added(f"{LAST}self_attn.kv_a_proj_with_mqa.weight")},
        r"latent attention \(MLA\) \(model.layers.4.self_attn.kv_a_proj_with_mqa.weight\)",
    ),
    "experts": (
        {"tensors": added(f"{LAST}mlp.experts.0.up_proj.weight")},
        r"the mtp_module layer has experts \(model.layers.4.mlp.experts.0.up_proj.weight\)",
    ),
    "quantised": (
        {"tensors": added(f"{LAST}eh_proj.weight_scale_inv")},
        "has quantised weights",
    ),
    "gated attention": (
        {"config": {"attn_output_gate": True}},
        "attn_output_gate True is not supported; supported: False",
    ),
    "windows": (
        {"config": {"use_sliding_window": True}},
        "use_sliding_window True is not supported",
    ),
    "partly rotated": (
        {"config": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 is not supported; supported: 1",
    ),
    "ends of their own": (
        {"tensors": ends(differ=True)[1]},
        "model.layers.4.shared_head.head.weight is not that of the first module",
    ),
    "number": (
        {"config": {"num_nextn_predict_layers": 1}},
        "num_nextn_predict_layers is 1, and the tensors have 2 modules; correct config.json",
    ),
    "missing": (
        {"tensors": removed(f"{LAST}enorm.weight")},
        "lacks 1 of 30 tensors, first model.layers.4.enorm.weight; copy it again",
    ),
    "unknown": (
        {"tensors": added(f"{LAST}more.weight")},
        "has 1 tensors that are not of mtp_module heads, first model.layers.4.more.weight",
    ),
    "none": (
        {"tensors": lambda x: {"model.norm.weight": np.zeros(3, np.float32)}},
        "has no mtp_module heads; its first tensor is model.norm.weight",
    ),
    "switch": (
        {"config": {"specjax": {"hidden": "final"}}},
        "specjax.hidden is 'final'; it must be one of",
    ),
}


@pytest.mark.parametrize("label", REFUSED)
def test_refused(target, tmp_path, label):
    changes, match = REFUSED[label]
    as_whole_model(tmp_path / "a", target=target, **changes)
    with pytest.raises(UserError, match=match) as caught:
        drafters.make("mtp_module", target[0], model=tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_refused_to_write(target, tmp_path):
    params, facts = drafter_of(target, 2)

    def refused(match, own=params, layout="", **changes):
        config = {key: value for key, value in (facts | changes).items() if value is not None}
        with pytest.raises(UserError, match=match) as caught:
            head_files.write(tmp_path / "a", "mtp_module", own, config, layout=layout)
        assert "\n" not in str(caught.value) and not (tmp_path / "a").exists()

    refused("the layout qwen3 has one module, and there are 2", layout="qwen3")
    refused("have no layout 'glm'; there is deepseek, mimo, qwen3", layout="glm")
    refused("num_hidden_layers is missing; the names of the layout", num_hidden_layers=None)
    refused("the parameters are not those of mtp_module heads", own={"fc": np.zeros(3)})


@pytest.mark.parametrize("experts", [0, 4])
def test_modules_of_qwen3_next_are_computed_as_transformers_computes_its_layers(tmp_path, experts):
    """Gate, part of a head rotated, norms around one, and experts; and back to the same tensors."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = transformers.Qwen3NextConfig(
        **{"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 8},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        layer_types=["linear_attention", "full_attention"],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 5},
        **{"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        shared_expert_intermediate_size=10,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
        },
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    )
    torch.manual_seed(0)
    parts = {
        "fc": torch.nn.Linear(2 * WIDTH, WIDTH, bias=False),
        "layers.0": modeling.Qwen3NextDecoderLayer(config, 1),
        **{name: modeling.Qwen3NextRMSNorm(WIDTH) for name in OWN["qwen3"] if name != "fc"},
    }
    tensors = {}
    for module, own in parts.items():
        for name, parameter in own.named_parameters():
            with torch.no_grad():
                parameter.copy_(0.4 * torch.randn(parameter.shape))
            tensors[f"mtp.{module}.{name}"] = parameter.detach().numpy()
    for name in [name for name in tensors if ".experts." in name]:
        for i, each in enumerate(tensors.pop(name)):
            front, _, last = name.rpartition(".")
            both = {"gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
            for part, half in zip(both, np.split(each, len(both)), strict=True):
                tensors[f"{front}.{i}.{part}.weight"] = np.ascontiguousarray(half)
    modeling.Qwen3NextForCausalLM(config).save_pretrained(tmp_path / "a")
    whole = load_file(tmp_path / "a" / "model.safetensors")
    save_file(whole | tensors, tmp_path / "a" / "model.safetensors")
    loaded = hf.load(tmp_path / "a")
    drafter = drafters.make("mtp_module", loaded.lm, model=tmp_path / "a", hidden="normed")
    network = drafter.training.loss.args[0]
    params = ModelParams(loaded.params, drafter.init_params(None))
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB, (2, 7))
    features = draw.normal(size=(2, 7, WIDTH)).astype(np.float32)
    fed, _ = network.apply(params, tokens, features, network.init_cache(2, 0))
    with torch.no_grad():
        embedded = torch.tensor(np.asarray(loaded.lm.embed(loaded.params, tokens)))
        read = parts["pre_fc_norm_embedding"](embedded), parts["pre_fc_norm_hidden"]
        x = parts["fc"](torch.cat([read[0], read[1](torch.tensor(features))], -1))
        places = torch.arange(7)[None].repeat(2, 1)
        angles = modeling.Qwen3NextRotaryEmbedding(config)(x, places)
        mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
        x = parts["layers.0"](x, position_embeddings=angles, attention_mask=mask)
        expected = parts["norm"](x).numpy()
    np.testing.assert_allclose(fed.hidden, expected, atol=2e-4)
    # Written alone, and read again.
    facts = dict(drafter.training.facts) | {"vocab_size": VOCAB}
    head_files.write(tmp_path / "b", "mtp_module", params.draft, facts)
    back = load_file(tmp_path / "b" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_allclose(back[name], value, atol=1e-6)
    same(head_files.read(tmp_path / "b", "mtp_module").params, params.draft)
    with pytest.raises(UserError, match="layout mimo has no place for a gate after the attention"):
        head_files.write(tmp_path / "c", "mtp_module", params.draft, facts, layout="mimo")
