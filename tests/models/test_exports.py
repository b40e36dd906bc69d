"""What other programs need of exported heads: keys and tensors, and refusals of ``--for``.

Each assertion stands for something that kept an engine from loading the heads, or made it draft
wrongly without an error; experiments/peers/heads.py runs the engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_file_cases import EAGLE3, IDS, LAYER, D, N, V, W, eagle, eagle3, layer
from head_file_cases import SHAPES, assert_same, fill
from safetensors.numpy import load_file, save_file

from specjax import convert_heads
from specjax.drafters.files import codec, head_files, probe
from specjax.errors import UserError

pytestmark = pytest.mark.fast

R = 4


@pytest.fixture(autouse=True)
def arrays_of_numpy(monkeypatch):
    """Reading compiles a program for each shape otherwise."""
    monkeypatch.setattr(jnp, "asarray", np.asarray)


TAPS = [1, 4, 6]  # the default of 10 layers


def block(
    markov=False,
    gru=False,
    mask=False,
    head=False,
    conv=False,
    selector=False,
    refiner=False,
    **options,
):
    """The shapes of a block drafter."""
    options = {"qk_norm": True} | options
    shapes = {
        "fc": {"kernel": (N * D, D)},
        "hidden_norm": {"scale": (D,)},
        "norm": {"scale": (D,)},
        "layers": {"0": layer(**options, attention_norm=True)},
    }
    if markov:
        shapes["markov"] = {"table": (V, R), "out": {"kernel": (R, V)}}
    if gru:
        shapes["gru"] = {"w": (D, 3 * R), "u": (R, 3 * R)}
        shapes["prefix"] = {"in": {"kernel": (D + R, R)}, "out": {"kernel": (R, V)}}
    if conv:
        # Two taps, groups of two channels.
        own = {"base": (2, 2, D), "project": {"kernel": (D, 2 * 2 * D // 2)}}
        shapes["layers"]["0"] |= {"attention_conv": own, "mlp_conv": own}
    if selector:
        shapes["selector"] = {"before": (V, R), "after": (V, R), "hidden": {"kernel": (D, R)}}
    if refiner:
        maps = {"hidden": (D, R), "mean": (D, R), "in": (3 * R, R), "readout": (R, V)}
        maps |= {"gate": (R, 3 * R), "up": (R, 3 * R), "down": (3 * R, R)}
        shapes["refiner"] = {name: {"kernel": size} for name, size in maps.items()}
        shapes["refiner"] |= {"table": (V, R), "mix": (R, 5, 5)}
    if mask:
        shapes["mask"] = (D,)
    return shapes | ({"head": {"kernel": (D, W)}} if head else {})


def module(**options):
    norms = {name: {"scale": (D,)} for name in ("token_norm", "feature_norm", "norm")}
    layers = {"0": layer(**options, attention_norm=True)}
    return {"modules": {"0": {"fc": {"kernel": (2 * D, D)}, **norms, "layers": layers}}}


BLOCK = LAYER | {"block_size": 5, "target_layer_ids": [1, 3, 4], "vocab_size": V}
BLOCK |= {"sample_from_anchor": False, "mask_token_id": 2, "base_model_name_or_path": "some/model"}
PARALLEL = {"parallel": 4, "mask_token_id": 2}
RAW = LAYER | {"hidden": "raw", "zero_first": True, "num_hidden_layers": 3}
MASKED = {"mask_hidden": (1, 1, N * D)}
PLAIN = EAGLE3 | {"taps": TAPS, "vocab_size": V}
REDUCED = PLAIN | {"draft_ids": IDS}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4}
# Name -> kind, shapes, keys of config.json.
HEADS = {
    "medusa": (*SHAPES["medusa"], {}),
    "medusa without a head": (*SHAPES["medusa without a head"], {}),
    "speculator": (*SHAPES["speculator"], {}),
    "eagle": ("eagle", eagle(), LAYER | {"vocab_size": V}),
    "eagle without bias": ("eagle", eagle(fc_bias=False), LAYER | {"vocab_size": V}),
    "eagle of Qwen3": ("eagle", eagle(fc_bias=False, qk_norm=True), LAYER),
    "eagle with shift 0": ("eagle", eagle(fc_bias=False), LAYER | {"shift": 0}),
    "eagle3": ("eagle3", eagle3(), REDUCED),
    "eagle3 of all tokens": ("eagle3", eagle3(width=V), PLAIN),
    "eagle3 of other taps": ("eagle3", eagle3(), REDUCED | {"taps": [0, 2, 5]}),
    "eagle3 of 2 taps": ("eagle3", eagle3(taps=2), REDUCED | {"taps": [1, 2]}),
    "eagle3 of 2 layers": ("eagle3", eagle3(2), REDUCED),
    "eagle3.1": ("eagle3", eagle3(fc="fc_norm"), REDUCED | {"norm_output": True}),
    "eagle3 before": ("eagle3", eagle3(), REDUCED | {"norm_before_residual": True}),
    "p-eagle": ("eagle3", eagle3(width=V) | MASKED, PLAIN | PARALLEL),
    "dflash": ("block_head", block(), BLOCK),
    "dflash of Llama": ("block_head", block(qk_norm=False), BLOCK),
    "dflash, anchor": ("block_head", block(), BLOCK | {"sample_from_anchor": True}),
    "dflash, sliding": ("block_head", block(), BLOCK | SLIDING),
    "dflash, causal": ("block_head", block(), BLOCK | SLIDING | {"causal_sliding": True}),
    "dflash, causal, with a mask": (
        "block_head",
        block(mask=True),
        BLOCK | SLIDING | {"causal_sliding": True, "mask_token_id": None},
    ),
    "dflash with a mask": ("block_head", block(mask=True), BLOCK | {"mask_token_id": None}),
    "dflash with a head": ("block_head", block(head=True), BLOCK | {"draft_ids": IDS}),
    "jetspec": ("block_head", block(), BLOCK | {"causal_head": True}),
    "dspark": ("block_head", block(markov=True), BLOCK | {"sample_from_anchor": True}),
    "dspark of masks": ("block_head", block(markov=True), BLOCK),
    "domino": ("block_head", block(gru=True), BLOCK | {"pure_draft_prefix_len": 1}),
    "dflash2": ("block_head", block(conv=True, selector=True), BLOCK | {"selector_top_k": 3}),
    "xpress": ("block_head", block(refiner=True), BLOCK),
    "convolutions alone": ("block_head", block(conv=True), BLOCK),
    "mtp": ("mtp_module", module(bias=True), RAW),
    "mtp of normed states": ("mtp_module", module(bias=True), RAW | {"hidden": "normed"}),
    "mtp of Llama": ("mtp_module", module(bias=False), RAW),
    "mtp of Qwen3": ("mtp_module", module(bias=False, qk_norm=True), RAW),
}


def write(path, name, layout=""):
    """(config.json, tensors) of heads that are written."""
    kind, shapes, config = HEADS[name]
    head_files.write(path, kind, fill(shapes), config, layout=layout)
    return of(path)


def of(path):
    file = next(path.glob("*.safetensors"))
    return json.loads((path / "config.json").read_text()), load_file(file)


def test_heads_on_the_last_feature(tmp_path):
    config, tensors = write(tmp_path / "m", "medusa")
    # Without this key vLLM drops the biases of the blocks.
    assert config["medusa_fc_bias"] is True and "0.0.linear.bias" in tensors
    assert (config["hidden_size"], config["vocab_size"]) == (4, 7)
    config, _ = write(tmp_path / "s", "speculator")
    assert config["top_k_tokens_per_head"] == [1] * config["n_predict"]
    kind, shapes, _ = HEADS["speculator"]
    for given, expected in (([4, 3, 2], [4, 3, 2]), ([5, 4], [1, 1, 1])):
        head_files.write(tmp_path / "s", kind, fill(shapes), {"top_k_tokens_per_head": given})
        assert of(tmp_path / "s")[0]["top_k_tokens_per_head"] == expected


@pytest.mark.parametrize("name", ["dflash", "jetspec", "dspark", "dflash with a head"])
@pytest.mark.parametrize("layout", codec.of("block_head").layouts)
def test_block_drafters(tmp_path, name, layout):
    config, tensors = write(tmp_path / "a", name, layout)
    kind, shapes, facts = HEADS[name]
    head = head_files.read(tmp_path / "a", kind)
    assert_same(head.params, fill(shapes))
    for key in ("target_layer_ids", "mask_token_id", "block_size"):
        assert head.config[key] == facts[key], key
    for key in ("causal_head", "sample_from_anchor"):
        assert head.config[key] is facts.get(key, False), key
    assert ("d2t" in tensors) == (name == "dflash with a head")
    layers = config.get("transformer_layer_config", config)
    assert layers["vocab_size"] == V and layers["num_attention_heads"] == 4
    assert layers["model_type"] == "qwen3" and layers.get("is_causal", False) is (name == "jetspec")
    if layout == "speculators":
        assert config["draft_vocab_size"] == (W if "head" in name else V)
        # vLLM recognises the layout by this key.
        stated = config["speculators_config"]
        [method] = stated["proposal_methods"]
        assert method["speculative_tokens"] == (5 if name == "dspark" else 4)
        assert stated["algorithm"] == ("dspark" if name == "dspark" else "dflash")
        assert stated["verifier"]["name_or_path"] == "some/model"
    elif layout != "deepspec":
        assert config["architectures"] == ["DFlashDraftModel"]
        nested = config["dflash_config"]
        assert (nested["target_layer_ids"], nested["mask_token_id"]) == ([1, 3, 4], 2)


# Name -> keys of config.json, some names of tensors.
ADDED = {
    "dflash2": (
        {"conv_kernel_size": 2, "conv_group_size": 2, "selector_rank": R, "selector_top_k": 3},
        (
            *("layers.0.attention_conv.base_kernel", "candidate_selector.successor_codebook"),
            *("layers.0.mlp_conv.kernel_projection.weight", "candidate_selector.hidden_projection"),
        ),
    ),
    "xpress": (
        {"xpress_rank": R, "xpress_mlp_ratio": 3, "num_jacobi_passes": 6},
        ("refiner_head.mix_l", "refiner_head.readout.weight", "refiner_head.in_proj.weight"),
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_convolutions_selectors_and_refiners(tmp_path, name):
    keys, names = ADDED[name]
    config, tensors = write(tmp_path / "a", name, "speculators")
    assert keys.items() <= config.items() and config["speculators_model_type"] == name
    assert all(any(each.startswith(own) for each in tensors) for own in names)
    back = head_files.read(tmp_path / "a", "block_head")
    assert_same(back.params, fill(HEADS[name][1]))
    assert back.config["target_layer_ids"] == [1, 3, 4]
    if name == "dflash2":
        assert tensors[names[0]].shape == (2, 2, D) and back.config["selector_top_k"] == 3
        nested, _ = write(tmp_path / "b", name, "dflash")
        assert nested["architectures"] == ["DFlash2DraftModel"]
        assert keys.items() <= nested["dflash_config"].items()
        assert_same(head_files.read(tmp_path / "b", "block_head").params, fill(HEADS[name][1]))
    for layout in ("specforge", "deepspec"):
        with pytest.raises(UserError, match=f"the layout {layout} has no place for "):
            write(tmp_path / layout, name, layout)
    wrong = {key: value + 1 for key, value in keys.items() if key.endswith(("rank", "size"))}
    for more, match in (
        *(({key: value}, f"{key} is {value}, and the tensors") for key, value in wrong.items()),
        ({"output_multiplier": 0.5}, "output_multiplier 0.5 is not supported; supported: 1"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(UserError, match=match):
            head_files.read(tmp_path / "a", "block_head")
    with pytest.raises(UserError, match="a selector only"):
        write(tmp_path / "c", "convolutions alone", "speculators")


def test_sliding_layers_state_that_a_block_is_not_causal(tmp_path):
    for layout in codec.of("block_head").layouts:
        config, _ = write(tmp_path / layout, "dflash, sliding", layout)
        assert config.get("transformer_layer_config", config)["is_causal"] is False, layout
        assert config.get("sliding_window_non_causal", True) is True


def test_sliding_layers_that_are_causal(tmp_path):
    """Programs take them for causal where nothing states the opposite."""
    for layout in codec.of("block_head").layouts:
        config, _ = write(tmp_path / layout, "dflash, causal", layout)
        layers = config.get("transformer_layer_config", config)
        stated = config | layers | config.get("dflash_config", {})
        assert not {"is_causal", "causal_head", "causal", "causal_sliding"} & set(stated), layout
        assert stated.get("sliding_window_non_causal", False) is False
        back = head_files.read(tmp_path / layout, "block_head").config
        assert back["causal_sliding"] is True and back["causal_head"] is False
    write(tmp_path / "mask", "dflash, causal, with a mask")
    assert head_files.read(tmp_path / "mask", "block_head").config["causal_sliding"] is True


def test_a_network_with_an_embedding_of_its_masks_is_of_specjax_alone(tmp_path):
    config, _ = write(tmp_path / "a", "dflash with a mask")
    assert config["model_type"] == "block_head" and "architectures" not in config


# Engine -> heads that it drafts with, and the layout; then heads that it does not, and the reason.
SUITED = {
    "vllm": {
        **{"medusa": None, "eagle without bias": "eagle", "mtp": "mimo", "mtp of Llama": "mimo"},
        **dict.fromkeys(("eagle3", "eagle3 of all tokens", "eagle3 of other taps"), "eagle3"),
        **dict.fromkeys(("eagle3 of 2 taps", "eagle3.1", "p-eagle"), "eagle3"),
        **dict.fromkeys(("dflash", "jetspec", "dflash, sliding", "dflash, causal"), "specforge"),
        **{"dflash with a head": "specforge", "dspark": "speculators"},
    },
    "sglang": {
        **{"eagle": "sglang", "eagle without bias": "sglang", "domino": "specforge"},
        **dict.fromkeys(("eagle3", "dflash", "dflash, causal"), "specforge"),
        "dspark": "deepspec",
    },
    "sglang-jax": {
        **dict.fromkeys(("eagle3", "eagle3 of all tokens"), "specforge"),
        **{"dflash": "specforge", "dflash, anchor": "specforge", "dspark": "deepspec"},
    },
    "tpu-inference": dict.fromkeys(("eagle3", "eagle3 before", "dflash"), "specforge"),
    "llama.cpp": dict.fromkeys(("eagle3", "eagle3 before", "dflash"), "specforge"),
    "speculators": dict.fromkeys(
        ("eagle3", "eagle3.1", "p-eagle", "dflash", "dspark of masks", "dflash, anchor"),
        "speculators",
    ),
}
REFUSED = {
    "vllm": {
        "medusa without a head": "it reads heads with LM heads of their own",
        "speculator": "it reads no mlp_speculator heads; those that read them: none",
        "eagle": "its fc has no bias; train with fc_bias=false",
        "eagle of Qwen3": "no norm of queries and keys",
        "eagle with shift 0": "train with shift=1",
        "dflash of Llama": "train with qk_norm=true",
        "dflash, anchor": "its first mask predicts",
        "dflash with a mask": "the layout specforge has no place for an embedding of its masks",
        "domino": "no correction by a GRU",
        "mtp of normed states": "train with hidden=raw",
        "mtp of Qwen3": "no norm of queries and keys",
    },
    "sglang": {
        "medusa": "it reads no medusa heads; those that read them: vllm",
        "eagle3 of other taps": "begins with layer 0",
        "eagle3.1": "no norms of taps",
        "eagle3 before": "its residual is the feature before the norm",
        "p-eagle": "train without parallel",
        "dflash, sliding": "train with causal_sliding=true",
        "dspark of masks": "train with anchor=true",
        "jetspec": "train with causal=false",
    },
    "sglang-jax": {
        "eagle3 of other taps": "unless the first is 1",
        "eagle3.1": "no norms of taps",
        "eagle3 of 2 layers": "it reads one layer",
    },
    "tpu-inference": {
        "eagle": "it reads no eagle heads",
        "eagle3 of other taps": "it reads layers 1, L / 2 - 1 and L - 4",
        "eagle3 of 2 taps": "its fc reads 3 taps, and these read 2",
        "dspark": "it has no correction",
        "dflash with a head": "these have their own",
    },
    "llama.cpp": {"mtp": "it reads no mtp_module heads; those that read them: vllm"},
    "speculators": {"jetspec": "train with causal=false", "eagle": "it reads no eagle heads"},
}


def pairs(table):
    return [(engine, *item) for engine, heads in table.items() for item in heads.items()]


@pytest.mark.parametrize(("engine", "name", "layout"), pairs(SUITED))
def test_heads_for_an_engine(tmp_path, capsys, engine, name, layout):
    write(tmp_path / "a", name)
    kind = HEADS[name][0]
    argv = [str(tmp_path / "a"), str(tmp_path / "b"), f"--kind={kind}", f"--for={engine}"]
    assert convert_heads.main(argv) == 0
    config, tensors = of(tmp_path / "b")
    assert config.get("specjax", {}).get("layout") == layout
    # These have no default for d2t.
    jax_alone = kind == "eagle3" and engine in ("sglang-jax", "tpu-inference")
    assert ("d2t" in tensors) == (jax_alone or "draft_ids" in HEADS[name][2])
    assert ("parallel_drafting" in capsys.readouterr().out) == (
        name == "p-eagle" and engine == "vllm"
    )
    back, own = (head_files.read(tmp_path / x, kind).params for x in "ba")
    if layout == "sglang":
        own["fc"].setdefault("bias", np.zeros(D, np.float32))
    if kind != "mtp_module":  # mimo exchanges the halves of fc
        assert_same(back, own)
    else:
        names = (f"model.mtp_layers.0.self_attn.{part}_proj.bias" for part in "qkv")
        assert all(tensors[each].any() == (name == "mtp") for each in names)


@pytest.mark.parametrize(("engine", "name", "reason"), pairs(REFUSED))
def test_heads_that_an_engine_cannot_read_are_refused(tmp_path, capsys, engine, name, reason):
    write(tmp_path / "a", name)
    argv = [str(tmp_path / "a"), str(tmp_path / "b"), f"--kind={HEADS[name][0]}"]
    assert convert_heads.main([*argv, f"--for={engine}"]) == 2
    out, error = capsys.readouterr()
    assert reason in error and error.count("\n") == 1 and not out
    assert not (tmp_path / "b").exists()


def search(taus, options, refused=(), files=True):
    """The best reading and those that were tried, where ``taus`` has that of some changes.

    ``files``: whether the target allows the reading of the files.
    """
    seen = []

    def tried(changes):
        if not (changes or files) or any(item in refused for item in changes.items()):
            raise UserError("refused")
        seen.append(changes)
        return probe.Reading(changes, taus.get(tuple(sorted(changes.items())), 1.0))

    return probe._search(tried, options).changes, seen


def test_the_search_for_a_reading():
    a, b, c = ("a", True), ("b", True), ("c", True)
    # A reading of the same tau does not replace that of the files.
    assert search({(): 2.0, (a,): 2.03}, [a, b])[0] == {}
    # One key after the other; the first ones again where a later one helped.
    best, seen = search({(): 1.3, (b,): 1.5, (a, b): 1.9}, [a, b])
    assert best == {"a": True, "b": True} and seen.count({"b": True}) == 1
    # Of several values of a key the last best one stands.
    assert search({(): 1.3, (("a", 1),): 1.5, (("a", 2),): 1.6}, [("a", 1), ("a", 2)])[0] == {
        "a": 2
    }
    # Two that help together only, where nothing else is accepted.
    assert search({(a, c): 1.8}, [a, b, c])[0] == {"a": True, "c": True}
    assert search({(): 1.3, (a, c): 1.8}, [a, b, c])[0] == {}
    # The target may refuse the reading of the files, but not all.
    assert search({(b,): 1.4}, [a, b], refused=[a], files=False)[0] == {"b": True}
    with pytest.raises(UserError, match="refused"):
        search({}, [a], refused=[a], files=False)


def test_a_probe_is_of_files_with_open_readings(tmp_path, capsys):
    write(tmp_path / "a", "medusa")
    target = str(Path(__file__).parents[2] / "assets" / "target")
    argv = [str(tmp_path / "a"), "--kind=medusa"]
    assert convert_heads.main([*argv, f"--probe={target}"]) == 2
    assert "those that do: block_head, eagle, eagle3, mtp_module" in capsys.readouterr().err
    assert convert_heads.main(argv) == 2
    assert "there is no destination" in capsys.readouterr().err


def test_files_of_earlier_versions_are_read(tmp_path):
    """With the key "bias" of EAGLE-1, and with maps of all tokens."""
    for name, layout in (("eagle", ""), ("eagle3 of all tokens", "specforge")):
        config, tensors = write(tmp_path / layout, name, layout)
        tensors |= {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, np.bool_)} if layout else {}
        save_file(tensors, tmp_path / layout / "model.safetensors")
        (tmp_path / layout / "config.json").write_text(json.dumps(config | {"bias": True}))
        kind, shapes, _ = HEADS[name]
        head = head_files.read(tmp_path / layout, kind)
        assert_same(head.params, fill(shapes))
        assert "draft_ids" not in head.config
