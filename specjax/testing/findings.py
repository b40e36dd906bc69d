"""The result of a check of a method, and its text."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check; ``passed`` None: not checked, ``detail`` gives the reason."""

    check: str
    passed: bool | None
    detail: str


class Report(NamedTuple):
    """All findings about one method."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(f.passed is not False for f in self.findings)

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}
        width = max(len(f.check) for f in self.findings)
        lines = [f"{mark[f.passed]} {f.check:{width}}  {f.detail}" for f in self.findings]
        result = "passed all checks" if self.passed else "FAILED"
        return "\n".join([f"{self.name} {result}", *lines])
