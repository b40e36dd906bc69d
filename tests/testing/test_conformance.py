"""Every drafter with every rule that takes its drafts, through the same checks; discovered, so that nobody can be left out.

The pairs are spread over the workers, whole cases at a time (see conftest), so that each drafter is built once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, testing
from specjax.errors import UserError
from specjax.testing import cases, conformance, mutants
from specjax.types import SIBLINGS, Draft

RULES = {name: accept.load(name) for name in accept.names()}
KINDS = {name: cases.case(name).drafter for name in cases.NAMES}
PAIRS = [
    (c, r)
    for c, drafter in KINDS.items()
    for r, rule in RULES.items()
    if drafter.siblings in rule.siblings
]
# These drafters differ from another case in topology alone: one rule for each is enough.
ONLY = {"irregular": ("recursive",), "ragged": ("traversal",)}
# To a rule one draft is like another of its kind: one or two rules for each of these in every run, all when asked (slow).
SAMPLE = {
    "none": ("chain", "match"),
    "prompt_lookup": ("chain", "block", "match"),
    "dynamic": ("deterministic",),
    # What is lossy decides by the target's laws alone: the chain has them all.
    "iid": ("deterministic", "k_seq", "match", "recursive", "traversal"),
    "independent": ("deterministic", "recursive", "traversal"),
    "without_replacement": ("deterministic", "recursive", "traversal"),
    "deterministic": ("deterministic", "match", "recursive", "traversal"),
    "llma": ("chain",),
    "ngram_lm": ("block",),
    "jacobi": ("chain", "match"),
    "lookahead": (),
    "token_recycling": ("recursive",),
    "trie": ("deterministic",),
    "suffix": ("recursive",),
    "sam": (),
    "rest": (),
    "escalate": ("match",),
    "controlled": ("recursive",),
    "medusa": ("deterministic",),
    "hydra": (),  # tests/test_hydra.py has the exact law
    "mlp_speculator": ("chain",),
    "bpd": ("match",),
}
PAIRS = [(c, r) for c, r in PAIRS if r in ONLY.get(c, (r,))]


def test_nobody_is_left_out():
    def base(drafter):
        return drafter.name.split(",")[0]

    assert {base(d) for d in KINDS.values()} == set(drafters.names())
    assert {r for _, r in PAIRS} == set(accept.names())
    assert {d.siblings for d in KINDS.values()} == set(SIBLINGS)


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(
            c,
            r,
            marks=[
                pytest.mark.xdist_group(c),
                *([] if r in SAMPLE.get(c, (r,)) else [pytest.mark.slow]),
            ],
        )
        for c, r in PAIRS
    ],
)
def test_pair(case, rule):
    given = cases.case(case)
    found = conformance.check_pair(given.drafter, RULES[rule], given.target, given.params)
    report = conformance.Report(f"{case} with {rule}", tuple(found))
    assert report.passed, str(report)


def test_inadmissible_pairs_are_refused_before_anything_is_compiled():
    for case, drafter in KINDS.items():
        for name, rule in RULES.items():
            if drafter.siblings not in rule.siblings:
                given = cases.case(case)
                with pytest.raises(
                    UserError, match=f"the rule {name} takes drafts whose siblings are"
                ):
                    conformance.check_pair(given.drafter, rule, given.target, given.params)


@pytest.mark.slow
@pytest.mark.xdist_group("reports")
def test_check_drafter_reports():
    """What a user calls on a drafter of their own: a healthy one passes, a sick one is told what is wrong with it."""
    case = cases.case("chain")
    report = testing.check_drafter(case.drafter, case.target, case.params, [RULES["chain"]])
    assert report.passed and "keeps its promises" in str(report) and "exact law" in str(report)
    assert "it remembers the text" in str(report)
    forgetful = case.drafter._replace(
        update=lambda params, cache, *_: cache.replace(tokens=cache.tokens * 0)
    )
    assert conformance._memory(forgetful, case.target, case.params).passed is False
    by_name = {m.name: m for m in mutants.MUTANTS}
    sick = by_name["claims_another_law"].change(case.drafter)
    found = conformance.check_law(case.target, sick, RULES["chain"], case.params, [cases.PROMPT])
    report = conformance.Report("sick", (found,))  # counting finds it too: tests/test_mutants.py
    assert not report.passed and "FAIL" in str(report) and found.check == "exact law of a round"


@pytest.mark.xdist_group("reports")
def test_check_accept_reports():
    sick = {m.name: m for m in mutants.MUTANTS}["block_stops_at_the_first_failure"].rule()
    report = testing.check_accept(sick._replace(lossless_class="L1"), ["chain"])
    assert not report.passed
    raw = {m.name: m for m in mutants.MUTANTS}["one_number_for_coin_and_residual"].rule()
    report = testing.check_accept(raw._replace(lossless_class="L1"), ["chain"])
    found = {f.check: f.passed for f in report.findings}
    assert (
        found["chain, temperature 1.0: exact law of a round"] is None
    )  # raw noise: it says that it cannot tell
    assert found["law, temperature 1.0"] is False  # and counting finds it


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": [[-1, 2, 0]]}, "row 0, node 1 has a parent that does not come before it"),
        ({"parents": [[-1, -2, 0]]}, "row 0, node 1 has a parent below -1"),
        ({"tokens": [[0, 3, 1]]}, "row 0, node 1 has a token outside 0..2"),
        ({"probs": [[[0.5, 0.3, 0.1]] * 3]}, "row 0, node 0 has a law that does not sum to 1"),
        ({"probs": [[[1.2, -0.2, 0.0]] * 3]}, "row 0, node 0 has a law with negative mass"),
        ({"probs": [[[np.nan, 0.5, 0.5]] * 3]}, "row 0, node 0 has a law that is not finite"),
        (
            {"probs": [[[0.0, 0.5, 0.5]] * 3]},
            "row 0, node 0 has a token that its own law cannot draw",
        ),
        (
            {"parents": [[-1, -1, -1]], "siblings": "without_replacement"},
            "node 1 has a law that could draw its elder",
        ),
        ({"siblings": "deterministic"}, "a deterministic draft has no laws"),
        ({"siblings": "chain"}, "parents must be None for a chain"),
        (
            {
                "probs": [[[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]],
                "parents": [[-1, -1, 0]],
                "siblings": "iid",
            },
            "node 1 has siblings of different laws, said to be i.i.d.",
        ),
    ],
)
def test_check_draft_names_row_and_node(change, message):
    given = {
        "tokens": [[0, 1, 2]],
        "valid": [[True] * 3],
        "parents": [[-1, 0, 0]],
        "probs": [[[0.5, 0.3, 0.2]] * 3],
    }
    siblings = change.pop("siblings", "independent")
    draft = Draft(**{k: jnp.asarray(v) for k, v in (given | change).items()})
    with pytest.raises(UserError) as error:
        testing.check_draft(draft, 3, siblings)
    assert message in str(error.value)


@pytest.mark.fast
def test_check_accept_knows_its_cases():
    for given in ({"names": ["chian"]}, {"loop_case": "chian"}):
        with pytest.raises(
            UserError, match="there is no case 'chian'; there is none, prompt_lookup, llma"
        ):
            testing.check_accept(RULES["chain"], **given)
    with pytest.raises(UserError, match="does not take the case iid"):
        testing.check_accept(RULES["chain"], ["chain"], loop_case="iid")


@pytest.mark.fast
def test_check_draft_counts_siblings():
    draft = Draft(
        jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool), parents=jnp.full((1, 4), -1)
    )
    with pytest.raises(UserError, match="one of 4 siblings; the vocabulary has 3 tokens"):
        testing.check_draft(draft, 3, "deterministic")


@pytest.mark.fast
def test_power_is_what_is_claimed():
    """A deviation of the stated total variation, of any shape, is found 99 times in 100."""
    law = np.random.default_rng(0).dirichlet(np.ones(40))
    size, rows, rng = testing.detectable(law, 20_000), 20_000, np.random.default_rng(1)
    even = np.where(rng.permutation(40) % 2, 1.0, -1.0) * law
    even -= law * even.sum()
    spike = np.zeros(40)
    spike[3], spike[7] = 1.0, -1.0
    for shift in (even, spike * min(law[7], 1)):
        changed = law + shift * size / (0.5 * np.abs(shift).sum())
        if (changed < 0).any():
            continue
        found = [
            testing.chi_square(rng.multinomial(rows, changed / changed.sum()), law)[2] < 1e-3
            for _ in range(300)
        ]
        assert np.mean(found) > 0.97
    healthy = [testing.chi_square(rng.multinomial(rows, law), law)[2] < 1e-3 for _ in range(300)]
    assert np.mean(healthy) < 0.02


@pytest.mark.fast
def test_the_script_walks_through_everything():
    """A draw, a draw without replacement and a coin: every outcome once, with its probability."""
    from specjax.testing import exact

    def program(script, rows):
        first = script.draw(0, jnp.asarray([[1.0, 0.0, 3.0]]).repeat(script.batch, 0))
        pair, real = script.draw_distinct(
            0, jnp.asarray([[0.5, 0.25, 0.25]]).repeat(script.batch, 0), 2, 7
        )
        coin = script.coins(1).flip(jnp.full((script.batch, 1), 0.2), jnp.ones((script.batch, 1)))
        return first, pair, real, coin

    with jax.enable_x64(True):
        seen = exact.expand(program, {"x": np.zeros(1)}, 1)
    first, pair, real, coin = (np.asarray(x) for x in seen.value)
    assert len(seen.chance) == 2 * 6 * 2 and seen.chance.sum() == pytest.approx(1, abs=1e-15)
    assert real.all() and (pair[:, 0] != pair[:, 1]).all()
    assert seen.chance[first == 2].sum() == pytest.approx(0.75, abs=1e-15)
    assert seen.chance[coin[:, 0]].sum() == pytest.approx(0.2, abs=1e-15)
    second = seen.chance[(pair[:, 0] == 0) & (pair[:, 1] == 2)].sum()
    assert second == pytest.approx(0.5 * 0.5, abs=1e-15)
