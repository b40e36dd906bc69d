"""bfloat16: our logits are as close to the exact ones as those of transformers.

Both round their activations. What is compared is the error against the float32 logits of the same
parameters, which bfloat16 holds exactly.
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


def error(logits, exact):
    return float(np.sqrt(np.mean((logits - exact) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rounding_error_is_that_of_transformers(family, torch, transformers, tmp_path):
    model = reference_model(torch, transformers, family)
    text = torch.tensor([IDS])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        exact = model(text).logits[0].numpy()
        theirs = copy.deepcopy(model).bfloat16()(text).logits[0].float().numpy()
    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path, dtype="bfloat16")
    ours = np.asarray(lm.forward(loaded.lm, loaded.params, jnp.asarray([IDS])).logits[0])
    # The two errors are random; their sizes differ by a few percent.
    assert error(ours, exact) < 1.15 * error(theirs, exact)
