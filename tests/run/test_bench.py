"""Mode bench from the command line: the files that it writes, resuming, and grids."""

from __future__ import annotations

import contextlib
import json
import resource
from pathlib import Path

import jax
import numpy as np
import pytest
from commandline import BENCH, GENERATE

from configs import bench as bench_file
from configs import generate as generate_config
from specjax import drafters, files
from specjax.bench import (
    lossless,
    metrics,
    overlap,
    passes,
    proofs,
    summaries,
    token_traces,
)
from specjax.data import progress
from specjax.drafters.files import head_files
from specjax.models import hf
from specjax.report import columns, inputs, series
from specjax.run import settings

QUESTIONS = [
    {"question_id": 7, "category": "writing", "turns": ["def add(a", "return a"]},
    {"question_id": 8, "category": "math", "turns": ["sub(a, b"]},
    {"question_id": 9, "category": "math", "turns": ["return b + a, a - b"]},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return path


@pytest.fixture
def common(target, draft, questions):
    return [
        BENCH,
        f"--config.target={target}",
        f"--config.prompts={questions}",
        "--config.max_new_tokens=10",
        "--config.drafter.name=draft_model",
        f"--config.drafter.model={draft}",
        "--config.repeats=2",
    ]


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def check_rows_of_categories(row, parts):
    """Rows of categories have speed, costs and spreads, and every row has its uncertainty."""
    low, high = row["speedup_interval"]
    assert low < row["speedup"] < high and row["class_status"] == "proven"
    assert row["standard_errors"]["block_efficiency"] >= 0
    for part in parts:
        assert part["costs_ms"] == row["costs_ms"] and part["time_split"] is None
        low, high = part["spread"]["speedup"]
        assert 0 < low <= high and set(part["spread"]) == set(row["spread"])
        assert part["system_efficiency"] == pytest.approx(
            part["speedup"] / part["predicted_speedup"]
        )
        assert part["class_status"] == "proven" and set(part["standard_errors"]) == set(
            row["standard_errors"]
        )
        assert (part["speedup_interval"] is None) == (part["prompts"] < 2)


def check_provenance(written, common):
    """The target with its hash, the settings, and the commit if there is one."""
    directory = common[1].partition("=")[2]
    target = written["target"]
    assert target["name"] == "target" and target["dtype"] == "float32"
    assert target["weights_sha256"] == files.sha256(Path(directory) / "model.safetensors")
    assert (written["max_new_tokens"], written["seed"], written["repeats"]) == (10, 0, 2)
    assert written["uncertainty"]["level"] == 0.95
    assert written["git"] is None or len(written["git"]["commit"]) == 40


def test_lengths_that_a_method_does_not_have_are_left_out(cli, target, questions, tmp_path):
    """Medusa with two heads has no chain of 3; suffix takes no gamma; both are said."""
    loaded = hf.load(target)
    heads = drafters.make("medusa", loaded.lm, heads=2).training.start
    params = jax.tree.map(np.asarray, heads(loaded.params, jax.random.key(0)))
    head_files.write(tmp_path / "heads", "medusa", params, {})
    given = [
        BENCH,
        f"--config.target={target}",
        f"--config.prompts={questions}",
        "--config.max_new_tokens=4",
        "--config.repeats=1",
        "--config.report=False",
        "--methods=medusa,suffix",
        f"--config.grid.methods.medusa.model={tmp_path / 'heads'}",
    ]
    status, out, err, workdir = cli(*given, "--config.grid.gammas=(2,3)")
    assert (status, err) == (0, "")
    assert "medusa, gamma 3 is left out: gamma is 3, and medusa drafts at most 2" in out
    assert "suffix takes no gamma and is measured once" in out
    rows = [row["method"] for row in results(workdir)["rows"] if row["category"] is None]
    assert rows == ["medusa, gamma 2", "suffix"]
    # A profile is measured for a length that is there, whatever was left out before it.
    more = "--config.grid.gammas=(3,2)", "--config.grid.methods.medusa.control=goodput"
    status, _, err, workdir = cli(*given, *more, workdir=tmp_path / "profiles")
    assert (status, err) == (0, "")
    rows = [row["method"] for row in results(workdir)["rows"] if row["category"] is None]
    assert rows == ["medusa, gamma 2", "suffix"]
    assert [path.name for path in (workdir / "profiles").iterdir()] == ["medusa_gamma 2.json"]
    status, _, err, _ = cli(*given[:-2], "--methods=medusa", given[-1], "--config.grid.gammas=(3,)")
    assert status == 2 and "gamma is 3, and medusa drafts at most 2 tokens ahead" in err
    status, _, err, _ = cli(*given[:6], "--config.drafter.name=rest", "--config.drafter.gamma=3")
    assert status == 2 and "its key for the length of drafts is 'depth'" in err


def test_a_grid_and_what_it_leaves(cli, common):
    status, out, err, workdir = cli(
        *common,
        "--config.grid.gammas=(1,2)",
        "--config.show_trace=True",
        "--config.trace_tokens=16",
    )
    assert (status, err) == (0, "")
    written = results(workdir)
    assert (
        written["command"].startswith("python -m specjax.run --config=")
        and written["machine"]["cores"] >= 1
    )
    whole = [row for row in written["rows"] if row["category"] is None]
    assert [(row["method"], row["gamma"]) for row in whole] == [
        ("draft_model, gamma 1", 1),
        ("draft_model, gamma 2", 2),
    ]
    for row in whole:
        assert row["prompts"] == 4 and row["tokens"] == 40 and row["prompt_set"] == "question"
        assert row["system_efficiency"] == pytest.approx(row["speedup"] / row["predicted_speedup"])
        low, high = row["spread"]["tokens_per_second"]
        assert low <= row["tokens_per_second"] <= high
        assert (
            set(row["costs_ms"]) == {"step", "draft", "verify"}
            and min(row["costs_ms"].values()) > 0
        )
        assert sum(row["time_split"].values()) == pytest.approx(1) and row["prefill_seconds"] > 0
        assert (
            row["parameters"]["target"] == row["parameters"]["draft"] > 0
            and row["compile_seconds"] > 0
        )
        assert row["step_bytes"] > 4 * row["parameters"]["target"] and row["devices"] == 1
        assert row["bandwidth_share"] is None  # there is no datasheet of a CPU
        assert row["lossless"] == {
            "check": "greedy-identity",
            "passed": True,
            "detail": "4/4 prompts",
        }
        seen = row["overlap"]
        assert (
            seen["tokens"] == 40
            and 0 <= seen["alpha"] <= 1
            and seen["by_depth"][0] == seen["alpha"]
        )
        for parts in (seen["by_class"], seen["by_category"]):
            assert sum(part["tokens"] for part in parts.values()) == 40
            together = sum(part["alpha"] * part["tokens"] for part in parts.values())
            assert together == pytest.approx(40 * seen["alpha"])
        parts = [r for r in written["rows"] if r["category"] and r["method"] == row["method"]]
        assert [(p["category"], p["prompts"]) for p in parts] == [("writing", 2), ("math", 2)]
        assert (
            sum(p["tokens"] for p in parts) == row["tokens"]
            and sum(p["rounds"] for p in parts) == row["rounds"]
        )
        check_rows_of_categories(row, parts)
    check_provenance(written, common)
    answers = [
        json.loads(line)
        for line in (workdir / "answers" / "autoregressive_temperature_0_batch_1.jsonl").open()
    ]
    assert [(a["question_id"], len(a["choices"][0]["turns"])) for a in answers] == [
        (7, 2),
        (8, 1),
        (9, 1),
    ]
    method = (
        (workdir / "answers" / "draft_model_gamma_2_temperature_0_batch_1.jsonl")
        .read_text()
        .splitlines()
    )
    answers_of = [json.loads(line)["choices"][0] for line in method]
    assert [c["turns"] for c in answers_of] == [
        a["choices"][0]["turns"] for a in answers
    ]  # greedy: the same texts
    rounds = [n for c in answers_of for n in c["accept_lengths"]]
    assert np.mean(rounds) == pytest.approx(whole[1]["block_efficiency"])
    traces, notices = inputs.read_traces(workdir / "trace.jsonl")
    assert [t["method"] for t in traces] == [row["method"] for row in whole] and not notices
    texts = ["".join(token[0] for one in t["rounds"] for token in one["out"]) for t in traces]
    lengths = {sum(len(one["out"]) for one in t["rounds"]) for t in traces}
    assert lengths == {16}  # longer than what was measured, and the same text
    assert texts[0] == texts[1] and texts[0].strip().startswith(
        answers[0]["choices"][0]["turns"][0]
    )
    page = (workdir / "report.html").read_text()
    assert "draft_model, gamma 2" in page and "<svg" in page
    assert {path.suffix for path in (workdir / "plots").iterdir()} == {".png", ".svg"}
    assert "accepted draft token" in out and not (workdir / progress.NAME).exists()


@pytest.fixture
def quick(common):
    """A lookup, whose programs compile faster, and no report."""
    plain = [key for key in common if not key.startswith("--config.drafter.")]
    return [*plain, "--config.report=False", "--config.trace_prompts=0"]


def test_a_bench_is_resumed_within_a_pass(cli, quick, monkeypatch):
    """Of the second of two batches one method was measured: the rows are those of a whole bench."""
    keys, real, ran = [*quick, "--config.batch_size=3"], passes.run_batch, []

    def interrupted(*given, brief=False):
        if not brief:
            if len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(given)
        return real(*given, brief=brief)

    monkeypatch.setattr(passes, "run_batch", interrupted)
    assert cli(*keys)[0] == 130
    monkeypatch.setattr(passes, "run_batch", real)
    status, out, err, workdir = cli(*keys)
    assert (status, err) == (0, "") and "resuming after 3 batches" in out
    resumed = results(workdir)["rows"]
    assert cli(*keys, "--config.again=True")[0] == 0
    for row, own in zip(results(workdir)["rows"], resumed, strict=True):
        assert all(row[key] == own[key] for key in ("tokens", "rounds", "block_efficiency"))
        assert row["category"] is not None or own["costs_ms"]["verify"] > 0


def test_a_killed_bench_is_resumed(cli, quick, monkeypatch):
    plain = [*quick, "--config.batch_size=4"]
    ran, real = [], passes.run_batch

    def interrupted(job, method, *group, brief=False):
        if not brief:
            if len(ran) == 4:
                raise KeyboardInterrupt
            ran.append(method and method.name)
        return real(job, method, *group, brief=brief)

    monkeypatch.setattr(passes, "run_batch", interrupted)
    status, _, err, workdir = cli(*plain)
    assert status == 130 and "the same command resumes training runs and benches" in err
    assert [path.name for path in workdir.iterdir()] == [progress.NAME]
    # The fingerprint and three batches; the fourth was for the turns of conversations.
    assert len((workdir / progress.NAME).read_text().splitlines()) == 4
    with (workdir / progress.NAME).open("a") as file:
        file.write('{"pass": "an incomplete li')
    ran.clear()
    status, out, err, _ = cli(*plain)
    assert (status, err) == (0, "") and "resuming after 3 batches" in out
    assert len(ran) == 2  # the first turns of conversations, and the one batch that was missing
    [row] = [row for row in results(workdir)["rows"] if row["category"] is None]
    assert row["tokens"] == 40 and row["lossless"]["passed"] and row["costs_ms"]["verify"] > 0
    assert not (workdir / progress.NAME).exists()


@pytest.mark.parametrize("flag", ["report=False", "trace_prompts=0"])
def test_only_what_is_asked_for_is_compiled(cli, common, monkeypatch, flag):
    """No probabilities along the texts, whose check is greedy, and no traces."""

    def unwanted(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(lossless, "_compare", unwanted)
    monkeypatch.setattr(overlap, "_call", unwanted)
    monkeypatch.setattr(token_traces, "_step", unwanted)
    status, out, err, workdir = cli(*common, f"--config.{flag}", "--config.repeats=1")
    assert (status, err) == (0, "")
    seconds = results(workdir)["seconds"]
    assert {"reading", "compiling", "decoding", "checking", "to the first row"} <= seconds.keys()
    assert seconds["to the first row"] > seconds["compiling"] > 0
    assert 1e7 < results(workdir)["peak_bytes"] < 1e11
    about = "1 x cpu, float32, weights 0.00 GB, the target's cache 0.00 GB for 1 x "
    assert about in out and "\nseconds: " in out
    [row] = [row for row in results(workdir)["rows"] if row["category"] is None]
    assert row["lossless"]["passed"] and row["overlap"] is None
    # The row, before the table is there.
    line = f"temperature 0, batch 1: draft_model: tau {row['block_efficiency']:.2f}, "
    assert line in out and out.index(line) < out.index("\nmethod ")
    assert not (workdir / "trace.jsonl").exists()


@contextlib.contextmanager
def largest_file(size):
    """No file may become larger: what a full disk is to the process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_is_one_line(cli, quick, tmp_path):
    """The batches that are stored are kept; a generation writes nothing, or all."""
    with largest_file(2000):
        status, _, err, workdir = cli(*quick)
    assert status == 2 and err.startswith("specjax: cannot write ") and err.count("\n") == 1
    assert {path.name for path in workdir.iterdir()} <= {progress.NAME}
    status, _, err, _ = cli(*quick)
    assert (status, err) == (0, "")
    keys = [key for key in quick if key.startswith(("--config.target=", "--config.prompts="))]
    keys += [GENERATE, "--config.max_new_tokens=3", f"--config.record={tmp_path / 'r.jsonl'}"]
    with largest_file(1000):
        status, _, err, workdir = cli(*keys, workdir=tmp_path / "texts")
    assert status == 2 and err.startswith("specjax: cannot write into ")
    assert not workdir.exists() and not (tmp_path / "r.jsonl").exists()


def test_fingerprints_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE", 1 << 10)
    monkeypatch.setattr(files, "FIRST", 1 << 8)
    path, marks = tmp_path / "weights", set()
    data = bytearray(1 << 21)
    for place in (None, 3, len(data) - 1, len(data) // 2 - 1):
        if place is not None:
            data[place] ^= 1
        path.write_bytes(data)
        marks.add(files.fingerprint(path))
    path.write_bytes(data + b"x")
    assert len(marks | {files.fingerprint(path)}) == 5
    path.write_bytes(b"short")
    assert files.fingerprint(path) == files.sha256(path)


def test_another_configuration_starts_over(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    config = {"target": str(model), "seed": 0}
    mark = progress.fingerprint(config, [[1, 2]])
    one = progress.Progress(tmp_path / "work", mark)
    assert not (tmp_path / "work").exists()  # before anything is measured
    one.put("a", {"x": [1, 2.5]})
    again = progress.Progress(tmp_path / "work", mark)
    assert again.get("a") == {"x": [1, 2.5]} and len(again) == 1 and again.get("b") is None
    (model / "weights").write_text("22")
    config["seed"] = 1
    marks = {mark, progress.fingerprint(config, [[1, 2]])}
    config["seed"] = 0
    marks |= {progress.fingerprint(config, [[1, 2]]), progress.fingerprint(config, [[1, 3]])}
    assert len(marks) == 4
    other = progress.Progress(tmp_path / "work", progress.fingerprint(config, [[1, 2]]))
    assert len(other) == 0
    other.put("a", 1)
    other.forget()
    assert not (tmp_path / "work").exists()


def test_contexts_and_prompt_sets(cli, target, tmp_path, questions):
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "question.jsonl"
    other.write_text('{"prompt": "def add(a, b):\\n    return a"}\n{"prompt": "x"}\n')
    keys = [
        BENCH,
        f"--config.target={target}",
        f"--config.grid.prompts={(str(questions), str(other))!r}",
    ]
    keys += ["--config.grid.contexts=(2,5)", "--config.repeats=1", "--config.max_new_tokens=4"]
    keys += ["--config.report=False", "--config.trace_prompts=0", "--config.drafter.gamma=1"]
    status, _, err, workdir = cli(*keys)
    assert (status, err) == (0, "")
    written = [row for row in results(workdir)["rows"] if row["category"] is None]
    assert {(row["prompt_set"], row["context"], row["prompts"]) for row in written} == {
        (f"{tmp_path.name}/question.jsonl", 2, 4),
        (f"{tmp_path.name}/question.jsonl", 5, 3),
        ("more/question.jsonl", 2, 1),
        ("more/question.jsonl", 5, 1),
    }
    assert not (workdir / "answers").exists()  # cut prompts are not the questions


def test_lengths_of_outputs(cli, target, tmp_path):
    """Each is a cell; tables and labels tell them apart."""
    keys = [BENCH, f"--config.target={target}", "--config.prompt=def add", "--config.repeats=1"]
    keys += ["--config.grid.new_tokens=(3,6)", "--config.ignore_eos=True"]
    keys += ["--config.report=False", "--config.trace_prompts=0", "--config.drafter.gamma=1"]
    status, _, err, workdir = cli(*keys)
    assert (status, err) == (0, "")
    rows = [row for row in results(workdir)["rows"] if row["category"] is None]
    assert [(row["new_tokens"], row["tokens"]) for row in rows] == [(3, 3), (6, 6)]
    assert len(set(series.distinct(rows))) == 2 and "-, 6 new" in columns.prompt_names(rows)[1]


@pytest.mark.slow
def test_sets_of_like_names_are_measured_apart(cli, target, tmp_path):
    """And what an earlier bench left in the workdir goes with its results."""
    (tmp_path / "set.v1.txt").write_text("def add\nreturn a\n")
    (tmp_path / "set.v2.txt").write_text("sub(a, b\n")
    files_ = tuple(str(tmp_path / name) for name in ("set.v1.txt", "set.v2.txt"))
    keys = [BENCH, f"--config.target={target}", "--config.max_new_tokens=4", "--config.repeats=1"]
    keys += ["--config.report=False", "--config.drafter.gamma=1", "--config.trace_prompts=1"]
    status, _, err, workdir = cli(*keys, f"--config.grid.prompts={files_!r}")
    assert (status, err) == (0, "")
    written = [
        (row["prompt_set"], row["prompts"], row["tokens"]) for row in results(workdir)["rows"]
    ]
    assert written == [("set.v1.txt", 2, 8), ("set.v2.txt", 1, 4)]
    assert len(list((workdir / "answers").iterdir())) == 4 and (workdir / "trace.jsonl").exists()
    status, _, _, _ = cli(*keys, "--config.prompt=def add", "--config.trace_prompts=0")
    assert (
        status == 0
        and not (workdir / "answers").exists()
        and not (workdir / "trace.jsonl").exists()
    )


def test_methods_of_a_grid():
    config = bench_file.get_config()
    config.grid.methods.a = generate_config.drafter("draft_model")
    config.grid.methods.b = generate_config.drafter("prompt_lookup")
    config.grid.models, config.grid.gammas = ("runs/x/draft", "runs/y/draft"), (1, 2)
    chosen = settings.read(config).methods
    assert list(chosen) == [
        *(f"a, gamma {g}, runs/{d}/draft" for g in (1, 2) for d in "xy"),
        "b, gamma 1",
        "b, gamma 2",
    ]
    assert chosen["a, gamma 2, runs/y/draft"].drafter == {
        "name": "draft_model",
        "gamma": 2,
        "model": "runs/y/draft",
    }
    config.grid.models = ("runs/x/draft", "runs/x/other")
    assert "a, gamma 1, other" in settings.read(config).methods


@pytest.mark.slow
def test_controlled_acceptance_from_the_command_line(cli, target, draft, questions, tmp_path):
    keys = [
        BENCH.replace("bench.py", "controlled.py"),
        f"--config.target={target}",
        f"--config.prompts={questions}",
    ]
    keys += [
        "--config.drafter.drafters.inner.name=draft_model",
        f"--config.drafter.drafters.inner.model={draft}",
    ]
    keys += ["--config.drafter.rate=1.0", "--config.report=False"]
    keys += [
        "--config.drafter.drafters.inner.gamma=2",
        "--config.max_new_tokens=10",
        "--config.repeats=1",
    ]
    keys += ["--config.trace_prompts=0"]
    status, _, err, _ = cli(*keys, "--config.grid.temperatures=(0.0,1.0)", workdir=tmp_path / "no")
    assert status == 2 and "controlled is for temperature 0 only" in err
    assert not (tmp_path / "no").exists()
    status, _, err, workdir = cli(*keys)
    assert (status, err) == (0, "")
    [row] = [row for row in results(workdir)["rows"] if row["category"] is None]
    assert (
        row["acceptance_rate"] == 1.0
        and row["lossless"]["passed"]
        and row["drafter"] == "controlled"
    )


def test_mistakes(cli, common, tmp_path, questions):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(QUESTIONS[0]) + '\n{"question_id": 2, "category": "x"}\n')
    for keys, message in [
        (["--config.grid.gammas=(2,2)"], "config.grid.gammas is (2, 2); give each value once"),
        (
            [
                "--config.drafter.name=none",
                "--config.drafter.model=None",
                "--config.grid.gammas=(2,)",
            ],
            "no method takes",
        ),
        (
            ["--config.grid.contexts=(0,)"],
            "a value of config.grid.contexts is 0; it must be a whole number >= 1",
        ),
        (["--config.grid.contexts=(900,)"], "no prompt has 900 tokens; ask for fewer"),
        (["--config.chat=own"], "chat template"),
        (
            ["--config.grid.temperatures=(1.0,1.0000001)"],
            "config.grid.temperatures is (1.0, 1.0000001); give each value once",
        ),
        (
            ["--config.grid.batch_sizes=(1,1)"],
            "config.grid.batch_sizes is (1, 1); give each value once",
        ),
        (["--config.record=x.jsonl"], "config.record is for modes generate and chat"),
        (["--config.trace_prompts=-1"], "config.trace_prompts is -1"),
        (["--config.trace_tokens=-1"], "config.trace_tokens is -1"),
        (["--config.proof=('none.json',)"], "the proof none.json cannot be read"),
        (["--config.proof=(1,)"], "config.proof"),
        (
            ["--config.mode=generate", "--config.grid.gammas=(1,2)"],
            "config.grid is for modes bench and replay",
        ),
        (["--config.prompts=~nobody_at_all/x.txt"], "the name of an unknown user"),
        (["--config.prompts=stdlib", "--config.chat=own"], "config.chat is for files of prompts"),
        (
            ["--config.max_prompt_tokens=-1"],
            "config.max_prompt_tokens is -1; it must be a whole number >= 0",
        ),
        ([f"--config.prompts={bad}"], "line 2"),
        (["--config.prompt_kind=gsm8k"], "question"),
        (["--config.max_new_tokens=5000"], "config.max_prompt_tokens"),
    ]:
        status, _, err, workdir = cli(*common, *keys, workdir=tmp_path / "no")
        assert status == 2 and message in err and len(err.splitlines()) == 1, (keys, err)
        assert not workdir.exists()


def test_generate_answers_every_turn(cli, target, questions):
    keys = [
        GENERATE,
        f"--config.target={target}",
        f"--config.prompts={questions}",
        "--config.max_new_tokens=6",
    ]
    status, out, err, workdir = cli(*keys, "--config.drafter.name=none", "--config.batch_size=2")
    assert (status, err) == (0, "")
    written = results(workdir)
    assert (
        len(written["texts"]) == 4
        and written["rows"][0]["prompts"] == 4
        and written["rows"][0]["tokens"] == 24
    )
    assert (
        f"def add(a\n\n{written['texts'][0].strip()}\n\nreturn a" in out
    )  # the second turn follows the first answer


def test_a_failed_lossless_check_gives_exit_status_1(cli, quick, monkeypatch):
    monkeypatch.setattr(
        lossless,
        "greedy_identity",
        lambda *_: proofs.Finding("greedy-identity", False, "0/4 prompts"),
    )
    status, _, err, workdir = cli(*quick, "--config.repeats=1")
    assert status == 1 and "prompt_lookup is not lossless: 0/4 prompts; see results.json" in err
    assert results(workdir)["rows"]


def test_passes_go_to_disk_and_back():
    counts = [metrics.Counts(5, 2, 3, np.array([2, 1]), np.array([2, 1]))]
    one = passes.Pass([[1, 2]], counts, [[2]], [0.1], [0.2], 0.1, 0.1, 0.0, 1, {"step": 0.5})
    again = passes.from_json(json.loads(json.dumps(passes.to_json(one))))
    assert again.counts[0].tested.tolist() == [2, 1] and again._replace(counts=[]) == one._replace(
        counts=[]
    )


def test_size_counts_floats():
    assert summaries.size({"a": np.zeros((2, 3), np.float32), "b": np.arange(4)}) == 6


def test_a_golden_curve_of_speed_bench_is_what_controlled_takes(cli, target, draft, tmp_path):
    """Measured, replayed from the recording of the same texts, and used as a length."""
    path = tmp_path / "qualitative" / "test.jsonl"
    path.parent.mkdir()
    rows = [q | {"question_id": str(q["question_id"]), "sub_category": None} for q in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = [f"--config.target={target}", f"--config.prompts=speed_bench:{path}"]
    model += ["--config.max_new_tokens=10"]
    golden = BENCH.replace("bench.py", "golden.py")
    keys = ["--config.drafter.name=draft_model", f"--config.drafter.model={draft}"]
    keys += ["--config.grid.gammas=(1,2)", "--config.report=False"]
    keys += ["--config.grid.temperatures=(0.0,)"]
    status, out, err, workdir = cli(golden, *model, *keys)
    assert (status, err) == (0, "")
    curves = results(workdir)["curves"]
    assert [curve["category"] for curve in curves] == [None, "writing", "math"]
    whole = curves[0]
    assert whole["prompt_set"] == "qualitative" and whole["gammas"] == [1, 2]
    assert f"draft_model for 1 to 2 draft tokens, temperature 0, batch 1: {whole['length']}" in out
    taus = [row["block_efficiency"] for row in results(workdir)["rows"] if not row["category"]]
    assert whole["tokens_per_round"] == taus and len(whole["intervals"][0]) == 2
    # Replay has the same curve for the same texts.
    record = tmp_path / "texts.jsonl"
    status, _, err, _ = cli(GENERATE, *model, f"--config.record={record}", workdir=tmp_path / "g")
    assert (status, err) == (0, "")
    again = [f"{golden}:replay", f"--config.target={target}", f"--config.traces={record}"]
    again += [keys[0], keys[1], keys[2]]
    status, out, err, workdir = cli(*again, workdir=tmp_path / "replayed")
    assert (status, err) == (0, "") and whole["length"] in out
    replayed = results(workdir)["curves"][0]
    assert replayed["tokens_per_round"] == taus
    assert replayed["intervals"] == [pytest.approx(each) for each in whole["intervals"]]
    fixed = [BENCH.replace("bench.py", "controlled.py"), *model, "--config.report=False"]
    fixed += ["--config.drafter.drafters.inner.gamma=2", "--config.drafter.length=1.5,1.75"]
    status, _, err, workdir = cli(*fixed, workdir=tmp_path / "fixed")
    assert (status, err) == (0, "")
    row = results(workdir)["rows"][0]
    # Every draft token of depth 1 with probability 0.75, and none of depth 2.
    assert row["lossless"]["passed"] and row["acceptance_by_depth"][1:] in ([], [0.0])
