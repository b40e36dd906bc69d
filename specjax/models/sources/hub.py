"""Models of the Hugging Face Hub: the files that are needed, in the cache of ``huggingface_hub``.

config.json comes first, so a model that cannot be computed costs no download of its weights. The
library keeps the files, and honours its own settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN). Pickled
weights, weights of other programs and anything else in a repository are not fetched.
"""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import UserError, library
from specjax.models.hf_config import config_from_hf, read_json, translated
from specjax.models.sources import tensors

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?")
CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
# What is read besides the weights.
_SMALL = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def is_name(text: str) -> bool:
    """Whether a text has the form organisation/model or organisation/model@revision."""
    return _NAME.fullmatch(text) is not None


def snapshot_of(path: Path) -> tuple[str, str] | None:
    """Organisation/model and the commit that a directory of the cache holds; None: another path."""
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1), path.name


def fetch(text: str, weights: bool = True) -> Path:
    """The directory of the cache with the files of a model; missing ones are downloaded.

    Args:
        text: organisation/model, or organisation/model@revision (a branch, a tag or a commit).
        weights: False: only the configuration and the tokenizer.

    Raises UserError in one line: the library is not installed; no such repository or revision, a
    gated or a private one; no network and not cached; an architecture that is not supported; no
    safetensors.
    """
    download = _Download(text)
    folder = download.file(CONFIG).parent
    if weights:
        translated(text, read_json(folder / CONFIG), config_from_hf)
    download.files(folder, (*_SMALL, _INDEX) if weights else _SMALL)
    if weights:
        index = folder / _INDEX
        shards = tensors.shard_names(index) if index.is_file() else ["model.safetensors"]
        download.files(folder, shards)
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            raise UserError(download.without_weights(missing[0]))
    return folder


def fetch_one_of(text: str, names: Sequence[str]) -> Path:
    """The directory of the cache with config.json and the first of the named files that exists.

    A safetensors file may be divided into shards. Raises UserError as ``fetch``; nothing if no file
    of these names exists.
    """
    download = _Download(text)
    folder = download.file(CONFIG).parent
    for name in names:
        download.files(folder, (name, *([_INDEX] if name == "model.safetensors" else [])))
        if name == "model.safetensors" and (folder / _INDEX).is_file():
            download.files(folder, tensors.shard_names(folder / _INDEX))
            break
        if (folder / name).is_file():
            break
    return folder


class _Download:
    """Fetches files of one repository, and translates the errors of the library."""

    def __init__(self, text: str):
        match = _NAME.fullmatch(text)
        assert match is not None
        self.text = text
        self._name, self._revision = match.groups()
        problem = f"{text} is no directory here, and to fetch a model of that name from the Hub "
        self._library = library("huggingface_hub", "hub", f"{problem}huggingface_hub is needed")
        self._unknown_host = False

    def file(self, name: str) -> Path:
        """The path of one file."""
        download = self._library.hf_hub_download
        return Path(self._call(download, filename=name, revision=self._revision))

    def files(self, folder: Path, names: Sequence[str]) -> None:
        """Fetches those of the files that exist, of the commit of ``folder``.

        Files that are in the cache need no network.
        """
        if all((folder / name).is_file() for name in names):
            return
        self._call(
            self._library.snapshot_download,
            revision=folder.name,
            allow_patterns=list(names),
            tqdm_class=progress_bar(),
        )

    def without_weights(self, missing: str) -> str:
        """The message for a repository without weights that can be read."""
        if self._offline():
            return (
                f"{self.text}: {missing} is not in the cache, and HF_HUB_OFFLINE is set; "
                "unset it to download the weights"
            )
        return (
            f"{self.text} has no {missing}; only safetensors are read (pickled weights never are; "
            "of a repository of .gguf files, download one and give its path)"
        )

    def _offline(self) -> bool:
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE)

    def _call(self, function: Callable[..., Any], **keys: Any) -> Any:
        from huggingface_hub import errors

        where, login = f"https://huggingface.co/{self._name}", "log in with: hf auth login"
        if not self._offline() and (self._unknown_host or _unknown_host()):
            # The library would try for half a minute.
            self._unknown_host, keys = True, keys | {"local_files_only": True}
        try:
            with _quiet():
                return function(self._name, **keys)
        except errors.GatedRepoError:
            message = f"access to it must be asked for at {where}; then {login}"
        except errors.RepositoryNotFoundError:
            message = (
                "there is neither a directory nor a model on the Hub of this name; "
                f"check the name, and if the model is private, {login}"
            )
        except errors.RevisionNotFoundError:
            message = f"there is no revision {self._revision}; see the branches and tags at {where}"
        except errors.LocalEntryNotFoundError as error:
            message = self._not_cached(error)
        except errors.EntryNotFoundError:
            message = (
                f"it has no {keys.get('filename')}, so it is no model directory (of a repository "
                "of .gguf files, download one and give its path)"
            )
        except errors.HFValidationError as error:
            message = f"it is neither a directory nor a name of the Hub ({_first(error)})"
        except Exception as error:  # those of the network have no common class
            message = f"fetching it failed ({type(error).__name__}: {_first(error)})"
        raise UserError(f"{self.text}: {message}") from None

    def _not_cached(self, error: Exception) -> str:
        if self._offline():
            return "it is not in the cache, and HF_HUB_OFFLINE is set; unset it to download"
        # The library keeps what happened on the network as the cause.
        cause = error.__cause__ or error
        unknown, other = "its host is not known", f"{type(cause).__name__}: {_first(cause)}"
        return (
            "there is no directory of this name, it is not in the cache, and the Hub cannot be "
            f"reached ({unknown if self._unknown_host else other})"
        )


def _unknown_host() -> bool:
    """Whether the Hub's host has no address, and no proxy looks for it."""
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().get(url.scheme):
        return False
    try:
        socket.getaddrinfo(url.hostname, url.port or url.scheme)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of the library: it gives one for each of its tries to connect."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _first(error: BaseException) -> str:
    """The first line of a message, cut where it is long."""
    return next(iter(str(error).strip().splitlines()), "no reason given")[:200]


def progress_bar() -> Any:
    """The progress bar of the library, only on a terminal."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **keys: Any):
            # None: disabled where stderr is no terminal.
            super().__init__(*args, **{**keys, "disable": keys.get("disable") or None})

    return Bar
