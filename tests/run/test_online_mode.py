"""Mode online from the command line: files, resuming, the report, the drafter, errors."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from commandline import ROOT

from specjax import drafters
from specjax.drafters.files import head_files
from specjax.models import hf
from specjax.report import plots
from specjax.train import stream

ONLINE = f"--config={ROOT}/configs/online.py"
LINES = ("def add(a, b):", "return a", "def sub", "    return b")


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """Sixteen requests; the topic changes after eight."""
    path = tmp_path_factory.mktemp("prompts") / "requests.jsonl"
    lines = [
        {"prompt": f"{LINES[i % 4]} {i}", "category": "code" if i < 8 else "numbers"}
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def common(target, draft, requests):
    return [
        ONLINE,
        f"--config.target={target}",
        f"--config.drafter.model={draft}",
        f"--config.prompts={requests}",
        "--config.max_new_tokens=6",
        "--config.batch_size=4",
        "--config.online.every=4",
        "--config.online.window=4",
        "--config.online.checkpoint_every=8",
        "--config.optimiser.learning_rate=0.01",
        "--config.drafter.gamma=3",
        "--config.sampling.temperature=1.0",
    ]


class Killed(Exception):
    """Stands for a signal."""


def results_of(workdir):
    """results.json without what differs between two runs: dates, times, the command."""
    stored = json.loads((workdir / "results.json").read_text())
    for window in stored["rows"][0]["windows"]:
        del window["seconds"]
    return stored["rows"], stored["online"]


@pytest.mark.slow
def test_a_stream_with_a_change_of_topic(cli, common, draft, tmp_path, monkeypatch):
    status, out, err, workdir = cli(*common)
    assert status == 0, err
    (whole, *topics), about = results_of(workdir)
    assert [row["category"] for row in topics] == ["code", "numbers"] and about["updates"] == 4
    windows = whole["windows"]
    assert [(one["first"], one["last"], one["updates"]) for one in windows] == [
        (0, 3, 0),
        (4, 7, 1),
        (8, 11, 2),
        (12, 15, 3),
    ]
    assert [one["categories"] for one in windows] == [{"code": 4}] * 2 + [{"numbers": 4}] * 2
    assert sum(one["tokens"] for one in windows) == whole["tokens"] == 16 * 6
    assert "0 to 3" in out and "ms per update" in out and "requests: 96 tokens" in err
    lines = [json.loads(line) for line in (workdir / "online.jsonl").read_text().splitlines()]
    assert [line["category"] for line in lines] == ["code"] * 8 + ["numbers"] * 8
    assert (workdir / "plots" / "acceptance_over_time.svg").is_file()
    assert "acceptance over time" in (workdir / "report.html").read_text()
    # The drafter at the end can be given to any other run.
    before, after = hf.load(draft), hf.load(workdir)
    assert before.config == after.config
    assert not np.array_equal(
        before.params["embed"]["embedding"], after.params["embed"]["embedding"]
    )
    # The same stream, killed after its first checkpoint, and resumed by the same command, in a
    # workdir with the results of another mode.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"mode": "bench"}')
    real = stream.serve

    def killed(*arguments):
        for count, each in enumerate(real(*arguments)):
            yield each
            if count == 2:
                raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(stream, "serve", killed)
        cli(*common, workdir=tmp_path / "b")
    assert not (tmp_path / "b" / "results.json").exists()
    status, _, err, other = cli(*common, workdir=tmp_path / "b")
    assert status == 0 and "resuming from request 8 of 16" in err
    rows, more = results_of(other)
    assert rows == [whole, *topics] and more["wrong"] == about["wrong"]
    files = [path / "model" / "model.safetensors" for path in (workdir, other)]
    assert files[0].read_bytes() == files[1].read_bytes()
    # Another stream is not mixed with it.
    status, _, err, _ = cli(*common, "--config.seed=1", workdir=tmp_path / "b")
    assert status == 2 and "seed was 0, is 1" in err


def test_without_updates_the_drafter_stays(cli, common, draft):
    status, _, err, workdir = cli(*common, "--config.online.learn=False", "--config.report=False")
    assert status == 0, err
    (whole, *_), about = results_of(workdir)
    assert about["updates"] == 0 and about["seconds_per_update"] is None
    assert {one["updates"] for one in whole["windows"]} == {0}
    before, after = (hf.load(path).params["embed"]["embedding"] for path in (draft, workdir))
    assert np.array_equal(before, after) and not (workdir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_heads_learn_and_are_written(cli, common, target, tmp_path, name):
    loaded = hf.load(target)
    training = drafters.make(name, loaded.lm).training
    start = training.start(loaded.params, jax.random.key(0))
    facts = {"base_model_name_or_path": "target", **dict(training.facts)}
    words = hf.fingerprint(loaded.tokenizer)
    head_files.write(tmp_path / "heads", name, start, facts, words)
    flags = [f"--config.drafter.name={name}", f"--config.drafter.model={tmp_path}/heads"]
    kept = [each for each in common if "drafter" not in each]
    status, _, err, workdir = cli(*kept, *flags)
    assert status == 0, err
    assert results_of(workdir)[1]["updates"] == 4
    after = drafters.make(name, loaded.lm, model=workdir).init_params(None)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), start, after)
    assert any(jax.tree.leaves(changed))


def test_mistakes_are_reported_before_anything_is_written(cli, common, requests):
    for flags, message in (
        (["--config.drafter.name=prompt_lookup"], "does not take the key 'model'"),
        (["--config.online.every=0"], "config.online.every is 0"),
        (["--config.online.every=6"], "every is 6 and config.batch_size is 4"),
        (["--config.online.window=0"], "config.online.window is 0"),
        (["--config.online.every=32"], "the stream has 16 requests and the first update is after"),
        (["--config.loss.divergence=kl"], "loss.divergence is 'kl'"),
        (["--config.loss.ce=1.0"], "config.loss.ce is not a key of the loss of draft_model"),
        (["--config.optimiser.name=adma"], "config.optimiser.name is 'adma'"),
        (
            ["--config.mesh=data:2"],
            "config.mesh is for modes generate and bench, not for mode online",
        ),
    ):
        status, out, err, workdir = cli(*common, *flags)
        assert status == 2 and message in err and err.count("\n") == 1, err
        assert out == "" and not workdir.exists()


@pytest.mark.fast
def test_the_plot_over_time_reads_any_row():
    windows = [
        {"first": 0, "last": 9, "alpha": 0.5, "tau": 2.0, "categories": {"a": 9, "b": 1}},
        {"first": 10, "last": 19, "alpha": None, "tau": 2.5, "categories": {"b": 10}},
        {"first": 20, "last": 29, "alpha": 0.7, "tau": 3.0},
    ]
    figure = plots.acceptance_over_time(
        [{"method": "one", "temperature": 1.0, "windows": windows}, {"method": "two"}]
    )
    alpha, tau = figure.axes
    assert list(alpha.lines[0].get_ydata()) == [0.5, 0.7]
    assert list(tau.lines[0].get_xdata()) == [4.5, 14.5, 24.5]
    assert "from request 0 a, from request 10 b" in figure.texts[-1].get_text().replace("\n", " ")
    for rows in ([], [{"windows": 3}], [{"windows": [1, {"first": 0}]}]):
        assert plots.acceptance_over_time(rows) is None
