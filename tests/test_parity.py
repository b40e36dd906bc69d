"""Comparison with transformers: equal greedy texts from a real checkpoint, equal sampling maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling
from specjax.data import datastore, ngram_tables
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig
from specjax.train import initial
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

# The other drafters share their rounds with one of these and pass conformance: they run on request.
USUAL = ("none", "prompt_lookup")
NAMES = [
    name if name in USUAL else pytest.param(name, marks=pytest.mark.slow)
    for name in drafters.names()
    if name != "spec_drafter"  # of encoder-decoder models alone
]


@pytest.fixture(scope="module")
def expected(stories, data_dir):
    """(token ids of the prompts, the continuations that transformers generates)."""
    # With two threads, each of these tiny products takes ten times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
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
    torch.set_num_threads(threads)
    return ids, texts


def options(name, stories, known):
    """The keys of a drafter that has required ones; ``known`` are texts to look up."""

    def heads(name, **keys):
        training = drafters.make(name, stories.lm, **keys).training
        return {"params": training.start(stories.params, jax.random.key(0)), **keys}

    def layers():
        decoder, params = initial.pruned(stories, "0,1")
        config = SpireConfig(decoder, sinks=2, window=16)
        params = spire.with_memory(config, params)
        return {"model": spire.from_config(config), "params": params}

    itself = {"model": stories.lm, "params": stories.params}
    twice = {"models": [stories.lm] * 2, "params": [stories.params] * 2}
    makers = {
        "draft_model": lambda: {**itself, "gamma": 3},
        "draft_tree": lambda: {**itself, "tree": "2x1"},
        "dynamic_tree": lambda: {**itself, "nodes": 4, "depth": 2, "top_k": 2},
        "specinfer": lambda: {"models": [stories.lm], "params": [stories.params], "tree": "2x1"},
        "bild": lambda: {**itself, "gamma": 4},
        "cascade": lambda: {**twice, "lengths": "3,1,2;2,2;3"},
        "staged": lambda: {**itself, "gamma": 3},
        "spire": lambda: {**layers(), "tree": "2x2x1"},
        "rest": lambda: {"datastore": datastore.build(known), "nodes": 8},
        "ngram_lm": lambda: {"tables": ngram_tables.count(known, stories.lm.vocab_size)},
        "token_recycling": lambda: {"tree": "4x2"},
        "lookahead": lambda: {"window": 3, "ngram": 3, "candidates": 3},
        "medusa": lambda: heads("medusa", tree="4x2x1x1"),
        "hydra": lambda: heads("hydra", prefix=True, head_dim=64, tree="4x2x1x1"),
        "mlp_speculator": lambda: heads("mlp_speculator", heads=3, tie=True, scale_input=True),
        "bpd": lambda: heads("bpd", tree="4x2x1"),
        "redrafter": lambda: heads("redrafter"),
        "magicdec": lambda: {"budget": 24},
        "triforce": lambda: {**itself, "budget": 24, "model_budget": 24, "gamma": 4},
        "layer_skip": lambda: {"skip_attention": "1,3", "skip_mlp": "2", "tree": "2x2x1"},
        "pass": lambda: heads("pass", calls=1, tree="4x2x1"),
        "controlled": lambda: {"drafters": {"lookup": {"name": "prompt_lookup"}}},
        "escalate": lambda: {
            "drafters": {"first": {"name": "suffix", "mode": "path"}, "second": {"name": "jacobi"}}
        },
    }
    return makers[name]() if name in makers else {}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_of_a_real_model(stories, expected, name):
    ids, texts = expected
    known = [prompt + text[:50] for prompt, text in zip(ids, texts, strict=True)]
    drafter = drafters.make(name, stories.lm, **options(name, stories, known))
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
    """Temperature, top-k, top-p, min-p in that order keep the same tokens (logits without ties)."""
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
        expected_probs = torch.softmax(chain(None, torch.tensor(logits)), -1).numpy()
        settings = sampling.make_sampling(1, temperature, top_k, top_p, min_p)
        got = np.asarray(sampling.to_probs(jnp.asarray(logits)[None], settings))[0]
        np.testing.assert_allclose(got, expected_probs, atol=1e-6)
        np.testing.assert_array_equal(got == 0, expected_probs == 0)
