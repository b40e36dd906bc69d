"""What ``check_accept`` and ``check_drafter`` report: statuses, progress, exceptions."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest

from specjax import accept, drafters, rng, testing, types
from specjax.errors import UserError
from specjax.testing import conformance, findings, law_checks, plain_cases
from specjax.testing.findings import Finding, Report
from specjax.types import Accept

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")


def law_of(drafter, rule, **keys):
    _, target, _, params = cases.case("chain")
    return law_checks.check_law(target, drafter, rule, params, [cases.PROMPT], **keys)


@pytest.mark.fast
def test_not_proven_is_not_passed():
    good, unknown = Finding("a", True, ""), Finding("b", None, "raw noise")
    report = Report("it", (good, unknown))
    assert not report.passed and not report.failed and report.not_proven == (unknown,)
    assert str(report).startswith("it did not fail; not proven: 1 of 2 checks")
    assert Report("it", (good,)).passed and "passed all checks" in str(Report("it", (good,)))
    bad = Report("it", (good, Finding("c", False, "wrong")))
    assert bad.failed and not bad.passed and "FAILED" in str(bad) and "FAIL c" in str(bad)


@pytest.mark.fast
def test_a_report_that_checked_nothing_has_not_passed():
    report = Report("it", ())
    assert not report.passed and not report.failed
    assert str(report) == "it did not pass: nothing was checked"
    report = testing.check_accept(accept.load("typical"), quick=True, progress=False)
    assert not report.passed and "nothing was checked" in str(report)


def mistaken(keys, draft, target_probs):
    """The wrong rule of docs/exactness.md: no residual after a rejection."""
    verdict, coins = accept.verdict, keys.coins(draft.tokens.shape[1], target_probs.dtype)
    passed = coins.flip(*verdict.masses(draft, target_probs)) & verdict.chain_nodes(draft)
    accepted = verdict.first_failure(passed)
    token = keys.draw(rng.RESIDUAL, verdict.at(target_probs, accepted))
    return verdict.prefix(draft, accepted, token)


@pytest.mark.fast
@pytest.mark.parametrize("declared", ["l1", "", "L4", "L1 ", None, 1])
def test_a_class_that_does_not_exist_is_an_error(declared):
    """A wrong rule must not pass because its class is misspelt."""
    rule = Accept(mistaken, accept.verdict.greedy, "mistaken", declared)
    _, target, drafter, params = cases.case("chain")
    message = "the rule mistaken declares the lossless class .*; it must be one of L1, L2, L3"
    checks = (
        lambda: testing.check_accept(rule, quick=True, progress=False),
        lambda: testing.check_drafter(drafter, target, params, [rule], progress=False),
        lambda: conformance.check_pair(drafter, rule, target, params),
        lambda: accept.check_pair(drafter, rule),
    )
    for check in checks:
        with pytest.raises(UserError, match=message) as caught:
            check()
        assert "\n" not in str(caught.value)


@pytest.mark.fast
@pytest.mark.parametrize("siblings", [(), "chain", ("Chain",), None])
def test_siblings_that_do_not_exist_are_an_error(siblings):
    rule = Accept(mistaken, accept.verdict.greedy, "mistaken", "L1", siblings)
    with pytest.raises(UserError, match="the rule mistaken declares siblings .* a tuple of some"):
        testing.check_accept(rule, quick=True, progress=False)


@pytest.mark.fast
def test_lines_appear_as_checks_end_and_the_first_failure_can_end_them():
    lines, run = [], []

    def check(number):
        run.append(number)
        return Finding(str(number), number != 2, "")

    checks = [(str(number), lambda n=number: check(n)) for number in range(4)]
    report = findings.collect("it", checks, progress=lines.append)
    assert run == [0, 1, 2, 3] and report.failed
    assert [line[:6] for line in lines] == ["ok   0", "ok   1", "FAIL 2", "ok   3"]
    assert findings.collect("it", checks, first_failure=True).findings[-1].check == "2"


@pytest.mark.fast
def test_progress_is_shown_on_stderr(capsys):
    findings.collect("it", [("a", lambda: Finding("a", True, "fine"))], progress=True)
    shown = capsys.readouterr()
    assert "ok   a  fine" in shown.err and not shown.out


def test_an_exception_is_a_line_that_names_its_place():
    def sampled(keys, draft, target_probs):
        last = draft.tokens[:, -1]  # a draft of 0 nodes has none
        return accept.load("chain").sampled(
            keys, draft.replace(tokens=draft.tokens + 0 * last[:, None]), target_probs
        )

    rule = Accept(sampled, accept.verdict.greedy, "mine", "L1")
    report = testing.check_accept(rule, quick=True, first_failure=True, progress=False)
    assert not report.passed
    line = report.findings[-1].detail
    assert "test_reports.py:" in line and "in sampled: IndexError" in line


@pytest.mark.fast
def test_an_exception_of_a_drafter_is_a_line():
    def propose(*args):
        raise KeyError("the table")

    _, target, drafter, params = cases.case("chain")
    broken = drafter._replace(propose=propose)
    report = testing.check_drafter(broken, target, params, first_failure=True, progress=False)
    assert len(report.findings) == 1 and "in propose: KeyError: 'the table'" in str(report)


@pytest.mark.fast
def test_whole_is_checked():
    _, target, drafter, params = cases.case("prompt_lookup")
    report = testing.check_drafter(
        drafter._replace(whole=True), target, params, first_failure=True, progress=False
    )
    assert "has an invalid node, and the drafter declares whole" in report.findings[0].detail


def test_a_law_without_a_draft_is_not_proven():
    _, target, _, params = cases.case("prompt_lookup")
    drafter = drafters.make("prompt_lookup", target, gamma=2, max_ngram=2)
    rule = accept.load("chain")
    finding = law_of(drafter, rule)
    assert finding.passed is None and finding.detail.startswith("nothing was drafted")
    finding = law_checks.check_law(target, drafter, rule, params, [cases.REPEATED])
    assert finding.passed and "2 nodes drafted" in finding.detail


def test_the_distance_of_a_rule_from_the_targets_law():
    """Accepting every token gives the draft's law: its distance is that of the two tables."""
    case = plain_cases.star("chain", 1)

    def sampled(keys, draft, target_probs):
        place = jnp.full(len(target_probs), 1)
        token = keys.draw(rng.RESIDUAL, accept.verdict.at(target_probs, place))
        return accept.verdict.prefix(draft, place, token)

    rule = Accept(sampled, accept.verdict.greedy, "every token", "L3")
    given = (case.target, case.drafter), (case.params, [plain_cases.PROMPT])
    finding = law_checks.distance(*given[0], rule, *given[1], temperature=1.0)
    p, q = (
        np.exp(table[2, 1]) / np.exp(table[2, 1]).sum()
        for table in (case.params.target, case.params.draft[0])
    )
    far = abs(p - q).sum() / 2, (q * np.log(q / p)).sum()
    text = f"total variation {far[0]:.3g}, KL divergence {far[1]:.3g} nats"
    assert finding.passed and finding.detail == text
    finding = law_checks.distance(*given[0], accept.load("chain"), *given[1], temperature=1.0)
    assert finding.detail.startswith("total variation 0,") or "e-1" in finding.detail


@pytest.mark.slow
def test_raw_noise_is_counted_or_not_proven():
    drafter = cases.case("chain").drafter
    rule = mutants.named("coins_keyed_by_position").rule()._replace(lossless_class="L1")
    finding = law_of(drafter, rule, count=False)
    assert finding.passed is None and "raw noise" in finding.detail
    finding = law_of(drafter, rule)
    assert finding.passed is False and "counted, not enumerated" in finding.detail
    assert "120000 rows" in finding.detail

    def raw(keys, draft, target_probs):
        """Right, with raw keys."""
        noise = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))
        coins = rng.Coins(noise(keys.at_round(rng.ACCEPT)))
        target_mass, draft_mass = accept.verdict.masses(draft, target_probs)
        accepted = accept.verdict.first_failure(coins.flip(target_mass, draft_mass) & draft.valid)
        rest = accept.verdict.leftover(accepted, draft, target_probs)
        return accept.verdict.prefix(draft, accepted, keys.draw(rng.RESIDUAL, rest))

    finding = law_of(drafter, Accept(raw, accept.verdict.greedy, "raw", "L1"))
    assert finding.passed and "counted, not enumerated" in finding.detail


@pytest.mark.slow
def test_a_report_names_what_failed():
    """A correct drafter passes, and the report of a wrong one names the failed check."""
    _, target, drafter, params = cases.case("chain")
    rule = accept.load("chain")
    report = testing.check_drafter(drafter, target, params, [rule], quick=True, progress=False)
    assert report.passed and "passed all checks" in str(report) and "exact law" in str(report)
    wrong = mutants.named("declares_other_probs").change(drafter)
    finding = law_of(wrong, rule)
    report = testing.Report("wrong", (finding,))
    assert not report.passed and "FAIL" in str(report)
    assert finding.check == "exact law of a round"


@pytest.mark.slow
def test_a_full_report_of_a_drafter():
    _, target, drafter, params = cases.case("chain")
    report = testing.check_drafter(drafter, target, params, [accept.load("chain")], progress=False)
    assert report.passed, str(report)
    for line in ("its state follows the text", "its forecast equals decoding", "top_p", "min_p"):
        assert line in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", accept.names())
def test_a_full_report_of_a_rule(name):
    report = testing.check_accept(accept.load(name), progress=False)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling", "lookahead", "jacobi"])
def test_full_reports_of_drafters_without_a_model(name):
    """Nothing of them is left unproven: they draft, and raw noise is counted."""
    _, target, drafter, params = cases.case(name)
    rules = [r for r in conformance.lossless_rules(drafter) if r.name in ("match", "deterministic")]
    report = testing.check_drafter(drafter, target, params, rules, progress=False)
    assert report.passed, str(report)


@pytest.mark.slow
def test_a_report_of_a_rule():
    wrong = mutants.named("block_stops_at_first_rejection").rule()
    wrong = wrong._replace(lossless_class="L1", siblings=("chain",))
    report = testing.check_accept(wrong, quick=True, first_failure=True, progress=False)
    assert report.failed and "deep chain" in report.findings[-1].check


@pytest.mark.fast
def test_the_example_of_a_rule_is_complete():
    """The docstring of ``specjax.accept.verdict`` has a rule; it passes."""
    text = accept.verdict.__doc__
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ") or not line]
    code = "\n".join(lines).strip()
    assert 10 <= len([line for line in code.splitlines() if line]) <= 15
    names = {"verdict": accept.verdict, "rng": rng, "types": types, "Accept": Accept}
    exec(code.replace("print(testing", "# print(testing"), names)
    report = testing.check_accept(names["rule"], quick=True, progress=False)
    assert report.passed, str(report)


@pytest.mark.fast
def test_the_names_for_rules_are_public():
    import specjax.accept.verdict as public

    assert public is accept.verdict and "verdict" not in accept.names()
    assert {"prefix", "along", "first_failure", "greedy", "draft_probs_at"} <= set(vars(public))
    with pytest.raises(UserError, match="unknown acceptance rule 'verdict'"):
        accept.load("verdict")


@pytest.mark.slow
def test_the_chance_of_acceptance_of_every_rule():
    """Against closed forms, on one and two siblings of every kind."""
    from specjax.testing import acceptance_checks

    known = 0
    for name in accept.names():
        rule = accept.load(name)
        for kind in rule.siblings if rule.lossless_class == "L1" else ():
            for width in (1,) if kind == "chain" else (1, 2):
                finding = acceptance_checks.chance_of(rule, kind, width)
                assert finding.passed, f"{name}: {finding}"
                known += "closed form" in finding.detail
    assert known >= 25


@pytest.mark.fast
def test_copies_on_a_path_are_accepted():
    """The parent of a node may be a copy of the node before it, and no other node."""
    from specjax.testing import verdicts

    mistakes = jax.jit(verdicts.mistakes, static_argnums=2)
    draft = types.Draft(
        tokens=jnp.array([[0, 0, 1, 2]]),
        valid=jnp.ones((1, 4), bool),
        parents=jnp.array([[-1, -1, -1, 1]]),
        depth=2,
    )

    def mistake(path, tokens, count):
        verdict = types.Verdict(jnp.array([tokens]), jnp.array([count]), jnp.array([path]))
        return int(mistakes(draft, verdict, 3)[0])

    assert mistake([0, 3], [0, 2, 1], 3) == mistake([1, 3], [0, 2, 1], 3) == -1
    assert mistake([-1, -1], [2, -1, -1], 1) == -1
    wrong = [
        mistake([-1, 1], [0, 1, -1], 2),
        mistake([0, 7], [0, 2, 1], 3),
        mistake([2, 3], [1, 2, 1], 3),
        mistake([0, 3], [1, 2, 1], 3),
        mistake([0, 3], [0, 2, 1], 2),
        mistake([0, 3], [0, 2, 9], 3),
    ]
    assert wrong[1:] == [1, 2, 3, 4, 5] and wrong[0] == 0


@pytest.mark.slow
def test_quick_checks_of_real_methods_pass():
    for name in ("block", "traversal"):
        rule = accept.load(name)._replace(siblings=("chain",))
        report = testing.check_accept(rule, quick=True, progress=False)
        assert report.passed, str(report)
    case = cases.named("deep chain")
    report = conformance.check_drafter(
        case.drafter, case.target, case.params, quick=True, progress=False
    )
    assert report.passed, str(report)
