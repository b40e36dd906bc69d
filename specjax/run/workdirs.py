"""What a workdir holds before a run: whether it can be written, and results of an earlier run."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.text import Text

from specjax import files, sharding
from specjax.bench import results
from specjax.data import progress, recordings
from specjax.data.prompts import Prompt
from specjax.errors import UserError
from specjax.files import buckets
from specjax.report import terminal
from specjax.run.settings import Settings, lasting

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"  # a run that was killed leaves it, without its lock
Written = tuple[Prompt, str, Sequence[int]]  # a prompt, its new text and the tokens of it


@contextlib.contextmanager
def opened(name: str | Path) -> Iterator[Path]:
    """The workdir; of an address in a bucket its copy, which is sent back at the end.

    Of several processes the first one copies; the others get the path of its copy, which they may
    not see. Raises UserError.
    """
    if not buckets.is_address(name):
        yield Path(name).expanduser()
        return
    folder = buckets.copy_of(address := str(name))
    with locked(folder.parent, address):
        with sharding.first_alone():
            if sharding.is_first():
                buckets.begin(address)
        try:
            yield folder
        finally:
            if sharding.is_first() and buckets.end(folder) is not None:
                terminal.console().print(Text(f"sent to {address}", "dim"))


def check(workdir: Path) -> None:
    """Tries to write into the workdir, and leaves it as it was. Raises UserError."""
    with made(workdir):
        pass


@contextlib.contextmanager
def made(workdir: Path) -> Iterator[None]:
    """Makes the workdir, and removes it and its parents again if they are empty at the end.

    With several processes the first one does, since it writes. Raises UserError if nothing can be
    written into it.
    """
    folders: list[Path] = []
    try:
        if sharding.is_first():
            _make(workdir, folders)
        yield
    finally:
        for folder in reversed(folders):
            with contextlib.suppress(OSError):  # something has been written
                folder.rmdir()


@contextlib.contextmanager
def locked(workdir: Path, name: str = "") -> Iterator[None]:
    """No other run of this machine writes into the workdir meanwhile.

    Of several processes the first one has the lock. It is the operating system's: it ends with the
    process, however that ends. Its file has the process and the machine. ``name`` is that of the
    workdir in the message. Raises UserError.
    """
    path, file, problem = workdir / LOCK, None, None
    if sharding.is_first():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _locked(path, name or str(workdir))
        except UserError as error:
            problem = str(error)
        except OSError:  # what writes there reports it
            pass
    if (message := sharding.first_error(problem)) is not None:
        raise UserError(message)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            file.close()


def _locked(path: Path, name: str) -> IO[str] | None:
    """The open file that has the lock; None where the system or the disk has no locks."""
    if fcntl is None:
        return None
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"{name} is in use by {who}; wait for its end, or choose another --workdir"
        ) from None
    except OSError:
        file.close()
        path.unlink(missing_ok=True)
        return None
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        file.close()  # its owner has removed it between the two calls
        return _locked(path, name)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    return file


def _make(workdir: Path, made: list[Path]) -> None:
    """Makes a folder; those that did not exist are added to ``made``. Raises UserError."""
    try:
        results.check_workdir(workdir)
        for folder in [*reversed(workdir.absolute().parents), workdir.absolute()]:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write into {workdir}: {error.strerror or error}; choose another --workdir"
        ) from None


def stored(workdir: Path, name: str = "results.json") -> dict[str, Any] | None:
    """The object in a file of a workdir; None if there is none that can be read."""
    try:
        value = files.parsed((workdir / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_finished(settings: Settings, workdir: Path) -> bool:
    """Whether the workdir holds the results of this very bench.

    That is: of the same configuration, made with the same versions on the same machine, from files
    of the same content (``progress.inputs``), and every check of losslessness passed.
    """
    earlier = stored(workdir)
    if earlier is None or not same_configuration(settings, workdir):
        return False
    if (workdir / progress.NAME).exists():  # killed before the report was written
        return False
    head = results.head() | {"inputs_sha256": progress.inputs(settings.measured)}
    if any(earlier.get(key) != head[key] for key in head.keys() - {"date"}):
        return False
    return not any(results.breaks_its_claim(row) for row in earlier.get("rows") or [])


def same_configuration(settings: Settings, workdir: Path) -> bool:
    """Whether config.json in the workdir is the configuration of these settings."""
    config = stored(workdir, "config.json")
    return config is not None and lasting(config) == lasting(json.loads(settings.config_json))


def show_finished(workdir: Path) -> None:
    """Prints the table of a finished bench, and how it is measured again."""
    console, earlier = terminal.console(), stored(workdir) or {}
    console.print(terminal.table(earlier.get("rows") or []))
    text = f"{workdir / 'results.json'}: this bench is finished ({earlier.get('date')}); "
    console.print(Text(f"{text}--config.again=True measures it again"))


def announce_replacement(settings: Settings, workdir: Path) -> None:
    """Prints a notice if the results of another run will be replaced."""
    earlier = stored(workdir)
    if earlier is None or same_configuration(settings, workdir):
        return
    command = earlier.get("command") or "another configuration"
    text = f"notice: {workdir} holds the results of another run, which will be replaced"
    terminal.console().print(Text(f"{text} (--workdir=DIR keeps both): {command}"))


def write(settings: Settings, workdir: Path, rows: Sequence[dict], **more: Any) -> Path:
    """``results.write`` with what the results of every run have; its path. Raises UserError."""
    same = {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed}
    return results.write(settings.config_json, workdir, rows, **same, **more)


def write_texts(
    settings: Settings, workdir: Path, rows: Sequence[dict], written: Sequence[Written], **more: Any
) -> None:
    """``write`` with the new texts, and ``settings.record``; prints their paths."""
    console = terminal.console()
    texts, outputs = [text for _, text, _ in written], [output for *_, output in written]
    path = write(settings, workdir, rows, texts=texts, token_ids=outputs, **more)
    console.print(Text(f"wrote {path}", "dim"))
    if settings.record:
        ids = [prompt.ids for prompt, *_ in written]
        categories = [prompt.category for prompt, *_ in written]
        recordings.record(settings.record, ids, outputs, categories=categories)
        console.print(Text(f"wrote {settings.record}", "dim"))
