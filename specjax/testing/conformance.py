"""Checks of a whole method: ``check_drafter`` and ``check_accept`` return a readable report.

    report = testing.check_drafter(make(target), target, params)
    print(report)
    assert report.passed

They run the compiled loop over thousands of ragged rows of a table model, and enumerate every
outcome in float64 where all randomness is coins and draws (``specjax.testing.exact``). What cannot
be enumerated is counted on 120,000 rows. A check that cannot decide is "not proven", and a report
with such a check has not passed.

Lines appear on stderr while the checks run. ``quick=True`` gives a first answer: no compiled loop,
one setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specjax import accept
from specjax.prompt import check_kinds
from specjax.testing import (
    acceptance_checks,
    claims,
    drafter_checks,
    forecast_checks,
    pair_checks,
    plain_cases,
    state_checks,
)
from specjax.testing.findings import Check, Finding, Progress, Report, collect
from specjax.testing.law_checks import check_law, distance
from specjax.testing.models import prompts_of
from specjax.testing.runner import Runner
from specjax.types import CHAIN, COUPLED, LM, Accept, Drafter, ModelParams

__all__ = ["check_accept", "check_drafter", "check_law", "check_pair", "lossless_rules"]

# Settings of the enumerated laws; the first one is that of quick checks.
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.85},
    {"temperature": 1.2, "min_p": 0.3},
)
# Later rounds whose laws are enumerated too.
LATER = (2, 6)


def check_pair(
    drafter: Drafter,
    rule: Accept,
    target: LM,
    params: ModelParams,
    *,
    seed: int = 0,
    settings: Sequence[dict] = pair_checks.SETTINGS,
    rows: int = pair_checks.ROWS,
    more: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Checks one drafter with one rule in the compiled loop.

    ``target`` has a small vocabulary (3 to 6 tokens). ``settings`` are those at which the law of
    sampled rows is counted, on ``rows`` of them, a multiple of 3,000; all rows have ``more``
    (arguments of ``make_sampling``). Raises UserError for a rule that does not take such drafts.
    """
    accept.check_pair(drafter, rule)
    return pair_checks.all_checks(Runner(drafter, rule, target, params, seed, more), settings, rows)


def check_drafter(
    drafter: Drafter,
    target: LM,
    params: ModelParams,
    rules: Sequence[Accept] | None = None,
    *,
    prompts: Sequence[Sequence[int]] = (plain_cases.PROMPT, plain_cases.REPEATED),
    quick: bool = False,
    first_failure: bool = False,
    progress: Progress = True,
) -> Report:
    """Checks a drafter with the given rules (default: every L1 rule that takes its drafts).

    Args:
        drafter: made for ``target``.
        target: a model with a vocabulary of 3 to 6 tokens, such as ``testing.tabular(3)``. For a
            drafter with a cache of its own, run the check of its state on a real decoder too:
            ``testing.state_follows_text``.
        params: of the pair; floats become float64 where the law is enumerated.
        rules: acceptance rules.
        prompts: texts after which drafts and laws are enumerated (see ``models.prompts_of``). After
            one of them the drafter should draft: a lookup finds nothing in a text without
            repetitions.
        quick: only the drafts themselves and the laws at one setting, without the compiled loop.
        first_failure: whether to end at the first check that fails.
        progress: True: finished lines appear on stderr; a function gets each line; False: silence.

    Returns:
        A ``Report``: the form of its drafts, the probs that it declares, its state, its forecast,
        then per rule the exact law of a round (of an L2 or L3 rule its distance from the target's,
        without a bound) and the findings of ``check_pair``. An exception in
        the drafter's code is a failed check. If its functions take or return something of another
        form, that is the only check.
    """
    check_kinds(target=target, drafter=drafter, params=params)
    chosen = lossless_rules(drafter) if rules is None else list(rules)
    for rule in chosen:
        check_kinds(accept=rule)
        accept.check_pair(drafter, rule)
    checks = _drafter_checks((drafter, target, params), chosen, prompts_of(target, prompts), quick)
    # Without a rule no law is compared.
    proves = "drafter" if chosen and not quick else ""
    how = {"progress": progress, "first_failure": first_failure, "proves": proves}
    return collect(drafter.name, checks, **how)


def _drafter_checks(
    own: tuple[Drafter, LM, ModelParams], rules: list[Accept], texts: list[list[int]], quick: bool
) -> Iterator[Check]:
    (drafter, target, params), name = own, "drafts are well formed"
    if wrong := drafter_checks.wrong_form(*own):
        yield name, Finding, name, False, wrong
        return
    yield name, drafter_checks.well_formed, *own
    settings = SETTINGS[:1] if quick else SETTINGS
    claimed = (target, drafter, params, texts, settings)
    yield "tokens are drawn from the declared probs", claims.drawn_as_declared, *claimed
    if not quick:
        yield "its state follows the text", state_checks.state_follows_text, *own
        yield "verified widths do not matter", state_checks.widths_do_not_matter, *own
        if drafter.probs is not None:
            yield "its first token is drawn from Drafter.probs", drafter_checks.probs_of_text, *own
        if drafter.training is not None and drafter.training.foresee is not None:
            yield "its forecast equals decoding", forecast_checks.forecast_equals_decoding, *own
    for number, rule in enumerate(rules):
        exact = rule.lossless_class == "L1"
        # What the drafter declares was enumerated at all settings; here one rule shows its effect.
        law = (target, drafter, rule, params, texts)
        for each in () if exact else settings:
            yield _named(rule.name, "distance of a round's law", distance, *law, **each)
        for each in (settings if number == 0 else SETTINGS[:1]) if exact else ():
            keys = {"count": not quick, "after": LATER, **each}
            yield _named(rule.name, "exact law of a round", check_law, *law, **keys)
        if not quick:
            loop = (drafter, rule, target, params)
            yield _named(rule.name, "the compiled loop", check_pair, *loop)


def _named(prefix: str, name: str, check: Callable, *args: Any, **keys: Any) -> Check:
    """The check of these arguments; ``prefix`` is put before the names of its findings."""

    def run() -> list[Finding]:
        results = check(*args, **keys)
        results = [results] if isinstance(results, Finding) else results
        return [f._replace(check=f"{prefix}: {f.check}") for f in results]

    return f"{prefix}: {name}", run


def lossless_rules(drafter: Drafter) -> list[Accept]:
    """Every L1 rule that takes the drafts of this drafter, with its default settings."""
    rules = [accept.load(name) for name in accept.names()]
    own = [r for r in rules if r.lossless_class == "L1" and drafter.siblings in r.siblings]
    # A rule for coupled drafts does with others what sample-then-match does.
    return [r for r in own if COUPLED not in r.siblings or drafter.siblings == COUPLED]


def check_accept(
    rule: Accept,
    *,
    quick: bool = False,
    first_failure: bool = False,
    progress: Progress = True,
) -> Report:
    """Checks a rule on drafts of every kind of siblings that it takes.

    Args:
        rule: an L1 rule must have the target's law; any rule must be greedy decoding at temperature
            0 with the settings it was made with.
        quick: only the enumeration of chains of four and of trees of three levels at one setting,
            without the compiled loop: no check of an L2 or L3 rule, so its report has not passed.
        first_failure: whether to end at the first check that fails.
        progress: True: finished lines appear on stderr; a function gets each line; False: silence.

    Returns:
        A ``Report``: empty drafts, the exact laws, the chance of acceptance against its closed form
        and the best possible, the compiled loop. An exception in the rule is a failed check. Of an
        L2 or L3 rule the distance of the law from the target's at each setting, without a bound,
        and whether ``Accept.law`` is the enumerated one.

    Raises:
        UserError: a class or siblings that do not exist.
    """
    accept.check(rule)
    checks = _rule_checks(rule, quick)
    proves = "" if quick else "rule"
    how = {"progress": progress, "first_failure": first_failure, "proves": proves, "rule": rule}
    return collect(rule.name, checks, **how)


def _rule_checks(rule: Accept, quick: bool) -> Iterator[Check]:
    exact = rule.lossless_class == "L1"
    for kind in rule.siblings if exact else ():
        yield f"{kind}: a draft of 0 nodes", acceptance_checks.empty_drafts, rule, kind
        yield _law(rule, plain_cases.deep(kind), SETTINGS[0], count=not quick, depths=True)
        yield _law(rule, plain_cases.deep(kind, holes=True), SETTINGS[1], count=not quick)
        if quick:
            continue
        yield _law(rule, plain_cases.deep(kind, sparse=True), SETTINGS[3])
        # With two tokens a residual is one token: four show how it is computed.
        yield _law(rule, plain_cases.star(kind, 1 if kind == CHAIN else 3, 4), {}, count=False)
        for width in (1,) if kind == CHAIN else (1, 2):
            yield f"{kind}: chance of acceptance", acceptance_checks.chance_of, rule, kind, width
    if quick:
        return
    for kind in dict.fromkeys((rule.siblings[0], rule.siblings[-1])):
        if rule.law is not None:
            yield f"{kind}: the law of a tested token", acceptance_checks.law_of_test, rule, kind
        case = plain_cases.real(kind)
        law = (case.target, case.drafter, rule, case.params, [plain_cases.REPEATED])
        for each in () if exact else SETTINGS:
            yield _named(case.name, "distance of a round's law", distance, *law, **each)
        loop = (case.drafter, rule, case.target, case.params)
        yield _named(case.name, "the compiled loop", check_pair, *loop)


def _law(rule: Accept, case: plain_cases.Case, settings: dict, **keys) -> Check:
    law = (case.target, case.drafter, rule, case.params, [plain_cases.prompt(case)])
    keys |= settings
    return _named(case.name, "exact law of a round", check_law, *law, **keys)
