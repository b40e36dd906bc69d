"""bfloat16: our logits are as close to the exact ones as those of transformers.

Both round their activations. What is compared is the error against the float32 logits of the same
parameters, which bfloat16 holds exactly. For one model the two errors differ by chance, by up to
1.7 times; so they are averaged over several.
"""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import reference_model

from specjax.models import hf, lm

IDS = [5, 9, 7, 30, 22, 41, 3, 17, 8, 50, 11, 12, 33, 44, 20, 19]
FAMILIES = ("llama", "gpt2", "gpt_neox", "olmo2", "gemma2", "gemma3_text", "qwen3", "smollm3")
FAMILIES += ("nemotron_h",)
MODELS = 8
# With biases a result is rounded before the bias is added and after it, in PyTorch once: measured
# 1.13 times its error for GPT-NeoX, 1.11 for Nemotron-H.
BIASED = ("gpt2", "gpt_neox", "nemotron_h")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rounding_error_is_that_of_transformers(family, torch, transformers, tmp_path):
    model, text = reference_model(torch, transformers, family), torch.tensor([IDS])
    ours, theirs = [], []
    for seed in range(MODELS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
                parameter.copy_(parameter.bfloat16().float())
            exact = model(text).logits[0].numpy()
            rounded = copy.deepcopy(model).bfloat16()(text).logits[0].float().numpy()
        model.save_pretrained(tmp_path / str(seed))
        loaded = hf.load(tmp_path / str(seed), dtype="bfloat16")
        logits = np.asarray(lm.forward(loaded.lm, loaded.params, jnp.asarray([IDS])).logits[0])
        ours.append(np.mean((logits - exact) ** 2))
        theirs.append(np.mean((rounded - exact) ** 2))
    most = 1.2 if family in BIASED else 1.1
    assert np.sqrt(np.mean(ours)) < most * np.sqrt(np.mean(theirs)), (ours, theirs)
