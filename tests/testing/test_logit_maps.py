"""The law of the text with grammars, penalties, biases and bans is that of the mapped target."""

from __future__ import annotations

import cases
import jax
import pytest
from marks import by_default
from mutants import maps

from specjax import accept, testing
from specjax.testing import claims, conformance, exact, loop
from specjax.testing.law_checks import EXACT, LEVEL, ROWS, check_law

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")

# All maps at once; token 2 ends a text, and token 1 is unlikely.
MAPS = {
    "temperature": 0.8,
    "repetition_penalty": 1.7,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": {0: 0.3, 1: -0.5},
    "min_new_tokens": 2,
    "end_ids": (2,),
    "vocab_size": cases.VOCAB,
}
GRAMMAR = maps.GRAMMAR | {"vocab_size": cases.VOCAB}
BANS = {"banned": (0,), "frequency_penalty": -0.8, "top_k": 2, "vocab_size": cases.VOCAB}
PAIRS = [
    (name, rule.name)
    for name in cases.NAMES
    for rule in conformance.lossless_rules(cases.case(name).drafter)
]
# A chain, and trees of every kind that is grown in another way; the others are slow.
DEFAULT = {("chain", "chain"), ("ngram_lm", "block")}


def error_of(name: str, rule: str, **settings) -> float:
    """The total variation between the law of two rounds and that of the mapped target."""
    case = cases.named(name)
    with jax.enable_x64(True):
        wide = jax.tree.map(claims.widen, case.params)
        result = exact.enumerated(
            *(case.target, case.drafter, accept.load(rule), wide, cases.PROMPT, 4),
            rounds=2,
            **settings,
        )
    return testing.total_variation(result.law, result.truth)


@pytest.mark.parametrize(("name", "rule"), by_default(PAIRS, {("chain", "chain")}))
def test_the_law_is_that_of_the_mapped_target(name, rule):
    case = cases.case(name)
    given = (case.target, case.drafter, accept.load(rule), case.params)
    prompts = [cases.REPEATED] if (name, rule) in DEFAULT else [cases.PROMPT, cases.REPEATED]
    finding = check_law(*given, prompts, after=() if (name, rule) in DEFAULT else (2,), **MAPS)
    # A drafter that finds nothing in these texts proves nothing.
    assert finding.passed is not False, finding
    assert finding.passed or "nothing was drafted" in finding.detail


@pytest.mark.parametrize(
    ("name", "rule"), by_default([("chain", "chain"), ("iid", "recursive")], {("chain", "chain")})
)
@pytest.mark.parametrize("settings", by_default(["MAPS", "BANS", "GRAMMAR"], {"MAPS", "GRAMMAR"}))
def test_the_law_of_two_rounds(name, rule, settings):
    chosen = {"MAPS": MAPS, "BANS": BANS, "GRAMMAR": GRAMMAR}[settings]
    assert error_of(name, rule, **chosen) < EXACT


# One token is left; a wait for two of two ends; greedy rows.
EDGES = (
    {"banned": (0, 2)},
    {"banned": (1,), "min_new_tokens": 3, "end_ids": (0,), "frequency_penalty": -2.0},
    {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 1.0},
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", EDGES)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("eagle3 tree", "recursive"),
        ("eagle3 chain", "chain"),
        ("ngram_lm", "chain"),
        ("without_replacement", "recursive"),
        ("dynamic", "deterministic"),
        ("iid", "k_seq"),
    ],
)
def test_the_law_where_few_tokens_are_left(name, rule, settings):
    """Also of a draft of a few tokens that are all banned ("eagle3" drafts 0 and 2 only)."""
    assert error_of(name, rule, vocab_size=cases.VOCAB, **settings) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [("chain", "block"), ("iid", "recursive"), ("dynamic", "traversal"), ("escalate", "chain")],
)
def test_the_law_of_the_compiled_loop(name, rule):
    """Several rounds in one program, counted: its noise, its caches and its maps."""
    case = cases.case(name)
    given = (case.target, case.drafter, accept.load(rule), case.params)
    fit = loop.loop_fit(*given, cases.REPEATED, 5, ROWS, **MAPS)
    assert fit.p_value > LEVEL and fit.detectable < 0.05, fit


# Each is a mistake of its own; the slow ones have a default neighbour in the same function.
SLOW = {"siblings_counted", "present_once", "one_too_late", "prompt_ignored", "target_unmapped"}
NAMES = [mutant.name for mutant in maps.MUTANTS]


@pytest.mark.parametrize("name", by_default(NAMES, set(NAMES) - SLOW))
def test_enumeration_detects(name):
    [mutant] = [mutant for mutant in maps.MUTANTS if mutant.name == name]
    rule = accept.default_rule(cases.named(mutant.case).drafter)
    settings = mutant.settings | {"vocab_size": cases.VOCAB}
    with maps.active(mutant):
        assert error_of(mutant.case, rule, **settings) > 1e-3, mutant.mistake


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "without_replacement"])
def test_the_same_settings_without_a_mistake(name):
    """The mutants differ from the truth because of the mistake alone."""
    for settings in {id(m.settings): m.settings for m in maps.MUTANTS}.values():
        rule = accept.default_rule(cases.named(name).drafter)
        assert error_of(name, rule, vocab_size=cases.VOCAB, **settings) < EXACT
