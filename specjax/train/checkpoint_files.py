"""What checkpoints add to Orbax: checksums, errors in one line, no log records."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from specjax import files

CHECKSUMS = "checksums.json"


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a step, without the list of checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): files.sha256(path)
        for path in sorted(paths)
        if not path.name.startswith(CHECKSUMS)
    }


def reason_of(error: BaseException) -> str:
    """Why a file could not be written, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore puts the error number of the system into its message.
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else str(error).partition("\n")[0]


class _FromOrbax(logging.Filter):
    """Drops the log records of Orbax.

    It logs every error that it also raises, with a traceback and from several threads, and warns of
    intended states (a checkpoint without a metric).
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname


_FILTER = _FromOrbax()


def silence(on: bool) -> None:
    """Drops the log records of Orbax from now on, or no longer."""
    logger = logging.getLogger("absl")
    (logger.addFilter if on else logger.removeFilter)(_FILTER)
