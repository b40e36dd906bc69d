"""Text files and JSON Lines given by the user: a message about a mistake names file and line."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from specjax import files
from specjax.errors import UserError, on_disk

# Suffix of a compressed file -> the name of its format, and how it is opened.
COMPRESSED = {".gz": ("gzip", gzip.open), ".xz": ("xz", lzma.open)}
MOST = 1 << 32  # bytes of a decompressed file: a few kilobytes can become any number

# What a value can be -> whether a value of a line is that.
KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "text that is not empty": lambda value: isinstance(value, str) and bool(value.strip()),
    "list of texts": lambda value: (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    ),
    "number or text": lambda value: type(value) in (int, str),
}


class Line(NamedTuple):
    """A line of a file that is not blank."""

    number: int
    where: str  # the file, and the number
    value: dict[str, Any] | None  # None: the line is no JSON object

    def check(self, what: str, keys: Mapping[str, str]) -> dict[str, Any]:
        """The object. Raises UserError unless it has these keys, with values of these ``KINDS``.

        ``what`` names the lines of such a file.
        """
        value = self.value or {}
        for key, kind in keys.items():
            if not KINDS[kind](value.get(key)):
                problem = f"has {value[key]!r:.40} as its" if key in value else "has no"
                raise UserError(
                    f'{self.where} {problem} "{key}"; in a line of {what} that is a {kind}'
                )
        return value


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
    name, opener = COMPRESSED.get(suffix, ("", open))
    with on_disk(f"{where} cannot be read", "give a readable file"):
        try:
            with opener(path, "rb") as file:
                data = b"".join(_parts(file, where)) if name else file.read()
            return data.decode("utf-8-sig")
        except (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error):
            raise UserError(
                f"{where} is not a complete {name} file; copy it again, or use a name without "
                f"{suffix}"
            ) from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}: byte {error.start} is not UTF-8; convert the file to UTF-8"
            ) from None


def _parts(file: IO[bytes], where: str) -> Iterator[bytes]:
    """What is decompressed, in parts. Raises UserError above ``MOST``."""
    size = 0
    while part := file.read(1 << 20):
        size += len(part)
        if size > MOST:
            raise UserError(f"{where} has more than {MOST} bytes; divide it, or decompress it")
        yield part


def lines(text: str) -> list[tuple[int, str]]:
    """(number, line) of the lines that are not blank.

    Only a line feed ends a line: JSON strings may contain other separators.
    """
    return [(n, line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def parse(line: str) -> dict[str, Any] | None:
    """The JSON object on a line, or None if the line is anything else."""
    try:
        value = files.parsed(line)
        # Fails for half a surrogate pair, which could not be written as UTF-8.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects(text: str, where: str) -> Iterator[Line]:
    """The lines of JSON Lines that are not blank; ``where`` is what the file is, and its path."""
    for number, line in lines(text):
        yield Line(number, f"{where} line {number}", parse(line))
