"""The studies run from end to end on tiny models; their numbers are not checked here."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from experiments import common
from experiments.accelerator import run as accelerator_study
from experiments.draft_cost import run as draft_cost_study
from experiments.draft_steps import run as draft_steps_study
from experiments.head_training import run as head_training_study
from experiments.long_context import run as long_context_study
from experiments.long_context import target as long_target_study
from experiments.mtp_loss import run as mtp_loss_study
from experiments.online import run as online_study
from experiments.op_times import run as op_times_study
from experiments.papers import law as papers_law
from experiments.papers import run as papers_study
from experiments.papers import tables as papers_tables
from experiments.peers import chat as peers_chat
from experiments.peers import models as peers_models
from experiments.peers import run as peers_study
from experiments.peers import tables as peers_tables
from experiments.programs import facts, hlo
from experiments.programs import programs as programs_study
from experiments.real_model import measuring as real_model_measuring
from experiments.real_model import methods as real_model_methods
from experiments.real_model import profiles as real_model_profiles
from experiments.real_model import rows as real_model_rows
from experiments.real_model import run as real_model_study
from experiments.rollouts import run as rollouts_study
from experiments.self_speculation import run as self_speculation_study
from experiments.several_drafts import run as several_study
from experiments.several_drafts import tables as several_tables
from experiments.states import run as states_study
from experiments.system_efficiency import run as system_efficiency_study
from experiments.t5 import run as t5_study
from experiments.trained_drafters import chat_head as chat_head_study
from experiments.trained_drafters import questions as questions_study
from experiments.trained_drafters import run as trained_study
from experiments.tree_search import run as tree_search_study
from experiments.vocabularies import run as vocabularies_study
from specjax import accept, decode, drafters, files, rng, sampling
from specjax.bench.passes import Method
from specjax.data import generated_text, shards
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.testing import loop as loops
from specjax.testing.models import tiny, tiny_config
from specjax.theory import roofline
from specjax.topology import shapes
from specjax.types import Draft, ModelParams

pytestmark = pytest.mark.usefixtures("quiet")
EXPERIMENTS = Path(common.__file__).parent
SPEEDS = {"tau": 2.0, "speedup": 1.5, "speedup_interval": [1.4, 1.6], "method": "lookup"}


def busy(monkeypatch, share):
    """Other processes use this share of the machine from now on."""
    monkeypatch.setattr(common.Stopwatch, "others_cpu", share)


@pytest.mark.fast
def test_a_study_refuses_a_busy_machine_before_it_measures(monkeypatch, tmp_path, capsys):
    busy(monkeypatch, 0.73)
    out = tmp_path / "results.json"
    with pytest.raises(SystemExit) as stopped:
        head_training_study.main(["--small", f"--out={out}"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and not out.exists()
    assert "other processes use 73% of this machine" in error and "--busy=drop" in error
    for choice, keep in (("drop", False), ("keep", True)):
        args = common.options(str(out), "").parse_args([f"--busy={choice}"])
        assert common.start(args).keep is keep
    busy(monkeypatch, 0.05)
    assert not common.start(common.options(str(out), "").parse_args([])).keep


@pytest.mark.fast
def test_times_are_null_if_the_machine_became_busy(monkeypatch, capsys):
    result = {"rows": [SPEEDS], "fit": {"part": {"speedup": 3.0}}}
    assert common.checked(result, common.Stopwatch(), common.BENCH_TIMES) == result
    busy(monkeypatch, 0.06)
    assert common.checked(result, common.Stopwatch(keep=True), common.BENCH_TIMES) == result
    assert capsys.readouterr().err == ""
    [row], fit, times = common.checked(result, common.Stopwatch(), common.BENCH_TIMES).values()
    assert row == SPEEDS | {"speedup": None, "speedup_interval": None}
    assert fit == {"part": {"speedup": None}} and times == "not measured on a quiet machine"
    assert "6% of this machine (at most 5% is quiet)" in capsys.readouterr().err
    assert result["rows"] == [SPEEDS]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changed", "right"),
    [
        ({}, True),
        ({"speedup": 2.05}, True),  # the interval has tau in it
        ({"speedup": 2.3, "speedup_interval": [2.1, 2.5]}, False),
        ({"speedup": 2.09, "speedup_interval": None}, True),  # within what others may use
        ({"speedup": 2.11, "speedup_interval": None}, False),
        ({"speedup": None, "speedup_interval": None, "speedup_of_totals": 2.11}, False),
        ({"tau": None, "steps": 6, "passes": 5, "speedup_interval": None}, False),
        ({"tau": None}, True),
    ],
)
def test_a_speedup_above_tau_is_an_error_and_no_time(changed, right, capsys):
    row = SPEEDS | changed
    [found] = common.possible([row], common.BENCH_TIMES)
    error = capsys.readouterr().err
    if right:
        assert found == row and not error
    else:
        assert found == row | {key: None for key in row if key in common.BENCH_TIMES}
        assert error.startswith("error: method lookup: the speed-up ") and error.count("\n") == 1


@pytest.mark.fast
def test_processes_that_a_study_has_started_are_no_others(monkeypatch):
    monkeypatch.undo()
    before = common._other_processes()
    # A child uses more than a tenth of a second; the rest of the machine may be busy meanwhile.
    monkeypatch.setattr(common.os, "times", lambda: (1.0, 1.0, 2.0, 3.0, 9.0))
    with_children = common._other_processes()
    monkeypatch.setattr(common.os, "times", lambda: (1.0, 1.0, 0.0, 0.0, 9.0))
    assert before >= 0 and common._other_processes() - with_children == pytest.approx(5, abs=1)


# The committed results of each study: file -> the module that wrote it.
WRITERS = {
    path: {
        "chat": "real_model.run",
        "chat_hydra": "real_model.run",
        "chat_draft": "real_model.run",
        "heads": "real_model.run",
        "chat_head": "trained_drafters.chat_head",
        "cost": "draft_lengths.cost",
    }.get(path.stem, f"{path.parent.name}.run")
    for path in EXPERIMENTS.glob("*/*.json")
}


def of_busy_machines(value, times, load=0.0):
    """The times in parts of a result whose others_cpu, or that around them, is too high."""
    found = []
    if isinstance(value, list):
        for each in value:
            found += of_busy_machines(each, times, load)
    elif isinstance(value, dict):
        load = value.get("others_cpu") or load
        for key, each in value.items():
            if key not in times:
                found += of_busy_machines(each, times, load)
            elif load > common.QUIET and each not in (None, common.NOT_QUIET):
                found.append((key, each))
    return found


@pytest.mark.fast
@pytest.mark.parametrize("path", WRITERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_results_have_no_times_of_a_busy_machine(path, capsys):
    study = importlib.import_module(f"experiments.{WRITERS[path]}")
    result = json.loads(path.read_text())
    times = getattr(study, "TIMES", common.BENCH_TIMES)
    if path.parent.name == "self_speculation":  # the names of its other parts are no times
        result = [result["parts"][name] for name in study.TIMED]
    assert of_busy_machines(result, times) == []
    if path.parent.name == "accelerator":
        return  # there a pass over one token does not cost least: its table shows it
    common.possible(result, times)
    assert capsys.readouterr().err == ""


@pytest.mark.fast
def test_every_study_that_times_looks_at_the_machine():
    times_nothing = ("vocabularies", "goodput/run.py", "goodput/trees.py", "programs", "mtp_loss")
    times_nothing += ("long_context/t",)
    collects = ("benches/run.py", "draft_lengths/run.py")  # other programs have timed
    for path in EXPERIMENTS.glob("*/*.py"):
        text, name = path.read_text(), path.relative_to(EXPERIMENTS).as_posix()
        # The program that starts peers/peer.py looks.
        if name.startswith((*times_nothing, "accelerator", "peers/peer")):
            continue
        assert "Stopwatch()" not in text or name == "self_speculation/run.py", name
        if "def main" in text and re.search(r"perf_counter|loops import|TIMES", text):
            needed = ("possible(",) if name in collects else ("start(", "checked(")
            assert all(word in text for word in needed), name


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with a random model, and with a text and prompts for its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    words = {f"w{i}": i for i in range(16)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    _, params = tiny(vocab_size=16)
    hf.save(folder / "target", tiny_config(vocab_size=16), params, tokenizer)
    (folder / "prompts.txt").write_text("w1 w2 w3\nw4 w5 w6\n")
    random = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in random.integers(0, 16, 50)) for _ in range(400)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_head_training(tmp_path):
    out = tmp_path / "results.json"
    head_training_study.main(["--small", "--length=16", "--samples=1", f"--out={out}"])
    result = json.loads(out.read_text())
    assert [row["method"] for row in result["rows"]] == list(head_training_study.METHODS)
    assert result["forward_ms"] > 0 and all(row["step_ms"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_mtp_loss(target, tmp_path):
    out = tmp_path / "results.json"
    quick = f"--quick --steps=3 --seeds 0 1 --text={target}/text.txt --workdir={tmp_path}/runs"
    mtp_loss_study.main([*quick.split(), f"--out={out}"])
    result = json.loads(out.read_text())
    alone, *others = result["methods"]
    assert [row["method"] for row in result["methods"]] == list(mtp_loss_study.METHODS)
    assert alone["differences"] == [0, 0] and alone["tau_t0"] is None
    assert all(1 <= row["tau_t0"] <= 4 and row["parameters"] > 0 for row in others)
    assert len(result["rows"]) == 6


@pytest.mark.slow
def test_t5(tmp_path):
    """Training and measuring are two stages of one workdir."""
    random = np.random.default_rng(0)
    words = lambda: " ".join(f"w{i}" for i in random.integers(0, 30, 4))  # noqa: E731
    lines = [json.dumps({"turns": [["U", words()], ["S", words()]] * 2}) for _ in range(200)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    common = [f"--dialogues={tmp_path}/chats.jsonl", f"--workdir={tmp_path}/work", "--quick"]
    common += ["--length=96", "--prompts=4", "--repeats=1", "--new=6", "--batch=4"]
    own = ["--vocabulary=300", "--steps=4", "--draft-steps=4", "--generated=120"]
    out = tmp_path / "results.json"
    t5_study.main([*common, *own, "--train-only", f"--out={out}"])
    assert not out.exists()
    t5_study.main([*common, "--measure-only", f"--out={out}"])
    result = json.loads(out.read_text())["answers in dialogues"]
    assert len(result["rows"]) == (len(t5_study.DRAFTS) + 1 + 2 + 3 + 2) * 6
    lossy = {*t5_study.spec_drafter.LOSSY, t5_study.bpd.LOSSY}
    assert all(row["tau"] >= 1 for row in result["rows"])
    # The sampled rows have too few tokens to tell.
    exact = [row for row in result["rows"] if row["method"] not in lossy]
    wrong = [row for row in exact if row["lossless"] is not (row["temperature"] == 0 or None)]
    assert not wrong, wrong
    [first, *_] = result["differences"]
    assert (first["method"], first["texts"], first["tokens"]) == ("Spec-Drafter", 0, 0)
    assert "--train-only" in result["trained_by"] and "--measure-only" in result["command"]
    lookups = [row for row in result["rows"] if row["method"] == "prompt lookup"]
    assert all(row["c"] is None for row in lookups) and len(result["training"]) == 6


@pytest.mark.slow
def test_long_context(target, tmp_path):
    out = tmp_path / "results.json"
    small = "--contexts=40,60 --batches=1,2 --views=streaming,retrieval --budget=16 --gamma=2"
    small += f" --refresh=2 --new=8 --apart=9 --repeats=1 --out={out}"
    long_context_study.main([*small.split(), "--parts=cost"])
    cost = json.loads(out.read_text())
    assert len(cost["rows"]) == 8
    assert cost["fit"] is None or cost["fit"]["bandwidth"] > 0
    assert all(row["draft_ms"] > 0 for row in cost["rows"])
    out.unlink()
    files_ = [f"--target={target}/target", f"--texts={target}/text.txt"]
    long_context_study.main([*small.split(), *files_])
    result = json.loads(out.read_text())
    assert all(
        1 <= row["tau"] <= 3 and row["equal_texts"] == row["batch"] for row in result["rows"]
    )
    # What was measured is kept.
    before = out.stat().st_mtime_ns
    long_context_study.main([*small.split(), *files_])
    assert out.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="a random target has no text to decode"):
        long_context_study.main(small.split())


@pytest.mark.slow
def test_a_target_for_long_contexts(target, tmp_path, monkeypatch):
    monkeypatch.setattr(long_target_study, "STAGES", {16: (4, 3, 0.02), 64: (1, 2, 0.01)})
    monkeypatch.setattr(long_target_study, "CHUNK", 16)
    small = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    monkeypatch.setattr(long_target_study, "SHAPE", long_target_study.SHAPE | small)
    argv = [f"--texts={target}/text.txt", f"--workdir={tmp_path}/long"]
    long_target_study.main(argv)
    result = json.loads((tmp_path / "long" / "loss.json").read_text())
    assert result["ends"] == [63] and 1 < result["loss"][0] < 7
    model = tmp_path / "long" / "books_64"
    kept = json.loads((model / "config.json").read_text())
    assert kept["init"].endswith("books_16") and kept["train"]["length"] == 64
    found = long_context_study.trained(str(model))
    assert found is not None and found["loss"] == result["loss"]
    assert long_context_study.trained(str(target / "target")) is None


@pytest.mark.slow
def test_rollouts(target, tmp_path):
    out = tmp_path / "results.json"
    small = "--busy=drop --steps=2 --samples=2 --new=6 --seeds=1 --arms=plain;suffix, warm"
    argv = small.split(" --")
    argv = [argv[0], *(f"--{each}" for each in argv[1:]), f"--target={target}/target"]
    rollouts_study.main([*argv, f"--out={out}"])
    result = json.loads(out.read_text())
    assert str(tmp_path) not in result["command"]
    assert [row["arm"] for row in result["rows"]] == ["plain", "suffix, warm"]
    assert all(len(row["tau"]) == 2 and min(row["tau"]) >= 1 for row in result["rows"])
    # The same parameters and keys: the first rewards are of the same law, and of plain rollouts.
    assert all(0 <= value <= 1 for row in result["rows"] for value in row["reward"])


@pytest.mark.fast
def test_rewards_of_the_rollouts():
    assert rollouts_study.reward("A. B! C? " * 2) == 0.75
    assert rollouts_study.reward("") == 0 and rollouts_study.reward("..." * 8) == 0
    gains = rollouts_study.advantages(np.asarray([[0.0, 1.0], [0.5, 0.5]]))
    np.testing.assert_allclose(gains, [[-1, 1], [0, 0]], atol=1e-3)
    done = [SimpleNamespace(prompt=1, tokens=[7, 8]), SimpleNamespace(prompt=0, tokens=[9])]
    tokens, prompt, length = rollouts_study.packed([[1], [2, 3]], done, 5)
    assert tokens.tolist() == [[2, 3, 7, 8, 0], [1, 9, 0, 0, 0]]
    assert prompt.tolist() == [2, 1] and length.tolist() == [4, 2]


@pytest.mark.slow
def test_online(target, tmp_path):
    lines = (target / "text.txt").read_text().splitlines()
    (tmp_path / "stories.txt").write_text(". ".join(lines[:40]) + " end")
    turns = [{"turns": [["U", line]]} for line in lines[40:80]]
    (tmp_path / "dialogues.jsonl").write_text("\n".join(map(json.dumps, turns)))
    programs = [{"code": line} for line in lines[80:120]]
    (tmp_path / "code.jsonl").write_text("\n".join(map(json.dumps, programs)))
    files_ = f"--target={target}/target --text={target}/text.txt --stories={tmp_path}/stories.txt"
    files_ += f" --dialogues={tmp_path}/dialogues.jsonl --code={tmp_path}/code.jsonl"
    small = "--requests=16 --new=6 --window=8 --gamma=2 --steps=4 --width=16"
    argv = [*files_.split(), *small.split(), f"--workdir={tmp_path}/runs"]
    argv += [f"--out={tmp_path}/results.json", "--arms=no updates;forward KL"]
    online_study.main(argv)
    result = json.loads((tmp_path / "results.json").read_text())
    assert str(tmp_path) not in result["command"]
    assert [(row["arm"], row["temperature"]) for row in result["rows"]] == [
        ("no updates", 0.0),
        ("no updates", 1.0),
        ("forward KL", 0.0),
        ("forward KL", 1.0),
    ]
    assert [row["updates"] for row in result["rows"]] == [0, 0, 8, 8]
    assert all(len(row["windows"]) == 8 for row in result["rows"])
    with pytest.raises(SystemExit, match="there are 40 beginnings of"):
        online_study.main([*argv, "--requests=64"])


@pytest.mark.slow
def test_self_speculation(target, tmp_path):
    out = tmp_path / "results.json"
    files = f"--target={target}/target --prompts={target}/prompts.txt --out={out}"
    small = "--chat=none --questions=2 --new=6 --exits 1 2 --gamma=2 --repeats=1 --parts"
    small = f"--reuse-exits 1 --batches 1 2 --timed-questions=2 --timed-new=6 {small}"
    self_speculation_study.main([*files.split(), *small.split(), "acceptance", "steps", "reuse"])
    self_speculation_study.main([*files.split(), *small.split(), "drafts"])
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["acceptance", "steps", "reuse", "drafts"]
    assert [row["batch"] for row in parts["reuse"]["rows"]] == [1, 2]
    assert all(row["same_texts"] and row["tau"] >= 1 for row in parts["reuse"]["rows"])
    assert [row["exit_layer"] for row in parts["acceptance"]["rows"]] == [1, 2]
    last = parts["acceptance"]["rows"][-1]
    assert last["acceptance_t0"] == 1 and last["acceptance_t1"] == pytest.approx(1, abs=1e-5)
    last = parts["drafts"]["rows"][-1]
    assert last["tau_t0"] == last["expected_tau_t0"] == 3
    assert all(row["ms"] > 0 and row["share"] > 0 for row in parts["steps"]["rows"])


@pytest.mark.slow
def test_tree_search(target, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "_impossible", lambda row: "")  # times of tiny models scatter
    out = tmp_path / "results.json"
    files = f"--target={target}/target --prompts={target}/prompts.txt --out={out}"
    small = "--draft-layers=1 --new=6 --batch=2 --width=2 --depth=1 --sizes 1 2 --k-ary 1"
    measured = "--repeats=1 --temperature=1"
    tree_search_study.main([*files.split(), *small.split(), *measured.split()])
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert [row["name"] for row in rows] == ["chain:1", "1", "optimal:1", "chosen"]
    # All names have the same tree, which is measured once.
    assert result["tree"] == [-1] and rows[0]["speedup"] == rows[3]["speedup"]
    for vector in result["acceptance"].values():
        assert len(vector["acceptance"]) == 2
        assert sum(vector["acceptance"]) + vector["none"] == pytest.approx(1)
        assert 6 <= vector["rounds"] <= 12
    assert set(result["verify_ms"]) == {"1", "2"}
    assert all(ms > 0 for ms in result["verify_ms"].values())
    assert shapes.parse(tmp_path / "tree.json").parents == tuple(result["tree"])
    for row in rows:
        assert 1 <= row["measured_tokens"] <= 1 + row["depth"] and row["speedup"] > 0


def test_tree_search_names_what_is_missing(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = "run python -m specjax.run --config=configs/quickstart.py:train first"
    with pytest.raises(UserError, match=quickstart):
        tree_search_study.main([])
    with pytest.raises(UserError, match="give either --draft"):
        tree_search_study.main([f"--target={target}/target"])
    with pytest.raises(UserError, match="draft-layers is 2; the target has 2, so give fewer"):
        tree_search_study.main([f"--target={target}/target", "--draft-layers=2"])


@pytest.mark.fast
def test_records_name_files_without_their_folders():
    assert common.without_folder("--text=/a/b.txt,/c/d.txt") == "--text=b.txt,d.txt"
    for other in ("--only=eagle, 1/4 of the text", "--steps=4", "--small"):
        assert common.without_folder(other) == other


@pytest.mark.slow
def test_trained_drafters(target, tmp_path, capsys):
    files = f"--target={target}/target --text={target}/text.txt --workdir={tmp_path}/runs"
    small = "--steps=4 --generated=80 --examined=4 --verified=4 --prompts=2 --new=8"
    shape = "--width=16 --length=32 --batch=2"
    out = [f"--out={tmp_path}/results.json", "--name=tiny", "--only=pretrained;medusa"]
    trained_study.main([*files.split(), *small.split(), *shape.split(), *out])
    result = json.loads((tmp_path / "results.json").read_text())["targets"]["tiny"]
    assert str(tmp_path) not in result["command"]  # names of files, without their folders
    for training in result["training"].values():
        assert training["heldout_tau_t0"] == training["heldout_decoded_tau_t0"]
        assert len(training["curve"]) == 4 and training["labels"] and training["flops"]
    assert set(result["forecasts"]) == {"pretrained", "medusa"}
    labels = {row["method"] for row in result["rows"]}
    assert labels == {"prompt_lookup", "pretrained", "medusa", "medusa, sampled", "medusa, tree"}
    assert all(row["lossless"]["passed"] is not False for row in result["rows"])
    assert "| medusa, tree |" in capsys.readouterr().out


def chat_model(target, folder):
    """The random model with a chat template, and text that it is said to have written."""
    shutil.copytree(target / "target", folder / "chat")
    words = {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}
    (folder / "chat" / "tokenizer_config.json").write_text(json.dumps(words))
    random = np.random.default_rng(1)
    texts = [
        {"split": "train", "temperature": 0.0, "prompt_ids": ids[:4], "output_ids": ids[4:]}
        for ids in random.integers(0, 16, (8, 40)).tolist()
    ]
    (folder / "generated").mkdir()
    shards.write(folder / "generated" / "shard", texts)
    tokenizer = hf.load(folder / "chat").tokenizer
    assert tokenizer is not None
    manifest = {"format": f"specjax {generated_text.NAME}", "schema": generated_text.SCHEMA}
    manifest |= {"tokenizer": hf.fingerprint(tokenizer)}
    manifest |= {"sampling": {"temperatures": [0.0]}}
    manifest["shards"] = {"shard": {"sha256": files.sha256(folder / "generated" / "shard")}}
    files.write_json(folder / "generated" / "manifest.json", manifest)
    return folder


@pytest.mark.slow
def test_real_model_continues_and_covers_every_task(target, tmp_path, monkeypatch, capsys):
    folder = chat_model(target, tmp_path)
    tasks = ("writing", "coding", "qa", "rag")
    questions = [
        {"question_id": n, "category": tasks[n % 4], "turns": [f"w{n} w1 w2 " * (1 + n % 4)]}
        for n in range(12)
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    monkeypatch.setattr(real_model_measuring, "WIDTHS", (6, 16))
    files_ = f"--target={folder}/chat --prompts={folder}/q.jsonl --generated={folder}/generated"
    small = f"--workdir={folder}/run --questions=2 --new=6 --out={folder}/results.json"
    argv = [*files_.split(), *small.split(), "--methods=prompt_lookup;rest;escalate"]
    argv += [f"--draft={target}/target"]
    real_model_study.main([*argv, "--seconds=0"])
    assert "time is up" in capsys.readouterr().out and not (folder / "results.json").exists()
    real_model_study.main(argv)
    cells = sorted((folder / "run" / "cells").iterdir())
    assert len(cells) == 2 * 2 * 3
    written = [cell.stat().st_mtime_ns for cell in cells]
    real_model_study.main(argv)
    assert [cell.stat().st_mtime_ns for cell in cells] == written  # nothing is measured again
    result = json.loads((folder / "results.json").read_text())
    assert str(folder) not in result["command"]
    rows = result["rows"]
    assert len(rows) == 3 * 2 * 2 * 4
    assert {row["category"] for row in rows} == {None, "mt_bench", "qa", "rag"}
    for row in rows:
        prompts = 2 if row["batch_size"] == 1 else 4
        assert row["prompts"] <= prompts * (3 if row["category"] is None else 1)
        # Of few tokens a speed-up can be above the tokens per round: it is then no number.
        assert row["speedup"] is None or row["speedup"] > 0
        assert 1 <= row["block_efficiency"] <= 1 + row["gamma"]
        assert row["temperature"] or row["lossless"]["passed"] is True
        if row["method"] == "prompt_lookup":
            # Nothing is read for the drafts, and the pass is bound by memory.
            expected = dict.fromkeys(real_model_rows.DEVICES, row["block_efficiency"])
            assert row["predicted"] == pytest.approx(expected)
    with pytest.raises(SystemExit, match="has cells of other arguments"):
        real_model_study.main([*argv, "--new=7"])


@pytest.mark.slow
def test_real_model_with_controllers(target, tmp_path, monkeypatch):
    """Other drafters than those of the study, and a profile for the controller that reads one."""
    folder = chat_model(target, tmp_path)
    questions = [
        {"question_id": n, "category": "qa", "turns": [f"w{n} w1 w2 w1 w2"]} for n in range(6)
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    monkeypatch.setattr(real_model_measuring, "WIDTHS", (6, 16))
    monkeypatch.setattr(real_model_profiles, "NEW", 40)
    methods = [f"prompt_lookup gamma=2 control={each}" for each in ("fixed:2", "goodput:explore=0")]
    argv = [f"--target={folder}/chat", f"--prompts={folder}/q.jsonl", f"--workdir={folder}/run"]
    argv += ["--questions=2", "--new=6", f"--out={folder}/results.json", "--batch-sizes=2"]
    real_model_study.main([*argv, "--methods=" + ";".join(methods), "--temperatures=0"])
    result = json.loads((folder / "results.json").read_text())
    assert list(result["profile"]["batches"]) == ["2"]
    assert {row["method"] for row in result["rows"]} == set(methods)
    assert all(row["lossless"]["passed"] for row in result["rows"])
    with pytest.raises(SystemExit, match="for batches of 2 rows, and the batch has 1") as stopped:
        more = ["--methods=" + ";".join(methods), "--temperatures=0", "--batch-sizes", "2", "1"]
        real_model_study.main([*argv, *more])
    assert "\n" not in str(stopped.value) and "remove the file" in str(stopped.value)
    with pytest.raises(SystemExit, match="is no method"):
        real_model_study.main([*argv, f"--workdir={folder}/x", "--methods=none gamma=2 x"])


@pytest.mark.fast
def test_predictions_of_real_model_by_hand(monkeypatch):
    """Passes bound by memory: each depth of a draft reads the drafter, Hydra a head for each."""
    monkeypatch.setattr(real_model_rows, "CONTEXT", 100)
    model = roofline.model_of(common.GPT2)
    row = {"gamma": 3, "nodes": 6, "batch_size": 2, "block_efficiency": 1.5}
    head = {"kernel": np.zeros((500, 100), np.float32)}
    plain = model.weight_bytes + 2 * 100 * model.kv_bytes
    for name, draft, read in (
        ("eagle3", head, 3 * 2 * 50_000),
        ("hydra", {"head": {"0": head, "1": head}}, 3 * 2 * 50_000),
        ("prompt_lookup", {}, 0),
        ("ngram_lm", head, 0),
    ):
        params = ModelParams(None, draft)
        method: Any = SimpleNamespace(drafter=SimpleNamespace(name=name), params=params)
        found = real_model_rows.predicted(row, method, common.GPT2)
        expected = 1.5 * plain / (plain + read)
        assert found == pytest.approx(dict.fromkeys(("H100 SXM", "TPU v5e"), expected))
    exits: Any = SimpleNamespace(drafter=SimpleNamespace(name="early_exit"), params=None)
    assert real_model_rows.predicted(row, exits, common.GPT2) == {}


def test_a_batch_of_real_model_begins_as_every_other(monkeypatch):
    """The state of ``decode.prefill``, also for a head that reads taps; rows are ragged."""
    monkeypatch.setattr(real_model_measuring, "WIDTHS", (5,))
    target, params = tiny("llama", 0)
    drafter = cases.random_heads("eagle3", target, params, tree="chain:2")
    rule = accept.load(accept.default_rule(drafter))
    pair = ModelParams(params, drafter.init_params(None))
    method = Method("eagle3", drafter, rule, pair)
    slots = 9 + drafter.nodes
    setting = real_model_measuring.Setting(target, params, (), 2, 4, slots, 0)
    prompts = [[1, 2, 3, 4, 5], [3, 4]]
    read = real_model_measuring.read(setting, prompts, method)
    keys, settings = rng.row_keys(0, [0, 1]), sampling.make_sampling(2, temperature=1.0)
    limit = read.lengths + 4
    ours = real_model_measuring._begin(drafter, pair, read, limit, keys, settings)
    packed, _ = decode.pack_prompts(prompts)
    theirs = decode.prefill(
        target, drafter, pair, packed, read.lengths, keys, max_len=9, limit=limit, sampling=settings
    )
    assert theirs.taps and ours.cache.length.tolist() == [4, 1]
    shown = jnp.where(theirs.tokens < 0, -1, ours.tokens)  # without padding
    ours = ours.replace(tokens=shown, keys=jax.random.key_data(ours.keys))
    theirs = theirs.replace(keys=jax.random.key_data(theirs.keys))
    same = jax.tree.map(lambda a, b: a.shape == b.shape and np.allclose(a, b), ours, theirs)
    assert all(jax.tree.leaves(same)), same


@pytest.mark.fast
def test_methods_of_real_model_are_named_without_their_model():
    label = real_model_methods.label_of("eagle3 model=runs/head tree=chain:3 siblings=iid")
    assert label == "eagle3 tree=chain:3 siblings=iid"
    nothing, twice = cast(Any, None), ["eagle3 model=a gamma=2", "eagle3 model=b gamma=2"]
    with pytest.raises(SystemExit, match="have one name"):
        real_model_methods.build(nothing, "", "", twice, [0.0])


HEAD_FORMS = {"chain", "drawn chain", "tree"}


@pytest.mark.slow
def test_chat_head(target, tmp_path):
    """Two parts of data, then a third one; the second head starts from the first."""
    folder, out = chat_model(target, tmp_path), tmp_path / "results.json"
    questions = [
        {"question_id": n, "category": "qa", "turns": [f"w{n % 9} w{n % 7} w{n % 5}"]}
        for n in range(120)
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    argv = [f"--target={folder}/chat", f"--questions={folder}/q.jsonl", f"--bench={folder}/q.jsonl"]
    argv += f"--workdir={tmp_path}/run --out={out} --part=40 --batch=8 --new=8".split()
    argv += ["--prompt-tokens=24", "--length=48", "--rows=2", "--places=16", "--draft-vocab=12"]
    argv += [
        "--epochs=1",
        "--evaluations=2",
        "--examined=2",
        "--prompts=2",
        "--bench-tokens=6",
        "--repeats=1",
    ]
    chat_head_study.main([*argv, "--parts=2", "--name=first"])
    chat_head_study.main([*argv, "--parts=3", "--name=second", f"--init={tmp_path}/run/head2"])
    found = json.loads(out.read_text())
    assert [len(found[name]["parts"]) for name in ("first", "second")] == [2, 3]
    for each in found.values():
        assert each["curve"][-1]["decoded_tau_t0"] >= 1
        assert {row["method"] for row in each["bench"]} == {*HEAD_FORMS, "prompt_lookup"}
        greedy = [
            row for row in each["bench"] if (row["temperature"], row["category"]) == (0, None)
        ]
        assert greedy and all(row["lossless"]["passed"] for row in greedy)
    assert "second" in chat_head_study.tables(found)
    # A head that is there.
    argv = [each for each in argv if not each.startswith("--questions")]
    chat_head_study.main([*argv, "--name=again", f"--head={tmp_path}/run/head3"])
    again = json.loads(out.read_text())["again"]
    assert not again["parts"] and not again["curve"]
    assert [row["block_efficiency"] for row in again["bench"]] == [
        row["block_efficiency"] for row in found["second"]["bench"]
    ]


@pytest.mark.fast
def test_kept_answers(tmp_path):
    """An archive has the shards and the manifest, no path and no user; a wrong one is one line."""
    folder = tmp_path / "work" / "generated"
    folder.mkdir(parents=True)
    (folder / "shard-0.array_record").write_bytes(b"abc")
    (folder / "plan.json").write_text("{}")
    manifest = {
        "target": {"name": "/home/me/smol", "sha256": "0"},
        "shards": {"shard-0.array_record": {}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    archive = tmp_path / "kept" / "0.tar.xz"
    chat_head_study.pack(tmp_path / "work", archive)
    chat_head_study.unpack(archive, tmp_path / "again")
    again = tmp_path / "again" / "generated"
    assert sorted(each.name for each in again.iterdir()) == [
        "manifest.json",
        "shard-0.array_record",
    ]
    assert (again / "shard-0.array_record").read_bytes() == b"abc"
    assert json.loads((again / "manifest.json").read_text())["target"]["name"] == "smol"
    argv = (
        f"--target=x --questions=q --bench=b --workdir={tmp_path / 'run'} --keep={archive.parent}"
    )
    args = chat_head_study.parse(argv.split())
    assert chat_head_study.answers(args, 0) == args.workdir / "answers0"
    archive.write_bytes(b"nothing")
    with pytest.raises(UserError, match="is no archive of answers"):
        chat_head_study.answers(args, 0)


@pytest.mark.slow
def test_vocabularies(data_dir, tmp_path, monkeypatch):
    """One pair of real models in both directions; without models it says which to give."""
    small = [
        pair._replace(methods=methods, prompts=pair.prompts[:2])
        for pair, methods in zip(
            vocabularies_study.PAIRS[:2], [("tli", "slem"), ("tli tree",)], strict=True
        )
    ]
    monkeypatch.setattr(vocabularies_study, "PAIRS", small)
    out = tmp_path / "results.json"
    models = [("stories", "stories260K"), ("dreams", "aidreams260K")]
    argv = [f"--{key}={data_dir / 'models' / name}" for key, name in models]
    vocabularies_study.main([*argv, "--new=6", f"--out={out}"])
    result = json.loads(out.read_text())
    assert str(data_dir) not in result["command"]
    assert len(result["pairs"]) == 2 and len(result["rows"]) == 2 * 3
    assert all(0 < pair["shared"] <= 512 for pair in result["pairs"])
    for row in result["rows"]:
        assert 1 <= row["tau"] <= 5 and 0 <= row["alpha"] <= 1 and row["tokens"] == 2 * 6
    with pytest.raises(UserError, match="give --stories and --dreams"):
        vocabularies_study.main([f"--out={out}"])


@pytest.mark.slow
def test_transformers(target, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "results.json"
    small = ["--small", "--passes=1", "--new=12", "--device=cpu"]
    peers_study.main([*small, f"--out={out}"])
    result = json.loads(out.read_text())
    rows = {(row["method"], row["temperature"]): row for row in result["rows"]}
    assert len(rows) == 6 and len(set(result["prompts"]["gpt2"])) == 4  # different lengths
    for (method, temperature), row in rows.items():
        assert row["ratio"] > 0 and row["transformers"]["threads"] >= 1
        if temperature == 0:  # the same texts in the same number of rounds
            assert row["identical"] == "4/4"
            assert row["specjax"]["rounds"] == row["transformers"]["rounds"]
        assert (row["specjax"]["block_efficiency"] == 1) == (method == "autoregressive")
    assert peers_tables.tables(result).count("\n| ") == 8


@pytest.mark.slow
def test_peers_needs_a_tokenizer(tmp_path):
    hf.save(tmp_path / "mute", tiny_config(vocab_size=16), tiny(vocab_size=16)[1])
    with pytest.raises(UserError, match="has no tokenizer"):
        peers_models.stories(str(tmp_path / "mute"), "", tmp_path, 4)


FAKE = '''
"""In place of llama-cpp-python: a model that counts, two tokens per pass with a draft."""

__version__ = "9"


class Llama:
    def __init__(self, path, *, draft_model, **options):
        assert open(path, "rb").read(4) == b"GGUF"
        self.step = 1 if draft_model is None else 2

    def eval(self, tokens):
        pass

    def generate(self, prompt, temp):
        for number in range(100):
            if number < 1 or number % self.step == 0:
                self.eval([])
            yield (prompt[-1] + number) % 16
'''


@pytest.fixture
def fake_llama(tmp_path, monkeypatch):
    """The Python of an environment with FAKE."""
    package = tmp_path / "environment" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = lambda *_: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return sys.executable


@pytest.mark.fast
def test_a_peer_answers_in_its_own_process(fake_llama, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    settings = {"model": str(tmp_path / "model.gguf"), "prompts": [[3, 4], [5, 9]], "new": 5}
    settings |= {"eos": [11], "threads": 1, "slots": 9, "gamma": 1, "max_ngram": 2, "lookup": True}
    peer = peers_chat.Peer(fake_llama, "llama", tmp_path / "peer", settings)
    [first] = peer(1)
    assert (first["tokens"], first["timed"], first["passes"]) == ([4, 5, 6, 7, 8], 3, 2)
    own, other = [peer(2), peer(2)], [peer(2), peer(2)]
    assert [each["tokens"] for each in own[0]] == [[4, 5, 6, 7, 8], [9, 10, 11]]  # 11 ends a text
    peer.close()
    other[1][1]["tokens"] = [9]
    plain, lookup = peers_chat.Side("specjax", "plain"), peers_chat.Side("llama.cpp", "lookup", "Q")
    answers = {plain: own, lookup: other}
    for each in (answer for some in answers.values() for one in some for answer in one):
        each["seconds"] = 2.0
    _, row = peers_chat.rows(answers, {"float32": 100, "Q": 50}, 25.0)
    assert row["tokens_per_second"] == 1 and row["ratio"] == 1 and row["identical"] == "1/2"
    assert row["block_efficiency"] == 4 / 3 and row["share_of_bandwidth"] == 1.5
    with pytest.raises(UserError, match=r"^--vllm=nowhere/python cannot be started .* with vllm$"):
        peers_chat.Peer("nowhere/python", "vllm", tmp_path / "none", settings)
    with pytest.raises(UserError, match="^the program of --vllm ended with status 1: Module"):
        peers_chat.Peer(fake_llama, "vllm", tmp_path / "without", settings)(1)


@pytest.mark.slow
def test_a_chat_model_beside_a_peer(fake_llama, target, tmp_path, capsys, monkeypatch):
    folder, out = chat_model(target, tmp_path), tmp_path / "results.json"
    lines = [{"question_id": n, "category": "qa", "turns": [f"w{n} w1 w2"]} for n in range(3)]
    (folder / "q.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    monkeypatch.setattr(peers_chat, "COPIED", 1 << 12)
    out.write_text(json.dumps({"models": {}, "dtype": "float32", "rows": []}))
    argv = [f"--chat={folder}/chat", f"--prompts={folder}/q.jsonl", f"--llama={fake_llama}"]
    peers_study.main([*argv, "--new=6", "--questions=2", "--gamma=2", f"--out={out}"])
    result = json.loads(out.read_text())
    part = result["chat"]
    assert str(folder) not in part["command"] and part["versions"]["llama-cpp-python"] == "9"
    assert result["dtype"] == "float32" and len(part["prompts"]) == 2
    assert [(row["side"], row["precision"]) for row in part["rows"]] == [
        *[("specjax", "float32")] * 3,
        *[("llama.cpp", "float32")] * 2,
        *[("llama.cpp", "Q8_0")] * 2,
    ]
    assert all(row["identical"] == "2/2" for row in part["rows"][:3])
    assert all(row["tokens_per_second"] > 0 for row in part["rows"])
    text = capsys.readouterr().out
    assert text.count("\n| ") == 9 and "| llama.cpp | prompt_lookup | Q8_0 | " in text
    with pytest.raises(UserError, match="^--chat needs --prompts"):
        peers_study.main(argv[:1])


@pytest.mark.slow
def test_accelerator(tmp_path, capfd):
    out = tmp_path / "results.json"
    accelerator_study.main(["--tiny", "--models", "1b", f"--out={out}"])
    result = json.loads(out.read_text())
    with_peer = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    assert [row["task"] for row in result["skipped"]] == ([] if with_peer else ["peer"])
    assert result["bandwidth"][0]["bytes_per_second"] > 0
    assert [row["batch_size"] for row in result["autoregressive"]] == [1, 2]
    peers = [row["batch_size"] for row in result.get("peer", [])]
    assert peers == ([1, 2] if with_peer else [])
    verified = {(row["shape"], row["tokens"]) for row in result["verify"]}
    assert verified == {("chain", 1), ("chain", 4), ("tree", 4)}
    for row in result["controlled"] + result["buffers"]:
        assert row["identical"] == row["batch_size"]
        assert 1 <= row["block_efficiency"] <= row["gamma"] + 1
    low, high = (row["block_efficiency"] for row in result["controlled"][:2])
    assert low < high  # rates .3 and .95
    kinds = {(row["implementation"], row["shape"], row["tokens"]) for row in result["attention"]}
    assert len(kinds) == 6 and all(row["us"] > 0 for row in result["attention"])
    assert all(row["error"] < 0.02 for row in result["attention"])
    [row] = result["contexts"]
    assert (row["model"], row["batch_size"], row["context"]) == ("1b", 2, 40)
    assert row["share_of_bandwidth"] > 0 and result["datasheet"] is None
    text = capfd.readouterr().out
    assert (
        "Controlled acceptance" in text
        and "Attention of one layer" in text
        and "after long prompts" in text
    )
    assert "\nno datasheet\n" in text and "on paper" not in text


@pytest.mark.slow
def test_accelerator_keeps_the_sections_within_the_time_limit(tmp_path):
    out = tmp_path / "results.json"
    sections = ["--sections", "bandwidth", "contexts", "--models", "1b", "--minutes=0.34"]
    accelerator_study.main(["--tiny", *sections, f"--out={out}"])
    result = json.loads(out.read_text())
    assert "bandwidth" in result
    assert [row["task"] for row in result["skipped"]] == ["1b:contexts"]


@pytest.mark.slow
def test_system_efficiency(tmp_path, capsys, monkeypatch):
    from specjax.bench import timing

    monkeypatch.setattr(timing, "MIN_SECONDS", timing.MIN_SECONDS)  # the study changes it
    monkeypatch.setattr(common, "_impossible", lambda row: "")
    out = tmp_path / "results.json"
    small = "--small --gammas 2 --rates 0.5 --new=12 --prompts=1 --repeats=1"
    system_efficiency_study.main([*small.split(), f"--out={out}"])
    [row] = json.loads(out.read_text())["rows"]
    assert row["rate"] == 0.5 and row["gamma"] == 2 and row["system_efficiency"] > 0
    assert "gamma 2, acceptance 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_op_times(target, tmp_path, capsys):
    """The compiler of this jax names its products; the head is one of them at every size."""
    out = tmp_path / "results.json"
    quick = "--sizes 1 2 --slots=64 --passes=3"
    op_times_study.main([*quick.split(), f"--target={target}/target", f"--out={out}"])
    result = json.loads(out.read_text())
    assert f"jax {result['versions']['jax']}, ms per pass" in capsys.readouterr().out
    assert [row["tokens"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["ms"] > 0 and set(row["kinds"]) == set(op_times_study.KINDS)
        assert row["kinds"]["head"] > 0 and row["kinds"]["products"] > 0
        assert row["kinds"]["products in loops"] == 0


def test_kinds_of_operations():
    """A product that is fused into a loop is not counted as a product."""
    text = """
%fused (x: f32[1,8], w: f32[32,8]) -> f32[1,32] {
  %x = f32[1,8]{1,0} parameter(0)
  %w = f32[32,8]{1,0} parameter(1)
  ROOT %dot = f32[1,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a: f32[1,8], b: f32[32,8]) -> f32[1,32] {
  %a = f32[1,8]{1,0} parameter(0)
  %b = f32[32,8]{1,0} parameter(1)
  %slow = f32[1,32]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused
  %call = f32[1,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  %copied = f32[32,8]{1,0} copy(%b)
  ROOT %head = f32[1,32]{1,0} dot(%a, %copied), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    program = hlo.read(text)
    each = program.computations["main"].instructions
    names = ("slow", "call", "head", "copied")
    kinds = [op_times_study.kind_of(program, each[name], 32) for name in names]
    assert kinds == ["products in loops", "head", "head", "copies"]
    assert op_times_study.kind_of(program, each["head"], 99) == "products"


def test_turns_of_a_loop_over_layers():
    """Of a TPU's program: the loop that ends at the number of layers, and no other one."""
    loops = ("first", "3"), ("second", "5")
    parts = [
        f"""
%{name} (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p.{name} = (s32[], f32[8]) parameter(0)
  %x.{name} = f32[8] get-tuple-element(%p.{name}), index=1
  %i.{name} = s32[] get-tuple-element(%p.{name}), index=0
  %y.{name} = f32[8] add(%x.{name}, %x.{name})
  ROOT %t.{name} = (s32[], f32[8]) tuple(%i.{name}, %y.{name})
}}

%end.{name} (p: (s32[], f32[8])) -> pred[] {{
  %q.{name} = (s32[], f32[8]) parameter(0)
  %n.{name} = s32[] constant({end})
  %j.{name} = s32[] get-tuple-element(%q.{name}), index=0
  ROOT %lt.{name} = pred[] compare(%j.{name}, %n.{name}), direction=LT
}}
"""
        for name, end in loops
    ]
    whole = [
        f"  %w.{name} = (s32[], f32[8]) while(%a), condition=%end.{name}, body=%{name}"
        for name, _ in loops
    ]
    text = "\n".join(parts) + "\nENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
    text += "  %a = (s32[], f32[8]) parameter(0)\n" + whole[0] + "\n"
    text += whole[1].replace("  %w", "  ROOT %w") + "\n}\n"
    program = hlo.read(text)
    once, thrice, five = (facts.sums(program, layers=n).written for n in (None, 3, 5))
    assert once > 0 and facts.sums(program, layers=4).written == once
    body = sum(facts.sums(program, name).written for name in ("first", "end.first"))
    assert thrice - once == pytest.approx(2 * body) and five - once == pytest.approx(4 * body)


@pytest.mark.parametrize("family", states_study.FAMILIES)
def test_both_commits_of_states_are_equal(family):
    """And that of nothing moves no state."""
    config = states_study.shape(family, layers=4, width=32)
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    tokens = jax.random.randint(jax.random.key(1), (3, 9), 0, 2048)

    @jax.jit
    def three(params, tokens):
        cache = target.init_cache(3, 20)
        _, block = target.apply(params, tokens[:, :4], cache)
        cache = target.commit(cache, block, jnp.asarray([4, 1, 2]))
        _, block = target.apply(params, tokens[:, 4:], cache)
        count = jnp.asarray([5, 0, 3])
        forms = ("updates", "states", "pass")
        made = [states_study.committed(form, target, cache, block, count) for form in forms]
        return cache.states, [each.states for each in made]

    before, (updates, states, still) = three(params, tokens)
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert np.abs(a).max() > 1e-3
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(still), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_as_a_loop_are_the_same_layers():
    """The pass, a commit of several counts, and texts of a compiled loop with trees."""
    config = tiny_config("llama", layers=3)
    whole = lm.from_config(config)
    params = lm.init_params(config, jax.random.key(0))
    loop = programs_study.scanned(config, np.dtype(np.float32)), programs_study.stacked(params)
    tokens, found = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]]), []
    for model, own in ((whole, params), loop):
        cache, passes = model.init_cache(2, 9), []
        for count in (3, 0), (1, 2):
            out, block = model.apply(own, tokens, cache)
            passes.append((out.logits, out.hidden))
            cache = model.commit(cache, block, jnp.array(count))
        found.append(passes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)
    texts = []
    for model, own in ((whole, params), loop):
        drafter = drafters.make("trie", model, nodes=6, depth=3)
        given = model, drafter, ModelParams(own, drafter.init_params(jax.random.key(0)))
        state = loops.begin(*given, [[1, 2, 1, 2, 1], [3, 4, 3]], 24, 0, temperature=0.0)
        rule = accept.load("deterministic")
        state, _ = decode.generate(model, drafter, rule, given[2], state, max_steps=24)
        texts.append((state.tokens.tolist(), state.length.tolist()))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_states(tmp_path):
    out = tmp_path / "results.json"
    small = "--batch-sizes 2 --tokens 1 3 --turns=2 --repeats=1 --busy=drop"
    states_study.main([*small.split(), f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 and all(row["states_bytes"] > row["updates_bytes"] for row in rows)


@pytest.mark.slow
def test_draft_cost(tmp_path):
    out = tmp_path / "results.json"
    small = "--small --length=128 --turns=1 --samples=1"
    draft_cost_study.main([*small.split(), f"--out={out}"])
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 13 and all(row["ms"] > 0 for row in result["rows"])
    sizes = {f"forward_{row['nodes'] + 1}" for row in result["rows"]}
    assert set(result["forward_ms"]) == {"forward_1", *sizes}


@pytest.mark.slow
def test_draft_steps(tmp_path):
    out = tmp_path / "results.json"
    draft_steps_study.main(["--small", "--length=24", "--turns=2", "--samples=1", f"--out={out}"])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 10 and {row["nodes"] for row in rows} == {4, 24}
    assert all(row["draft_ms"] > 0 and row["first_share"] > 0 for row in rows)


@pytest.mark.slow
def test_draft_networks_are_trained_and_measured(target, tmp_path):
    """Every kind of network, with its shapes of drafts, and a share of the text."""
    files = f"--target={target}/target --text={target}/text.txt --workdir={tmp_path}/runs"
    small = "--steps=4 --generated=160 --examined=2 --verified=4 --prompts=2 --new=8"
    shape = "--width=16 --length=32 --batch=2 --features=float32"
    names = "redrafter;eagle;hass;eagle3;eagle, 1/4 of the text"
    out = [f"--out={tmp_path}/results.json", "--name=tiny", f"--only={names}"]
    out += ["--own=hass: train.steps=6; eagle3: drafter.draft_vocab=16 loss.steps=2"]
    trained_study.main([*files.split(), *small.split(), *shape.split(), *out])
    result = json.loads((tmp_path / "results.json").read_text())["targets"]["tiny"]
    labels = {row["method"] for row in result["rows"]}
    shapes_of = ("", ", sampled", ", fixed tree", ", dynamic tree")
    assert labels >= {
        f"{name}{shape}" for name in ("eagle", "hass", "eagle3") for shape in shapes_of
    }
    assert {"redrafter", "redrafter, beam", "eagle, 1/4 of the text"} <= labels
    assert all(row["lossless"]["passed"] is not False for row in result["rows"])
    steps = {name: run["curve"][-1][0] for name, run in result["training"].items()}
    assert steps["hass"] == 6 and steps["eagle"] == 4
    for folder in ("generated-40/generated", "features-40/features", "features/features"):
        assert (tmp_path / "runs" / folder / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--only=eagle4", "unknown drafter 'eagle4'; it must be one of pretrained; "),
        ("--methods=eagle, beam", "unknown drafter 'eagle, beam'; it must be one of "),
        ("--own=eagle=3", "--own has 'eagle=3'; it must be name: key=value key=value"),
        ("--own=egle: a=3", "unknown drafter 'egle'; it must be one of "),
    ],
)
def test_trained_drafters_names_what_is_unknown(flag, message, tmp_path):
    files = [f"--target={tmp_path}", f"--workdir={tmp_path}/runs", "--name=tiny"]
    with pytest.raises(SystemExit, match=message):
        trained_study.main([*files, flag])
    assert not (tmp_path / "runs").exists()


def test_questions_are_short_and_not_in_the_test_sets(tmp_path):
    long, short = "word " * 99, "What is it?"
    story = "one day, a little cat went to the park."
    sets = {
        "gsm8k": [{"question": "How many?"}],
        "mbpp": [{"task_id": 510, "text": "a"}, {"task_id": 511, "text": "b"}],
        "dialogues": [{"turns": [{"speaker": "USER", "utterance": "I need a room."}]}],
        "spec-bench": [
            {"question_id": i, "category": "qa", "turns": [text, "And why?"]}
            for i, text in enumerate((long, short, short))
        ],
    }
    (tmp_path / "stories").write_text(story + " it ran.\n\ntoo short.\n")
    for name, rows in sets.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [*sets, "stories"]
    questions_study.main([f"--{name}={tmp_path / name}" for name in names] + [f"--out={tmp_path}"])
    made = {
        name: [json.loads(line)["turns"] for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("gsm8k_train", "mbpp_train", "sgd", "stories", "bench")
    }
    assert made["gsm8k_train"] == [["How many?"]] and made["mbpp_train"] == [["b"]]
    assert made["sgd"] == [["I need a room."]] and made["bench"] == [[short]]
    assert len(made["stories"]) == 1 and made["stories"][0][0].endswith(story)
    paragraph = "They went to the road and the house, and then Maria saw the garden near it. " * 2
    text = f"# Title: A Walk\n\n## Author: Jane Doe\n\n{paragraph * 2}\n" + f"{paragraph}\n\n" * 60
    (tmp_path / "books").write_text(text)
    questions_study.main(
        [f"--{name}={tmp_path / name}" for name in [*names, "books"]] + [f"--out={tmp_path}"]
    )
    for name in ("summary", "passages", "translation", "knowledge", "writing"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        assert len(lines) == 1400 and not any("{" in line["turns"][0] for line in lines), name


@pytest.mark.slow
def test_papers(target, tmp_path):
    """One pair with a given draft and categories of prompts, one whose draft is trained."""
    _, params = tiny(vocab_size=16, seed=1)
    tokenizer = hf.load(target / "target").tokenizer
    hf.save(tmp_path / "draft", tiny_config(vocab_size=16), params, tokenizer)
    lines = [{"prompt": f"w{i} w{i + 1} w3", "category": "ab"[i % 2]} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    given = f"given={target}/target,{tmp_path}/draft,{tmp_path}/prompts.jsonl,{target}/text.txt"
    pairs = [f"--pair={given}", f"--pair=trained={target}/target,,,{target}/text.txt"]
    small = "--small --new=8 --prompts=4 --texts=4 --repeats=1 --draft-steps=4 --generated=80"
    out = [f"--out={tmp_path}/results.json", f"--workdir={tmp_path}/runs"]
    papers_study.main([*pairs, *small.split(), *out])
    own = [f"--draft=16={tmp_path}/draft", f"--checkpoint=1={tmp_path}/draft"]
    own += [f"--checkpoint=2={target}/target", "--further"]
    papers_study.main([pairs[0], *small.split(), *out, *own])
    result = json.loads((tmp_path / "results.json").read_text())
    further = result["further"]["given"]
    assert {row["controller"] for row in further["controllers"]} >= {"pending, by class"}
    # None: a few texts show nothing.
    assert all(row["lossless"] is not False for row in further["controllers"])
    assert all(0 <= row["alpha"] <= 1 + 1e-6 for row in further["exits"] + further["sizes"])
    assert [row["steps"] for row in result["further"]["checkpoints"]["rows"]] == [1] * 3
    text = papers_tables.tables(result)
    assert str(tmp_path) not in json.dumps(result) and "None" not in text
    names = ("trained", "given: a", "given: b", "bigram")
    assert all(f"| {name} |" in text for name in names)
    for pair in result["pairs"].values():
        assert all(0 <= row["alpha"] <= 1 for row in [*pair["alphas"], *pair["lenience"]])
        assert all(1 <= row["expected_tokens"] <= row["gamma"] + 1 for row in pair["chains"])
        assert [row["new"] for row in pair["lengths"]] == [4, 16]
        for kind in ("unigram", "bigram", "draft model"):
            shares = [row for row in pair["tops"] if row["drafter"] == kind]
            for name in ("greedy", "sampled"):
                values = [row[name] for row in shares]
                assert values == sorted(values) and values[0] >= 0 and values[-1] <= 1 + 1e-9
            rows = [row for row in pair["lenience"] if row["drafter"] == kind]
            exact, loose = (row["total_variation"] for row in rows if row["temperature"] == 1)
            assert exact < 1e-6 < loose
            for heat in (0, 1):
                strict, lax = (row["alpha"] for row in rows if row["temperature"] == heat)
                known = next(
                    row["alpha"]
                    for row in pair["alphas"]
                    if (row["drafter"], row["temperature"]) == (kind, heat)
                )
                assert strict <= lax and strict == pytest.approx(known, abs=1e-5)


def test_rules_for_several_drafts_accept_as_published():
    """Tables A and B of tests/accept: k_seq, recursive and the best rule; ``coupled`` is below."""
    target = np.array([[0.5, 0.3, 0.2], [0.05, 0.05, 0.9]])
    draft = np.array([[0.2, 0.7, 0.1], [0.6, 0.3, 0.1]])
    known = {2: ((0.72, 0.75, 0.81), (0.28, 0.2846, 0.29)), 3: ((0.804, 0.8466, 0.957),)}
    many = np.repeat(target, 2000, 0), np.repeat(draft, 2000, 0)
    for count, rows in known.items():
        found = several_study.accepted(target, draft, count, 0)
        for place, row in enumerate(rows):
            values = [found[name][place] for name in ("recursive", "k_seq", "best")]
            assert np.round(values, 4).tolist() == list(row)
        assert (found["gbv"] <= found["best"] + 1e-12).all()
        shares = several_study.coupled(*many, count, 1).reshape(2, -1).mean(1)
        assert (shares < found["best"] + 0.015).all() and (shares > (target * draft).sum(-1)).all()
    # With one draft: at least (1 - d) / (1 + d), and below the overlap.
    one = several_study.coupled(*many, 1, 2).reshape(2, -1).mean(1)
    overlap = np.minimum(target, draft).sum(-1)
    np.testing.assert_allclose(several_study.accepted(target, draft, 1, 0)["gbv"], overlap)
    assert (one > overlap / (2 - overlap) - 0.01).all() and (one < overlap + 0.01).all()


@pytest.mark.slow
def test_several_drafts(target, tmp_path, monkeypatch):
    """Both parts, and their tables."""
    shapes = {"one chain": "chain:3", "late": "1x2"}
    monkeypatch.setattr(several_study, "SHAPES", shapes)
    small = "--new=8 --prompts=2 --texts=2 --batch=2 --temperatures 1 --busy=drop"
    files = f"{target}/target,draft_tree,{target}/target,{target}/prompts.txt"
    out = tmp_path / "results.json"
    several_study.main(
        [f"--pair=same={files}", *small.split(), f"--workdir={tmp_path}/runs", f"--out={out}"]
    )
    result = json.loads(out.read_text())
    pair = result["pairs"]["same"]
    assert all(
        row[name] == pytest.approx(1) for row in pair["positions"] for name in ("k_seq", "best")
    )
    assert len(pair["shapes"]) == 2 + len(several_study.TREES)
    assert {row["lossless"] for row in pair["shapes"]} <= {True, None}
    text = several_tables.tables(result)
    assert "| late |" in text and str(tmp_path) not in json.dumps(result)


class Rejecting:
    """Noise with which a rule rejects every token; it keeps what the rule asks for."""

    def coins(self, *_):
        return self

    def flip(self, target, draft):
        self.chances = np.minimum(np.asarray(target) / draft, 1)
        return jnp.zeros(self.chances.shape, bool)

    def draw(self, _, weights):
        self.weights = np.asarray(weights)
        return jnp.zeros(len(weights), jnp.int32)


def test_the_law_of_the_lenient_rule_is_its_formula():
    """The chance of each draft token and the residual are those that the rule itself asks for."""
    p, q = np.random.default_rng(0).dirichlet(np.ones(5), (2, 40))
    spread = []
    for lenience in (1.0, 0.5, 0.3, 0.1):
        laws, rule = papers_law.emitted(p, q, lenience), accept.load("lenient", lenience=lenience)
        for target, draft, law in zip(p[:2], q[:2], laws, strict=False):
            noise, tokens = Rejecting(), jnp.arange(5)[:, None]  # a row for each draft token
            probs = jnp.asarray(np.broadcast_to(draft, (5, 1, 5)))
            one = Draft(tokens=tokens, valid=tokens >= 0, probs=probs)
            rule.sampled(noise, one, jnp.asarray(np.broadcast_to(target, (5, 2, 5))))
            accepted = draft * noise.chances[:, 0]
            left = noise.weights / noise.weights.sum(-1, keepdims=True)
            for row in left:
                wanted = accepted + (1 - accepted.sum()) * row
                np.testing.assert_allclose(law, wanted, atol=1e-6)
            alpha = papers_law.of_sampled(target, draft, lenience)["alpha"]
            assert accepted.sum() == pytest.approx(alpha, abs=1e-6)
        assert np.allclose(laws.sum(-1), 1, atol=1e-14) and (laws <= p / lenience + 1e-14).all()
        found = papers_law.distances(p, laws)
        spread.append([values.mean() for values in found.values()])
    assert np.allclose(spread[0], 0, atol=1e-12) and (np.diff(spread, axis=0) > 0).all()
