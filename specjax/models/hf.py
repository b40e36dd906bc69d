"""Hugging Face style directories, in and out: config.json, safetensors, tokenizer.json. Nothing is ever unpickled.

Two tables say how a checkpoint spells our configuration and our modules; both are read in both directions. Linear kernels
are [in, out] here and in GPT-2, and [out, in] everywhere else; GPT-2 keeps q, k and v side by side in one tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer import RopeScaling, TransformerConfig
from specjax.types import LM

_FAMILIES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}


def _table(text: str) -> dict[str, dict[str, str]]:
    """Family -> name here -> name in the checkpoint."""
    rows = [line.split() for line in text.strip().splitlines()]
    return {family: {row[0]: row[i] for row in rows if row[i] != "-"} for i, family in enumerate(_FAMILIES, 1)}


_FIELDS = _table("""
    vocab_size         vocab_size               vocab_size
    hidden_size        hidden_size              n_embd
    num_heads          num_attention_heads      n_head
    num_layers         num_hidden_layers        n_layer
    intermediate_size  intermediate_size        n_inner
    num_kv_heads       num_key_value_heads      -
    head_dim           head_dim                 -
    max_positions      max_position_embeddings  n_positions
    norm_eps           rms_norm_eps             layer_norm_epsilon
    tie_embeddings     tie_word_embeddings      tie_word_embeddings
    attention_bias     attention_bias           -
    mlp_bias           mlp_bias                 -
""")
_MODULES = _table("""
    embed              model.embed_tokens        transformer.wte
    positions          -                         transformer.wpe
    layers             model.layers              transformer.h
    norm               model.norm                transformer.ln_f
    head               lm_head                   lm_head
    attention_norm     input_layernorm           ln_1
    attention.q        self_attn.q_proj          attn.c_attn
    attention.k        self_attn.k_proj          attn.c_attn
    attention.v        self_attn.v_proj          attn.c_attn
    attention.o        self_attn.o_proj          attn.c_proj
    mlp_norm           post_attention_layernorm  ln_2
    mlp.gate           mlp.gate_proj             -
    mlp.up             mlp.up_proj               mlp.c_fc
    mlp.down           mlp.down_proj             mlp.c_proj
""")
# What the decoder computes without asking; a checkpoint that wants anything else is refused by name.
_ONLY: dict[str, dict[str, list]] = {
    "llama": {"hidden_act": ["silu"]},
    "gpt2": {
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "reorder_and_upcast_attn": [False],
    },
}
_FLAGS = {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True}
_DEFAULTS: dict[str, dict[str, Any]] = {  # of transformers, where config.json is silent
    "llama": {"max_positions": 2048, "norm_eps": 1e-6} | dict.fromkeys(_FLAGS, False),
    "gpt2": {"max_positions": 1024, "norm_eps": 1e-5} | _FLAGS,
}
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # written by old versions, carry no weights


class Loaded(NamedTuple):
    """A model directory in memory."""

    lm: LM
    params: dict
    config: TransformerConfig
    tokenizer: Tokenizer | None
    directory: str


class _Stored(NamedTuple):
    """A tensor of a checkpoint, and the leaves of ours that are its equal parts along the last axis."""

    paths: list[tuple]
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
    raw = _read_json(path / "config.json")
    try:
        config = config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from None
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype, tokenizer, file = jnp.dtype(dtype), None, path / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{file} is damaged ({error}); copy it again") from None
    model = lm.from_config(config, dtype, tuple(taps))
    if tokenizer is not None:
        words = json.dumps(sorted(tokenizer.get_vocab().items()))
        model = model._replace(vocabulary=hashlib.sha256(words.encode()).hexdigest())
    return Loaded(model, _read_params(path, config, dtype), config, tokenizer, str(path))


def save(
    directory: str | os.PathLike,
    config: TransformerConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that ``load`` and transformers read, all at once; ``params`` keep their dtype."""
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, lm.abstract_params(config)):
        raise UserError("the parameters are not those of the config; save a model with the config it was made with")
    raw = config_to_hf(config) | {"torch_dtype": str(params["embed"]["embedding"].dtype)}
    path = Path(directory).expanduser().resolve()
    # A slip of the pen must not replace somebody's home.
    if path.is_file() or (any(path.glob("*")) and not any(path.glob("model*.safetensors"))):
        raise UserError(f"{path} exists and is not a model directory; name a new one to save a model")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        fresh = Path(beside) / "new"
        fresh.mkdir()
        _write_json(fresh / "config.json", raw)
        _write_params(fresh, config, params, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(str(fresh / "tokenizer.json"))
            ids = {"bos_token": config.bos_token_id, "eos_token": next(iter(config.eos_token_id), None)}
            tokens = {key: tokenizer.id_to_token(i) for key, i in ids.items() if i is not None}
            tokens["unk_token"] = getattr(tokenizer.model, "unk_token", None)
            tokens = {key: token for key, token in tokens.items() if token is not None}
            kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions}
            _write_json(fresh / "tokenizer_config.json", kind | tokens | {"clean_up_tokenization_spaces": False})
        if path.exists():
            path.rename(Path(beside) / "old")
        fresh.rename(path)


def config_from_hf(raw: dict) -> TransformerConfig:
    """The decoder that a config.json describes, in the spelling of transformers 4 or 5."""
    kind = raw.get("model_type")
    names = raw.get("architectures") or ([_FAMILIES.get(kind, kind)] if kind else [])
    if not names:
        raise UserError("not a model's (no architectures, no model_type); give a model directory or a trained workdir")
    family = next((family for family, name in _FAMILIES.items() if name in names), None)
    if family is None:
        raise UserError(f"architecture {names[0]} is not supported; supported: {', '.join(_FAMILIES.values())}")
    for key, allowed in _ONLY[family].items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise UserError(f"{key} {raw[key]!r} is not supported; supported: {', '.join(map(str, allowed))}")
    keys, gpt2 = _FIELDS[family], family == "gpt2"
    hidden, heads = _value(raw, keys["hidden_size"]), _value(raw, keys["num_heads"])
    if hidden % heads and (gpt2 or raw.get("head_dim") is None):
        raise UserError(f"the hidden size {hidden} is not a multiple of the {heads} attention heads")
    values: dict[str, Any] = {"num_kv_heads": heads, "head_dim": hidden // heads} | _DEFAULTS[family]
    values |= {"intermediate_size": 4 * hidden} if gpt2 else {}
    for field, key in keys.items():
        kind = type(values[field]) if field in _DEFAULTS[family] else int
        values[field] = _value(raw, key, kind, values.get(field))
    if heads % values["num_kv_heads"]:
        raise UserError(f"{heads} attention heads are not a multiple of {values['num_kv_heads']} key/value heads")
    if not gpt2:
        if values["head_dim"] % 2:
            raise UserError(f"head_dim {values['head_dim']} is odd; rotary positions need an even one")
        values["rope_theta"], values["rope_scaling"] = _rope(raw, values["max_positions"])
    eos = raw.get("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return TransformerConfig(family=family, bos_token_id=raw.get("bos_token_id"), eos_token_id=eos, **values)


def config_to_hf(config: TransformerConfig) -> dict:
    """The config.json of a decoder; a shape that its architecture cannot spell (GPT-2 without biases) is refused."""
    raw: dict[str, Any] = {"architectures": [_FAMILIES[config.family]], "model_type": config.family}
    raw |= {key: allowed[0] for key, allowed in _ONLY[config.family].items()}
    raw |= {key: getattr(config, field) for field, key in _FIELDS[config.family].items()}
    eos = config.eos_token_id
    raw |= {"bos_token_id": config.bos_token_id, "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None)}
    if config.family == "llama":
        # The old spelling: transformers 4 knows no other, and 5 still reads it.
        raw |= {"rope_theta": config.rope_theta, "rope_scaling": None}
        if config.rope_scaling is not None:
            scaling = dataclasses.asdict(config.rope_scaling)
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
            raw["rope_scaling"] = {"rope_type": "llama3", **scaling}
    back = config_from_hf(raw)
    for field in dataclasses.fields(config):
        if getattr(config, field.name) != getattr(back, field.name):
            raise UserError(f"a {_FAMILIES[config.family]} cannot have {field.name} {getattr(config, field.name)!r}")
    return raw


def same_vocabulary(a: Loaded, b: Loaded) -> str | None:
    """None if both models mean the same text by the same token ids; otherwise one sentence saying how they differ."""
    size = a.config.vocab_size
    if size != b.config.vocab_size:
        return f"{a.directory} has {size} tokens and {b.directory} has {b.config.vocab_size}"
    if a.tokenizer is None or b.tokenizer is None:
        return None
    first, second = ({i: token for token, i in t.get_vocab().items()} for t in (a.tokenizer, b.tokenizer))
    differ = sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
    return f"{differ} of {size} token ids differ between {a.directory} and {b.directory}" if differ else None


def _value(raw: dict, key: str, kind: type = int, default: Any = None) -> Any:
    """A number above zero, or a truth value, of config.json."""
    value = default if raw.get(key) is None else raw[key]
    right = isinstance(value, (int, kind)) and isinstance(value, bool) == (kind is bool)
    if not right or (kind is not bool and value <= 0):
        told = "true or false" if kind is bool else f"a positive {'integer' if kind is int else 'number'}"
        raise UserError(f"{key} is {'missing' if value is None else repr(value)}; it must be {told}")
    return value


def _rope(raw: dict, positions: int) -> tuple[float, RopeScaling | None]:
    loose = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    given = loose | (raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = _value(given, "rope_theta", float, 10000.0)
    if _value(given, "partial_rotary_factor", float, 1) != 1:
        raise UserError(f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; supported: 1")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {kind!r} is not supported; supported: default, llama3")
    factor, low, high = (_value(given, key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return theta, RopeScaling(factor, low, high, _value(given, "original_max_position_embeddings", int, positions))


def _layout(config: TransformerConfig) -> dict[str, _Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the decoder."""
    modules, layout = _MODULES[config.family], {}
    leaves: Any = flatten_dict(lm.abstract_params(config))
    for path in sorted(leaves, key=lambda path: "qkv".find(path[-2])):  # the order within GPT-2's fused tensor
        first, *inner, leaf = path
        name = f"{modules['layers']}.{inner[0]}.{modules['.'.join(inner[1:])]}" if inner else modules[first]
        name += ".bias" if leaf == "bias" else ".weight"
        transposed = leaf == "kernel" and (config.family == "llama" or first == "head")
        paths = [*layout[name].paths, path] if name in layout else [path]
        shape = (*leaves[path].shape[:-1], leaves[path].shape[-1] * len(paths))
        layout[name] = _Stored(paths, shape[::-1] if transposed else shape, transposed)
    return layout


def _weight_files(path: Path) -> Iterator[Path]:
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        yield path / "model.safetensors"
    elif index.is_file():
        for shard in sorted(set(_read_json(index).get("weight_map", {}).values())):
            if not (path / shard).is_file():
                raise UserError(f"{path} lacks {shard}, which {index.name} names; copy the directory again")
            yield path / shard
    elif any(path.glob("*.bin")):
        raise UserError(f"{path} has pickled weights only, which are never read; convert them to model.safetensors")
    else:
        raise UserError(f"{path} has no weights; a model directory has model.safetensors, or shards and {index.name}")


def _read_params(path: Path, config: TransformerConfig, dtype: np.dtype) -> dict:
    """Tensor by tensor, so that a file is never in memory as a whole."""
    layout, found, params = _layout(config), {}, {}
    prefix = _MODULES[config.family]["layers"].partition(".")[0] + "."  # GPT-2 checkpoints come with and without it
    told = "the weights do not belong to this config.json, or the copy is incomplete"
    with contextlib.ExitStack() as stack:
        for file in _weight_files(path):
            try:
                opened = stack.enter_context(safe_open(str(file), framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or incomplete ({error}); copy it again") from None
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if not _BUFFERS.search(name) and not (config.tie_embeddings and name == "lm_head.weight"):
                    found[prefix + name if prefix + name in layout else name] = (opened, name)
        missing = [name for name in layout if name not in found]
        if missing:
            raise UserError(f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; {told}")
        extra = [name for name in found if name not in layout]
        if extra:
            raise UserError(f"{path} has {len(extra)} tensors too many, first {extra[0]}; {told}")
        for name, (opened, spelled) in found.items():
            part = opened.get_slice(spelled)
            if tuple(part.get_shape()) != layout[name].shape:
                raise UserError(f"{path}: {name} is {part.get_shape()}, expected {list(layout[name].shape)}; {told}")
            if part.get_dtype() not in ("F32", "BF16", "F16"):
                raise UserError(f"{path}: {name} is stored as {part.get_dtype()}; supported: F32, BF16, F16")
        for name, (opened, spelled) in found.items():
            tensor, paths = opened.get_tensor(spelled), layout[name].paths
            parts = np.split(tensor.T if layout[name].transposed else tensor, len(paths), axis=-1)
            for leaf, part in zip(paths, parts, strict=True):
                params[leaf] = jnp.asarray(np.asarray(part, dtype, order="C"))
    return unflatten_dict(params)


def _write_params(path: Path, config: TransformerConfig, params: dict, max_shard_bytes: int) -> None:
    leaves: Any = flatten_dict(params)
    layout, weight_map = _layout(config), {}
    sizes = {name: sum(leaves[leaf].nbytes for leaf in stored.paths) for name, stored in layout.items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and size + sum(sizes[other] for other in shards[-1]) > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for name in names:
            tensor = np.concatenate([np.asarray(leaves[leaf]) for leaf in layout[name].paths], axis=-1)
            # safetensors writes the bytes as they lie: it would store a transposed view untransposed.
            tensors[name] = np.ascontiguousarray(tensor.T if layout[name].transposed else tensor)
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(path / "model.safetensors.index.json", index)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; give a Hugging Face style model directory") from None
    except ValueError as error:  # not JSON, or not even UTF-8
        raise UserError(f"{path} is not valid JSON ({error}); copy it again") from None


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
