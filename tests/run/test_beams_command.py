"""Beam search on the command line."""

from __future__ import annotations

import json

import pytest
from commandline import GENERATE

import specjax as sj
from specjax.models import hf

NONE = "--config.drafter.name=none"
SHORT = ("--config.max_new_tokens=6", "--config.prompt=def add")


def test_plain_and_speculative_beams_are_the_same(cli, target, draft, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(a\nreturn\na - b\n")
    keys = (
        *(GENERATE, f"--config.target={target}", f"--config.prompts={prompts}"),
        *("--config.max_new_tokens=6", "--config.batch_size=2", "--config.ignore_eos"),
        *("--config.beams.count=3", "--config.beams.returned=2"),
    )
    pair = ("--config.drafter.name=draft_model", f"--config.drafter.model={draft}")
    runs = {
        "plain": (NONE,),
        "drafted": (*pair, "--config.drafter.gamma=2", "--config.beams.draft=4"),
        "same": (pair[0], f"--config.drafter.model={target}", "--config.drafter.gamma=2"),
    }
    found = {}
    for name, more in runs.items():
        status, out, err, workdir = cli(*keys, *more, workdir=tmp_path / name)
        assert status == 0, err
        found[name] = json.loads((workdir / "results.json").read_text())
        assert found[name]["texts"][0] in out
    plain = found["plain"]
    assert [len(row) for row in plain["hypotheses"]] == [2, 2, 2]
    for name, each in found.items():
        assert each["token_ids"] == [row[0]["tokens"] for row in plain["hypotheses"]], name
        for ours, theirs in zip(each["hypotheses"], plain["hypotheses"], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one["tokens"] == other["tokens"]
                assert one["score"] == pytest.approx(other["score"], abs=1e-4)
    rows = {name: each["rows"][0] for name, each in found.items()}
    assert rows["plain"]["method"] == "beam_search"
    assert rows["drafted"]["method"] == "beam_search, draft_model"
    assert [row["tokens"] for row in rows.values()] == [18, 18, 18]
    # A draft that is the target: three steps in each pass, over 3 + 2 * 3 nodes.
    assert [rows[name]["rounds"] for name in ("plain", "same")] == [18, 6]
    assert rows["same"]["verified_per_round"] == 9


@pytest.mark.slow
def test_options_reach_the_search(cli, target, tmp_path):
    """Length penalty, early stopping, the end of texts and the recording."""
    loaded = hf.load(target)
    keys = (GENERATE, f"--config.target={target}", *SHORT, NONE)
    more = ("--config.beams.count=3", "--config.beams.length_penalty=-1.0")
    more += ("--config.beams.early_stopping=true", f"--config.record={tmp_path}/record.jsonl")
    status, _, err, workdir = cli(*keys, *more)
    assert status == 0, err
    result = json.loads((workdir / "results.json").read_text())
    prompt, lengths = sj.pack_prompts([loaded.tokenizer.encode("def add").ids])
    how = {"beams": 3, "max_new_tokens": 6, "length_penalty": -1.0, "early_stopping": True}
    eos = loaded.config.eos_token_id
    params = sj.ModelParams(loaded.params)
    wanted = sj.beam_search(loaded.lm, params, prompt, lengths, **how, eos_id=eos)
    assert result["token_ids"] == wanted.outputs()[0][:1]
    assert result["hypotheses"][0][0]["score"] == pytest.approx(
        float(wanted.scores[0, 0]), abs=1e-4
    )
    recorded = json.loads((tmp_path / "record.jsonl").read_text().splitlines()[0])
    assert recorded["output_ids"] == result["token_ids"][0]


WRONG = {
    "a drafter without beams": (
        ("--config.drafter.name=prompt_lookup",),
        "'prompt_lookup', and its drafts are no beams",
    ),
    "a rule": ((NONE, "--config.accept=chain"), "no acceptance rule"),
    "a temperature": ((NONE, "--config.sampling.temperature=0.5"), "sampling.temperature is 0.5"),
    "a penalty": ((NONE, "--config.sampling.repetition_penalty=1.2"), "set it to 1.0"),
    "a ban": ((NONE, "--config.sampling.banned=(3,)"), "sampling.banned is (3,)"),
    "stop strings": ((NONE, "--config.stop=('x',)"), "config.stop is ('x',)"),
    "devices": ((NONE, "--config.mesh=data:1"), "config.mesh is 'data:1'"),
    "widths": ((NONE, "--config.verify_widths=full"), "config.verify_widths is given"),
    "one beam": ((NONE, "--config.beams.count=1"), "greedy decoding"),
    "too many hypotheses": ((NONE, "--config.beams.returned=4"), "return at most all beams"),
    "early stopping": ((NONE, "--config.beams.early_stopping=yes"), "never"),
    "no draft": ((NONE, "--config.beams.draft=4"), "there is no draft model"),
    "a smaller draft": ((NONE, "--config.beams.draft=2"), "at least as many beams"),
    "no beams": ((NONE, "--config.beams.count=0", "--config.beams.returned=2"), "is 0, which is"),
    "a tree": (
        (
            "--config.drafter.name=draft_model",
            "--config.drafter.model=DIR",
            "--config.drafter.tree=2,2",
        ),
        "config.drafter.tree has no effect",
    ),
    "too long": ((NONE, "--config.max_new_tokens=500"), "positions"),
}


@pytest.mark.parametrize("keys", WRONG)
def test_keys_that_do_not_apply_are_errors_of_one_line(keys, cli, target):
    given, message = WRONG[keys]
    counts = () if any("beams.count" in key for key in given) else ("--config.beams.count=3",)
    status, _, err, workdir = cli(GENERATE, f"--config.target={target}", *SHORT, *counts, *given)
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert message in err
    assert not workdir.exists()
