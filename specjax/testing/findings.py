"""What a check of a method found, and how it reads."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was checked; ``passed`` None: it could not be, and ``detail`` says why."""

    check: str
    passed: bool | None
    detail: str


class Report(NamedTuple):
    """All findings about one method."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(f.passed is not False for f in self.findings)

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}
        width = max(len(f.check) for f in self.findings)
        lines = [f"{mark[f.passed]} {f.check:{width}}  {f.detail}" for f in self.findings]
        verdict = "keeps its promises" if self.passed else "BREAKS ITS PROMISES"
        return "\n".join([f"{self.name} {verdict}", *lines])
