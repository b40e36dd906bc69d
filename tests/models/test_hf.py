"""Model directories: the numbers of transformers, bit-identical round trips, and one clear line for every broken one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specjax import testing
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer import RopeScaling, TransformerConfig

SCALED = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
)


def shaped(family: str, **changes) -> TransformerConfig:
    """A tiny config that differs from the defaults wherever a checkpoint can say so."""
    base = vars(testing.tiny_config(family, vocab_size=61)) | {
        "max_positions": 96,
        "bos_token_id": 1,
    }
    return TransformerConfig(**(base | {"eos_token_id": (2,)} | changes))


CONFIGS = {
    "llama": shaped("llama"),
    "llama-untied": shaped("llama", tie_embeddings=False, num_kv_heads=4, norm_eps=1e-3),
    "llama-biases": shaped(
        "llama", attention_bias=True, mlp_bias=True, num_kv_heads=1, eos_token_id=(2, 3)
    ),
    "llama-rope": shaped(
        "llama", rope_theta=500.0, rope_scaling=SCALED, head_dim=16, eos_token_id=()
    ),
    "gpt2": shaped("gpt2"),
    "gpt2-untied": shaped(
        "gpt2", tie_embeddings=False, intermediate_size=40, norm_eps=1e-3, num_layers=3
    ),
}
ALL = pytest.mark.parametrize("name", CONFIGS)


def random_params(config, seed=0, dtype=jnp.float32):
    """Every leaf random, norms and biases too: a zero bias in the wrong place would go unnoticed."""
    leaves, tree = jax.tree.flatten(lm.abstract_params(config))
    rng = np.random.default_rng(seed)
    made = [rng.normal(0.5 if leaf.ndim == 1 else 0.0, 0.3, leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(tree, [jnp.asarray(x, dtype) for x in made])


def words(size, start=0):
    """A tokenizer without merges."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i + start}": i for i in range(3, size)}
    return Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))


def assert_same(a, b):
    a, b = flatten_dict(a), flatten_dict(b)
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=str(path))


def rewrite(directory, change):
    """Applies ``change`` to the dict of tensors of a directory."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file)


def reconfigure(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- the numbers of transformers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def theirs(torch, model, rows):
    """Logits of each row on its own, without padding."""
    model.eval()
    with torch.no_grad():
        return [model(torch.tensor([row.tolist()])).logits[0].numpy() for row in rows]


def assert_parity(loaded, want, tokens, lengths, tolerance=1e-4):
    """Ragged rows, right-padded, a block at a time; each row commits another number of the tokens it was fed."""
    batch, width = tokens.shape
    apply, size = jax.jit(loaded.lm.apply), 13
    step = size - np.arange(batch)  # what was fed and not committed is fed again
    start, cache = np.zeros(batch, int), loaded.lm.init_cache(batch, width + size)
    while (start < lengths).any():
        at = start[:, None] + np.arange(size)
        block = np.take_along_axis(tokens, np.minimum(at, width - 1), axis=1)
        out, cache = apply(loaded.params, jnp.asarray(block), cache)
        got, real = np.asarray(out.logits), at < lengths[:, None]
        for row in range(batch):
            np.testing.assert_allclose(
                got[row][real[row]], want[row][at[row][real[row]]], rtol=0, atol=tolerance
            )
        count = np.minimum(step, lengths - start)
        cache = loaded.lm.commit(cache, jnp.asarray(count, jnp.int32))
        start = start + count
    np.testing.assert_array_equal(np.asarray(cache.length), lengths)


HF_MODELS = {
    "tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "untied-gqa": ("LlamaConfig", {"tie_word_embeddings": False, "num_key_value_heads": 2}),
    "biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "head_dim": ("LlamaConfig", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama3": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt2-untied": (
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.mark.parametrize("name", HF_MODELS)
def test_parity_with_transformers(name, torch, transformers, tmp_path):
    kind, changes = HF_MODELS[name]
    if kind == "LlamaConfig":
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        changes = sizes | {"max_position_embeddings": 64} | changes
    config = getattr(transformers, kind)(vocab_size=61, bos_token_id=1, eos_token_id=2, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(tmp_path / "theirs")
    lengths = np.array([30, 9, 17])
    tokens = np.random.default_rng(0).integers(0, 61, (3, 30)).astype(np.int32)
    want = theirs(torch, model, [tokens[row, :size] for row, size in enumerate(lengths)])
    assert np.std(want[0]) > 0.1  # else the comparison says nothing
    loaded = hf.load(tmp_path / "theirs", dtype=jnp.float32)
    assert_parity(loaded, want, tokens, lengths)

    # And back: transformers finds in what we save the very model it started from.
    hf.save(tmp_path / "ours", loaded.config, loaded.params, words(61), max_shard_bytes=20_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(theirs(torch, model, tokens[:1])[0], want[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )
    assert tokenizer.get_vocab() == words(61).get_vocab()


def test_parity_of_a_trained_model(torch, transformers, stories, data_dir):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        data_dir / "models" / "stories260K", dtype=torch.float32
    )
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = [1, *stories.tokenizer.encode(text, add_special_tokens=False).ids]
    lengths = np.array([len(ids), len(ids) - 11, 5])
    tokens = np.stack([np.roll(ids, -shift) for shift in range(3)]).astype(np.int32)
    want = theirs(torch, model, [tokens[row, :size] for row, size in enumerate(lengths)])
    assert_parity(stories, want, tokens, lengths)


# --- round trips --------------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("shard", [5_000_000_000, 20_000], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@ALL
def test_round_trip_is_bit_identical(name, dtype, shard, tmp_path):
    config = CONFIGS[name]
    params = random_params(config, dtype=dtype)
    hf.save(tmp_path / "m", config, params, words(61), max_shard_bytes=shard)
    files = sorted(file.name for file in (tmp_path / "m").glob("*.safetensors*"))
    assert (files == ["model.safetensors"]) == (shard > 20_000)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == dtype
    loaded = hf.load(tmp_path / "m", dtype=dtype)
    assert loaded.config == config
    assert_same(loaded.params, params)
    assert loaded.tokenizer.get_vocab() == words(61).get_vocab()
    if shard == 20_000:  # no tensor is that large, so no shard is larger
        sizes = [
            sum(x.nbytes for x in load_file(tmp_path / "m" / f).values())
            for f in files
            if f.endswith("rs")
        ]
        assert max(sizes) <= shard and len(sizes) > 1


@pytest.mark.fast
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_twelve_layers_keep_their_order(family, tmp_path):
    config = testing.tiny_config(family, layers=12, width=16)
    params = random_params(config)
    for index in range(12):
        params["layers"][index]["mlp_norm"]["scale"] = jnp.full((16,), float(index))
    hf.save(tmp_path / "m", config, params, max_shard_bytes=20_000)
    stored = {}
    for file in (tmp_path / "m").glob("*.safetensors"):
        stored |= load_file(file)
    name = {
        "llama": "model.layers.{}.post_attention_layernorm.weight",
        "gpt2": "transformer.h.{}.ln_2.weight",
    }[family]
    assert [float(stored[name.format(i)][0]) for i in range(12)] == list(range(12))
    assert_same(hf.load(tmp_path / "m").params, params)


@pytest.mark.fast
def test_dtype(tmp_path):
    config = CONFIGS["llama"]
    hf.save(tmp_path, config, random_params(config, dtype="bfloat16"))
    loaded = hf.load(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {
        jnp.dtype("float32")
    }  # the tests run on a CPU
    assert hf.load(tmp_path).lm == loaded.lm  # equal, so nothing compiles twice
    half = hf.load(tmp_path, dtype=jnp.bfloat16, taps=(0, 1))
    out = jax.eval_shape(lambda: lm.forward(half.lm, half.params, jnp.zeros((1, 3), jnp.int32)))
    assert [x.dtype for x in (*out.taps, out.logits)] == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.fast
def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    config = CONFIGS["llama"]
    first, second = random_params(config, 1), random_params(config, 2)
    hf.save(tmp_path / "m", config, first, words(61), max_shard_bytes=20_000)

    class Broken:
        def save(self, path):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hf.save(tmp_path / "m", config, second, Broken())
    assert_same(hf.load(tmp_path / "m").params, first)
    hf.save(tmp_path / "m", config, second)
    assert sorted(x.name for x in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert_same(hf.load(tmp_path / "m").params, second)
    assert [x.name for x in tmp_path.iterdir()] == ["m"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    with pytest.raises(UserError, match="not a model directory"):
        hf.save(tmp_path / "precious", config, first)
    with pytest.raises(UserError, match="not those of the config"):
        hf.save(tmp_path / "n", config, {**first, "more": jnp.zeros(1)})
    with pytest.raises(UserError, match=r"GPT2LMHeadModel cannot have mlp_bias False"):
        hf.save(
            tmp_path / "n",
            shaped("gpt2", mlp_bias=False),
            random_params(shaped("gpt2", mlp_bias=False)),
        )
    assert not (tmp_path / "n").exists()


@pytest.mark.fast
def test_names_and_buffers_of_old_checkpoints(tmp_path):
    for name, buffers in {
        "gpt2": ["h.0.attn.bias", "h.1.attn.masked_bias", "lm_head.weight"],
        "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"],
    }.items():
        params = random_params(CONFIGS[name])
        hf.save(tmp_path / name, CONFIGS[name], params)
        extra = {buffer: np.ones((1, 1), np.float32) for buffer in buffers}
        rewrite(
            tmp_path / name,
            lambda t, e=extra: {k.removeprefix("transformer."): v for k, v in t.items()} | e,
        )
        assert_same(hf.load(tmp_path / name).params, params)


# --- what can be wrong --------------------------------------------------------------------------------------------------


def shorten(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def shard(directory):
    loaded = hf.load(directory)
    hf.save(directory, loaded.config, loaded.params, max_shard_bytes=20_000)
    next(directory.glob("model-00002-*")).unlink()


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def drop(directory):
    gone = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    rewrite(directory, lambda t: {k: v for k, v in t.items() if k not in gone})


Q = "model.layers.1.self_attn.q_proj"
BROKEN = {
    "missing directory": (shutil.rmtree, "is no directory; give a"),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json; give a"),
    "config not JSON": (
        lambda d: (d / "config.json").write_text('{"a": '),
        r"config.json is not valid JSON \(",
    ),
    "config a list": (
        lambda d: (d / "config.json").write_text("[]"),
        r"config.json is not valid JSON \(",
    ),
    "a run": (
        lambda d: (d / "config.json").write_text('{"mode": "bench"}'),
        "not a model's .* give a model directory",
    ),
    "unfinished": (
        lambda d: (d / "checkpoints").mkdir(),
        "is not finished; run it again with the same command",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "has no weights; a model directory has",
    ),
    "lost shard": (
        shard,
        r"lacks model-00002-of-\d+.safetensors, which model.safetensors.index.json names; copy",
    ),
    "cut short": (shorten, r"model.safetensors is damaged or incomplete \(.*; copy it again"),
    "pickled": (pickled, "pickled weights only, .* convert them to model.safetensors"),
    "architecture": (
        lambda d: reconfigure(d, architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is not supported; supported: LlamaForCausalLM, GPT2LMHeadModel",
    ),
    "missing": (
        drop,
        "lacks 2 of 20 tensors, first model.layers.0.mlp.up_proj.weight; the weights do not belong",
    ),
    "extra": (
        lambda d: rewrite(d, lambda t: t | {f"{Q}.bias": t["model.norm.weight"]}),
        f"has 1 tensors too many, first {Q}.bias; the weights do not belong",
    ),
    "shape": (
        lambda d: rewrite(d, lambda t: t | {f"{Q}.weight": t[f"{Q}.weight"][:8]}),
        rf"{Q}.weight is \[8, 32\], expected \[32, 32\]",
    ),
    "integers": (
        lambda d: rewrite(d, lambda t: t | {f"{Q}.weight": t[f"{Q}.weight"].astype(np.int8)}),
        f"{Q}.weight is stored as I8; supported: F32, BF16, F16",
    ),
    "tokenizer": (
        lambda d: (d / "tokenizer.json").write_text("{"),
        r"tokenizer.json is damaged \(.*; copy it again",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories(case, tmp_path):
    damage, told = BROKEN[case]
    hf.save(tmp_path / "m", CONFIGS["llama"], random_params(CONFIGS["llama"]), words(61))
    hf.load(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError, match=told) as caught:
        hf.load(tmp_path / "m")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


LLAMA, GPT2 = (hf.config_to_hf(CONFIGS[name]) for name in ("llama", "gpt2"))
REFUSED = [
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    (
        GPT2 | {"activation_function": "relu"},
        "activation_function 'relu' .* gelu_new, gelu_pytorch_tanh",
    ),
    (
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx True is not",
    ),
    (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False is not"),
    (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope type 'linear' .* supported: default, llama3",
    ),
    (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
    (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor is missing",
    ),
    (LLAMA | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
    (
        LLAMA | {"num_key_value_heads": 3},
        "4 attention heads are not a multiple of 3 key/value heads",
    ),
    (
        LLAMA | {"head_dim": None, "hidden_size": 30},
        "hidden size 30 is not a multiple of the 4 attention heads",
    ),
    (LLAMA | {"head_dim": 7}, "head_dim 7 is odd"),
    (GPT2 | {"n_head": 5}, "hidden size 32 is not a multiple of the 5"),
    (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive integer"),
    (LLAMA | {"vocab_size": None}, "vocab_size is missing; it must be a positive integer"),
    (LLAMA | {"hidden_size": 32.5}, "hidden_size is 32.5; it must be a positive integer"),
    (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a positive number"),
    (
        LLAMA | {"tie_word_embeddings": "yes"},
        "tie_word_embeddings is 'yes'; it must be true or false",
    ),
    ({"model_type": "mamba"}, "architecture mamba is not supported"),
    ({"mode": "train"}, "no architectures, no model_type"),
]


@pytest.mark.fast
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused_configs(case):
    raw, told = REFUSED[case]
    with pytest.raises(UserError, match=told) as caught:
        hf.config_from_hf(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_spellings_of_a_config():
    for name, config in CONFIGS.items():
        assert hf.config_from_hf(json.loads(json.dumps(hf.config_to_hf(config)))) == config, name
    old = hf.config_to_hf(CONFIGS["llama-rope"])
    new = {
        key: value
        for key, value in old.items()
        if key not in ("rope_theta", "rope_scaling", "architectures")
    }
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500.0}
    assert hf.config_from_hf(new) == CONFIGS["llama-rope"]
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert (
        hf.config_from_hf(new).rope_scaling is None and hf.config_from_hf(new).rope_theta == 500.0
    )
    bare = hf.config_from_hf(GPT2 | {"n_inner": None, "eos_token_id": [5, 6]})
    assert bare.intermediate_size == 4 * 32 and bare.eos_token_id == (5, 6)
    assert hf.config_from_hf(LLAMA | {"head_dim": None, "eos_token_id": None}).head_dim == 8
    few = {
        key: value
        for key, value in LLAMA.items()
        if key not in ("tie_word_embeddings", "num_key_value_heads")
    }
    assert not hf.config_from_hf(few).tie_embeddings and hf.config_from_hf(few).num_kv_heads == 4


@pytest.mark.fast
def test_resolve(tmp_path):
    hf.save(tmp_path / "run" / "model", CONFIGS["gpt2"], random_params(CONFIGS["gpt2"]))
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"mode": "train"}')
    assert hf.resolve(tmp_path / "run") == tmp_path / "run" / "model"
    assert hf.resolve(str(tmp_path)) == tmp_path
    assert hf.load(tmp_path / "run").directory == str(tmp_path / "run" / "model")


@pytest.mark.fast
def test_vocabularies(tmp_path):
    def model(name, size, tokenizer):
        config = shaped("llama", vocab_size=size)
        hf.save(tmp_path / name, config, random_params(config), tokenizer)
        return hf.load(tmp_path / name)

    a, bare, larger = (
        model("a", 61, words(61)),
        model("bare", 61, None),
        model("larger", 62, words(62)),
    )
    same, shifted = model("same", 61, words(61)), model("shifted", 61, words(61, start=1))
    assert hf.same_vocabulary(a, same) is None and hf.same_vocabulary(a, bare) is None
    assert "has 61 tokens and" in hf.same_vocabulary(a, larger)
    assert hf.same_vocabulary(a, shifted).startswith("58 of 61 token ids differ between ")
    assert (
        a.lm.vocabulary == same.lm.vocabulary != shifted.lm.vocabulary
        and bare.lm.vocabulary is None
    )


def test_vocabularies_of_trained_models(stories, data_dir):
    other = hf.load(data_dir / "models" / "aidreams260K")
    assert hf.same_vocabulary(stories, stories) is None
    assert "of 512 token ids differ" in hf.same_vocabulary(stories, other)


@pytest.mark.fast
def test_torch_is_never_imported():
    code = "import sys, specjax.models.hf; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fast
def test_generation_config_adds_ends(tmp_path):
    config = CONFIGS["llama"]
    hf.save(tmp_path / "m", config, random_params(config), words(61))
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert hf.load(tmp_path / "m").config.eos_token_id == (2, 9)


@pytest.mark.fast
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    config = CONFIGS["llama"]
    hf.save(tmp_path / "m", config, random_params(config), words(80))
    with pytest.raises(UserError, match="has ids up to 79 and the model 61 tokens"):
        hf.load(tmp_path / "m")


@pytest.mark.fast
def test_taps_out_of_range_are_refused():
    with pytest.raises(UserError, match=r"layers are numbered 0\.\.1"):
        lm.from_config(testing.tiny_config(), taps=(2,))


@pytest.mark.fast
def test_nothing_is_cut_off_or_filled_up(tmp_path):
    """What a tokenizer.json says of the length of its network's inputs is not done to texts."""
    config, tokenizer = CONFIGS["llama"], words(61)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = " ".join([tokenizer.id_to_token(5)] * 20)
    length = len(tokenizer.encode(text).ids)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    hf.save(tmp_path / "m", config, random_params(config), tokenizer)
    loaded = hf.load(tmp_path / "m").tokenizer
    assert (
        len(loaded.encode(text).ids) == length > 4
        and len(loaded.encode(tokenizer.id_to_token(5)).ids) < 12
    )
