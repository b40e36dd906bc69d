"""Beam search compared with ``generate(num_beams=...)`` of transformers: hypotheses and scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.models import hf
from specjax.types import ModelParams

VOCAB, NEW, LENGTHS = 17, 9, (7, 1, 4, 5)
# Beams, length penalty, early stopping, end-of-sequence ids.
SETTINGS = (
    (4, 1.0, False, (2,)),
    (4, 1.0, True, (3,)),
    (4, 1.0, "never", (4,)),
    (4, 0.0, False, (5,)),
    (4, -0.6, "never", (6,)),
    (4, 2.5, False, (7,)),
    (4, 2.5, "never", (8,)),
    (4, -0.6, True, (9,)),
    (4, 0.6, False, (2, 5, 9)),
    (4, 1.0, True, (3, 4, 11)),
    (4, 2.5, "never", (6, 8, 10)),
    (4, -0.6, False, (7, 12, 13)),
    (3, 1.0, False, ()),
)


def decoder(torch, transformers, seed):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return randomised(torch, transformers.LlamaForCausalLM(config), seed)


def windowed(torch, transformers, seed):
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        sliding_window=4,
        tie_word_embeddings=False,
    )
    return randomised(torch, transformers.MistralForCausalLM(config), seed)


def encoder_decoder(torch, transformers, seed):
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=6,
        d_ff=32,
        num_heads=4,
        num_layers=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        decoder_start_token_id=0,
    )
    return randomised(torch, transformers.T5ForConditionalGeneration(config), seed)


def randomised(torch, model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.35)
    # The settings name the end-of-sequence tokens; the model has none of its own.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model.eval()


def theirs(torch, transformers, model, rows, setting, returned):
    """The new tokens and the score of each hypothesis; rows are padded on the left."""
    beams, penalty, early, ends = setting
    width = max(map(len, rows))
    ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = transformers.GenerationConfig(
        num_beams=beams,
        do_sample=False,
        max_new_tokens=NEW,
        length_penalty=penalty,
        early_stopping=early,
        num_return_sequences=returned,
        eos_token_id=list(ends) or None,
        pad_token_id=1,
        decoder_start_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, generation_config=config)
    new = out.sequences[:, 1 if model.config.is_encoder_decoder else width :].tolist()
    # After its end a hypothesis is padded; without an end, all have NEW tokens.
    new = [row[: next((i + 1 for i, t in enumerate(row) if t in ends), NEW)] for row in new]
    return new, out.sequences_scores.numpy()


@pytest.mark.parametrize(
    "make", [decoder, encoder_decoder, pytest.param(windowed, marks=pytest.mark.slow)]
)
def test_hypotheses_and_scores_equal_those_of_transformers(make, torch, transformers, tmp_path):
    rng, seen = np.random.default_rng(0), []
    for seed in range(2):
        model = make(torch, transformers, seed)
        model.save_pretrained(tmp_path / str(seed))
        loaded = hf.load(tmp_path / str(seed), dtype=jnp.float32)
        rows = [rng.integers(2, VOCAB, size).tolist() for size in LENGTHS]
        packed, lengths = sj.pack_prompts([loaded.lm.prompt(row) for row in rows])
        near = jax.tree.map(
            lambda x: x + 0.03 * rng.normal(size=x.shape).astype(np.float32), loaded.params
        )
        params = ModelParams(loaded.params, near)
        for setting in SETTINGS:
            beams, penalty, early, ends = setting
            tokens, scores = theirs(torch, transformers, model, rows, setting, beams)
            # One setting with speculative beams too.
            for draft in (None, sj.BeamDraft(loaded.lm, 2, 6))[: 1 + (setting == SETTINGS[0])]:
                found = sj.beam_search(
                    *(loaded.lm, params, packed, lengths),
                    beams=beams,
                    max_new_tokens=NEW,
                    returned=beams,
                    length_penalty=penalty,
                    early_stopping=early,
                    eos_id=ends,
                    draft=draft,
                )
                sj.check(found)
                assert [text for row in found.outputs() for text in row] == tokens, setting
                np.testing.assert_allclose(np.ravel(found.scores), scores, rtol=0, atol=1e-4)
                if draft is not None:
                    assert found.passes.sum() < found.steps.sum()
            seen += [
                (len(text), int(steps))
                for row, steps in zip(found.outputs(), found.steps, strict=True)
                for text in row
                if ends
            ]
    # Hypotheses of all lengths but one at most, and rows that ended before the limit.
    assert len({length for length, _ in seen}) >= NEW - 1
    assert sum(steps < NEW for _, steps in seen) > len(seen) / 10
