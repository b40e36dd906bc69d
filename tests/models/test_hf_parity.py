"""Model directories compared with transformers: equal logits, and equal models after saving."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import words

from specjax.models import hf


def theirs(torch, model, rows):
    """The logits of each row, computed separately and without padding."""
    model.eval()
    with torch.no_grad():
        return [model(torch.tensor([row.tolist()])).logits[0].numpy() for row in rows]


def assert_parity(loaded, expected, tokens, lengths, tolerance=1e-4):
    """Feeds padded rows of different lengths in blocks; each row commits a different number."""
    batch, width = tokens.shape
    apply, size = jax.jit(loaded.lm.apply), 13
    step = size - np.arange(batch)  # tokens that are not committed are fed again
    start, cache = np.zeros(batch, int), loaded.lm.init_cache(batch, width + size)
    while (start < lengths).any():
        at = start[:, None] + np.arange(size)
        block = np.take_along_axis(tokens, np.minimum(at, width - 1), axis=1)
        out, fed = apply(loaded.params, jnp.asarray(block), cache)
        got, real = np.asarray(out.logits), at < lengths[:, None]
        for row in range(batch):
            np.testing.assert_allclose(
                got[row][real[row]], expected[row][at[row][real[row]]], rtol=0, atol=tolerance
            )
        count = np.minimum(step, lengths - start)
        cache = loaded.lm.commit(cache, fed, jnp.asarray(count, jnp.int32))
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
    expected = theirs(torch, model, [tokens[row, :size] for row, size in enumerate(lengths)])
    assert np.std(expected[0]) > 0.1  # otherwise the comparison would prove little
    loaded = hf.load(tmp_path / "theirs", dtype=jnp.float32)
    assert_parity(loaded, expected, tokens, lengths)

    # transformers must read the same model back from what we save.
    hf.save(tmp_path / "ours", loaded.config, loaded.params, words(61), max_shard_bytes=20_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(theirs(torch, model, tokens[:1])[0], expected[0])
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
    text = (
        "Once upon a time, there was a little girl named Lily. "
        "She loved to play outside in the park."
    )
    ids = [1, *stories.tokenizer.encode(text, add_special_tokens=False).ids]
    lengths = np.array([len(ids), len(ids) - 11, 5])
    tokens = np.stack([np.roll(ids, -shift) for shift in range(3)]).astype(np.int32)
    expected = theirs(torch, model, [tokens[row, :size] for row, size in enumerate(lengths)])
    assert_parity(stories, expected, tokens, lengths)
