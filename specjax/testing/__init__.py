"""Tools to prove a method, for drafters and rules of the library and of its users.

- ``check_drafter``, ``check_accept``: all checks of one method, as a readable report.
- ``exact_law``, ``histories``: the exact law of what a drafter and a rule emit, from the real code.
- ``loop_fit``: chi-square of the compiled loop's outputs, with its power.
- ``tabular``, ``tiny``: small models; ``cases``: one drafter of every kind on them.
- ``mutants``: wrong rules and drafters that a test must be able to detect.
"""

from specjax.testing.conformance import check_accept, check_drafter
from specjax.testing.drafts import check_draft
from specjax.testing.exact import (
    Histories,
    NoiseReused,
    NotEnumerable,
    TooLarge,
    exact_law,
    histories,
)
from specjax.testing.findings import Finding, Report
from specjax.testing.laws import sequence_law
from specjax.testing.loop import Fit, detectable, loop_fit
from specjax.testing.models import random_table, tabular, tiny, tiny_config
from specjax.testing.transport import best_acceptance
from specjax.theory.statistics import chi_square, chi_square_tail, total_variation

__all__ = [
    "Finding",
    "Fit",
    "Histories",
    "NoiseReused",
    "NotEnumerable",
    "Report",
    "TooLarge",
    "best_acceptance",
    "check_accept",
    "check_draft",
    "check_drafter",
    "chi_square",
    "chi_square_tail",
    "detectable",
    "exact_law",
    "histories",
    "loop_fit",
    "random_table",
    "sequence_law",
    "tabular",
    "tiny",
    "tiny_config",
    "total_variation",
]
