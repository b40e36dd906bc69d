"""Every reader with changed files, and every configuration with changed keys.

The property: an input is read, or it ends in a UserError of one line, in bounded time and memory,
and nothing is written. SPECJAX_FUZZ_SECONDS=3600 runs this file for about an hour: each case gets
an equal part of it. Without it a case has ``EXAMPLES`` inputs, always the same.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import itertools
import json
import lzma
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import commandline
import gguf_cases
import hf_cases
import jax
import jax.numpy as jnp
import pytest
import quantised_cases
import report_cases
import t5_cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from specjax import drafters, testing
from specjax.bench import proofs
from specjax.control import costs
from specjax.data import chat, datastore, dialogues, pairs, prompt_files, recordings, shards
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.hf_tokenizer import load_tokenizer
from specjax.report import advice, html, inputs, tables, terminal
from specjax.run import command_line, dispatch
from specjax.run import settings as run_settings
from specjax.topology import shapes
from specjax.train import recipes
from specjax.train.recipes import checks

SECONDS = float(os.environ.get("SPECJAX_FUZZ_SECONDS", 0))
EXAMPLES = 12
BOUND = 20  # seconds of an input
ROOM = 3 << 30  # bytes that an input may take

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**4, 10**9, 2**31, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *("", "x", "1", "\ud800", "\x1b[31m", "=1+1", "../x", "</script>", "x" * 5000),
    *([], {}, [[]], [0], [-1], [10**30], ["x"], [None], [1, 2, 3], {"": 0}, {"type": "x"}),
    *([True], [[1, 2], [3]], {"a": {"b": []}}, [0] * 1000, json.loads("[" * 100 + "]" * 100)),
]
TEXTS = [
    *("", "0", "-1", "1", "2", "7", "1e999", "nan", "-inf", "1e-320", "0.5", "9" * 400, "None"),
    *("True", "False", "x", "a,b", ",", "(1,2)", "(1", "[1]", "{}", "{workdir}", "../..", "\x00"),
    *("~nobody/x", "é", "dynamic", "search", "threshold:0.4", "chain:3", "2x2", "/dev/null"),
    *("data:-1", "data:0", "tensor:3", "-" * 50, "llama", "t5", "medusa", "none", "auto"),
]


class Case(NamedTuple):
    """A reader, the file that is changed, and how."""

    make: Callable[[Path], Any]  # writes a valid input into a folder; gets what ``read`` needs
    read: Callable[[Path, Any], Any]
    file: str
    form: str = "json"  # "json", "lines", "header" (of safetensors) or "bytes"
    allowed: tuple[type[Exception], ...] = ()  # besides UserError: what the function documents


@st.composite
def edits(draw):
    """Up to three changes of a JSON value: (what, where, the new value)."""
    kinds = st.sampled_from(("replace", "replace", "drop", "add", "swap"))
    places = st.integers(0, 10**6)
    one = st.tuples(kinds, places, places, st.sampled_from(VALUES))
    return draw(st.lists(one, min_size=1, max_size=3))


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = []
    for key in list(keys):
        found.append((value, key))
        if isinstance(value[key], dict | list) and len(value[key]) < 300:
            found += nodes(value[key])
    return found


def edited(value: Any, changes: list) -> Any:
    """A JSON value after ``edits``; a change without a place replaces the whole."""
    value = copy.deepcopy(value)
    for kind, first, second, new in changes:
        places, new = nodes(value) if isinstance(value, dict | list) else [], copy.deepcopy(new)
        if not places:
            return new
        (box, key), (other, name) = (places[n % len(places)] for n in (first, second))
        if kind == "drop":
            del box[key]
        elif kind == "add" and isinstance(box, dict):
            box[str(name)] = new
        elif kind == "swap":
            box[key], other[name] = copy.deepcopy((other[name], box[key]))
        else:
            box[key] = new
    return value


@st.composite
def cuts(draw):
    """Up to four changes of bytes: (what, where, how many, bytes)."""
    kinds = st.sampled_from(("flip", "flip", "insert", "delete", "fill", "cut", "repeat"))
    places = st.one_of(st.integers(0, 400), st.integers(0, 10**6))
    one = st.tuples(kinds, places, st.integers(1, 9), st.binary(min_size=1, max_size=9))
    return draw(st.lists(one, min_size=1, max_size=4))


def cut(data: bytes, changes: list) -> bytes:
    """Bytes after ``cuts``."""
    for kind, place, size, new in changes:
        at = place % (len(data) + 1)
        middle = {
            "flip": bytes(b ^ new[0] for b in data[at : at + 1]),
            "insert": new,
            "delete": b"",
            "fill": new[:1] * size,
            "cut": b"",
            "repeat": data[max(at - 50, 0) : at] * size,
        }[kind]
        taken = {"flip": 1, "delete": size, "fill": size, "cut": len(data)}.get(kind, 0)
        data = data[:at] + middle + data[at + taken :]
    return data


def changed(data: bytes, form: str, changes: list) -> bytes:
    """The bytes of a file after changes of its form."""
    if form == "bytes":
        return cut(data, changes)
    if form == "header":
        size = int.from_bytes(data[:8], "little")
        head = json.dumps(edited(json.loads(data[8 : 8 + size]), changes)).encode()
        return len(head).to_bytes(8, "little") + head + data[8 + size :]
    if form == "lines":
        lines = edited([json.loads(line) for line in data.decode().splitlines()], changes)
        lines = lines if isinstance(lines, list) else [lines]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()
    return json.dumps(edited(json.loads(data), changes)).encode()


@contextlib.contextmanager
def bounded():
    """Ends what takes too long, or too much memory."""

    def late(*_):
        raise TimeoutError(f"not finished after {BOUND} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, BOUND)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def listing(folder: Path) -> list[tuple[str, int]]:
    """The files of a folder with their times."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def attempt(folder: Path, read: Callable[[], Any], allowed: tuple = ()) -> None:
    """Reads; checks the property."""
    before = listing(folder)
    try:
        with bounded():
            read()
    except UserError as error:
        assert str(error).strip() and "\n" not in str(error).strip()
    except allowed:
        pass
    assert listing(folder) == before


def fuzz(strategy: Any, check: Callable[[Any], None], parts: int) -> None:
    """Tries ``EXAMPLES`` inputs, or so many as fit into one of ``parts`` parts of ``SECONDS``."""
    ends = time.monotonic() + SECONDS / parts
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    quiet |= {"phases": [Phase.generate]}  # the inputs are small, and to shrink them takes minutes
    for number in itertools.count():
        count = 25 if SECONDS else EXAMPLES
        test = given(strategy)(check)
        seed(number)(settings(max_examples=count, print_blob=False, **quiet)(test))()
        if time.monotonic() >= ends:
            return


def model(family: str, **changes):
    """A model directory of a family."""

    def make(folder: Path) -> None:
        config = hf_cases.shaped(family, **changes)
        params = hf_cases.random_params(config)
        hf.save(folder, config, params, hf_cases.words(61), max_shard_bytes=8000)
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3], "x": null}')
        # One file, except where the index is read.
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": "{{ messages[0]['content'] }}", "eos_token": "</s>"})
        )

    return make


def whole(family: str, **changes):
    """A model directory with one file of weights."""

    def make(folder: Path) -> None:
        config = hf_cases.shaped(family, **changes)
        hf.save(folder, config, hf_cases.random_params(config), hf_cases.words(61))

    return make


def written(name: str, text: str):
    """A folder with one file."""
    return lambda folder: (folder / name).write_text(text)


def heads_of(kind: str):
    """A directory of new heads."""

    def make(folder: Path) -> None:
        t5 = kind == "spec_drafter"
        target, params = testing.tiny_t5() if t5 else testing.tiny("llama", vocab_size=61)
        keys = {"exit_layer": 1, "adapter": "layer"} if kind == "early_exit" else {}
        training = drafters.make(kind, target, **keys).training
        assert training is not None and training.start is not None
        shapes_of = jax.eval_shape(training.start, params, jax.random.key(0))
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, leaf.dtype), shapes_of)
        facts = {"base_model_name_or_path": "x", "vocab_size": target.vocab_size}
        head_files.write(folder / "h", kind, params, facts | dict(training.facts), "abc")

    return make


def gguf(name: str):
    """A .gguf file."""

    def make(folder: Path) -> None:
        pytest.importorskip("gguf")
        config = gguf_cases.config_of(name)
        gguf_cases.write_gguf(folder / "m.gguf", config, gguf_cases.tensors_of(config))

    return make


def quantised(folder: Path) -> None:
    """A directory with weights of 8 bits."""
    made, _ = quantised_cases.both(folder, "packed")
    for file in made.iterdir():
        file.rename(folder / file.name)


def load(folder: Path, _) -> None:
    hf.load(folder)


def load_gguf(folder: Path, _) -> None:
    hf.load(folder / "m.gguf")


def read_chat(folder: Path, _) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    template = chat.load("", folder, tokenizer)
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    chat.render(template, messages)
    chat.spans(template, messages)


def read_tokenizer(folder: Path, _) -> None:
    tokenizer = load_tokenizer(folder, 61)
    assert tokenizer is not None
    hf.fingerprint(tokenizer)


def read_prompts(name: str):
    return lambda folder, _: prompt_files.read(folder / name, f"config.prompts: {folder / name}")


def read_report(folder: Path, _) -> None:
    results = inputs.read_results(folder / "results.json")
    page = html.render(results, [], "x", plots={})
    assert page.count("<script") == len(html.SCRIPTS)
    rows, _ = inputs.finished_rows(results["rows"])
    terminal.console().render_str(str(terminal.table(rows)))
    advice.lines(rows)
    for write in tables.FORMATS.values():
        for categories in (False, True):
            write(results, categories=categories)
    if SECONDS and rows:
        from specjax.report import plots

        plots.draw(rows)


def read_traces(folder: Path, _) -> None:
    traces, _ = inputs.read_traces(folder / "trace.jsonl")
    html.render(report_cases.results(), traces, "x", plots={})


def save_datastore(folder: Path) -> Any:
    target, _ = testing.tiny("llama", vocab_size=61)
    store = datastore.build([[1, 2, 3, 1, 2], [4, 5, 6]])
    datastore.save(folder, store, vocab_size=61, vocabulary=None)
    return target


def save_profile(folder: Path) -> None:
    kind = {"times": [1.0, 1.1, 1.2], "acceptance": [0.7, 0.6], "heats": [], "empty": 1.0}
    kind |= {"finds": 0.5, "missed": 0.0}
    one = {"lengths": [0, 1, 2], "greedy": kind, "sampled": kind}
    value = {"schema": costs.SCHEMA, "device": "x", "target": "t", "drafter": "d"}
    (folder / "p.json").write_text(json.dumps(value | {"batches": {"1": one, "4": one}}))


TRACE = json.dumps({"id": "a", "category": "x", "prompt_ids": [1, 2], "output_ids": [3, 1]}) + "\n"
QUESTION = {"question_id": 1, "category": "x", "turns": ["a b", "c"]}
PROMPT = json.dumps(QUESTION) + "\n" + json.dumps(QUESTION | {"question_id": 2}) + "\n"
CODE = json.dumps({"task_id": 1, "text": "a", "test_list": ["b"], "prompt": "c"}) + "\n"
TALK = (
    json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    + "\n"
)
PAIR = json.dumps({"source": "a", "output": "b"}) + "\n"
PROOF = dict.fromkeys(proofs.Proof._fields) | {"schema": proofs.SCHEMA, "passed": True}
PROOF["findings"] = [["x", True]]
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3_moe", "smollm3", "gemma2", "gemma3_text", "phi3")


def cases() -> dict[str, Case]:
    """Every reader of files."""
    found = {
        f"config of {name}": Case(family_maker(name), load, "config.json") for name in FAMILIES
    }
    found |= {
        "config of t5": Case(lambda folder: t5_cases.save(folder), load, "config.json"),
        "generation config": Case(model("llama"), load, "generation_config.json"),
        "index": Case(model("llama"), load, "model.safetensors.index.json"),
        "header": Case(whole("llama"), load, "model.safetensors", "header"),
        "weights": Case(whole("llama"), load, "model.safetensors", "bytes"),
        "config as bytes": Case(whole("llama"), load, "config.json", "bytes"),
        "tokenizer": Case(whole("llama"), read_tokenizer, "tokenizer.json"),
        "tokenizer as bytes": Case(whole("llama"), read_tokenizer, "tokenizer.json", "bytes"),
        "tokenizer config": Case(model("llama"), read_chat, "tokenizer_config.json"),
        "template": Case(template, read_chat, "chat_template.jinja", "bytes"),
        "config of 8 bits": Case(quantised, load, "config.json"),
        "header of 8 bits": Case(quantised, load, "model.safetensors", "header"),
        "gguf": Case(gguf("llama"), load_gguf, "m.gguf", "bytes"),
        "gguf of gemma": Case(gguf("gemma3"), load_gguf, "m.gguf", "bytes"),
        "recording": Case(written("r.jsonl", TRACE * 3), recording("r.jsonl"), "r.jsonl", "lines"),
        "recording as bytes": Case(
            written("r.jsonl", TRACE * 3), recording("r.jsonl"), "r.jsonl", "bytes"
        ),
        "prompts": Case(written("p.jsonl", PROMPT), read_prompts("p.jsonl"), "p.jsonl", "lines"),
        "code": Case(written("p.jsonl", CODE), read_prompts("p.jsonl"), "p.jsonl", "lines"),
        "prompts as text": Case(written("p.txt", PROMPT), read_prompts("p.txt"), "p.txt", "bytes"),
        "prompts in gzip": Case(
            lambda f: (f / "p.jsonl.gz").write_bytes(gzip.compress(PROMPT.encode(), mtime=0)),
            read_prompts("p.jsonl.gz"),
            *("p.jsonl.gz", "bytes"),
        ),
        "prompts in xz": Case(
            lambda f: (f / "p.jsonl.xz").write_bytes(lzma.compress(PROMPT.encode())),
            read_prompts("p.jsonl.xz"),
            *("p.jsonl.xz", "bytes"),
        ),
        "dialogues": Case(
            written("d.jsonl", TALK), lambda f, _: dialogues.read(f / "d.jsonl"), "d.jsonl", "lines"
        ),
        "pairs": Case(
            written("d.jsonl", PAIR), lambda f, _: pairs.read(f / "d.jsonl"), "d.jsonl", "lines"
        ),
        "shard": Case(
            lambda f: shards.write(f / "s", [{"a": 1}, {"b": [2]}]),
            lambda f, _: shards.read(f / "s"),
            *("s", "bytes", (ValueError,)),
        ),
        "datastore": Case(save_datastore, datastore.load, "datastore.json"),
        "datastore's arrays": Case(
            save_datastore, datastore.load, "datastore.safetensors", "header"
        ),
        "profile": Case(save_profile, lambda f, _: costs.read(f / "p.json"), "p.json"),
        "proof": Case(
            written("p.json", json.dumps(PROOF)),
            lambda f, _: proofs.read(f / "p.json"),
            "p.json",
        ),
        "tree": Case(
            lambda f: shapes.save(f / "t.json", shapes.parse("2x2")),
            lambda f, _: shapes.parse(f / "t.json"),
            "t.json",
        ),
        "results": Case(
            written("results.json", json.dumps(report_cases.results())), read_report, "results.json"
        ),
        "results as bytes": Case(
            written("results.json", json.dumps(report_cases.results())),
            *(read_report, "results.json", "bytes"),
        ),
        "traces": Case(
            written("trace.jsonl", json.dumps(report_cases.trace(2)) + "\n"),
            *(read_traces, "trace.jsonl", "lines"),
        ),
    }
    for kind in head_files.kinds():
        read = lambda folder, _, kind=kind: head_files.read(folder / "h", kind)  # noqa: E731
        found[f"config of {kind}"] = Case(heads_of(kind), read, "h/config.json")
        found[f"tensors of {kind}"] = Case(heads_of(kind), read, "h/*.safetensors", "header")
    return found


def family_maker(name: str):
    """A model directory of a family in one file."""

    def make(folder: Path) -> None:
        whole("llama")(folder)
        # The families that llama's writer does not make: their own.
        if name != "llama":
            raw = hf_cases.hf_keys(name)
            config = hf.config_from_hf(raw)
            hf.save(folder, config, hf_cases.random_params(config), hf_cases.words(61))

    return make


def template(folder: Path) -> None:
    model("llama")(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )


def recording(name: str):
    return lambda folder, _: recordings.read(folder / name, 61)


CASES = cases()
CONFIGS = sorted(path.stem for path in (commandline.ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_files(name, tmp_path):
    case = CASES[name]
    given_to = case.make(tmp_path)
    [file] = tmp_path.glob(case.file)
    good = file.read_bytes()
    case.read(tmp_path, given_to)

    def check(changes: list) -> None:
        file.write_bytes(changed(good, case.form, changes))
        attempt(tmp_path, lambda: case.read(tmp_path, given_to), case.allowed)

    fuzz(cuts() if case.form == "bytes" else edits(), check, len(CASES) + len(CONFIGS))


@pytest.mark.parametrize("name", CONFIGS)
def test_overrides(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = commandline.ROOT / "configs" / f"{name}.py"
    config, _ = command_line.parse(["x", f"--config={file}"])
    keys = sorted(_leaves(config))

    def read(given_keys: list[tuple[int, str]]) -> None:
        arguments = [f"--config.{keys[n % len(keys)]}={text}" for n, text in given_keys]
        config, _ = command_line.parse(["x", f"--config={file}", *arguments])
        mode = dispatch._check_keys(config)
        if mode == "train":
            config = checks.complete(config)
            if config.objective in recipes._PREPARE:
                checks.check_training(config)
        else:
            run_settings.read(config).check_methods()

    places = st.tuples(st.integers(0, 10**6), st.sampled_from(TEXTS))
    strategy = st.lists(places, min_size=1, max_size=3)
    fuzz(
        strategy,
        lambda given_keys: attempt(tmp_path, lambda: read(given_keys)),
        len(CASES) + len(CONFIGS),
    )


def _leaves(config: ConfigDict, front: str = "") -> list[str]:
    """The dotted keys of a configuration."""
    found = []
    for key, value in config.items():
        inner = isinstance(value, ConfigDict)
        found += _leaves(value, f"{front}{key}.") if inner else [f"{front}{key}"]
    return found
