"""Text to batches: the embedded corpus, TFDS, local files, tokenizers, crops, and documents packed into rows."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from specjax import testing
from specjax.data import corpora, packing, token_streams
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.models import lm

ROOT = Path(__file__).parents[2]
fast = pytest.mark.fast


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def test_the_embedded_corpus(corpus_dir, capfd, monkeypatch):
    def no_network(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", no_network)
    texts = {split: token_streams.load_texts(corpus_dir, split) for split in corpora.SPLITS}
    assert capfd.readouterr() == ("", "")
    together = {path: text for split in corpora.SPLITS for path, text in texts[split]}
    assert together == dict(corpora.stdlib_sources())
    assert sum(map(len, texts.values())) == len(together)  # no file in two splits
    assert together["asyncio/base_events.py"].startswith('"""Base implementation of event loop.')
    assert not any("test" in Path(path).parts or "site-packages" in path for path in together)
    assert [path for path, _ in texts["train"]] == sorted(path for path, _ in texts["train"])
    assert 0.8 < len(texts["train"]) / len(together) < 0.97 and texts["valid"] and texts["test"]
    written = {path: path.stat().st_mtime_ns for path in corpus_dir.rglob("*")}
    assert token_streams.load_texts(corpus_dir, "valid") == texts["valid"]
    assert written == {
        path: path.stat().st_mtime_ns for path in corpus_dir.rglob("*")
    }  # read, not built again
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


def test_a_killed_build_is_no_dataset(tmp_path):
    script = f"""
        import os, signal
        from specjax.train import corpora
        def sources():
            yield "a.py", "a"
            os.kill(os.getpid(), signal.SIGKILL)
        corpora.stdlib_sources = sources
        corpora.build({str(tmp_path)!r})
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("*array_record*")) or list(
        tmp_path.rglob("incomplete*")
    )  # it had begun
    assert "os.py" in {
        path for split in corpora.SPLITS for path, _ in token_streams.load_texts(tmp_path, split)
    }


@fast
def test_local_files(tmp_path):
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines) + "\n"
    )
    for name in ("a.txt", "b.jsonl"):
        parts = {
            split: "".join(
                text for _, text in token_streams.load_files(str(tmp_path / name), split)
            )
            for split in corpora.SPLITS
        }
        assert parts["train"] + parts["test"] + parts["valid"] == "".join(lines)
        assert all(part.endswith("\n") and part.startswith("line") for part in parts.values())
        assert len(parts["valid"]) == pytest.approx(0.05 * len("".join(lines)), abs=10)
        assert len(parts["test"]) == pytest.approx(0.05 * len("".join(lines)), abs=20)
    both = token_streams.load_files([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], "train")
    assert len(both) == 1 + parts["train"].count("\n")


@fast
@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.txt", None, "No such file"),
        ("empty.txt", b" \n", "empty"),
        ("latin.txt", b"caf\xe9", "byte 3 is not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}\n', "line 2"),
        ("b.jsonl", b'{"text": "x"}\n\nnonsense\n', "line 3"),
        ("c.jsonl", b'{"text": 7}\n', "line 1"),
    ],
)
def test_local_files_that_cannot_be(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told) as error:
        token_streams.load_files(str(tmp_path / name), "train")
    assert name in str(error.value) and "\n" not in str(error.value)


TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # caf\u00e9\n\n" for i in range(400))


@fast
def test_tokenizer_and_stream():
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.to_str() == token_streams.train_tokenizer([TEXT], 300).to_str()
    assert (
        tokenizer.token_to_id(token_streams.SEPARATOR) == token_streams.separator_id(tokenizer) == 0
    )
    stream = token_streams.tokenise(tokenizer, ["def f(", "\u00fc\n"])
    assert stream.dtype == np.int32 and stream[0] == 0 and list(stream).count(0) == 2
    assert tokenizer.decode(stream.tolist()) == "def f(\u00fc\n"
    assert tokenizer.decode(token_streams.tokenise(tokenizer, [TEXT]).tolist()) == TEXT
    assert token_streams.tokenise(tokenizer, []).shape == (0,)
    with pytest.raises(UserError, match="257"):
        token_streams.train_tokenizer([TEXT], 256)


def test_streams_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(token_streams, "_WORTH_A_FILE", 10)
    first, second = (
        token_streams.train_tokenizer([TEXT], 300),
        token_streams.train_tokenizer([TEXT], 310),
    )
    stream = token_streams.cached_tokens(first, [TEXT], tmp_path)
    other = token_streams.cached_tokens(second, [TEXT], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and len(other) < len(stream)
    monkeypatch.setattr(token_streams, "tokenise", None)
    assert np.array_equal(token_streams.cached_tokens(first, [TEXT], tmp_path), stream)


@fast
def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.int32)
    batches = token_streams.Batches(tokens, 4, 16, seed=3)
    assert batches.batch(0).labelled is None and batches.batch(0).segments is None
    later = [batches.batch(step).tokens for step in (5, 0, 9)]
    again = token_streams.Batches(tokens, 4, 16, seed=3)
    assert np.array_equal(later, [again.batch(step).tokens for step in (5, 0, 9)])
    assert (
        isinstance(later[0], np.ndarray)
        and later[0].shape == (4, 17)
        and later[0].dtype == np.int32
    )
    assert (np.diff(later[0], axis=1) == 1).all()  # crops
    assert not np.array_equal(later[0], later[1])
    assert not np.array_equal(
        later[0], token_streams.Batches(tokens, 4, 16, seed=4).batch(5).tokens
    )
    assert np.array_equal(
        token_streams.Batches(tokens[:17], 2, 16).batch(0).tokens, [tokens[:17]] * 2
    )  # the smallest corpus
    with pytest.raises(UserError, match="16 tokens, fewer than one crop of 17"):
        token_streams.Batches(tokens[:16], 4, 16)


@fast
def test_held_out_batches():
    tokens = np.arange(1000, dtype=np.int32)
    batches = [batch.tokens for batch in token_streams.held_out_batches(tokens, 4, 16, 3)]
    assert [batch.shape for batch in batches] == [(4, 17)] * 3
    assert (
        len(np.unique(batches)) == 3 * 4 * 17
        and batches[0][0, 0] == 0
        and batches[-1][-1, -1] == 999
    )
    assert (
        len(token_streams.held_out_batches(tokens, 4, 16, 1000)) == 1000 // 68
    )  # nothing is read twice
    assert len(token_streams.held_out_batches(tokens[:20], 4, 16, 5)) == 1
    with pytest.raises(UserError, match="fewer"):
        token_streams.held_out_batches(tokens[:16], 4, 16, 5)


@fast
def test_held_out_prompts():
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    prompts = token_streams.held_out_prompts([TEXT[:5000], TEXT[5000:]], tokenizer, 20, 12, seed=1)
    assert [len(prompt) for prompt in prompts] == [12] * 20
    assert prompts == token_streams.held_out_prompts(
        [TEXT[:5000], TEXT[5000:]], tokenizer, 20, 12, seed=1
    )
    assert prompts != token_streams.held_out_prompts(
        [TEXT[:5000], TEXT[5000:]], tokenizer, 20, 12, seed=2
    )
    lines = TEXT.splitlines()
    assert all(
        tokenizer.decode(prompt).splitlines()[0][:8] in {line[:8] for line in lines}
        for prompt in prompts
    )
    with pytest.raises(UserError, match="prompts of 9999 tokens"):
        token_streams.held_out_prompts([TEXT[:5000]], tokenizer, 2, 9999)


# --- any dataset of TFDS ---------------------------------------------------------------------------------------------


@pytest.fixture
def few(tmp_path, monkeypatch) -> Path:
    """The embedded corpus made of sixty files, built."""
    monkeypatch.setattr(
        corpora, "stdlib_sources", lambda: ((f"{n}.py", f"text {n}\n") for n in range(60))
    )
    return corpora.build(tmp_path / "data").data_path


@fast
def test_a_built_dataset_by_its_directory(few):
    texts = {
        split: token_streams.load_tfds(str(few), "", split, "text") for split in corpora.SPLITS
    }  # it has our three splits
    for split, pairs in texts.items():
        assert [text for _, text in pairs] == [
            text for _, text in token_streams.load_texts(few.parent.parent, split)
        ]
    assert texts["train"][3][0] == f"{few} train 3"
    assert token_streams.load_tfds(str(few), "", "train", "path")[0][1].endswith(".py")


@fast
def test_a_dataset_by_its_name(few):
    texts = token_streams.load_tfds("python_stdlib", few.parent.parent, "train", "text")
    assert [text for _, text in texts] == [
        text for _, text in token_streams.load_texts(few.parent.parent, "train")
    ]


@fast
@pytest.mark.parametrize(
    "own", [("train",), ("train", "test"), ("train", "validation"), ("train", "validation", "test")]
)
def test_splits_that_a_dataset_has_not(own, tmp_path, monkeypatch):
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
        s: [int(text) for _, text in token_streams.load_tfds(str(folder), "", s, "text")]
        for s in corpora.SPLITS
    }
    whole = [n for s in ("train", "test", "valid") for n in parts[s]]
    assert len(set(whole)) == len(whole) == 100 + 10 * len(own)
    rest = 110  # what the train split holds
    for split, name in (("test", "test"), ("valid", "validation")):
        assert len(parts[split]) == (10 if name in own else pytest.approx(0.05 * rest, abs=1))


@fast
@pytest.mark.parametrize(
    ("name", "key", "told"),
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
def test_datasets_that_cannot_be(name, key, told, few, tmp_path, monkeypatch):
    def no_network(*_):
        raise OSError("the network is unreachable\nmore")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("requests.Session.send", no_network)
    (tmp_path / "empty").mkdir()
    name = {"HERE": str(few), "EMPTY": str(tmp_path / "empty")}.get(name, name)
    with pytest.raises(UserError, match=told) as error:
        token_streams.load_tfds(name, tmp_path / "elsewhere", "train", key)
    assert "\n" not in str(error.value)


@fast
def test_what_a_config_names(few, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    source = ConfigDict({"files": "", "dir": "", "tfds": "", "text_key": "text"})
    assert token_streams.sources(source) == ["embedded corpus"]
    assert token_streams.load(
        source, few.parent.parent.parent, "train"
    ) == token_streams.load_texts(few.parent.parent, "train")
    source.tfds = str(few)
    assert token_streams.load(source, tmp_path, "valid") == token_streams.load_tfds(
        str(few), "", "valid", "text"
    )
    assert token_streams.sources(source) == [f"tfds:{few}"]
    source.files = f"{tmp_path / 'a.txt'}, {tmp_path / 'a.txt'}"
    with pytest.raises(UserError, match="both given"):
        token_streams.load(source, tmp_path, "train")
    source.tfds = ""
    assert (
        len(token_streams.load(source, tmp_path, "train"))
        == 2
        == len(token_streams.sources(source))
    )
    old = ConfigDict({"files": str(tmp_path / "a.txt"), "dir": ""})  # as configurations were
    assert token_streams.load(old, tmp_path, "test") == token_streams.load_files(
        str(tmp_path / "a.txt"), "test"
    )


# --- packing ---------------------------------------------------------------------------------------------------------


def document(start: int, labels: str) -> Document:
    """Token ids that occur nowhere else; "x" marks those to learn."""
    return Document(
        np.arange(start, start + len(labels), dtype=np.int32),
        np.array([c == "x" for c in labels], bool),
    )


@st.composite
def corpus(draw) -> list[Document]:
    masks = draw(st.lists(st.text("x.", max_size=40), min_size=1, max_size=30))
    return [document(1000 * n + 1, mask) for n, mask in enumerate([*masks, "xxx"])]


def learnt(batch) -> list[int]:
    return batch.tokens[batch.labelled].tolist()


def expected(documents) -> list[int]:
    """Every labelled token but the first of a document, which nothing precedes."""
    return sorted(int(i) for ids, labelled in documents for i in ids[1:][labelled[1:]])


@fast
@settings(max_examples=60, deadline=None)
@given(corpus(), st.integers(1, 20), st.integers(0, 3), st.integers(1, 3))
def test_an_epoch_has_every_label_once(documents, length, seed, batch_size):
    try:
        packed = packing.Packed(documents, batch_size, length, seed)
    except UserError as error:
        assert "fewer than one batch" in str(error)
        return
    batches = [packed.batch(step) for step in range(2 * packed.rows)]  # batch_size epochs, twice
    for epochs in (batches[: packed.rows], batches[packed.rows :]):
        assert sorted(token for batch in epochs for token in learnt(batch)) == sorted(
            expected(documents) * batch_size
        )
    following = {int(b): int(a) for ids, _ in documents for a, b in itertools.pairwise(ids)}
    for batch in batches:
        assert (
            batch.tokens.shape
            == batch.labelled.shape
            == batch.segments.shape
            == (batch_size, length + 1)
        )
        assert [x.dtype for x in (batch.tokens, batch.labelled, batch.segments)] == [
            np.int32,
            bool,
            np.int32,
        ]
        for tokens, labelled, segments in zip(
            batch.tokens, batch.labelled, batch.segments, strict=True
        ):
            used = int((segments > 0).sum())
            assert (segments[used:] == 0).all() and not labelled[
                segments == 0
            ].any()  # padding comes last
            steps = np.diff(segments[:used])
            assert segments[0] == 1 and set(steps.tolist()) <= {0, 1}  # 1, 2, ...: none comes back
            for place in np.flatnonzero(labelled):
                assert place > 0 and segments[place] == segments[place - 1]
                assert following[int(tokens[place])] == tokens[place - 1]  # its context is its own
    again = packing.Packed(documents, batch_size, length, seed)
    for step in (len(batches) - 1, 0):  # any step first: nothing is carried
        assert all(
            np.array_equal(a, b)
            for a, b in zip(
                jax.tree.leaves(again.batch(step)), jax.tree.leaves(batches[step]), strict=True
            )
        )


@fast
def test_documents_stay_whole_and_long_ones_are_cut():
    documents = [
        document(100, "x" * 5),
        document(200, ".x" * 3),
        document(300, "x"),
        document(400, "x" * 12),
    ]
    parts = packing.pieces(documents, 5)
    assert [part.ids.tolist() for part in parts] == [
        [*range(100, 105)],
        [*range(200, 206)],
        [*range(400, 406)],
        [*range(405, 411)],  # begins with the last token of the piece before it
        [410, 411],
    ]
    assert (
        not any(part.labelled[0] for part in parts) and documents[0].labelled[0]
    )  # what was given is not changed
    packed = packing.Packed(documents, 1, 5)
    assert packed.rows == 5 and packed.waste == pytest.approx(1 - 25 / 30)
    rows = {tuple(packed.batch(step).tokens[0]) for step in range(5)}
    assert (410, 411, 0, 0, 0, 0) in rows and tuple(range(400, 406)) in rows


@fast
def test_epochs_and_seeds_differ():
    documents = [document(100 * n + 1, "x" * (3 + n % 3)) for n in range(40)]
    first, second = packing.Packed(documents, 2, 8, seed=0), packing.Packed(documents, 2, 8, seed=1)
    epochs = first.rows // 2 + 1
    assert not np.array_equal(first.batch(0).tokens, first.batch(epochs).tokens)
    assert not np.array_equal(first.batch(0).tokens, second.batch(0).tokens)


@fast
def test_little_is_wasted():
    random = np.random.default_rng(0)
    for sizes in (
        random.integers(10, 512, 3000),
        np.clip(random.lognormal(5, 0.6, 3000), 2, 513).astype(int),
    ):
        plan = packing.best_fit(sizes, 513)
        ordered = -np.sort(-sizes)
        assert max(sum(ordered[rank] for rank in row) for row in plan) <= 513
        assert sorted(rank for row in plan for rank in row) == list(range(3000))
        assert 1 - sizes.sum() / (len(plan) * 513) < 0.05


@fast
def test_too_few_documents():
    with pytest.raises(UserError, match="fill 1 rows of 9 tokens, fewer than one batch of 2"):
        packing.Packed([document(1, "xxx")] * 3, 2, 8)
    with pytest.raises(UserError, match="length of a row is 0"):
        packing.Packed([document(1, "xxx")], 1, 0)
    for nothing in ([], [document(1, "x")], [document(1, "x..")]):
        for make in (lambda d: packing.Packed(d, 1, 8), lambda d: packing.held_out(d, 1, 8, 1)):
            with pytest.raises(UserError, match="no document has a token to learn"):
                make(nothing)


@fast
def test_held_out_documents():
    documents = [document(100 * n + 1, "." + "x" * (2 + n % 7)) for n in range(50)]
    whole = packing.held_out(documents, 2, 8, 1000)
    assert all(batch.tokens.shape == (2, 9) for batch in whole)
    seen = [token for batch in whole for token in learnt(batch)]
    assert len(set(seen)) == len(seen) and len(seen) > 0.9 * len(
        expected(documents)
    )  # but for half a batch
    some = packing.held_out(documents, 2, 8, 3)
    assert len(some) == 3 and all(
        np.array_equal(a.tokens, b.tokens) for a, b in zip(some, whole, strict=False)
    )
    [one] = packing.held_out(documents[:2], 4, 8, 3)  # fewer than a batch: rows of padding
    assert one.tokens.shape == (4, 9) and sorted(learnt(one)) == expected(documents[:2])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_row_reads_as_each_document_alone(family):
    model, params = testing.tiny(family, scale=2.0, layers=1)
    random = np.random.default_rng(0)
    documents = [
        Document(random.integers(1, 32, n).astype(np.int32), np.ones(n, bool))
        for n in (9, 4, 7, 5, 11, 3)
    ]
    packed = packing.Packed(documents, 2, 19)
    batch = packed.batch(0)
    assert batch.segments.max() >= 2 and packed.rows == 2
    forward = jax.jit(
        lambda tokens, segments=None: lm.forward(model, params, tokens, segments).logits
    )
    got, alone = forward(batch.tokens, batch.segments), np.zeros((1, 20), np.int32)
    for row, segments in enumerate(batch.segments):
        for number in range(1, segments.max() + 1):
            there = segments == number
            alone[0, : there.sum()] = batch.tokens[row, there]
            assert np.allclose(forward(alone)[0, : there.sum()], got[row, there], atol=1e-5)
