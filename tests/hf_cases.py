"""Shared by the tests of model directories: tiny configurations, random parameters, tokenizers."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from specjax import testing
from specjax.models import hf, lm
from specjax.models.transformer_config import Experts, RopeScaling, TransformerConfig

SCALED = RopeScaling(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16
)


def shaped(family: str, **changes) -> TransformerConfig:
    """A tiny config with values other than the defaults wherever a checkpoint stores them."""
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


def random_params(config, seed=0, dtype=jnp.float32):
    """Random leaves, norms and biases too: a misplaced bias of zeros would not be noticed."""
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
    """Changes keys of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def hf_keys(family, **changes):
    """The config.json of a tiny decoder of a family, with other values for some keys."""
    more = {"query_scalar": 8.0} if family.startswith("gemma") else {}
    more |= {"experts": Experts(8, 2, 16, layers=(1,))} if family == "qwen3_moe" else {}
    return hf.config_to_hf(shaped(family, **more)) | changes


def same_vocabulary(a: hf.Loaded, b: hf.Loaded) -> str | None:
    """None if both models have the same tokens under the same ids, else the difference in words.

    If one has no tokenizer, only the sizes of the vocabularies are compared.
    """
    size = a.config.vocab_size
    if size != b.config.vocab_size:
        return f"{a.directory} has {size} tokens and {b.directory} has {b.config.vocab_size}"
    if a.tokenizer is None or b.tokenizer is None:
        return None
    first, second = (
        {i: token for token, i in t.get_vocab().items()} for t in (a.tokenizer, b.tokenizer)
    )
    differ = sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
    if not differ:
        return None
    return f"{differ} of {size} token ids differ between {a.directory} and {b.directory}"
