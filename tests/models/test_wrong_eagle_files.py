"""Wrong EAGLE files: one clear line for every mistake in tensors, vocabularies and config.json."""

from __future__ import annotations

import copy
import json

import jax
import numpy as np
import pytest
from eagle_file_cases import (
    CASES,
    IDS,
    PUBLISHED,
    SPECFORGE,
    SPECULATORS,
    D,
    H,
    V,
    W,
    assert_refused,
    params_of,
    released_eagle,
    released_eagle3,
    store,
)

from specjax.drafters.files import decoder_layers, head_files
from specjax.models import families, hf, lm

pytestmark = pytest.mark.fast
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def test_wrong_tensors(tmp_path):
    good = released_eagle3()

    def refused(match, config=SPECFORGE, **changes):
        tensors = {k: x for k, x in (good | changes).items() if x is not None}
        assert_refused(match, store(tmp_path / "a", tensors, config))

    refused("lacks 1 of 13 tensors, first norm.weight", **{"norm.weight": None})
    refused("1 tensors that are not of eagle3 heads, first more", more=np.zeros(3))
    refused(r"mask_hidden is \[1, 1, 3\], expected", mask_hidden=np.zeros(3, np.float32))
    masked = np.zeros((1, 1, 3 * D), np.float32)
    refused("has mask_hidden and no id of a mask; give mask_token_id", mask_hidden=masked)
    narrow = {"midlayer.self_attn.k_proj.weight": np.zeros((8, D), np.float32)}
    refused(r"k_proj.weight is \[8, 8\], expected \[8, 16\]", **narrow)
    refused("lm_head.weight is stored as int8", **{"lm_head.weight": np.zeros((W, D), np.int8)})
    refused(
        "q_norm.weight|k_norm.weight",
        **{"midlayer.self_attn.q_norm.weight": np.ones(H, np.float32)},
    )
    moe = {"midlayer.mlp.experts.0.up_proj.weight": np.zeros((2, 2), np.float32)}
    refused("first midlayer.mlp.experts.0.up_proj.weight", **moe)
    fc = {"fc.weight": np.zeros((D, 2 * D + 1), np.float32)}
    refused("fc reads 17 values, which are not taps of width 8", **fc)
    other = {"fc.weight": np.zeros((D, 3 * 12), np.float32)}
    twelve = SPECFORGE | {"target_hidden_size": 12}
    refused("lacks embed_tokens.weight; heads of width 8 cannot use", twelve, **other)
    two = {"fc.weight": np.zeros((D, 2 * D), np.float32)}
    refused("fc reads 2 taps, and config.json does not name their layers", PUBLISHED, **two)
    wide = SPECFORGE | {"target_hidden_size": 64}
    refused("fc reads 24 values, which are not taps of width 64", wide)
    assert_refused("has eagle3 heads; give a directory of eagle heads", tmp_path / "a", "eagle")
    store(tmp_path / "b", released_eagle(), PUBLISHED)
    assert_refused("has eagle heads; give a directory of eagle3 heads", tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    assert_refused("has medusa heads; give a directory of eagle heads", tmp_path / "b", "eagle")
    (tmp_path / "c").mkdir()
    assert_refused("such a directory has model.safetensors or pytorch_model.bin", tmp_path / "c")


@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "gpt_neox", "phi3"])
def test_a_target_is_no_head(tmp_path, family):
    shape = families.shape(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        max_positions=32,
        family=family,
    )
    hf.save(tmp_path / "model", shape, lm.init_params(shape, jax.random.key(0)))
    for kind in ("eagle", "eagle3"):
        match = f"is a whole model, not {kind} heads; give a directory of {kind} heads"
        assert_refused(match, tmp_path, kind)


def test_wrong_draft_vocabularies(tmp_path):
    def refused(match, config=SPECFORGE, **changes):
        tensors = {k: x for k, x in (released_eagle3() | changes).items() if x is not None}
        assert_refused(match, store(tmp_path, tensors, config))

    offsets, marks = IDS.astype(np.int64) - np.arange(W), np.zeros(V, np.bool_)
    marks[IDS] = True
    far = offsets.copy()
    far[-1] += 2
    refused("d2t holds token ids; it must hold offsets", d2t=IDS.astype(np.int64))
    refused("must ascend, and 0 is followed by -9", d2t=offsets - [0, 12, 0, 0, 0, 0], t2d=None)
    refused("token 21, outside the vocabulary of 20", d2t=far)
    refused("token 21, outside the vocabulary of 20", d2t=far, t2d=None)
    refused("token -1, outside the vocabulary of 20", d2t=offsets - [1, 0, 0, 0, 0, 0], t2d=None)
    refused("d2t and t2d name different tokens", t2d=np.roll(marks, 1))
    refused("t2d marks 20 tokens, and the head gives 6", t2d=np.ones(V, np.bool_))
    refused("t2d marks 20 tokens, and the head gives 6", t2d=np.ones(V, np.bool_), d2t=None)
    refused(r"d2t is int64\[5\], and the head gives 6 logits", d2t=offsets[:5])
    refused(r"d2t is float32\[6\]", d2t=offsets.astype(np.float32))
    refused(r"t2d is float32\[20\]; it must mark", t2d=marks.astype(np.float32))
    refused("a head of 6 tokens for a vocabulary of 20, and no d2t", d2t=None, t2d=None)
    embedding = np.zeros((V + 1, D), np.float32)
    refused(
        "t2d marks a vocabulary of 20 tokens, and the other tensors have 21",
        **{"embed_tokens.weight": embedding},
    )
    # A buffer that was never filled; it is right only if t2d agrees, or for all tokens.
    zeros = {"d2t": np.zeros(W, np.int64)}
    refused("d2t is all zeros, which means the first 6 tokens, and t2d marks others", **zeros)
    refused("d2t is all zeros, .*, and there is no t2d; copy both", **zeros, t2d=None)
    first = released_eagle3() | zeros | {"t2d": np.arange(V) < W}
    head = head_files.read(store(tmp_path, first, SPECFORGE), "eagle3")
    np.testing.assert_array_equal(head.config["draft_ids"], np.arange(W))
    # One of the two is enough.
    for missing in ("d2t", "t2d"):
        tensors = released_eagle3()
        del tensors[missing]
        head = head_files.read(store(tmp_path, tensors, SPECFORGE), "eagle3")
        np.testing.assert_array_equal(head.config["draft_ids"], IDS)
        assert head.config["vocab_size"] == V


@pytest.fixture
def refused(tmp_path):
    """Reads good tensors with a changed config.json: (match, folder, keys to drop, changes)."""
    store(tmp_path / "flat", released_eagle3(), {})
    store(tmp_path / "nested", released_eagle3("layers.0"), {})

    def check(match, folder="flat", drop=(), **changes):
        config = copy.deepcopy({"flat": SPECFORGE, "nested": SPECULATORS}[folder]) | changes
        config = {key: value for key, value in config.items() if key not in drop}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        assert_refused(match, tmp_path / folder)

    return check


def nested(refused, match, **changes):
    layer = SPECULATORS["transformer_layer_config"] | changes
    refused(match, "nested", transformer_layer_config=layer)


def test_wrong_configurations(refused):
    refused(
        "architecture Eagle3DeepseekV2ForCausalLM is not supported for eagle3",
        architectures=["Eagle3DeepseekV2ForCausalLM"],
    )
    refused("architectures is 'Llama'; it must be a list", architectures="Llama")
    refused(
        "config.json is that of P-EAGLE, and the tensors lack mask_hidden",
        "nested",
        speculators_model_type="peagle",
    )
    refused("layers of model_type 'gemma3' are not supported", model_type="gemma3")
    nested(refused, "layers of model_type 'gpt_oss' are not supported", model_type="gpt_oss")
    refused(
        "transformer_layer_config is 3; it must be an object", "nested", transformer_layer_config=3
    )
    refused(
        "has no norm_before_residual; programs differ", "nested", drop=("norm_before_residual",)
    )
    refused(
        "norm_before_residual is 'yes'; it must be true or false",
        "nested",
        norm_before_residual="yes",
    )
    refused("has 0, the embeddings of the tokens", "nested", **{LAYER_IDS: [0, 4, 7]})
    refused("must be a list of different layer numbers", "nested", **{LAYER_IDS: [2, 2, 7]})
    refused("must be a list of different layer numbers", "nested", **{LAYER_IDS: "2,5"})
    refused(
        "fc reads 3 taps, and config.json names 2 layers",
        "nested",
        **{LAYER_IDS: [2, 7], "target_hidden_size": 8},
    )
    refused("fc_norm is true, and the tensors lack this norm", fc_norm=True)
    refused("norm_before_fc is true, and the tensors lack", "nested", norm_before_fc=True)
    refused(
        "eagle_config.use_aux_hidden_state False is not supported",
        eagle_config={"use_aux_hidden_state": False},
    )
    refused(
        "eagle_config.parallel_draft_step 4 is not supported",
        eagle_config={"parallel_draft_step": 4},
    )
    refused(
        f"{LAYER_IDS} is .* and eagle_config.{LAYER_IDS} is .*; they must be equal",
        "flat",
        **{LAYER_IDS: [3, 4, 5]},
    )
    refused("eagle_config is 3; it must be an object", eagle_config=3)
    refused("specjax is 3; it must be an object", specjax=3)
    refused("layer_types is 3; it must be a list of names", layer_types=3)
    refused("speculators_config is 3; it must be an object", "nested", speculators_config=3)
    refused(
        "proposal_methods is 3; it must be a list",
        "nested",
        speculators_config={"proposal_methods": 3},
    )
    refused(
        r"\[1, 4, 7\] and specjax.taps \[2, 4, 7\] name different layers",
        specjax={"taps": [2, 4, 7]},
    )
    refused(
        "norm_output is False and specjax.norm_output is True",
        "nested",
        norm_output=False,
        specjax={"norm_output": True, "taps": [1, 4, 7]},
    )
    refused("has eagle heads; give a directory of eagle3 heads", specjax={"kind": "eagle"})


def test_keys_that_other_programs_read(refused):
    """Each of them would be ignored, and only acceptance would fall."""
    refused("target_layer_ids is not a key of EAGLE heads", target_layer_ids=[1, 2, 3])
    refused("dflash_config is not a key", dflash_config={"target_layer_ids": [1, 2, 3]})
    refused("attention_multiplier 2.0 is not supported", attention_multiplier=2.0)
    refused("residual_multiplier 0.2 is not supported", residual_multiplier=0.2)
    refused("sliding_window 128 is not supported", model_type="mistral", sliding_window=128)
    five = SPECFORGE["eagle_config"] | {"num_aux_hidden_states": 5}
    refused("num_aux_hidden_states is 5 and .* has 3 layers", eagle_config=five)
    by_layer = {"full_attention": {"rope_theta": 1e6}}
    refused(r"an object per kind of layer \(full_attention\)", rope_parameters=by_layer)
    scaled = {"rope_type": "llama3", "factor": 8.0}
    refused(
        "rope_parameters.factor is 4.0 and rope_scaling.factor is 8.0",
        rope_parameters={"rope_theta": 1e6, "factor": 4.0},
        rope_scaling=scaled,
        drop=("rope_theta",),
    )
    refused("rope_theta is outside of transformer_layer_config", "nested", rope_theta=1e6)


def test_both_objects_of_the_rotation_are_read():
    scaling = {"rope_type": "llama3", "factor": 8.0}
    layer = {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": scaling}
    assert decoder_layers.rope_of("x", layer) == (1e6, scaling)


def test_wrong_layers(refused):
    refused("hidden_act 'gelu' is not supported", hidden_act="gelu")
    refused("logit_scale 0.5 is not supported", logit_scale=0.5)
    refused("use_sliding_window True is not supported", use_sliding_window=True)
    nested(refused, "layer_types has 'sliding_attention'", layer_types=["sliding_attention"])
    refused("partial_rotary_factor 0.5 is not supported", partial_rotary_factor=0.5)
    refused("rope type 'yarn' is not supported", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    nested(
        refused,
        "rope_theta is 500000.0 and that of the scaling is 1.0",
        rope_parameters={"rope_theta": 1.0},
    )
    refused("rope_scaling is 3; it must be an object or null", rope_scaling=3)
    refused("rope_theta is 'x'; it must be a positive number", rope_theta="x")
    refused(
        "num_attention_heads or head_dim; the tensors do not show", drop=("num_attention_heads",)
    )
    refused("cannot be split into attention heads", head_dim=5)
    refused("head_dim 1 is odd", head_dim=1)
    refused("target_hidden_size is '8'", target_hidden_size="8")


def test_eagle_is_not_in_the_dialect_of_eagle3(tmp_path):
    store(tmp_path, released_eagle(), SPECULATORS)
    assert_refused("has eagle3 heads; give a directory of eagle heads", tmp_path, "eagle")
    store(tmp_path, released_eagle(), SPECULATORS | {"speculators_model_type": "eagle"})
    assert_refused("speculators_model_type 'eagle' is not supported", tmp_path, "eagle")


def test_an_unsafe_pickle(torch, tmp_path):
    class Run:
        def __reduce__(self):
            return print, ("ran",)

    torch.save({"fc.weight": Run()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    for kind in ("eagle", "eagle3", "redrafter"):
        assert_refused("would run __builtin__.print when it is read", tmp_path, kind)


def test_own_keys_repeat_those_of_the_dialect(tmp_path):
    """A directory written here, then changed by hand: contradictions are refused."""
    for layout in ("eagle3", "speculators"):
        config = CASES["eagle3.1"][2]
        head_files.write(tmp_path / "a", "eagle3", params_of("eagle3.1"), config, layout=layout)
        raw = json.loads((tmp_path / "a" / "config.json").read_text())
        shifted = raw | {LAYER_IDS: [i + 1 for i in raw[LAYER_IDS]]}
        (tmp_path / "a" / "config.json").write_text(json.dumps(shifted))
        assert_refused("name different layers; the first must be larger by 1", tmp_path / "a")
