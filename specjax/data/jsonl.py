"""Text files and JSON Lines as people hand them in: a mistake names the file, and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from specjax.errors import UserError


def read(path: Path, where: str, *, gz: bool = False) -> str:
    """The text of a file, without a byte order mark. ``where`` (what the file is, and its path) begins every message.

    With ``gz`` a file whose name ends in .gz is unpacked.

    Raises:
        UserError: a file that cannot be read, is no whole gzip file though it should be, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
        if gz and path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(
            f"{where} is no gzip file, or not a whole one; give one, or a name without .gz"
        ) from None
    except OSError as error:
        raise UserError(
            f"{where} cannot be read ({error.strerror or error}); give a file that can be"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8"
        ) from None


def lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of the lines that are not blank; only a line feed ends one (JSON may hold other separators)."""
    return [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse(line: str) -> dict[str, Any] | None:
    """The JSON object on a line, or None if there is none."""
    try:
        value = json.loads(line)
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # half a surrogate pair is no character, and nobody could write it
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects(text: str, key: str, where: str) -> list[dict[str, Any]]:
    """The object on every line. Raises UserError for a line that has none, or no text under ``key``."""
    found = []
    for number, line in lines(text):
        value = parse(line)
        if value is None or not isinstance(value.get(key), str):
            raise UserError(f'{where} line {number} is no JSON object with a "{key}" text')
        found.append(value)
    return found
