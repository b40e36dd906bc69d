"""Encoder-decoder targets through the engine: plain texts, laws, and drafters of every kind.

The models are random tiny T5 models with three tokens; token 0 begins every output. The logits
are compared with transformers in tests/models/test_t5.py.
"""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, testing
from specjax.errors import UserError
from specjax.testing import conformance, law_checks, laws, loop, state_checks
from specjax.theory import statistics
from specjax.types import ModelParams

SOURCES = ([2, 1, 1, 1, 1, 2, 0], [1, 0], [2, 2, 1, 0], [1, 1, 2, 2, 1, 0])
ROWS, STEPS, EOS = 2000, 4, 2  # rows of each source
# They need a part of a decoder, or choose among its keys.
REFUSED = ("early_exit", "layer_skip", "pass", "magicdec", "triforce", "spire")
# They translate between the vocabularies of two decoders.
REFUSED += ("tli", "slem", "slrs")


def refused(name):
    return name.split()[0] in REFUSED


@functools.cache
def plain():
    """The models of ``cases.with_encoder`` without a draft."""
    return cases.with_encoder("none")


@functools.cache
def law(source):
    """The target's law of the first tokens, f64[3,3,3,3]."""
    case = plain()
    return laws.sequence_law(case.target, case.params.target, SOURCES[source], STEPS)


def decoded(case, rule, temperature, eos=None):
    """The new tokens of ROWS rows of each source in one batch."""
    prompts = [prompt for prompt in SOURCES for _ in range(ROWS)]
    own = (case.target, case.drafter, case.params, prompts, STEPS, 0)
    state = loop.begin(*own, temperature=temperature)
    pair = (case.target, case.drafter, rule, case.params)
    state, _ = decode.generate(*pair, state, max_steps=STEPS, eos_id=eos)
    return decode.outputs(state, [len(prompt) for prompt in prompts])


def greedy_texts(case, eos=None):
    """One text per source, by plain decoding."""
    none = plain().drafter
    own = (case.target, none, ModelParams(case.params.target), SOURCES, STEPS, 0)
    state = loop.begin(*own, temperature=0.0)
    state = decode.autoregressive(
        case.target, ModelParams(case.params.target), state, max_steps=STEPS, eos_id=eos
    )
    return decode.outputs(state, [len(prompt) for prompt in SOURCES])


WORKING = [name for name in cases.NAMES if not refused(name)] + list(cases.ENCODER_NAMES)


@pytest.mark.parametrize("name", by_default(WORKING, ("chain",)))
def test_ragged_sources_have_the_plain_texts_and_the_exact_law(name):
    """Greedy rows, with and without an end; the sampled texts of each source by chi-square."""
    case = cases.with_encoder(name)
    rule = accept.load(accept.default_rule(case.drafter))
    for eos in (None, EOS):
        texts = decoded(case, rule, 0.0, eos)
        expected = greedy_texts(case, eos)
        assert any(len(text) > 1 for text in expected)
        for number in range(len(SOURCES)):
            assert texts[number * ROWS] == expected[number]
            assert texts[(number + 1) * ROWS - 1] == expected[number]
    tokens = np.asarray(decoded(case, rule, 1.0)).reshape(len(SOURCES), ROWS, STEPS)
    for number in (0, 1):
        cells = np.ravel_multi_index(tuple(tokens[number].T), (cases.VOCAB,) * STEPS)
        counts = np.bincount(cells, minlength=cases.VOCAB**STEPS)
        assert statistics.chi_square(counts, law(number))[2] > 1e-4
    # The sources matter: the rows of one do not have the law of another.
    counts = np.bincount(
        np.ravel_multi_index(tuple(tokens[1].T), (cases.VOCAB,) * STEPS),
        minlength=cases.VOCAB**STEPS,
    )
    assert statistics.chi_square(counts, law(0))[2] < 1e-6


@pytest.mark.slow
def test_methods_that_need_a_decoder_are_refused_in_one_line():
    for name in filter(refused, cases.NAMES):
        with pytest.raises(UserError) as error:
            cases.with_encoder(name)
        assert "\n" not in str(error.value), name


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "rule"), [(None, "chain"), ("2x1", "recursive")])
def test_the_law_of_a_round_is_exact(tree, rule):
    """Enumerated in float64, after two sources and after two rounds."""
    with jax.enable_x64(True):
        small = {"vocab_size": 3, "dtype": jnp.float64, "num_layers": 1, "encoder_layers": 1}
        target, params = testing.tiny_t5(0, **small)
        draft, own = testing.tiny_t5(1, **small)
        if tree is None:
            drafter = drafters.make("draft_model", target, model=draft, gamma=2)
        else:
            drafter = drafters.make(
                "draft_tree", target, model=draft, tree=tree, siblings="without_replacement"
            )
        pair = ModelParams(params, own)
        prompts = [[2, 1, 0], [1, 2, 2, 1, 2, 0]]
        own = (target, drafter, accept.load(rule), pair, prompts)
        finding = law_checks.check_law(*own, after=(2,), temperature=0.9)
    assert finding.passed, finding


@pytest.mark.parametrize(
    "name",
    by_default(["chain", "without_replacement", "medusa", "eagle", "eagle3", "spec_drafter"], ()),
)
def test_the_state_of_a_drafter_follows_the_text(name):
    """A fresh prefill of source and output gives the draft caches that decoding leaves."""
    case = cases.with_encoder(name)
    finding = state_checks.state_follows_text(case.drafter, case.target, case.params)
    assert finding.passed, finding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("chain", "block"),
        ("dynamic", "deterministic"),
        *cases.ENCODER_PAIRS,
    ],
)
def test_the_compiled_loop_passes_all_checks(name, rule):
    case = cases.with_encoder(name)
    own = (case.drafter, accept.load(rule), case.target, case.params)
    report = testing.Report(name, tuple(conformance.check_pair(*own)))
    assert report.passed, str(report)


def test_lookups_find_the_output_in_the_source():
    """After the output 5 the draft is what follows 5 in the source."""
    target, params = testing.tiny_t5(0, vocab_size=31, num_layers=1, encoder_layers=1)
    drafter = drafters.make("prompt_lookup", target, gamma=2, max_ngram=1, min_ngram=1)
    prompt = [7, 5, 9, 4, 0, 5]
    state = loop.begin(target, drafter, ModelParams(params), [prompt], 4, 0, temperature=0.0)
    np.testing.assert_array_equal(state.cache.source, [4])
    np.testing.assert_array_equal(state.cache.length, [5])
    draft = loop.propose(drafter, ModelParams(params), state)
    np.testing.assert_array_equal(draft.tokens[0], [9, 4])
    assert bool(draft.valid.all())
