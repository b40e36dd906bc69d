"""Hugging Face style directories, in and out: config.json, safetensors, tokenizer.json. Nothing is ever unpickled.

One table says where each of our parameters lives in a checkpoint, and is read in both directions. Linear kernels are
[in, out] here and in GPT-2's Conv1D, and [out, in] everywhere else; GPT-2 keeps q, k and v side by side in one tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer import RopeScaling, TransformerConfig
from specjax.types import LM

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "GPT2LMHeadModel": "gpt2"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

# What the decoder computes without asking; a checkpoint that wants anything else is refused by name.
_FIXED: dict[str, dict[str, tuple]] = {
    "llama": {"hidden_act": ("silu",)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
}

# Module of ours -> module of the checkpoint; the lower half is relative to a layer.
_MODULES = {
    "llama": {
        "embed": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    "gpt2": {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
}
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # saved by old versions, carry no weights


class Loaded(NamedTuple):
    """A model directory in memory."""

    lm: LM
    params: dict
    config: TransformerConfig
    tokenizer: Tokenizer | None
    directory: str


class _Stored(NamedTuple):
    """One tensor of a checkpoint, and the leaves of ours that lie side by side along the last axis of it."""

    paths: list[tuple]
    widths: list[int]
    shape: tuple[int, ...]  # in the file, so after transposing
    transposed: bool


def resolve(directory: str | os.PathLike) -> Path:
    """The model directory meant by ``directory``: itself, or the ``model`` folder of a trained run's workdir."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise UserError(f"{path} is no directory; give a Hugging Face style directory or a trained run's workdir")
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if (path / "checkpoints").is_dir():
        raise UserError(f"training in {path} is not finished; run it again with the same command to resume it")
    return path


def load(directory: str | os.PathLike, *, dtype: Any = None, taps: tuple[int, ...] = ()) -> Loaded:
    """Reads a model directory. ``dtype`` None is float32 on CPUs, where bfloat16 is slow, and bfloat16 elsewhere."""
    path = resolve(directory)
    raw = _read_json(path / "config.json", "a Hugging Face style directory has one")
    try:
        config = config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from None
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    tokenizer = None
    if (path / "tokenizer.json").is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path / 'tokenizer.json'} is not a readable tokenizer ({_line(error)})") from None
    params = _read_params(path, config, dtype)
    return Loaded(lm.from_config(config, dtype, tuple(taps)), params, config, tokenizer, str(path))


def save(
    directory: str | os.PathLike,
    config: TransformerConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that ``load`` and transformers read; ``params`` keep their dtype.

    All of it appears at once: it is written beside ``directory`` and renamed when complete.
    """
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, lm.abstract_params(config)):
        raise UserError("the parameters are not those of the config; save a model with the config it was made with")
    raw = {**config_to_hf(config), "torch_dtype": str(params["embed"]["embedding"].dtype)}
    path = Path(directory).expanduser().resolve()
    if path.exists() and not _replaceable(path):
        raise UserError(f"{path} exists and is not a model directory; name a new one to save a model")
    fresh, stale = (path.with_name(f".{path.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_json(fresh / "config.json", raw)
        _write_params(fresh, config, params, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(str(fresh / "tokenizer.json"))
            _write_json(fresh / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
        if path.exists():
            path.rename(stale)
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(stale, ignore_errors=True)


def config_from_hf(raw: dict) -> TransformerConfig:
    """The decoder that a config.json describes, in the spelling of transformers 4 or 5."""
    family = _family(raw)
    for key, allowed in _FIXED[family].items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise UserError(f"{key} {raw[key]!r} is not supported; supported: {', '.join(map(str, allowed))}")
    llama = family == "llama"
    hidden = _number(raw, "hidden_size" if llama else "n_embd")
    heads = _number(raw, "num_attention_heads" if llama else "n_head")
    kv_heads = _number(raw, "num_key_value_heads", heads) if llama else heads
    if heads % kv_heads:
        raise UserError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    explicit = llama and raw.get("head_dim") is not None
    if not explicit and hidden % heads:
        raise UserError(f"the hidden size {hidden} is not a multiple of the {heads} attention heads")
    width = _number(raw, "head_dim") if explicit else hidden // heads
    if llama and width % 2:
        raise UserError(f"head_dim {width} is odd; rotary positions need an even one")
    eos = raw.get("eos_token_id")
    common = {
        "family": family,
        "vocab_size": _number(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width,
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }
    if not llama:
        return TransformerConfig(
            **common,
            intermediate_size=_number(raw, "n_inner", 4 * hidden),
            num_layers=_number(raw, "n_layer"),
            max_positions=_number(raw, "n_positions", 1024),
            norm_eps=_number(raw, "layer_norm_epsilon", 1e-5, float),
            tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
            attention_bias=True,
            mlp_bias=True,
        )
    positions = _number(raw, "max_position_embeddings", 2048)
    theta, scaling = _rope(raw, positions)
    return TransformerConfig(
        **common,
        intermediate_size=_number(raw, "intermediate_size"),
        num_layers=_number(raw, "num_hidden_layers"),
        max_positions=positions,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def config_to_hf(config: TransformerConfig) -> dict:
    """The config.json of a decoder; a shape that its architecture cannot spell (GPT-2 without biases) is refused."""
    eos = list(config.eos_token_id)
    raw: dict[str, Any] = {
        "architectures": [name for name, family in _ARCHITECTURES.items() if family == config.family],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
    }
    if config.family == "gpt2":
        raw |= {
            "n_embd": config.hidden_size,
            "n_inner": config.intermediate_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
        }
    else:
        scaling = config.rope_scaling
        raw |= {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            # The old spelling: transformers 4 knows no other, and 5 still reads it.
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling
            and {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            },
        }
    back = config_from_hf(raw)
    lost = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(back, f.name)]
    if lost:
        raise UserError(f"{raw['architectures'][0]} cannot express {lost[0]}={getattr(config, lost[0])!r}")
    return raw


def same_vocabulary(a: Loaded, b: Loaded) -> str | None:
    """None if both models mean the same text by the same token ids; otherwise one sentence saying how they differ."""
    if a.config.vocab_size != b.config.vocab_size:
        return f"{a.directory} has {a.config.vocab_size} tokens and {b.directory} has {b.config.vocab_size}"
    if a.tokenizer is None or b.tokenizer is None:
        return None
    # Token by id, not id by token: what matters is which ids would be misread.
    first, second = ({i: token for token, i in x.tokenizer.get_vocab().items()} for x in (a, b))
    differ = sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
    if not differ:
        return None
    return f"{differ} of {a.config.vocab_size} token ids mean different text in {a.directory} and {b.directory}"


def _family(raw: dict) -> str:
    kinds = {family: name for name, family in _ARCHITECTURES.items()}
    kind = raw.get("model_type")
    names = raw.get("architectures") or ([kinds.get(kind, kind)] if kind else [])
    if not names:
        raise UserError("this is not a model directory: no architectures and no model_type; name a model or a trained run")
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise UserError(f"architecture {names[0]} is not supported; supported: {', '.join(_ARCHITECTURES)}")


def _number(raw: dict, key: str, default: Any = None, kind: type = int) -> Any:
    """A positive number of config.json."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise UserError(f"{key} is missing; it must be a positive number")
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
        raise UserError(f"{key} is {value!r}; it must be a positive {'number' if kind is float else 'integer'}")
    return value


def _rope(raw: dict, positions: int) -> tuple[float, RopeScaling | None]:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    given = {"rope_theta": raw.get("rope_theta"), **given}
    theta = _number(given, "rope_theta", 10000.0, float)
    kind = given.get("rope_type", given.get("type", "default"))
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor {partial} is not supported; supported: 1")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {kind!r} is not supported; supported: default, llama3")
    factor, low, high = (_number(given, f"{word}factor", kind=float) for word in ("", "low_freq_", "high_freq_"))
    if low >= high:
        raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return theta, RopeScaling(factor, low, high, _number(given, "original_max_position_embeddings", positions))


def _layout(config: TransformerConfig) -> dict[str, _Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the decoder."""
    modules, layout = _MODULES[config.family], {}
    leaves = jax.tree_util.tree_leaves_with_path(lm.abstract_params(config))
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    # Leaves come in alphabetical order; only q before k matters, for the fused tensor.
    for path in sorted(shapes, key=lambda path: "qkv".find(path[-2]) if len(path) > 3 else -1):
        *module, leaf = path
        if module[0] == "layers":
            name = f"{modules['layers']}.{module[1]}.{modules['.'.join(module[2:])]}"
        else:
            name = modules[module[0]]
        name += ".bias" if leaf == "bias" else ".weight"
        transposed = leaf == "kernel" and (config.family == "llama" or module[0] == "head")
        before = layout.get(name, _Stored([], [], (), transposed))
        widths = [*before.widths, shapes[path][-1]]
        shape = (*shapes[path][:-1], sum(widths))
        shape = shape[::-1] if transposed else shape
        layout[name] = _Stored([*before.paths, path], widths, shape, transposed)
    return layout


def _weight_files(path: Path) -> Iterator[Path]:
    if (path / _WEIGHTS).is_file():
        yield path / _WEIGHTS
    elif (path / _INDEX).is_file():
        shards = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{path / _INDEX} has no weight_map; copy the directory again")
        for shard in sorted(set(shards.values())):
            if not (path / shard).is_file():
                raise UserError(f"{path} lacks {shard}, which its index names; copy the directory again")
            yield path / shard
    elif any(path.glob("*.bin")):
        raise UserError(f"{path} holds pickled weights (.bin), which are never read; convert them to {_WEIGHTS}")
    else:
        raise UserError(f"{path} has no weights; a model directory has {_WEIGHTS} or {_INDEX} and its shards")


def _read_params(path: Path, config: TransformerConfig, dtype: np.dtype) -> dict:
    layout = _layout(config)
    prefix = _MODULES[config.family]["layers"].partition(".")[0] + "."
    with contextlib.ExitStack() as stack:
        found = {}
        for file in _weight_files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or incomplete ({_line(error)}); copy it again") from None
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                # GPT-2 checkpoints come with and without the prefix.
                full = name if name in layout or prefix + name not in layout else prefix + name
                if not _BUFFERS.search(name) and not (config.tie_embeddings and name == "lm_head.weight"):
                    found[full] = (opened, name)
        _compare(path, layout, found)
        params: dict = {}
        # Tensor by tensor, so that the file is never in memory as a whole.
        for name, stored in layout.items():
            opened, name = found[name]
            tensor = opened.get_tensor(name)
            tensor = tensor.T if stored.transposed else tensor
            for leaf, part in zip(stored.paths, np.split(tensor, np.cumsum(stored.widths)[:-1], axis=-1), strict=True):
                parent = functools.reduce(lambda node, key: node.setdefault(key, {}), leaf[:-1], params)
                parent[leaf[-1]] = jnp.asarray(np.asarray(part, dtype, order="C"))
    return params


def _compare(path: Path, layout: dict[str, _Stored], found: dict) -> None:
    """Every tensor that config.json promises, nothing else, and in its shape."""
    told = "; the weights do not belong to this config.json"
    missing = [name for name in layout if name not in found]
    if missing:
        raise UserError(f"{path} lacks {len(missing)} of {len(layout)} tensors, the first is {missing[0]}{told}")
    extra = [name for name in found if name not in layout]
    if extra:
        raise UserError(f"{path} has {len(extra)} tensors too many, the first is {extra[0]}{told}")
    for name, stored in layout.items():
        part = found[name][0].get_slice(found[name][1])
        if tuple(part.get_shape()) != stored.shape:
            raise UserError(f"{path}: {name} has shape {tuple(part.get_shape())}, expected {stored.shape}{told}")
        if part.get_dtype() not in ("F32", "BF16", "F16"):
            raise UserError(f"{path}: {name} is stored as {part.get_dtype()}; supported: F32, BF16, F16")


def _write_params(path: Path, config: TransformerConfig, params: dict, max_shard_bytes: int) -> None:
    leaf = functools.partial(functools.reduce, operator.getitem)
    shards: list[list[str]] = []
    size = total = 0
    layout = _layout(config)
    for name, stored in layout.items():
        count = sum(leaf(p, params).nbytes for p in stored.paths)
        if not shards or size + count > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + count, total + count
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            tensor = np.concatenate([np.asarray(leaf(p, params)) for p in layout[name].paths], axis=-1)
            # safetensors writes the bytes as they lie: a transposed view would be saved untransposed.
            tensors[name] = np.ascontiguousarray(tensor.T if layout[name].transposed else tensor)
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(path / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tokenizer_config(config: TransformerConfig, tokenizer: Tokenizer) -> dict:
    ids = {"bos_token": config.bos_token_id, "eos_token": (*config.eos_token_id, None)[0]}
    tokens = {key: tokenizer.id_to_token(i) for key, i in ids.items() if i is not None}
    tokens["unk_token"] = getattr(tokenizer.model, "unk_token", None)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in tokens.items() if token is not None},
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }


def _replaceable(path: Path) -> bool:
    """Whether ``save`` may put a model in the place of ``path``: an empty folder, or another model."""
    if not path.is_dir():
        return False
    if not any(path.iterdir()):
        return True
    with contextlib.suppress(UserError):
        return "model_type" in _read_json(path / "config.json")
    return False


def _read_json(path: Path, hint: str = "") -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}" + (f"; {hint}" if hint else "")) from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise UserError(f"{path} is not valid JSON ({_line(error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
