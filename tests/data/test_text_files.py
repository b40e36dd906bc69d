"""Plain text: local files, the embedded corpus, datasets of TFDS."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from specjax.data import corpora, text_files
from specjax.data.text_files import TextSource
from specjax.errors import UserError

ROOT = Path(__file__).parents[2]
fast = pytest.mark.fast
TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}\n\n" for i in range(400))


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def test_the_embedded_corpus(corpus_dir, capfd, monkeypatch):
    def no_network(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", no_network)
    texts = {split: corpora.load_texts(corpus_dir, split) for split in corpora.SPLITS}
    assert capfd.readouterr() == ("", "")
    together = {path: text for split in corpora.SPLITS for path, text in texts[split]}
    assert together == dict(corpora.stdlib_sources())
    assert sum(map(len, texts.values())) == len(together)  # no file in two splits
    assert together["asyncio/base_events.py"].startswith('"""Base implementation of event loop.')
    assert not any("test" in Path(path).parts or "site-packages" in path for path in together)
    assert [path for path, _ in texts["train"]] == sorted(path for path, _ in texts["train"])
    assert 0.8 < len(texts["train"]) / len(together) < 0.97 and texts["valid"] and texts["test"]
    written = {path: path.stat().st_mtime_ns for path in corpus_dir.rglob("*")}
    assert corpora.load_texts(corpus_dir, "valid") == texts["valid"]
    # It was read, not built again.
    assert written == {path: path.stat().st_mtime_ns for path in corpus_dir.rglob("*")}
    version = ".".join(map(str, sys.version_info[:3]))
    assert sorted(path.name for path in (corpus_dir / "python_stdlib").iterdir()) == [version]


def test_sources_are_sorted_utf8_modules(tmp_path):
    for name in (
        "b.py",
        "a/c.py",
        "a.py",
        "test/x.py",
        "lib2to3/tests/y.py",
        "site-packages/z.py",
        "note.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert [path for path, _ in corpora.stdlib_sources(tmp_path)] == ["a.py", "a/c.py", "b.py"]


def test_a_killed_build_leaves_no_dataset(tmp_path):
    script = f"""
        import os, signal
        from specjax.data import corpora
        def sources():
            yield "a.py", "a"
            os.kill(os.getpid(), signal.SIGKILL)
        corpora.stdlib_sources = sources
        corpora.build({str(tmp_path)!r})
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    assert process.returncode == -signal.SIGKILL
    # It had started.
    assert list(tmp_path.rglob("*array_record*")) or list(tmp_path.rglob("incomplete*"))
    assert "os.py" in {
        path for split in corpora.SPLITS for path, _ in corpora.load_texts(tmp_path, split)
    }


@fast
def test_without_tfds_only_a_dataset_of_it_is_an_error(tmp_path):
    """The modes can be imported; the message names what to install."""
    script = f"""
        import sys
        class Broken:
            def find_spec(self, name, *_):
                if name.startswith("tensorflow_datasets"):
                    raise RuntimeError("gencode 6.31.1\\nruntime 5.29.6")
        sys.meta_path.insert(0, Broken())
        import specjax.run, specjax.train.recipes.lookup_data
        from specjax.data import corpora, text_files
        from specjax.errors import UserError
        (path := {str(tmp_path)!r} + "/a.txt") and open(path, "w").write("a text\\n" * 100)
        assert text_files.load(text_files.TextSource(files=(path,)), {str(tmp_path)!r}, "train")
        for source in (text_files.TextSource(), text_files.TextSource(tfds="imdb_reviews")):
            try:
                text_files.load(source, {str(tmp_path)!r}, "train")
            except UserError as error:
                print(error)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    messages = [
        f"{wanted} needs TensorFlow Datasets, which cannot be imported (gencode 6.31.1 runtime "
        f"5.29.6); run {corpora.INSTALL} and start Python again, or give text files "
        "(config.data.files)"
        for wanted in ("the embedded corpus", "config.data.tfds")
    ]
    assert done.stdout.splitlines() == messages
    # The command names the bound of the package.
    [bound] = re.findall(r'"(tensorflow-metadata[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert f'"{bound}"' in corpora.INSTALL


@pytest.mark.slow
def test_beside_the_pins_of_colab(tmp_path):
    """Every module can be imported, and what the message names mends the embedded corpus.

    A virtual environment with the pins of Colab's images; all else is that of this interpreter.
    """
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    [site] = (tmp_path / "env").rglob("site-packages")
    # Its own packages come first.
    (site / "others.pth").write_text("\n".join([str(ROOT), *map(str, _site_packages())]))

    def install(*packages: str) -> None:
        pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--ignore-installed"]
        done = subprocess.run([*pip, "--no-deps", *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {packages}: {done.stderr.splitlines()[-1:]}")

    def run(code: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [str(python), "-c", textwrap.dedent(code)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    install("tensorflow-metadata==1.21.0", "protobuf==5.29.6")
    assert run(_IMPORT_ALL) == "1.21.0 5.29.6 True"
    build = f"""
        from specjax.data import corpora
        from specjax.errors import UserError
        try:
            print(len(corpora.load_texts({str(tmp_path / "data")!r}, "test")) > 10)
        except UserError as error:
            print(error)
    """
    assert corpora.INSTALL in run(build)
    install(*[each for each in shlex.split(corpora.INSTALL) if each.startswith("tensorflow-meta")])
    assert run(build) == "True"


_IMPORT_ALL = """
    import importlib, pkgutil
    from importlib.metadata import version
    import specjax
    names = [each.name for each in pkgutil.walk_packages(specjax.__path__, "specjax.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(version("tensorflow-metadata"), version("protobuf"), len(names) > 200)
"""


def _site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


@fast
def test_local_files(tmp_path):
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines) + "\n"
    )
    for name in ("a.txt", "b.jsonl"):
        parts = {
            split: "".join(text for _, text in text_files.load_files(str(tmp_path / name), split))
            for split in corpora.SPLITS
        }
        assert parts["train"] + parts["test"] + parts["valid"] == "".join(lines)
        assert all(part.endswith("\n") and part.startswith("line") for part in parts.values())
        assert len(parts["valid"]) == pytest.approx(0.05 * len("".join(lines)), abs=10)
        assert len(parts["test"]) == pytest.approx(0.05 * len("".join(lines)), abs=20)
    both = text_files.load_files([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], "train")
    assert len(both) == 1 + parts["train"].count("\n")


@fast
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "No such file"),
        ("empty.txt", b" \n", "empty"),
        ("latin.txt", b"caf\xe9", "byte 3 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2"),
        ("b.jsonl", b'{"text": "x"}\n\nnonsense\n', "line 3"),
        ("c.jsonl", b'{"text": 7}\n', "line 1"),
    ],
)
def test_invalid_local_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        text_files.load_files(str(tmp_path / name), "train")
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def few(tmp_path, monkeypatch) -> Path:
    """The embedded corpus, built of sixty files."""
    monkeypatch.setattr(
        corpora, "stdlib_sources", lambda: ((f"{n}.py", f"text {n}\n") for n in range(60))
    )
    return corpora.build(tmp_path / "data").data_path


@fast
def test_a_built_dataset_by_its_directory(few):
    # It has our three splits.
    texts = {split: corpora.load_tfds(str(few), "", split, "text") for split in corpora.SPLITS}
    for split, pairs in texts.items():
        assert [text for _, text in pairs] == [
            text for _, text in corpora.load_texts(few.parent.parent, split)
        ]
    assert texts["train"][3][0] == f"{few} train 3"
    assert corpora.load_tfds(str(few), "", "train", "path")[0][1].endswith(".py")


@fast
def test_a_dataset_by_its_name(few):
    texts = corpora.load_tfds("python_stdlib", few.parent.parent, "train", "text")
    assert [text for _, text in texts] == [
        text for _, text in corpora.load_texts(few.parent.parent, "train")
    ]


@fast
@pytest.mark.parametrize(
    "own", [("train",), ("train", "test"), ("train", "validation"), ("train", "validation", "test")]
)
def test_splits_that_a_dataset_does_not_have(own, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "SPLITS", own)
    monkeypatch.setattr(
        corpora,
        "split_of",
        lambda path: "train" if int(path[:-3]) < 100 else own[int(path[:-3]) % len(own)],
    )
    monkeypatch.setattr(
        corpora, "stdlib_sources", lambda: ((f"{n}.py", str(n)) for n in range(100 + 10 * len(own)))
    )
    folder = corpora.build(tmp_path).data_path
    monkeypatch.undo()
    parts = {
        s: [int(text) for _, text in corpora.load_tfds(str(folder), "", s, "text")]
        for s in corpora.SPLITS
    }
    whole = [n for s in ("train", "test", "valid") for n in parts[s]]
    assert len(set(whole)) == len(whole) == 100 + 10 * len(own)
    rest = 110  # texts in the train split
    for split, name in (("test", "test"), ("valid", "validation")):
        assert len(parts[split]) == (10 if name in own else pytest.approx(0.05 * rest, abs=1))


@fast
@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("HERE", "txt", "config.data.text_key is 'txt'; the text features of .* are path, text"),
        (
            "no_such_dataset",
            "text",
            "'no_such_dataset' is no dataset of TFDS: Dataset no_such_dataset not found",
        ),
        ("/nowhere", "text", "there is no directory /nowhere"),
        ("EMPTY", "text", "is no directory of a TFDS dataset"),
        ("lm1b", "text", "lm1b is not in .* and cannot be prepared: .*"),
    ],
)
def test_invalid_datasets(name, key, message, few, tmp_path, monkeypatch):
    def no_network(*_):
        raise OSError("the network is unreachable\nmore")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("requests.Session.send", no_network)
    (tmp_path / "empty").mkdir()
    name = {"HERE": str(few), "EMPTY": str(tmp_path / "empty")}.get(name, name)
    with pytest.raises(UserError, match=message) as error:
        corpora.load_tfds(name, tmp_path / "elsewhere", "train", key)
    assert "\n" not in str(error.value)


@fast
def test_sources(few, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    path, data = str(tmp_path / "a.txt"), few.parent.parent
    source = TextSource()
    assert text_files.names(source) == ["embedded corpus"]
    assert text_files.load(source, data.parent, "train") == corpora.load_texts(data, "train")
    source = TextSource(tfds=str(few))
    expected = corpora.load_tfds(str(few), "", "valid", "text")
    assert text_files.load(source, tmp_path, "valid") == expected
    assert text_files.names(source) == [f"tfds:{few}"]
    source = TextSource(text_files.split_names(f"{path}, {path},"))
    assert len(text_files.load(source, tmp_path, "train")) == 2
    assert text_files.names(source) == [path, path]


@fast
def test_the_folder_of_datasets(tmp_path):
    assert text_files.folder(TextSource(), tmp_path) == tmp_path / "data"
    assert text_files.folder(TextSource(dir="~/x"), tmp_path) == Path.home() / "x"


@fast
@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_text(tmp_path, suffix, pack):
    """The same pieces as of the plain file; a part of a file is one line."""
    lines = "".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(40))
    for name, text in (("a.txt", TEXT), ("b.jsonl", lines)):
        plain, packed = tmp_path / name, tmp_path / f"{name}{suffix}"
        plain.write_text(text)
        packed.write_bytes(pack(text.encode()))
        assert text_files.pieces(packed) == text_files.pieces(plain)
        for split in ("train", "test", "valid"):
            expected = [text for _, text in text_files.load_files(str(plain), split)]
            assert [text for _, text in text_files.load_files(str(packed), split)] == expected
        packed.write_bytes(packed.read_bytes()[:-9])
        with pytest.raises(
            UserError, match=f"is not a complete {'gzip' if 'g' in suffix else 'xz'}"
        ):
            text_files.pieces(packed)
