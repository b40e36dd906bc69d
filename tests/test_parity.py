"""transformers as the peer: the same greedy text from a real checkpoint, and the same sampling maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling
from specjax.data import datastore, ngram_tables
from specjax.types import ModelParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "Once upon a time",
    "Lily and Tom went to the park. They saw a big red ball and",
    "The little dog was sad because",
    "One day, a boy named Tim",
]
NEW = 100


# The others share their rounds with one of these, and conformance proves them all: they run when asked (slow).
USUAL = ("none", "prompt_lookup", "draft_model", "draft_tree", "lookahead")


@pytest.fixture(scope="module")
def theirs(stories, data_dir):
    """Prompts, and what transformers makes of them."""
    ids = [stories.tokenizer.encode(text).ids for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        data_dir / "models" / "stories260K", dtype=torch.float32
    )
    texts = []
    for prompt in ids:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    return ids, texts


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in drafters.names()]
)
def test_greedy_text_of_a_real_model(stories, theirs, name):
    ids, texts = theirs
    known = [prompt + text[:50] for prompt, text in zip(ids, texts, strict=True)]
    itself = {"model": stories.lm, "params": stories.params}

    def heads(name, **keys):
        fresh = drafters.make(name, stories.lm, **keys).training.start(
            stories.params, jax.random.key(0)
        )
        return {"params": fresh, **keys}

    keys = {
        "draft_model": {**itself, "gamma": 3},
        "draft_tree": {**itself, "tree": "2x1"},
        "dynamic_tree": {**itself, "nodes": 4, "depth": 2, "top_k": 2},
        "specinfer": {"models": [stories.lm], "params": [stories.params], "tree": "2x1"},
        "rest": {"datastore": datastore.build(known), "nodes": 8},
        "ngram_lm": {"tables": ngram_tables.count(known, stories.lm.vocab_size)},
        "token_recycling": {"tree": "4x2"},
        "lookahead": {"window": 3, "ngram": 3, "candidates": 3},
        "medusa": heads("medusa", tree="4x2x1x1"),
        "hydra": heads("hydra", prefix=True, head_dim=64, tree="4x2x1x1"),
        "mlp_speculator": heads("mlp_speculator", heads=3, tie=True, scale_input=True),
        "bpd": heads("bpd", tree="4x2x1"),
        "escalate": {
            "drafters": {"first": {"name": "suffix", "mode": "path"}, "second": {"name": "jacobi"}}
        },
    }
    drafter = drafters.make(name, stories.lm, **keys.get(name, {}))
    params = ModelParams(stories.params, drafter.init_params(None))
    packed, lengths = decode.pack_prompts(ids)
    state = decode.prefill(
        stories.lm,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(ids)),
        max_len=packed.shape[1] + NEW,
        limit=lengths + NEW,
        sampling=sampling.make_sampling(len(ids), 0.0),
    )
    eos = stories.config.eos_token_id
    state, _ = decode.generate(
        stories.lm, drafter, accept.load("recursive"), params, state, max_steps=NEW, eos_id=eos
    )
    decode.check(state)
    assert decode.outputs(state, lengths) == texts


def test_sampling_maps_are_those_of_transformers():
    """The same order (temperature, top-k, top-p, min-p) and the same survivors, on logits without ties."""
    logits = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32) * 2
    for temperature, top_k, top_p, min_p in [
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 10, 0.9, 0.05),
    ]:
        chain = transformers.LogitsProcessorList(
            [transformers.TemperatureLogitsWarper(temperature)]
        )
        if top_k:
            chain.append(transformers.TopKLogitsWarper(top_k))
        if top_p < 1:
            chain.append(transformers.TopPLogitsWarper(top_p))
        if min_p:
            chain.append(transformers.MinPLogitsWarper(min_p))
        want = torch.softmax(chain(None, torch.tensor(logits)), -1).numpy()
        knobs = sampling.make_sampling(1, temperature, top_k, top_p, min_p)
        got = np.asarray(sampling.to_probs(jnp.asarray(logits)[None], knobs))[0]
        np.testing.assert_allclose(got, want, atol=1e-6)
        np.testing.assert_array_equal(got == 0, want == 0)
