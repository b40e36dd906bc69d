"""Stages: all is checked before the first one starts, and those that are not needed are skipped."""

from __future__ import annotations

import importlib
import json
import os
import shutil

import jax
import pytest
from commandline import BENCH, ROOT

from specjax.bench import methods
from specjax.bench.methods import MethodChoice
from specjax.errors import UserError
from specjax.run import build, dispatch, settings, stand_ins, workdirs

QUICKSTART, TREES, LOOKAHEAD, ESCALATE = (
    f"--config={ROOT}/configs/{name}"
    for name in ("quickstart.py:train", "trees.py", "lookahead.py", "escalate.py")
)


@pytest.fixture
def started(monkeypatch):
    """The stages that would have been trained; nothing is."""
    names = []

    class Stop(Exception):
        pass

    def stop(config, workdir):
        names.append((workdir.name, config.target))
        raise Stop

    monkeypatch.setattr("specjax.run.dispatch.train", stop)
    names.append(Stop)
    return names


MISTAKES = {
    "rule": ([QUICKSTART, "--config.accept=maybe"], "unknown acceptance"),
    "pair": (
        [TREES, "--config.grid.methods.tree.accept=chain"],
        "the rule chain takes drafts with siblings chain, and draft_tree drafts without",
    ),
    "draft": ([QUICKSTART, "--config.grid.methods.draft_model.gamma=0"], "gamma is 0"),
    "tree": ([TREES, "--config.grid.methods.tree.tree=0x"], "tree is '0x'"),
    "lookahead": ([LOOKAHEAD, "--config.grid.methods.lookahead.ngram=1"], "ngram is 1"),
    "tables": ([ESCALATE, "--config.grid.methods.escalate.least=2.0"], "least is 2.0"),
    "target": ([LOOKAHEAD, "--config.target=/nowhere"], "/nowhere is no directory"),
    "prompts": ([TREES, "--config.prompts=/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
    "batch": ([TREES, "--config.num_prompts=2", "--config.batch_size=4"], None),
    "sizes": (
        [TREES, "--config.num_prompts=2", "--config.grid.batch_sizes=(4,)"],
        "the batch size is 4 and there are 2 prompts; give more, or lower it",
    ),
    "tokens": ([QUICKSTART, "--config.max_new_tokens=0"], "config.max_new_tokens is 0"),
    "traces": ([QUICKSTART, "--config.trace_prompts=-1"], "config.trace_prompts is -1"),
    "record": (
        [QUICKSTART, "--config.record=x.jsonl"],
        "config.record is for modes generate and chat",
    ),
    "optimiser": (
        [QUICKSTART, "--config.stages.draft.optimiser.name=adma"],
        "(stage draft: config.stages.draft)",
    ),
    "text": (
        [QUICKSTART, "--config.stages.target.data.files=/no.txt"],
        "data file /no.txt cannot be read",
    ),
    "loss": ([QUICKSTART, "--config.stages.draft.loss.divergence=kl"], "loss.divergence is 'kl'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_before_training(cli, started, name):
    arguments, message = MISTAKES[name]
    if message is None:
        with pytest.raises(started[0]):
            cli(*arguments)
        return
    status, out, err, workdir = cli(*arguments)
    assert status == 2 and message in err and err.count("\n") == 1, err
    assert out == "" and len(started) == 1 and not workdir.exists()


@pytest.fixture
def measured(monkeypatch):
    """The arguments of every bench that would have run; none runs."""
    calls = []
    monkeypatch.setitem(dispatch.DECODING, "bench", lambda *arguments: calls.append(arguments))
    return calls


COMMON = ["--config.prompt=def add", "--config.prompts=", "--config.max_new_tokens=4"]
COMMON += ["--config.grid.batch_sizes=(1,)"]


def test_a_stage_whose_result_was_given_is_skipped(cli, started, measured, target, draft):
    common = [*COMMON, f"--config.target={target}"]
    with pytest.raises(started[0]):
        cli(QUICKSTART, *common)
    assert started[1:] == [("draft", target)] and not measured
    model = f"--config.grid.methods.draft_model.model={draft}"
    status, out, err, workdir = cli(QUICKSTART, *common, model)
    assert (status, err) == (0, "") and len(started) == 2 and len(measured) == 1
    assert f"target: skipped, no setting uses {workdir}/target" in out
    assert f"draft: skipped, no setting uses {workdir}/draft" in out


def test_methods_of_a_command_line(cli, started, measured, target):
    """Labels of the configuration keep their keys; other names are drafters with default keys."""
    common = [*COMMON, f"--config.target={target}"]
    both = "--methods=prompt_lookup,suffix"
    status, _, err, _ = cli(QUICKSTART, *common, both, "--config.grid.methods.suffix.nodes=3")
    assert (status, err) == (0, "") and len(started) == 1
    settings = measured[0][0]
    assert settings.methods["prompt_lookup"].drafter == {"name": "prompt_lookup", "gamma": 4}
    assert settings.methods["suffix"] == MethodChoice({"name": "suffix", "nodes": 3}, "", {})
    _, rule = methods.objects(stand_ins.target(), settings.methods["suffix"], [0.0])
    assert rule.name == "deterministic"
    assert cli(QUICKSTART, *common, "--methods=free,early_exit", "--config.again=True")[0] == 0
    free = {"prompt_lookup", "sam", "suffix", "token_recycling", "jacobi", "lookahead"}
    others = {"none", "draft_model", "medusa", "rest", "staged"}
    assert free < set(measured[-1][0].methods) and not others & set(measured[-1][0].methods)
    assert "early_exit" in measured[-1][0].methods
    for arguments, message in (
        (["--methods=prompt_lokup"], "no drafter 'prompt_lokup'; did you mean prompt_lookup?"),
        (["--methods=sam,sam"], "give different names, separated by commas"),
        (["--methods="], "give different names"),
        (
            ["--methods=sam", "--config.drafter.gamma=2"],
            "config.drafter.gamma is for a single method, and --methods is given; give "
            "--config.grid.methods.sam.gamma",
        ),
    ):
        status, _, err, _ = cli(QUICKSTART, *common, *arguments)
        assert status == 2 and message in err and err.count("\n") == 1


def test_the_dtype_of_the_target(target):
    from configs import generate

    config = generate.get_config()
    config.target = target
    for name, expected in (("", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        config.dtype = name
        loaded = build.target(settings.read(config))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)} == {expected}


def test_a_finished_bench_says_so(cli, target, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add\n")
    common = [BENCH, f"--config.target={target}", f"--config.prompts={prompts}"]
    common += ["--config.max_new_tokens=3", "--config.repeats=1", "--config.report=False"]
    common += ["--config.trace_prompts=0", "--config.drafter.gamma=1"]
    status, _, err, workdir = cli(*common)
    assert (status, err) == (0, "")
    first = (workdir / "results.json").stat().st_mtime_ns
    prompts.write_text("def add\n")  # newer, of the same content
    status, out, err, _ = cli(*common)
    assert (status, err) == (0, "") and "this bench is finished" in out
    assert "--config.again=True measures it again" in out and "prompt_lookup" in out
    assert (workdir / "results.json").stat().st_mtime_ns == first
    ran = []
    monkeypatch.setitem(dispatch.DECODING, "bench", lambda *arguments: ran.append(arguments))
    # Measured again: on request, with other prompts in the same file, with other settings.
    cli(*common, "--config.again=True")
    assert len(ran) == 1
    prompts.write_text("def sub\n")
    os.utime(prompts, (0, 0))
    cli(*common)
    assert len(ran) == 2
    cli(*common, "--config.seed=5")
    assert len(ran) == 3
    capsys.readouterr()
    workdirs.announce_replacement(ran[0][0], workdir)
    assert not capsys.readouterr().out
    workdirs.announce_replacement(ran[2][0], workdir)
    out = capsys.readouterr().out
    assert f"notice: {workdir} holds the results of another run, which will be replaced (" in out
    # Not finished: the checks failed, or the bench was killed before its report.
    results = json.loads((workdir / "results.json").read_text())
    results["rows"][0]["lossless"]["passed"] = False
    (workdir / "results.json").write_text(json.dumps(results))
    cli(*common)
    assert len(ran) == 4


def test_a_workdir_is_left_as_it_was(tmp_path):
    workdirs.check(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    for bad in (tmp_path / ("x" * 300), "/proc/none/x"):
        with pytest.raises(workdirs.UserError, match="cannot write into"):
            workdirs.check(workdirs.Path(bad))


def test_what_is_needed():
    """Stages whose results are used directly, or by a stage that is needed."""
    from configs import quickstart

    config = quickstart.get_config("train")
    dispatch._fill(config, "runs/x")
    needed, skipped = dispatch.planned(config, workdirs.Path("runs/x"))
    assert [stage.name for stage in needed] == ["target", "draft"] and not skipped
    config.grid.methods.draft_model.model = "elsewhere"
    needed, skipped = dispatch.planned(config, workdirs.Path("runs/x"))
    assert [stage.name for stage in needed] == ["target"]
    assert [stage.name for stage in skipped] == ["draft"]


def test_the_shipped_models():
    """They are read, every method of the quickstart takes them, and they are small."""
    from configs import quickstart

    config = quickstart.get_config()
    assert not config.prepare and config.keep
    for key, value in (("target", config.target), ("prompts", config.prompts)):
        config[key] = str(ROOT / "assets" / value.rpartition("assets/")[2])
    chosen = settings.read(config)
    target = build.target(chosen)
    heats = chosen.temperatures
    made = [methods.objects(target.lm, each, heats)[0] for each in chosen.methods.values()]
    assert {each.name: each.nodes for each in made} == {
        "draft_model": 3,
        "escalate": 5,
        "prompt_lookup": 8,
    }
    files = [path for path in (ROOT / "assets").rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    head = sum(size for path, size in sizes.items() if "eagle3" in path.parent.name)
    assert sum(sizes.values()) - head < 25e6 and head < 20e6


def test_without_the_shipped_models_the_quickstart_trains(cli, started, monkeypatch, tmp_path):
    """A copy of the configurations, as in the wheel, has none beside it."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    with pytest.raises(started[0]):
        cli(f"--config={tmp_path}/configs/quickstart.py")
    assert [name for name, _ in started[1:]] == ["target"]
    status, _, err, _ = cli(f"--config={ROOT}/configs/quickstart.py:fast")
    assert status == 2 and "quickstart.py:fast is unknown; it must be train, or left out" in err


FOLDERS = ["boost", "cascade", "controllers", "escalate", "sweep", "training_free", "trees"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_models(name, tmp_path):
    """No target is trained, and no corpus is built in the folder; one that is there is used."""
    module, argument = importlib.import_module(f"configs.{name}"), str(tmp_path)
    argument = f"draft_model,{argument}" if name == "controllers" else argument
    for text in ("{workdir}/data", f"{tmp_path}/data", f"{tmp_path}/target/data"):
        if text.startswith("/"):
            (tmp_path / text).mkdir(parents=True)
        config = module.get_config(argument)
        assert config.target == f"{tmp_path}/target" and config.data_dir == text
        used = [config.stages[each] for each in config.prepare]
        assert {each.data.dir for each in used} <= {text}
        assert not {"target", "draft"} & set(config.prepare)
        assert "{workdir}/draft" not in str(config.grid.methods)


@pytest.mark.parametrize("file", ["pard", "spire", "mtp_pretrain", "layer_skip", "distill"])
def test_the_loss_of_a_stage_is_that_of_what_it_trains(file):
    """The keys of its own configuration are taken; a plain draft model has no exits."""
    config = importlib.import_module(f"configs.{file}").get_config()
    dispatch._check_loss(config)
    if file == "distill":
        with config.unlocked():
            config.loss.exits = 1.0
        with pytest.raises(UserError, match="config.loss.exits is not a key of the loss of"):
            dispatch._check_loss(config)
