"""Names of the Hub: a cache laid out on disk, and the errors of ``huggingface_hub``.

No test reaches the network: the library is offline, or its two functions are replaced.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hf_cases import CONFIGS, assert_same, random_params, words

from specjax.bench import provenance
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.sources import hub as sources_hub

hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")
NAME, COMMIT, OTHER = "some-org/tiny.chat-1", "0123456789abcdef" * 2 + "01234567", "f" * 40


def lay_out(cache: Path, model: Path, commit: str = COMMIT, branch: str = "main") -> Path:
    """The files of a directory as the library stores them; returns the snapshot."""
    repository = cache / ("models--" + NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    for file in model.iterdir():
        blob = repository / "blobs" / f"{commit[:8]}{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


@pytest.fixture
def model(tmp_path):
    """A directory of shards with a tokenizer, a template and the ids that end a text."""
    config = CONFIGS["llama"]
    hf.save(tmp_path / "m", config, random_params(config), words(61), max_shard_bytes=20_000)
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    return tmp_path / "m"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_cached_model_is_loaded_offline(model, cache):
    snapshot = lay_out(cache, model)
    loaded, expected = hf.load(NAME), hf.load(model)
    assert loaded.config == expected.config and loaded.config.eos_token_id == (7, 2)
    assert_same(loaded.params, expected.params)
    assert loaded.lm.vocabulary == expected.lm.vocabulary is not None
    assert Path(loaded.directory) == snapshot
    facts = provenance.target(loaded.params, name="", directory=loaded.directory)
    assert (facts["name"], facts["source"], facts["revision"]) == (NAME, "hub", COMMIT)
    assert (
        facts["weights_sha256"] == provenance.target({}, name="", directory=model)["weights_sha256"]
    )
    assert hf.resolve(NAME, weights=False) == snapshot


def test_revisions(model, cache):
    first = lay_out(cache, model)
    (model / "chat_template.jinja").write_text("other")
    second = lay_out(cache, model, OTHER, "v2")
    assert hf.resolve(f"{NAME}@main") == hf.resolve(f"{NAME}@{COMMIT}") == first
    assert hf.resolve(f"{NAME}@v2") == second
    with pytest.raises(UserError, match=f"^{NAME}@v3: it is not in the cache, and HF_HUB_OFFLINE"):
        hf.resolve(f"{NAME}@v3")


def test_a_path_that_exists_is_not_a_name(model, cache, tmp_path):
    lay_out(cache, model)
    here = Path(NAME)
    here.parent.mkdir()
    shutil.copytree(model, here)
    assert hf.resolve(NAME) == here
    # A trained run's workdir, and one that is not finished.
    (here / "model").mkdir()
    shutil.copy(model / "config.json", here / "model")
    assert hf.resolve(NAME) == here / "model"
    shutil.rmtree(here)
    (here / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="is not finished"):
        hf.resolve(NAME)


@pytest.mark.parametrize(
    "text", ["word", "a/b/c", "./a/b", "/a/b", "~/a", "a/b@", "a b/c", "../b", "a/..", ""]
)
def test_other_texts_are_paths(text, cache, monkeypatch):
    def never(*args, **keys):
        raise AssertionError

    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(hub, name, never)
    with pytest.raises(UserError, match=r"is no directory; give a|has no config.json"):
        hf.load(text)


def test_not_in_the_cache(model, cache):
    with pytest.raises(UserError, match=f"^{NAME}: it is not in the cache, and HF_HUB_OFFLINE is"):
        hf.load(NAME)
    snapshot = lay_out(cache, model)
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard.name} is not in the cache, and HF_HUB_OFFLINE"):
        hf.load(NAME)


def test_without_the_library(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub is needed: pip install 'specjax\[hub\]'"):
        hf.load(NAME)


class Server:
    """A repository on the network, in place of the functions of the library."""

    def __init__(self, monkeypatch, cache, files: dict[str, bytes]):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "hf_hub_download", self.one)
        monkeypatch.setattr(hub, "snapshot_download", self.some)
        self.files, self.fetched = files, []
        self.folder = cache / ("models--" + NAME.replace("/", "--")) / "snapshots" / COMMIT
        self.folder.mkdir(parents=True)

    def one(self, repo_id, *, filename, revision):
        assert repo_id == NAME and revision in (None, "dev")
        if filename not in self.files:
            raise errors.EntryNotFoundError(f"404: {filename}")
        self.some(repo_id, revision=COMMIT, allow_patterns=[filename], tqdm_class=None)
        return str(self.folder / filename)

    def some(self, repo_id, *, revision, allow_patterns, tqdm_class):
        assert repo_id == NAME and revision == COMMIT
        for name in allow_patterns:
            if name in self.files and not (self.folder / name).exists():
                (self.folder / name).write_bytes(self.files[name])
                self.fetched.append(name)
        return str(self.folder)


OTHERS = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "m.gguf", "onnx/model.onnx")


def served(monkeypatch, cache, model, leave_out=()):
    monkeypatch.setattr(sources_hub, "_unknown_host", lambda: False)
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    files |= dict.fromkeys(OTHERS, b"large")
    kept = {name: data for name, data in files.items() if name not in leave_out}
    return Server(monkeypatch, cache, kept)


def test_only_the_files_that_are_needed_are_fetched(model, cache, monkeypatch):
    server = served(monkeypatch, cache, model)
    assert hf.resolve(f"{NAME}@dev", weights=False) == server.folder
    small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert server.fetched == [*small, "chat_template.jinja"]
    loaded = hf.load(NAME)
    assert set(server.fetched) == {file.name for file in model.iterdir()}
    assert server.fetched[5] == "model.safetensors.index.json"
    assert_same(loaded.params, hf.load(model).params)
    before = list(server.fetched)
    hf.load(NAME)
    assert server.fetched == before


def test_one_file_of_weights(cache, monkeypatch, tmp_path):
    config = CONFIGS["gpt2"]
    hf.save(tmp_path / "one", config, random_params(config))
    server = served(monkeypatch, cache, tmp_path / "one")
    assert hf.load(NAME).config == config
    assert server.fetched == ["config.json", "model.safetensors"]


def test_an_unsupported_architecture_costs_no_weights(model, cache, monkeypatch):
    raw = json.loads((model / "config.json").read_text())
    raw |= {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4"}
    (model / "config.json").write_text(json.dumps(raw))
    server = served(monkeypatch, cache, model)
    with pytest.raises(UserError, match=rf"^{NAME}: .*Gemma4ForCausalLM.* not supported"):
        hf.load(NAME)
    assert server.fetched == ["config.json"]


def test_a_repository_without_safetensors(model, cache, monkeypatch):
    shards = [file.name for file in model.glob("*.safetensors*")]
    served(monkeypatch, cache, model, shards)
    with pytest.raises(UserError, match=rf"^{NAME} has no model.safetensors; only safetensors are"):
        hf.load(NAME)


def test_a_repository_of_other_files(model, cache, monkeypatch):
    served(monkeypatch, cache, model, ["config.json"])
    with pytest.raises(UserError, match=rf"^{NAME}: it has no config.json, so it is no model"):
        hf.load(NAME)


def http_error(kind, status=404):
    """An error of the library as it makes them: of a response."""
    import httpx2 as http

    request = http.Request("GET", f"https://huggingface.co/{NAME}")
    return kind("first line\nsecond line", response=http.Response(status, request=request))


def local_error(kind):
    error = kind("cannot\nbe found")
    error.__cause__ = ConnectionError("name resolution\nfailed")
    return error


ERRORS = {
    "missing": (lambda: http_error(errors.RepositoryNotFoundError), "neither a directory nor"),
    "gated": (lambda: http_error(errors.GatedRepoError, 403), "access to it must be asked for"),
    "revision": (lambda: http_error(errors.RevisionNotFoundError), "no revision dev; see"),
    "network": (
        lambda: local_error(errors.LocalEntryNotFoundError),
        "the Hub cannot be reached (ConnectionError: name resolution)",
    ),
    "server": (lambda: http_error(errors.HfHubHTTPError, 500), "fetching it failed (HfHub"),
    "disk": (lambda: OSError(28, "No space left on device"), "No space left on device)"),
    "name": (lambda: errors.HFValidationError("too long"), "nor a name of the Hub (too long)"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("function", ["hf_hub_download", "snapshot_download"])
def test_one_line_for_every_error(case, function, model, cache, monkeypatch):
    try:
        error = ERRORS[case][0]()
    except ImportError:
        pytest.skip("the HTTP library of huggingface_hub has another name")
    served(monkeypatch, cache, model)

    def fail(*args, **keys):
        raise error

    monkeypatch.setattr(hub, function, fail)
    with pytest.raises(UserError) as caught:
        hf.load(f"{NAME}@dev")
    message = str(caught.value)
    assert message.startswith(f"{NAME}@dev: ") and "\n" not in message
    assert ERRORS[case][1] in message


def test_the_progress_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    # transformers may have turned off all bars of the process.
    hub.utils.enable_progress_bars()
    bar = sources_hub.progress_bar()
    assert bar(total=1, file=io.StringIO()).disable and not bar(total=1, file=Terminal()).disable


def test_heads_of_the_hub(cache, monkeypatch, model):
    """Of heads the first file that exists is fetched, for any architecture."""
    (model / "config.json").write_text('{"architectures": ["Any"]}')
    shards = [file.name for file in model.glob("*.safetensors*")]
    server = served(monkeypatch, cache, model, shards)
    names = ("model.safetensors", "pytorch_model.bin")
    assert hf.resolve(NAME, names=names) == server.folder
    assert server.fetched == ["config.json", "pytorch_model.bin"]


def test_without_a_network_the_cache_is_enough(model, cache, monkeypatch):
    """The library alone would try to connect for half a minute."""

    def unknown(*args):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    lay_out(cache, model)
    assert_same(hf.load(NAME).params, hf.load(model).params)
    with pytest.raises(UserError, match="cannot be reached .its host is not known") as error:
        hf.load("some-org/other")
    assert "\n" not in str(error.value)
    # A proxy may know it.
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    assert not sources_hub._unknown_host()


@pytest.mark.slow
def test_the_command_line_offline(model, tmp_path):
    """With the real variables of the library, in a process of its own."""
    lay_out(tmp_path / "hub", model)
    variables = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "specjax.run", "--config=generate", f"--workdir={tmp_path}/w"]
    keys = ["--config.prompt=w5", "--config.max_new_tokens=3", "--config.drafter.name=none"]

    def run(name):
        return subprocess.run(
            [*command, *keys, f"--config.target={name}"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )

    done = run(NAME)
    assert done.returncode == 0, done.stderr
    target = json.loads((tmp_path / "w" / "results.json").read_text())["target"]
    assert (target["name"], target["source"]) == (NAME, "hub")
    failed = run("some-org/other")
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1
    assert "some-org/other: it is not in the cache, and HF_HUB_OFFLINE is set" in failed.stderr
