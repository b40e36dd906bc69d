"""The results of the checks of a method, and how a list of checks is run."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from specjax.bench.proofs import Finding, Report
from specjax.errors import UserError
from specjax.types import Accept

# Parts of the paths of frames that do not show where a user's code failed.
_LIBRARIES = ("/jax/", "/jaxlib/", "/numpy/", "/flax/", "<frozen")
_OWN = "/specjax/"


Check = tuple[str, Callable[..., Finding | list[Finding]], *tuple[Any, ...]]
"""A check: the name of its line if it raises, the function that runs it, and its arguments."""

Progress = bool | Callable[[str], None]
"""True: lines on stderr; False: nothing; a function: it is called with each line."""


def collect(
    name: str,
    checks: Iterable[Check],
    *,
    progress: Progress = False,
    first_failure: bool = False,
    proves: str = "",
    rule: Accept | None = None,
) -> Report:
    """Runs the checks in order; an exception in one of them is a finding that failed.

    Args:
        name: of the method.
        checks: may be lazy: the next one is requested when the last one has ended.
        progress: where the finished lines are shown while the checks run.
        first_failure: whether to end at the first check that fails.
        proves: see ``Report``.
        rule: see ``Report``.
    """
    findings: list[Finding] = []
    show = progress if callable(progress) else functools.partial(print, file=sys.stderr, flush=True)
    for title, check, *args in checks:
        begin = time.perf_counter()
        try:
            results = check(*args)
        except Exception as error:
            results = Finding(title, False, where(error))
        for finding in [results] if isinstance(results, Finding) else results:
            findings.append(finding)
            if progress:
                show(f"{finding} ({time.perf_counter() - begin:.1f} s)")
        if first_failure and any(f.passed is False for f in findings):
            break
    return Report(name, tuple(findings), proves, rule)


def where(error: BaseException) -> str:
    """The exception in one line: the innermost place of the user's code, its type, its message.

    Of a ``UserError`` of the library the message alone.
    """
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)]
    users = [f for f in known if _OWN not in f.filename]
    place, message = "", " ".join(str(error).split())[:300]
    if isinstance(error, UserError) and not (users and known[-1] is users[-1]):
        return message
    if users or known:
        frame = (users or known)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}, in {frame.name}: "
    return f"{place}{type(error).__name__}: {message}"
