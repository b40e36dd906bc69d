"""Mode replay from the command line: its results, recordings that mode generate wrote, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
import tokenizers

from specjax import testing
from specjax.bench import replay
from specjax.data import recordings
from specjax.models import hf, lm

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/replay.py"
LINE = {"id": 7, "category": "qa", "prompt_ids": [1, 2, 3, 1, 2], "output_ids": [3, 1, 2, 4]}


def write(path, *values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


def one_line(err):
    return err.startswith("specjax: ") and err.count("\n") == 1


def test_bad_lines_are_refused_or_listed(cli, tmp_path):
    other = {**LINE, "category": "[/b] writing", "output_ids": [1] * 9}
    large, unnamed = {**LINE, "output_ids": [77]}, {**LINE, "category": None}
    file = write(tmp_path / "t.jsonl", LINE, large, other, "x", unnamed)
    common = [CONFIG, f"--config.traces={file}", "--config.vocab_size=50"]
    common += ["--config.drafter.gamma=3"]
    status, out, err, workdir = cli(*common)
    assert (status, out) == (2, "") and one_line(err)
    assert f"{file} line 2: output_ids has 77" in err
    assert not workdir.exists()
    status, out, err, workdir = cli(*common, "--config.skip_bad=true")
    assert (status, err) == (0, "")
    assert "left out 2 bad lines: line 2: output_ids has 77" in out and "[/b] writing" in out
    results = json.loads((workdir / "results.json").read_text())
    assert [bad["line"] for bad in results["skipped"]] == [2, 4]
    rows = results["rows"]
    assert [(r["category"], r["prompts"], r["tokens"]) for r in rows] == [
        (None, 3, 17),
        ("[/b] writing", 1, 9),
        ("qa", 1, 4),
    ]
    for row in rows:
        assert row["block_efficiency"] == row["tokens"] / row["rounds"] > 1
        facts = (row["method"], row["accept"], row["class"], row["temperature"], row["batch_size"])
        assert facts == ("prompt_lookup", "chain", "L1", 0, 3)
        assert row["tokens_per_second"] is row["speedup"] is row["lossless"] is None
    assert "\n".join(map(json.dumps, rows)) + "\n" == (workdir / "metrics.jsonl").read_text()


def test_recorded_rounds_stand_beside_a_replay(cli, tmp_path):
    """Rounds of 5, 4 of 4, ... as SpecDecode-Bench records them: walked with drafts of 2 tokens."""
    lengths = [4, 3, 2, 1, 1, 2, 1]
    own = {"prompt_token_ids": [1, 2], "generated_token_ids": [3, 1, 2, 4, 3, 1, 2, 4]}
    line = own | {"acc_eagle": {"acc_len": lengths}}
    file = write(tmp_path / "t.jsonl", line, LINE)
    status, out, _, workdir = cli(CONFIG, f"--config.traces={file}", "--config.drafter.gamma=2")
    rows = json.loads((workdir / "results.json").read_text())["rows"]
    assert status == 0 and "eagle (recorded), gamma 2" in out
    row = next(row for row in rows if row["method"].startswith("eagle"))
    # 3 of 4, then 1, 1, 2 of 2.
    assert (row["prompts"], row["tokens"], row["rounds"]) == (1, 7, 4)
    assert row["acceptance_rate"] is None and row["accepted_per_round"] == 0.75
    trace = recordings.read(file).traces[0]
    assert replay.recorded_rounds(trace, "eagle", 8)[1] == [4, 1, 2]
    # The first of the five tokens belongs to no round.
    assert replay.recorded_rounds(trace, "eagle", 8, 5)[1] == [4]


def save(path, seed, words=30):
    """A random model whose tokenizer has the words w0, w1, ..."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = testing.tiny_config(vocab_size=words, layers=1, width=16)
    params = lm.init_params(config, jax.random.key(seed))
    hf.save(path, config, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params), tokenizer)
    return path


def test_a_replay_of_what_generate_recorded_has_its_counts(cli, tmp_path):
    target, draft = save(tmp_path / "target", 0), save(tmp_path / "draft", 0)
    prompts = write(
        tmp_path / "p.jsonl",
        {"prompt": "w1 w2 w3 w1", "category": "b"},
        {"prompt": "w4"},
        {"prompt": "w5 w5"},
    )
    common = ["--config.batch_size=2", "--config.drafter.name=draft_model"]
    common += [f"--config.drafter.model={draft}", "--config.drafter.gamma=2"]
    options = [f"--config={ROOT}/configs/generate.py", f"--config.target={target}"]
    options += [f"--config.prompts={prompts}", *common]
    record = ["--config.record={workdir}.jsonl", "--config.max_new_tokens=12"]
    status, _, err, workdir = cli(*options, *record)
    assert (status, err) == (0, "")
    generated = json.loads((workdir / "results.json").read_text())
    traces = recordings.read(tmp_path / "out.jsonl").traces
    assert [t.output for t in traces] == generated["token_ids"]
    assert [t.category for t in traces] == ["b", None, None]
    replays = [CONFIG, f"--config.traces={tmp_path / 'out.jsonl'}", *common]
    status, out, err, workdir = cli(*replays, f"--config.target={target}")
    assert (status, err) == (0, "") and "vocabulary 30" in out
    row = json.loads((workdir / "results.json").read_text())["rows"][0]
    same = ("prompts", "tokens", "rounds", "block_efficiency")
    assert [row[key] for key in same] == [generated["rows"][0][key] for key in same]
    # The target is its own draft model, and tokens beyond the recording are not tested.
    assert row["acceptance_rate"] == 1
    status, _, err, _ = cli(*replays)
    assert status == 2 and "give config.vocab_size" in err and one_line(err)
    status, _, err, _ = cli(*replays, "--config.vocab_size=29", f"--config.target={target}")
    assert status == 2 and "config.vocab_size is 29 and" in err
    status, _, err, _ = cli(*options, f"--config.record={tmp_path / 'no' / 'x.jsonl'}")
    assert status == 2 and "config.record: " in err and "not a writable directory" in err


MISTAKES = {
    "no recording": (["--config.traces="], "config.traces is empty; give a .jsonl file"),
    "no such file": (
        ["--config.traces=/nowhere.jsonl"],
        "config.traces: /nowhere.jsonl cannot be read",
    ),
    "sampled": (["--config.sampling.temperature=0.5"], "replayed at temperature 0 only"),
    "minus one": (
        ["--config.num_traces=-1"],
        "config.num_traces is -1; it must be a whole number >= 0",
    ),
    "beyond": (
        ["--config.vocab_size=4"],
        "line 1: output_ids has 4; ids are whole numbers in 0..3",
    ),
    "no target": (["--config.target=/nowhere"], "/nowhere is no directory"),
    "no model": ([f"--config.target={ROOT}"], "has no config.json"),
    "batch 0": (["--config.batch_size=0"], "config.batch_size is 0"),
    "lossy": (["--config.accept=typical"], "the rule typical is lossy"),
    "no drafts": (["--config.drafter.gamma=0"], "gamma is 0"),
    "reads the target": (["--config.drafter.name=jacobi"], "jacobi reads what the target computes"),
    "warm": (["--config.drafter.warm=True"], "warm=True"),
    "memory": (["--config.drafter.name=suffix", "--config.drafter.memory=9"], "memory is 9"),
    "another mode": (["--config.mode=generate"], "config.max_new_tokens is 0"),
    "unknown drafter": (["--config.drafter.name=medusa9"], "unknown drafter 'medusa9'"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(cli, tmp_path, name):
    args, message = MISTAKES[name]
    file = write(tmp_path / "t.jsonl", LINE)
    status, out, err, workdir = cli(CONFIG, f"--config.traces={file}", *args)
    assert (status, out) == (2, "") and message in err and one_line(err), err
    assert not workdir.exists()
