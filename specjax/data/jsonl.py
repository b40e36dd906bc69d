"""Text files and JSON Lines given by the user: a message about a mistake names file and line."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from specjax.errors import UserError

# Suffix of a compressed file -> the name of its format, and how it is decompressed.
COMPRESSED = {".gz": ("gzip", gzip.decompress), ".xz": ("xz", lzma.decompress)}


def plain_suffix(path: Path) -> str:
    """The suffix of a file in lower case, without .gz or .xz: ".jsonl" of "a.jsonl.gz"."""
    compressed = path.suffix.lower() in COMPRESSED
    return (path.with_suffix("") if compressed else path).suffix.lower()


def read(path: Path, where: str, *, compressed: bool = False) -> str:
    """The text of a file, without a byte order mark.

    ``where`` (what the file is, and its path) begins every message. With ``compressed``, a file
    with the suffix .gz or .xz is decompressed.

    Raises UserError: the file cannot be read, is not a complete compressed file but has that
    suffix, or is not UTF-8.
    """
    suffix = path.suffix.lower() if compressed else ""
    name, decompress = COMPRESSED.get(suffix, ("", bytes))
    try:
        return decompress(path.read_bytes()).decode("utf-8-sig")
    except (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error):
        raise UserError(
            f"{where} is not a complete {name} file; copy it again, or use a name without {suffix}"
        ) from None
    except OSError as error:
        raise UserError(
            f"{where} cannot be read ({error.strerror or error}); give a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8"
        ) from None


def lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of the lines that are not blank.

    Only a line feed ends a line: JSON strings may contain other separators.
    """
    return [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse(line: str) -> dict[str, Any] | None:
    """The JSON object on a line, or None if the line is anything else."""
    try:
        value = json.loads(line)
        # Fails for half a surrogate pair, which could not be written as UTF-8.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects(text: str, key: str, where: str) -> list[dict[str, Any]]:
    """The object of each line. Raises UserError for a line without one, or without text ``key``."""
    values = []
    for number, line in lines(text):
        value = parse(line)
        if value is None or not isinstance(value.get(key), str):
            raise UserError(f'{where} line {number} is no JSON object with a "{key}" text')
        values.append(value)
    return values
