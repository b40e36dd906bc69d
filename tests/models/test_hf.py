"""Model directories: bit-identical round trips, one clear line for a broken one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import (
    CONFIGS,
    assert_same,
    random_params,
    reconfigure,
    rewrite,
    shaped,
    words,
)
from safetensors.numpy import load_file

from specjax import testing
from specjax.errors import UserError
from specjax.models import hf, lm

ALL = pytest.mark.parametrize("name", CONFIGS)


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
    if shard == 20_000:  # no tensor is that large, so the limit holds for every shard
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
    # The tests run on a CPU.
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}
    assert hf.load(tmp_path).lm == loaded.lm  # equal, so no program is compiled twice
    half = hf.load(tmp_path, dtype=jnp.bfloat16, taps=(0, 1))
    out = jax.eval_shape(lambda: lm.forward(half.lm, half.params, jnp.zeros((1, 3), jnp.int32)))
    assert [x.dtype for x in (*out.taps, out.logits)] == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("backend", "capability", "dtype"),
    [
        ("cpu", None, "float32"),
        ("tpu", None, "bfloat16"),
        ("gpu", "7.5", "float16"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "12.0", "bfloat16"),
        ("gpu", "gfx942", "bfloat16"),
    ],
)
def test_dtype_of_a_device(monkeypatch, backend, capability, dtype):
    device = SimpleNamespace(**{} if capability is None else {"compute_capability": capability})
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert hf.parameter_dtype(None) == jnp.dtype(dtype)
    assert hf.parameter_dtype("float32") == jnp.float32


@pytest.mark.fast
def test_saving_replaces_a_model_but_no_other_directory(tmp_path):
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


def folder(file):
    """A directory in the place of a file."""
    file.unlink(missing_ok=True)
    file.mkdir()


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
    "config nested deeply": (
        lambda d: (d / "config.json").write_text('{"a": ' * 10**5 + "1" + "}" * 10**5),
        r"config.json is not valid JSON \(it is nested too deeply\)",
    ),
    "config a directory": (
        lambda d: folder(d / "config.json"),
        r"config.json cannot be read \(.*; give a file of this name",
    ),
    "ends a directory": (
        lambda d: folder(d / "generation_config.json"),
        r"generation_config.json cannot be read \(.*; give a file of this name",
    ),
    "more layers": (
        lambda d: reconfigure(d, num_hidden_layers=10_000),
        "the configuration asks for 10000 layers, and the tensors have at most 2; the weights do",
    ),
    "more tokens": (
        lambda d: reconfigure(d, vocab_size=10**9),
        "the configuration asks for 1000000000 tokens, and the tensors have at most",
    ),
    "beyond 32 bits": (
        lambda d: reconfigure(d, hidden_size=10**400),
        r"hidden_size is 10{59}; it must be a positive integer below 2\*\*31",
    ),
    "a run": (
        lambda d: (d / "config.json").write_text('{"mode": "bench"}'),
        "not the configuration of a model .* give a model directory",
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
    damage, message = BROKEN[case]
    hf.save(tmp_path / "m", CONFIGS["llama"], random_params(CONFIGS["llama"]), words(61))
    hf.load(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(UserError, match=message) as caught:
        hf.load(tmp_path / "m")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.fast
def test_resolve(tmp_path):
    hf.save(tmp_path / "run" / "model", CONFIGS["gpt2"], random_params(CONFIGS["gpt2"]))
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"mode": "train"}')
    assert hf.resolve(tmp_path / "run") == tmp_path / "run" / "model"
    assert hf.resolve(str(tmp_path)) == tmp_path
    assert hf.load(tmp_path / "run").directory == str(tmp_path / "run" / "model")


@pytest.mark.fast
def test_torch_is_never_imported():
    code = (
        "import sys, specjax.models.hf; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        (None, (2,)),
        ({"eos_token_id": [9, 2, 9]}, (9, 2)),
        ({"eos_token_id": 9}, (9,)),
        ({"eos_token_id": None}, ()),
        ({}, ()),
    ],
)
def test_generation_config_decides_where_a_text_ends(tmp_path, generation, ends):
    config = dataclasses.replace(CONFIGS["llama"], eos_token_id=(2,))
    hf.save(tmp_path / "m", config, random_params(config), words(61))
    if generation is not None:
        (tmp_path / "m" / "generation_config.json").write_text(json.dumps(generation))
    assert hf.load(tmp_path / "m").config.eos_token_id == ends


@pytest.mark.fast
def test_ends_that_are_no_ids_are_refused(tmp_path):
    config = CONFIGS["llama"]
    hf.save(tmp_path / "m", config, random_params(config), words(61))
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(
        UserError, match=r"generation_config\.json: eos_token_id is '</s>'; it must"
    ):
        hf.load(tmp_path / "m")


@pytest.mark.fast
def test_taps_out_of_range_are_refused():
    with pytest.raises(UserError, match=r"layers are numbered 0\.\.1"):
        lm.from_config(testing.tiny_config(), taps=(2,))
