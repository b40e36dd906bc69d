"""Penalties, bans and stop strings on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from commandline import BENCH, GENERATE, ROOT

import specjax as sj
from specjax.generation import cut

KEYS: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}


def flags(**more):
    keys = [f"--config.sampling.{key}={value}" for key, value in (KEYS | more).items()]
    return [*keys, "--config.max_new_tokens=24"]


@pytest.mark.slow
def test_generate_has_the_text_of_the_library(cli, target, tmp_path):
    prompts = ["def add", "return a"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    model = sj.load(target)
    how: dict[str, Any] = {"drafter": {"name": "prompt_lookup", "gamma": 3}, "max_new_tokens": 24}
    plain = sj.generate_text(model, prompts, **how)
    banned = plain.completions[0].tokens[0]
    whole = sj.generate_text(model, prompts, banned=[banned], **how, **KEYS)
    # Text in the middle of the first output ends it.
    text = whole.completions[0].text
    stop = text[len(text) // 2 :][:3]
    common = [GENERATE, f"--config.target={target}", f"--config.prompts={tmp_path / 'p.jsonl'}"]
    ways = ({"banned": f"({banned},)"}, {"logit_bias": f"{banned}:-1e6,{banned + 1}:0"})
    for name, batch, way in (("none", 1, ways[0]), ("prompt_lookup", 2, ways[1])):
        chosen = [f"--config.drafter.name={name}", f"--config.batch_size={batch}"]
        more = flags(**way)
        status, _, err, workdir = cli(*common, *chosen, *more, f"--config.stop=({stop!r},)")
        assert (status, err) == (0, "")
        results = json.loads((workdir / "results.json").read_text())
        for each, text, ids in zip(
            whole.completions, results["texts"], results["token_ids"], strict=True
        ):
            right = cut(each.tokens, stop, model.tokenizer.decode)
            assert text == right.text and ids == each.tokens[: right.tokens]
            assert banned not in ids
        assert stop not in results["texts"][0] and len(results["token_ids"][0]) < 24


@pytest.mark.slow
def test_a_bench_compares_with_the_mapped_target(cli, target, draft, tmp_path):
    prompts = ("def add", "return a", "def sub(a", "a, b", "return b")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    status, _, err, workdir = cli(
        *(BENCH, f"--config.target={target}", *flags()),
        *(f"--config.prompts={tmp_path / 'p.jsonl'}", "--config.batch_size=5"),
        *("--config.drafter.name=draft_model", f"--config.drafter.model={draft}"),
        *("--config.repeats=1", "--config.report=False", "--config.max_new_tokens=100"),
        "--config.grid.temperatures=(0.0, 1.0)",
    )
    assert (status, err) == (0, "")
    results = json.loads((workdir / "results.json").read_text())
    greedy, sampled = (
        next(row for row in results["rows"] if row["temperature"] == t) for t in (0, 1)
    )
    # The law test of the sampled outputs knows the penalties too.
    assert greedy["lossless"]["passed"] is True and sampled["lossless"]["passed"] is True


@pytest.mark.fast
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("sampling.repetition_penalty=0.0", "repetition_penalty is 0; it must be in (0, 1e6]"),
        ("sampling.presence_penalty=1e9", "presence_penalty is 1e+09"),
        ("sampling.min_new_tokens=-1", "min_new_tokens is -1"),
        ("sampling.min_new_tokens=3", "names no end-of-sequence token"),
        ("sampling.banned=(-3,)", "banned has the id -3"),
        ("sampling.banned=('a',)", "it must hold token ids"),
        ("sampling.banned=(99999,)", "banned has the id 99999"),
        ("sampling.logit_bias=12", "it must have the form '12:-1.5,30:2'"),
        ("sampling.logit_bias=1:2,1:3", "it must have the form '12:-1.5,30:2'"),
        ("sampling.logit_bias=1:nan", "it must be in [-1e6, 1e6]"),
        ("sampling.logit_bias=99999:2", "logit_bias has the id 99999"),
        ("stop=('',)", "it must be a text that is not empty"),
    ],
)
def test_wrong_keys_are_one_line(cli, target, key, message):
    status, _, err, workdir = cli(
        *(GENERATE, f"--config.target={target}", "--config.prompt=def add", f"--config.{key}"),
        "--config.max_new_tokens=8",
    )
    assert status == 2 and message in err and len(err.splitlines()) == 1
    assert not workdir.exists()


@pytest.mark.fast
def test_stop_strings_are_for_mode_generate(cli, target):
    status, _, err, _ = cli(BENCH, f"--config.target={target}", "--config.stop=('a',)")
    assert status == 2 and "config.stop is for modes generate and chat, not for mode bench" in err
    replay = f"--config={ROOT}/configs/replay.py"
    status, _, err, _ = cli(replay, "--config.sampling.repetition_penalty=1.5")
    assert status == 2 and "repetition_penalty" in err
