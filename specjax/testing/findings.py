"""The results of the checks of a method, and how a list of checks is run."""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from specjax.errors import UserError
from specjax.types import Accept

# Parts of the paths of frames that do not show where a user's code failed.
_LIBRARIES = ("/jax/", "/jaxlib/", "/numpy/", "/flax/", "<frozen")
_OWN = "/specjax/"


class Finding(NamedTuple):
    """The result of one check.

    ``passed`` None: not proven. Nothing failed, but the check could not decide; ``detail`` gives
    the reason.
    """

    check: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "?   "}[self.passed]
        return f"{mark} {self.check}  {self.detail}"


class Report(NamedTuple):
    """All findings about one method."""

    name: str
    findings: tuple[Finding, ...]
    # What it proves if all checks passed: "drafter", "rule", or "" if some checks were left out.
    proves: str = ""
    # The rule that was checked; None: a report about a drafter.
    rule: Accept | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed. False without a check, and if one failed or is not proven."""
        return bool(self.findings) and all(f.passed is True for f in self.findings)

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(f.passed is False for f in self.findings)

    @property
    def not_proven(self) -> tuple[Finding, ...]:
        """The checks that could not decide."""
        return tuple(f for f in self.findings if f.passed is None)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.name} did not pass: nothing was checked"
        width = max(len(f.check) for f in self.findings)
        lines = [str(f._replace(check=f"{f.check:{width}}")) for f in self.findings]
        result = "FAILED" if self.failed else "passed all checks"
        if not self.failed and self.not_proven:
            result = f"did not fail; not proven: {len(self.not_proven)} of {len(lines)} checks"
        return "\n".join([f"{self.name} {result}", *lines])


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
