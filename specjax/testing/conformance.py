"""Checks of a whole method: ``check_drafter`` and ``check_accept`` return a readable report.

    report = testing.check_drafter(make(target), target, params)
    print(report)
    assert report.passed

They run the compiled loop over thousands of ragged rows of a table model, and enumerate every
outcome in float64 where all randomness is coins and draws (``specjax.testing.exact``).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax import accept
from specjax.errors import UserError
from specjax.testing import cases, drafter_checks, exact, laws, pair_checks
from specjax.testing.findings import Finding, Report
from specjax.testing.runner import Runner
from specjax.theory import statistics
from specjax.types import LM, Accept, Drafter, ModelParams

EXACT = 1e-12


def check_pair(
    drafter: Drafter, rule: Accept, target: LM, params: ModelParams, *, seed: int = 0
) -> list[Finding]:
    """Checks one drafter with one rule in the compiled loop.

    ``target`` has a small vocabulary (3 to 6 tokens). Raises UserError for a rule that does not
    take such drafts.
    """
    accept.check_pair(drafter, rule)
    return pair_checks.all_checks(Runner(drafter, rule, target, params, seed))


def check_law(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    **settings,
) -> Finding:
    """The exact law of one round: its total variation from the target's law is below 1e-12.

    ``passed`` is None where the law cannot be enumerated, and for a rule that is not L1.
    """
    name = "exact law of a round"
    with jax.enable_x64(True):
        wide = jax.tree.map(_widen, params)
        steps, worst = drafter.longest + 1, 0.0
        try:
            for prompt in prompts:
                law = exact.exact_law(
                    target, drafter, rule, wide, list(prompt), steps, rounds=1, **settings
                )
                truth = laws.sequence_law(target, wide.target, list(prompt), steps, **settings)
                worst = max(worst, statistics.total_variation(law, truth))
        except (exact.NoiseReused, exact.ImpossibleProbs) as error:
            return Finding(name, False, str(error))
        except (exact.NotEnumerable, exact.TooLarge) as error:
            return Finding(name, None, str(error))
    passed = worst < EXACT if rule.lossless_class == "L1" else None
    return Finding(name, passed, f"total variation {worst:.1e}, {rule.name}")


def _widen(x: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, jnp.float64) if floating else jnp.asarray(x)


def check_drafter(
    drafter: Drafter,
    target: LM,
    params: ModelParams,
    rules: Sequence[Accept] | None = None,
    *,
    prompts: Sequence[Sequence[int]] = (cases.PROMPT,),
) -> Report:
    """Checks a drafter with the given rules (default: every L1 rule that takes its drafts).

    Args:
        drafter: made for ``target``.
        target: a model with a vocabulary of 3 to 6 tokens, such as ``testing.tabular(3)``.
        params: of the pair; floats become float64 where the law is enumerated.
        rules: acceptance rules.
        prompts: texts after which the law is enumerated.

    Returns:
        A ``Report``: the form of its drafts, its state, then per rule the exact law of a round and
        the findings of ``check_pair``.
    """
    findings = [drafter_checks.well_formed(drafter, target, params)]
    if findings[0].passed is False:
        return Report(drafter.name, tuple(findings))
    findings.append(drafter_checks.state_follows_text(drafter, target, params))
    for rule in lossless_rules(drafter) if rules is None else rules:
        results = [
            check_law(target, drafter, rule, params, prompts),
            *check_pair(drafter, rule, target, params),
        ]
        findings += [f._replace(check=f"{rule.name}: {f.check}") for f in results]
    return Report(drafter.name, tuple(findings))


def lossless_rules(drafter: Drafter) -> list[Accept]:
    """Every L1 rule that takes the drafts of this drafter, with its default settings."""
    rules = [accept.load(name) for name in accept.names()]
    return [r for r in rules if r.lossless_class == "L1" and drafter.siblings in r.siblings]


def check_accept(
    rule: Accept, names: Sequence[str] | None = None, *, loop_case: str | None = None
) -> Report:
    """Checks a rule on one drafter of every kind that it takes (``cases.NAMES``).

    Args:
        rule: an L1 rule must have the target's law; any rule must be greedy decoding at temperature
            0 with the settings it was made with.
        names: the cases to enumerate; default: all that fit.
        loop_case: the case for the compiled loop; default: the last of them.

    Returns:
        A ``Report``.

    Raises:
        UserError: an unknown case, or one that the rule does not take.
    """
    for name in (*(names or ()), *([loop_case] if loop_case else ())):
        if name not in cases.NAMES:
            raise UserError(f"unknown case {name!r}; it must be one of {', '.join(cases.NAMES)}")
    every = [cases.case(name) for name in names or cases.NAMES]
    fit = {case.name: case for case in every if case.drafter.siblings in rule.siblings}
    if not fit:
        raise UserError(
            f"rule {rule.name} takes none of the cases {', '.join(names or cases.NAMES)}"
        )
    if loop_case and loop_case not in fit:
        raise UserError(f"rule {rule.name} does not take the case {loop_case}")
    findings = []
    for case in fit.values():
        for settings in pair_checks.SETTINGS if rule.lossless_class == "L1" else ():
            finding = check_law(
                case.target, case.drafter, rule, case.params, [cases.PROMPT], **settings
            )
            name = f"{case.name}, {pair_checks.setting_name(settings)}: {finding.check}"
            findings.append(finding._replace(check=name))
    chosen = fit[loop_case] if loop_case else list(fit.values())[-1]
    findings += check_pair(chosen.drafter, rule, chosen.target, chosen.params)
    return Report(rule.name, tuple(findings))
