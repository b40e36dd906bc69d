"""configs/compare_targets.py: a bench with several targets of one vocabulary."""

from __future__ import annotations

import json
import re

import commandline
import jax
import numpy as np
import pytest
from commandline import BENCH

from experiments.targets import run as study
from experiments.targets import tables
from specjax import drafters
from specjax.drafters.files import head_files
from specjax.models import hf

COMPARE = BENCH.replace("bench.py", "compare_targets.py:")


@pytest.fixture
def common(target, tmp_path):
    """Heads of EAGLE that were made for ``target``."""
    loaded = hf.load(target)
    training = drafters.make("eagle", loaded.lm).training
    heads = jax.tree.map(np.asarray, training.start(loaded.params, jax.random.key(0)))
    head_files.write(tmp_path / "heads", "eagle", heads, dict(training.facts))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a\nreturn a\nsub(a, b\n")
    return [
        f"--config.target={target}",
        f"--config.prompts={prompts}",
        "--config.max_new_tokens=10",
        "--config.drafter.name=eagle",
        f"--config.drafter.model={tmp_path / 'heads'}",
        "--config.drafter.tree=chain:2",
        "--config.report=False",
    ]


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


COUNTS = ("tokens", "rounds", "block_efficiency", "acceptance_by_depth", "standard_errors")


def test_rows_are_those_of_a_bench_with_each_target(cli, common, draft, tmp_path):
    """The head runs with the embeddings and the LM head of the target that it drafts for."""
    status, out, err, workdir = cli(COMPARE + f"{draft},{common[0].partition('=')[2]}", *common)
    assert (status, err) == (0, "")
    written = results(workdir)
    rows = {(row["target"], row["method"]): row for row in written["rows"]}
    names = [(None, "eagle"), ("draft", "draft: eagle"), ("target", "target: eagle")]
    assert list(rows) == names and all(row["lossless"]["passed"] for row in rows.values())
    status, _, err, alone = cli(
        BENCH, *common, f"--config.target={draft}", "--config.repeats=1", workdir=tmp_path / "alone"
    )
    assert (status, err) == (0, "")
    [row] = results(alone)["rows"]
    first, other, again = (rows[name] for name in names)
    assert {key: other[key] for key in COUNTS} == {key: row[key] for key in COUNTS}
    assert {key: first[key] for key in COUNTS} == {key: again[key] for key in COUNTS}
    assert len(first["standard_errors"]["acceptance_by_depth"]) == len(first["acceptance_by_depth"])
    apart, same = written["targets"]
    assert (apart["label"], apart["name"], same["label"]) == ("draft", "draft", "target")
    assert apart["weights_sha256"] != written["target"]["weights_sha256"] == same["weights_sha256"]
    [one], [none] = apart["compared"], same["compared"]
    assert one["setting"] == "temperature 0, batch 1" and one["texts"] == 3 and one["tokens"] == 30
    assert one["total_variation"] > 0.1 and one["argmax_agreement"] < 0.9
    ratio = other["block_efficiency"] / first["block_efficiency"]
    assert one["methods"]["eagle"]["tau_ratio"] == pytest.approx(ratio)
    assert none["total_variation"] == pytest.approx(0, abs=1e-5) and none["texts_equal"] == 3
    assert none["argmax_agreement"] == 1 and none["methods"]["eagle"]["tau_ratio"] == 1
    assert "target, temperature 0, batch 1: total variation 0.0000" in out
    assert f"tau of eagle x {ratio:.3f}" in out and "3 of 3 texts equal" in out
    check_table(workdir, tmp_path / "study.json", ratio)
    # The same command has nothing left to do.
    status, out, err, _ = cli(COMPARE + f"{draft},{common[0].partition('=')[2]}", *common)
    assert status == 0 and "this bench is finished" in out


def check_table(workdir, out, ratio):
    """The study keeps counts and no times, and its table has a line for each target."""
    assert study.main([str(workdir), f"--out={out}"]) == 0
    kept = json.loads(out.read_text())
    assert "seconds" not in out.read_text() and "speedup" not in out.read_text()
    lines = tables.tables(kept).rpartition("\n\n")[2].split("\n")[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| target, float32", "| draft", "| target"]
    assert f"x {ratio:.3f}" in lines[1] and "3 of 3" in lines[2]


def test_int8_is_a_target_of_its_own(cli, common):
    """Its rows are lossless with regard to it, and results have its bytes."""
    status, out, err, workdir = cli(COMPARE + "int8", *common, "--config.batch_size=2")
    assert (status, err) == (0, "")
    written = results(workdir)
    first, other = written["rows"]
    assert other["target"] == "int8" and other["lossless"]["passed"]
    assert other["step_bytes"] < 0.7 * first["step_bytes"]
    [target] = written["targets"]
    assert (target["dtype"], written["target"]["dtype"]) == ("int8", "float32")
    [one] = target["compared"]
    assert 0 < one["total_variation"] < 0.1 and one["argmax_agreement"] > 0.8
    assert "int8, temperature 0, batch 2: total variation 0.0" in out


def test_mistakes(cli, target, draft, tmp_path):
    keys = [f"--config.target={target}", "--config.prompt=def", "--config.report=False"]
    common = [*keys, "--config.drafter.name=prompt_lookup"]
    other = commandline.save(tmp_path / "other", text="another text of other tokens")
    cases = [
        (f"{COMPARE}{other}", [], "config.grid.targets.other, .*has other tokens than"),
        (f"{COMPARE}{tmp_path / 'nothing'}", [], "nothing is no directory"),
        (f"{COMPARE}{draft}", ["--config.weights=int4"], "config.weights is 'int4'"),
        (f"{COMPARE}{draft}", ["--config.keep=True"], "keep is for config.target alone"),
        (f"{COMPARE}{draft}", ["--config.drafter.control=goodput"], "measured for one target"),
        (
            f"{COMPARE}float32",
            ["--config.grid.targets.float32.dtype=int4"],
            "config.dtype is 'int4",
        ),
        (f"{COMPARE}float32", ["--config.grid.targets.float32.size=4"], "size"),
    ]
    for config, keys, message in cases:
        status, _, err, _ = cli(config, *common, *keys)
        assert status == 2 and len(err.splitlines()) == 1, err
        assert re.search(message, err), err
