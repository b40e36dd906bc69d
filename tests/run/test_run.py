"""The command line: what it writes; a mistake gives one line and exit 2, and nothing is written."""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commandline import BENCH, GENERATE, ROOT, save
from marks import by_default

from specjax import convert_heads, declare, drafters, run
from specjax.bench.methods import MethodChoice
from specjax.drafters.files import head_files, probe
from specjax.errors import UserError
from specjax.generation import load
from specjax.models import hf, lm
from specjax.run import settings, workdirs
from specjax.testing import models
from specjax.train import settings as training
from specjax.train.recipes import checks


def test_generate_writes_text_and_results(cli, target, draft, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("def add", "return a", "def sub(a"))
    )
    common = [
        GENERATE,
        f"--config.target={target}",
        f"--config.prompts={prompts}",
        "--config.max_new_tokens=12",
    ]
    texts = {}
    for name, keys in (
        ("none", []),
        ("prompt_lookup", ["--config.drafter.gamma=3"]),
        ("draft_model", [f"--config.drafter.model={draft}", "--config.batch_size=2"]),
    ):
        status, out, err, workdir = cli(*common, f"--config.drafter.name={name}", *keys)
        assert (status, err) == (0, "")
        results = json.loads((workdir / "results.json").read_text())
        assert results["schema"] == 1 and results["versions"]["backend"] == "cpu"
        [row] = results["rows"]
        assert (
            row["method"] == name
            and row["class"] == "L1"
            and row["tokens"] == 36
            and row["prompts"] == 3
        )
        assert row["speedup"] is None and row["lossless"] is None
        assert (row["acceptance_rate"] is None) == (name == "none")
        assert [len(ids) for ids in results["token_ids"]] == [12] * 3
        for text in results["texts"]:
            assert text.splitlines()[0] in out
        assert json.loads((workdir / "config.json").read_text())["drafter"]["name"] == name
        assert (workdir / "metrics.jsonl").read_text()
        texts[name] = results["token_ids"]
    assert texts["none"] == texts["prompt_lookup"] == texts["draft_model"]


GRID = """
from configs import bench, generate


def get_config():
    config = bench.get_config()
    methods = config.grid.methods
    methods.warm = generate.drafter("trie")
    methods.warm.update({"nodes": 4, "depth": 2, "samples": 4, "warm": True, "memory": 64})
    methods.warm.accept = "deterministic"
    methods.both = generate.drafter("escalate")
    methods.both.drafters.lookup = generate.drafter("prompt_lookup")
    methods.both.drafters.lookup.update({"gamma": 2, "min_ngram": 2})
    methods.both.drafters.model = generate.drafter("draft_model")
    methods.both.drafters.model.gamma = 1
    config.repeats = 1
    config.max_new_tokens = 8
    config.batch_size = 2
    config.report, config.trace_prompts = False, 0
    return config
"""


def test_warm_methods_and_methods_made_of_methods(cli, target, draft, tmp_path):
    file, prompts = tmp_path / "grid.py", tmp_path / "p.txt"
    file.write_text(GRID)
    prompts.write_text("def add\nreturn a\ndef sub(a, b)\na + b\n")
    common = [f"--config={file}", f"--config.target={target}", f"--config.prompts={prompts}"]
    model = f"--config.grid.methods.both.drafters.model.model={draft}"
    status, _, err, workdir = cli(*common, model, "--config.warm_prompts=2")
    assert (status, err) == (0, "")
    rows = json.loads((workdir / "results.json").read_text())["rows"]
    assert [(row["method"], row["warm"], row["prompts"], row["tokens"]) for row in rows] == [
        ("both", False, 2, 16),
        ("warm", True, 2, 16),
    ]
    assert all(row["lossless"]["passed"] for row in rows)
    for flags, message in [
        (
            [model],
            "config.warm_prompts is 0, and 1 methods have warm=True; a bench needs both or none",
        ),
        (
            [model, "--config.warm_prompts=4"],
            "there are 4 prompts, and config.warm_prompts takes 4 of them",
        ),
        (["--config.warm_prompts=1"], "drafter draft_model needs the key 'model'"),
        (
            [model, "--config.warm_prompts=1", "--config.grid.methods.warm.name=prompt_lookup"],
            "drafter prompt_lookup does not take the key 'depth'",
        ),
    ]:
        status, _, err, _ = cli(*common, *flags, workdir=tmp_path / "no")
        assert status == 2 and message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
def test_every_configuration_is_one(name):
    """It loads, its drafter and rule exist and take its keys, and no key of its mode is missing."""
    config = importlib.import_module(f"configs.{name}").get_config()
    if config.mode != "train":
        settings.read(config)
        keys, names = settings.Settings, settings.KEYS[config.mode]
    else:
        checks.complete(config)
        keys, names = training.Training, training.KEYS[config.objective]
    known = {name.partition(".")[0] for name in names} | set(settings.STAGES)
    assert set(config) <= known <= {key.name for key in declare.keys_of(keys)} | known


def test_every_key_of_a_drafter_is_in_the_configuration():
    from configs import generate

    keys, config = drafters.keys(), generate.drafter("none")
    assert (
        {"gamma", "max_ngram", "tree", "datastore", "tables", "output_weight"}
        <= set(keys)
        <= set(config)
    )
    assert (keys["gamma"], keys["model"], keys["partial"], keys["least"]) == (int, str, bool, float)
    config.gamma, config.output_weight = 3, 0.5
    with pytest.raises(TypeError):
        config.gamma = "many"


@pytest.mark.slow
def test_bench_measures_and_checks(cli, target, draft, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add\nreturn a\n\ndef sub(a, b)\n")
    status, out, err, workdir = cli(
        BENCH,
        f"--config.target={target}",
        f"--config.prompts={prompts}",
        "--config.max_new_tokens=24",
        "--config.drafter.name=draft_model",
        f"--config.drafter.model={draft}",
        "--config.drafter.gamma=2",
        "--config.grid.temperatures=(0.0,1.0)",
        "--config.batch_size=2",
        "--config.repeats=2",
        "--config.show_trace=True",
    )
    assert (status, err) == (0, "")
    rows = json.loads((workdir / "results.json").read_text())["rows"]
    assert [row["temperature"] for row in rows] == [0.0, 1.0]
    for row in rows:
        # Sampled rows: both passes; greedy passes are equal.
        assert row["tokens"] == 72 * (2 if row["temperature"] else 1)
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["autoregressive_tokens_per_second"]
        )
        assert row["block_efficiency"] == pytest.approx(row["tokens"] / row["rounds"])
        assert sum(row["time_split"].values()) == pytest.approx(1)
        assert row["predicted_speedup"] > 0 and 0 <= row["acceptance_rate"] <= 1
        assert len(row["acceptance_by_depth"]) in (1, 2)
    assert rows[0]["lossless"] == {
        "check": "greedy-identity",
        "passed": True,
        "detail": "3/3 prompts",
    }
    assert (
        rows[1]["lossless"]["check"] == "law" and rows[1]["lossless"]["passed"] is None
    )  # 144 tokens are too few
    assert "draft_model" in out and "accepted draft token" in out


def nan_model(path):
    bad = {"norm": {"scale": jnp.full((32,), jnp.nan)}}
    return save(path, **bad)


LOOKUP = "--config.drafter.name=prompt_lookup"
MISTAKES = {
    "unknown key": (["--config.foo=1"], "unknown configuration key 'foo'"),
    "misspelt key": (["--config.drafter.gama=1"], "did you mean gamma?"),
    "wrong type": (
        ["--config.max_new_tokens=many"],
        "--config.max_new_tokens=many: 'many' is not a whole number (int)",
    ),
    "no truth": (["--config.ignore_eos=7"], "config.ignore_eos=7: '7' is not True or False (bool)"),
    "no number": (
        ["--config.sampling.top_p", "high"],
        "--config.sampling.top_p=high: 'high' is not a number (float)",
    ),
    "key of a value": (["--config.target.size=1"], "config.target is"),
    "key of a group": (["--config.temperature=1"], "did you mean config.sampling.temperature?"),
    "no prefix": (["--temperature=1"], "did you mean --config.sampling.temperature?"),
    "dtype": (["--config.dtype=int8"], "config.dtype is 'int8'; it must be one of"),
    "methods of one": (["--methods=suffix"], "--methods is for modes bench and replay"),
    "unknown flag": (["--wrkdir=x"], "Unknown command line flag 'wrkdir'"),
    "a key as a flag": (["--prompts=x"], "flag 'prompts'; did you mean --config.prompts?"),
    "stray argument": (["generate"], "unexpected argument 'generate'"),
    "unknown mode": (
        ["--config.mode=sing"],
        "config.mode is 'sing'; it must be one of train, generate, chat, bench, replay, online",
    ),
    "no target": (["--config.target="], "config.target is empty"),
    "missing directory": (["--config.target=/nowhere"], "/nowhere is no directory"),
    "no prompt": (["--config.prompt="], "give either config.prompt"),
    "two prompts": (["--config.prompts=stdlib"], "give either config.prompt"),
    "empty prompt": (["--config.prompt= "], "prompt 1 is empty"),
    "missing prompts": (
        ["--config.prompt=", "--config.prompts=/nowhere.txt"],
        "/nowhere.txt cannot be read",
    ),
    "too long": (["--config.max_new_tokens=127"], "the model has 128 positions"),
    "nothing to do": (["--config.max_new_tokens=0"], "config.max_new_tokens is 0"),
    "batch 0": (
        ["--config.batch_size=0"],
        "config.batch_size is 0; it must be a whole number >= 1",
    ),
    "cold": (["--config.sampling.temperature=-0.5"], "temperature is -0.5; it must be in [0, 1e6]"),
    "top_p 0": (["--config.sampling.top_p=0.0"], "top_p is 0; it must be in (0, 1]"),
    "top_p 2": (["--config.sampling.top_p=2.0"], "top_p is 2; it must be in (0, 1]"),
    "unknown drafter": (
        ["--config.drafter.name=medusa9"],
        "unknown drafter 'medusa9'; it must be one of bild, block_head",
    ),
    "seed": (["--config.seed=-1"], "config.seed is -1; it must be a whole number >= 0"),
    "minus one prompt": (["--config.num_prompts=-1"], "config.num_prompts is -1"),
    "more rows than prompts": (
        ["--config.batch_size=2"],
        "the batch size is 2 and there are 1 prompts",
    ),
    "no corpus": (
        ["--config.prompt=", "--config.prompts=stdlib"],
        "there is no corpus beside the target",
    ),
    "unknown rule": (["--config.accept=maybe"], "unknown acceptance rule 'maybe'"),
    "gamma 0": ([LOOKUP, "--config.drafter.gamma=0"], "gamma is 0; it must be a whole number >= 1"),
    "key of another drafter": (
        ["--config.drafter.name=draft_model", "--config.drafter.max_ngram=2"],
        "draft_model does not take the key 'max_ngram'",
    ),
    "key of another rule": (
        ["--config.accept=chain", "--config.accept_keys.lenience=0.5"],
        "chain does not take the key 'lenience'; it takes none",
    ),
    "key of no rule": (
        ["--config.accept_keys.lenience=0.5"],
        "accept_keys.lenience is a key of a rule, and config.accept is empty; name the rule",
    ),
    "key out of range": (
        ["--config.accept=lenient", "--config.accept_keys.lenience=2.0"],
        "lenience is 2.0; it must be a number in (0, 1]",
    ),
    "no draft model": (["--config.drafter.name=draft_model"], "draft_model needs the key 'model'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(cli, target, name):
    args, message = MISTAKES[name]
    status, out, err, workdir = cli(
        GENERATE,
        f"--config.target={target}",
        "--config.prompt=def add",
        "--config.max_new_tokens=8",
        *args,
    )
    assert status == 2 and out == ""
    assert message in err and err.startswith("specjax: ") and err.count("\n") == 1
    assert not workdir.exists()


def test_mistakes_in_files_are_one_line(cli, target, tmp_path):
    other = save(
        tmp_path / "other",
        text="completely different words of another tokenizer, and others still\n",
    )
    small = save(tmp_path / "small", text="xyz")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"prompt": "def"}\n{"text": "x"}\n')
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    void = tmp_path / "void.txt"
    void.write_text("\n")
    file = tmp_path / "file"
    file.write_text("")
    draft = ["--config.drafter.name=draft_model"]
    prompt = "--config.prompt=def"
    cases = [
        ([f"--config.target={broken}", prompt], "is not valid JSON"),
        (
            [f"--config.target={nan_model(tmp_path / 'nan')}", prompt],
            "NaN or infinite logits in row 0, round 0",
        ),
        ([prompt, *draft, f"--config.drafter.model={other}"], "they must share one tokenizer"),
        ([prompt, *draft, f"--config.drafter.model={small}"], "they must share one tokenizer"),
        ([prompt, *draft, f"--config.drafter.model={broken}"], "is not valid JSON"),
        (
            [f"--config.prompts={lines}"],
            'line 2 has no "prompt"; in a line of prompts',
        ),
        ([f"--config.prompts={latin}"], "is not UTF-8"),
        ([f"--config.prompts={void}"], "has no prompts"),
    ]
    for args, message in cases:
        status, out, err, workdir = cli(
            GENERATE, f"--config.target={target}", "--config.max_new_tokens=8", *args
        )
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
        assert not workdir.exists()
    status, _, err, _ = cli(GENERATE, f"--config.target={target}", prompt, workdir=file / "below")
    assert status == 2 and "is not a writable directory; choose another --workdir" in err


TOGETHER = "a[dim]b [/b] [bold :smile: ends in \\\\"


@pytest.mark.parametrize(
    "text", by_default(["[/b] [bold", "ends in \\\\", ":smile:", "a[dim]b", TOGETHER], [TOGETHER])
)
def test_text_is_printed_as_it_is(cli, target, text):
    """Markup in a prompt or an output is printed as it is."""
    status, out, err, _ = cli(
        GENERATE,
        f"--config.target={target}",
        f"--config.prompt={text}",
        "--config.max_new_tokens=2",
    )
    assert (status, err) == (0, "") and out.startswith(text)


def test_the_best_reading_of_heads_is_taken(cli, target, tmp_path, monkeypatch, capsys):
    """By load, by mode generate, and by convert_heads, which writes it; it is found once."""
    tokenizer = hf.load(target).tokenizer
    config = models.tiny_config("llama", tokenizer.get_vocab_size(), layers=4)
    params = lm.init_params(config, jax.random.key(0))
    hf.save(tmp_path / "deep", config, params, tokenizer)
    made = drafters.make("eagle3", lm.from_config(config), taps=(1, 2), gamma=2).training
    facts = dict(made.facts) | {"vocab_size": config.vocab_size, "rope_theta": 500.0}
    heads = made.start(params, jax.random.key(0))
    head_files.write(tmp_path / "heads", "eagle3", heads, facts, layout="eagle3")
    seen = []

    def tau(target, params, drafter, *_):
        network = drafter.training.loss.args[0]
        seen.append((drafter.taps, network.shape.config.rope_theta))
        return 1 + (drafter.taps == (2, 3)) + (network.shape.config.rope_theta == config.rope_theta)

    monkeypatch.setattr(probe, "_tau", tau)
    keys = {"name": "eagle3", "model": str(tmp_path / "heads"), "gamma": 2}
    with pytest.warns(UserWarning, match=r"is read with tau 3.00, .*taps=\[2, 3\]"):
        method = load(tmp_path / "deep").method(keys | {"probe": True})
    assert method.drafter.taps == (2, 3) and ((0, 1), config.rope_theta) in seen
    flags = [f"--config.drafter.{key}={value}" for key, value in keys.items()]
    common = (GENERATE, f"--config.target={tmp_path / 'deep'}", "--config.prompt=x", *flags)
    count = len(seen)
    probed = "--config.drafter.probe=True"
    assert cli(*common, probed, "--config.max_new_tokens=4")[0] == 0 and len(seen) == count
    argv = [str(tmp_path / "heads"), str(tmp_path / "best"), "--kind=eagle3"]
    assert convert_heads.main([*argv, f"--probe={tmp_path / 'deep'}"]) == 0
    written = head_files.read(tmp_path / "best", "eagle3").config
    assert written["taps"] == [2, 3] and written["rope_theta"] == config.rope_theta
    assert convert_heads.main([argv[0], *argv[2:], "--for=vllm", "--probe=x"]) == 2
    assert "engine is for writing" in capsys.readouterr().err


def test_a_console_without_utf8_gets_replacements(target, tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    argv = [GENERATE, f"--config.target={target}", "--config.prompt=é", "--config.max_new_tokens=2"]
    assert run.main(["specjax", *argv, f"--workdir={tmp_path / 'out'}"]) == 0
    sys.stdout.flush()
    assert raw.getvalue().startswith(b"?")
    assert (tmp_path / "out" / "results.json").exists()


def test_a_workdir_of_another_run_is_one_line(cli, target, tmp_path):
    """Until that run ends, also by a kill, which leaves the file of the lock."""
    tokens = "--config.max_new_tokens=4"
    common = (GENERATE, f"--config.target={target}", "--config.prompt=x", tokens)
    folder = tmp_path / "out"
    folder.mkdir()
    with workdirs.locked(folder):
        status, out, err, _ = cli(*common, workdir=folder)
        assert status == 2 and not out and err.count("\n") == 1
        assert f"{folder} is in use by process {os.getpid()} on " in err
    assert list(folder.iterdir()) == []
    (folder / workdirs.LOCK).write_text("process 1 on another machine\n")
    assert cli(*common, workdir=folder)[0] == 0
    assert not (folder / workdirs.LOCK).exists() and (folder / "results.json").exists()


def test_a_lock_that_its_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    path, flock, calls = tmp_path / workdirs.LOCK, fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(workdirs.fcntl, "flock", late)
    with workdirs.locked(tmp_path):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(UserError, match="is in use by process"), workdirs.locked(tmp_path):
            pass
    assert not path.exists()


@pytest.mark.parametrize("name", ["checkpoints", "generated", "ngram_tables.json"])
def test_a_training_run_is_not_overwritten(cli, target, tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    status, _, err, _ = cli(
        GENERATE, f"--config.target={target}", "--config.prompt=x", workdir=tmp_path / "run"
    )
    assert status == 2 and "holds a training run" in err
    assert [p.name for p in (tmp_path / "run").iterdir()] == [name]


@pytest.mark.parametrize(
    "code, message",
    [
        ("def get_config(:", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def get_config():\n    return {}.nothing", "has no attribute"),
        (
            "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict()",
            "config.mode is None",
        ),
    ],
)
def test_a_broken_configuration_is_one_line(cli, tmp_path, code, message):
    (tmp_path / "broken.py").write_text(code)
    status, out, err, workdir = cli(f"--config={tmp_path / 'broken.py'}")
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not workdir.exists()


def test_no_configuration_and_no_such_file():
    """As processes, because this is before any flag is parsed: no traceback, status 2."""
    for args, message in (
        ([], "no configuration; give --config="),
        (["--config=configs/nope.py"], "configs/nope.py"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "specjax.run", *args],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr


def test_sampled_generation_repeats_with_its_seed(cli, target):
    common = [
        GENERATE,
        f"--config.target={target}",
        "--config.prompt=def add",
        "--config.sampling.temperature=1.0",
    ]
    ids = []
    for seed in (1, 1, 2):
        status, _, err, workdir = cli(
            *common, f"--config.seed={seed}", "--config.max_new_tokens=16"
        )
        assert (status, err) == (0, "")
        ids.append(json.loads((workdir / "results.json").read_text())["token_ids"][0])
    assert ids[0] == ids[1] != ids[2]
    assert np.isfinite(ids).all()


@pytest.mark.slow
def test_a_rule_for_each_method(cli, target, draft, tmp_path):
    """Methods of a grid have their own rules and keys; tree drafters are configured by flags."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add\nreturn a\n")
    (tmp_path / "own.py").write_text(
        "from configs import bench, generate\n"
        "def get_config():\n"
        "    config = bench.get_config()\n"
        "    config.max_new_tokens, config.repeats = 6, 1\n"
        "    methods = config.grid.methods\n"
        "    methods.dynamic_tree = generate.drafter('dynamic_tree')\n"
        "    methods.dynamic_tree.accept = 'deterministic'\n"
        "    methods.lookup = generate.drafter('prompt_lookup')\n"
        "    methods.lookup.accept = 'lenient'\n"
        "    methods.lookup.accept_keys = bench.get_config().accept_keys\n"
        "    return config\n"
    )
    own = [
        f"--config={tmp_path / 'own.py'}",
        f"--config.target={target}",
        f"--config.prompts={prompts}",
    ]
    own += [
        f"--config.grid.methods.dynamic_tree.{key}"
        for key in (f"model={draft}", "nodes=4", "depth=2", "top_k=2")
    ]
    status, _, err, workdir = cli(*own, "--config.grid.methods.lookup.accept_keys.lenience=0.5")
    assert (status, err) == (0, "")
    rows = {
        row["method"]: row for row in json.loads((workdir / "results.json").read_text())["rows"]
    }
    rules = {name: (row["accept"], row["class"]) for name, row in rows.items()}
    assert rules == {"dynamic_tree": ("deterministic", "L1"), "lookup": ("lenient", "L3")}
    assert rows["dynamic_tree"]["lossless"]["passed"]
    for args, message in (
        (["--config.grid.methods.lookup.accept=maybe"], "unknown acceptance rule 'maybe'"),
        (["--config.grid.methods.lookup.accept_keys.top=3"], "lenient does not take the key 'top'"),
        (
            ["--config.grid.methods.dynamic_tree.accept=chain"],
            "and dynamic_tree drafts deterministic; rules for it are",
        ),
        (["--config.grid.methods.dynamic_tree.nodes=7"], "ask for at most 6 nodes"),
        (
            ["--config.accept=chain", "--config.accept_keys.top=3"],
            "chain does not take the key 'top'",
        ),
    ):
        status, out, err, workdir = cli(*own, *args, workdir=tmp_path / "not")
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1, err
        assert not workdir.exists()


@pytest.mark.slow
def test_trees_by_flags(cli, target, draft):
    """Tree, siblings and draft models are set by flags; a rule that does not fit gives one line."""
    common = [
        GENERATE,
        f"--config.target={target}",
        "--config.prompt=def add",
        "--config.max_new_tokens=6",
    ]
    tree = [
        "--config.drafter.name=draft_tree",
        f"--config.drafter.model={draft}",
        "--config.drafter.tree=2x1",
    ]
    several = ["--config.drafter.name=specinfer", f"--config.drafter.models={draft},{target}"]
    texts = []
    for keys in (
        [*tree, "--config.drafter.siblings=iid", "--config.accept=k_seq"],
        [*several, "--config.drafter.tree=chain:2", "--config.accept=recursive"],
    ):
        status, _, err, workdir = cli(*common, *keys)
        assert (status, err) == (0, "")
        texts.append(json.loads((workdir / "results.json").read_text())["token_ids"])
    assert texts[0] == texts[1]  # both say what the target message
    for keys, kind in ((tree, "without_replacement"), (several, "independent")):
        status, out, err, _ = cli(*common, *keys, "--config.accept=chain")
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert (
            "the rule chain takes drafts with siblings chain" in err
            and f"drafts {kind}; rules for it are" in err
        )


def test_the_configuration_of_trees():
    from configs import trees

    for config in (trees.get_config(), trees.get_config("runs/quickstart")):
        settings.read(config)
        chosen = settings.read(config).methods
        assert {label: choice.rule for label, choice in chosen.items()} == {
            "chain": "chain",
            "tree": "recursive",
            "iid_tree": "recursive",
            "dynamic_tree": "deterministic",
            "budget_tree": "deterministic",
        }
    assert config.target == "runs/quickstart/target" and not config.prepare


def test_old_configurations_need_no_accept_keys(target):
    """And keys that no method would read are a mistake."""
    from configs import bench, generate

    config = bench.get_config()
    del config["accept_keys"]
    settings.read(config)
    plain = MethodChoice({"name": "prompt_lookup"}, "", {})
    assert settings.read(config).methods["prompt_lookup"] == plain
    config = bench.get_config()
    config.accept, config.accept_keys.top = "tolerance", 3
    config.grid.methods.mine = generate.drafter("prompt_lookup")
    settings.read(config)
    assert settings.read(config).methods["mine"].rule_keys == {"top": 3}
    config.grid.methods.mine.accept = "chain"
    with pytest.raises(
        UserError, match="every method of config.grid.methods has a rule of its own"
    ):
        settings.read(config)
    del config.grid.methods.mine["accept"]
    config.grid.methods.mine.accept_keys = {"top": 2}
    with pytest.raises(UserError, match="method mine has accept_keys and no rule of its own"):
        settings.read(config)
