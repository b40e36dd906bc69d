"""Tools to prove a method, for drafters and rules of the library and of its users.

- ``check_drafter``, ``check_accept``: all checks of one method, as a readable report.
- ``state_follows_text``, ``forecast_equals_decoding``: what no text shows: a drafter's state, and
  its forecast of its speed. The first one wants a real decoder.
- ``exact_law``, ``histories``: the exact law of what a drafter and a rule emit, from the real code.
- ``loop_fit``: chi-square of the compiled loop's outputs, with its power.
- ``tabular``, ``keyed``, ``whole_text``, ``tiny``, ``tiny_t5``: small models.
"""

from specjax.testing.acceptance_checks import best_coverage
from specjax.testing.conformance import check_accept, check_drafter
from specjax.testing.drafter_checks import check_draft
from specjax.testing.exact import (
    Enumerated,
    Histories,
    NoiseReused,
    NotEnumerable,
    TooLarge,
    WrongVerdict,
    enumerated,
    exact_law,
    histories,
)
from specjax.testing.findings import Finding, Report
from specjax.testing.forecast_checks import forecast_equals_decoding
from specjax.testing.laws import sequence_law
from specjax.testing.lm_checks import check_lm
from specjax.testing.loop import Fit, detectable, loop_fit
from specjax.testing.models import (
    keyed,
    random_table,
    tabular,
    tiny,
    tiny_config,
    tiny_t5,
    whole_text,
)
from specjax.testing.state_checks import state_follows_text
from specjax.theory.statistics import chi_square, chi_square_tail, total_variation

__all__ = [
    "Enumerated",
    "Finding",
    "Fit",
    "Histories",
    "NoiseReused",
    "NotEnumerable",
    "Report",
    "TooLarge",
    "WrongVerdict",
    "best_coverage",
    "check_accept",
    "check_draft",
    "check_drafter",
    "check_lm",
    "chi_square",
    "chi_square_tail",
    "detectable",
    "enumerated",
    "exact_law",
    "forecast_equals_decoding",
    "histories",
    "keyed",
    "loop_fit",
    "random_table",
    "sequence_law",
    "state_follows_text",
    "tabular",
    "tiny",
    "tiny_config",
    "tiny_t5",
    "total_variation",
    "whole_text",
]
