"""Text files and JSON Lines as people hand them in: a mistake names the file, and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.errors import UserError


def read(path: Path, where: str) -> str:
    """The text of a file, without a byte order mark. ``where`` (what the file is, and its path) begins every message.

    Raises:
        UserError: a file that cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror or error}); give a file that can be") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None


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
