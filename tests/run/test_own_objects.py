"""Drafters and rules outside the package, "my_module:make", in every mode and with its checks."""

from __future__ import annotations

import json
import sys

import pytest
from commandline import BENCH, GENERATE, ROOT

from specjax import UserError, accept, drafters, registry, types

MODULE = '''
"""Repeats the newest token. L1.

A drafter outside the package.
"""

import jax.numpy as jnp

from specjax.types import Draft, Drafter


def make(target, *, gamma: int = 2, shift: int = 0) -> Drafter:
    """Proposes the pending token again.

    Args:
        gamma: draft tokens per round.
        shift: is added to its id.
    """
    def propose(params, keys, context, state):
        tokens = (context.pending[:, None] + shift + jnp.zeros(gamma, int)) % target.vocab_size
        tokens = tokens.astype(jnp.int32)
        return Draft(tokens, jnp.ones_like(tokens, bool)), state

    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="repeat",
    )


def rule(*, unused: float = 0.5):
    from specjax import accept

    return accept.load("chain")._replace(name="mine")


ready = rule()
misspelt = ready._replace(lossless_class="l1")
number = 7


def nothing(target):
    return number


def bare():
    return None


def failing(target):
    return {}["a key"]
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module of one's own in the working directory."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    registry.imported.cache_clear()
    yield name
    sys.modules.pop(name, None)
    sys.modules.pop("broken_module", None)


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def test_a_drafter_and_a_rule_of_ones_own(cli, target, own):
    drafter, rule = f"--config.drafter.name={own}:make", f"--config.accept={own}:rule"
    common = [f"--config.target={target}", "--config.prompt=def add", "--config.max_new_tokens=6"]
    status, out, err, workdir = cli(GENERATE, *common, drafter, rule, "--config.drafter.shift=1")
    assert (status, err) == (0, "") and f"{own}:make, mine: 6 tokens of 1 prompt, tau" in out
    assert "tokens per round, " in out and "tokens/s without prefill" in out
    [row] = results(workdir)["rows"]
    assert (row["method"], row["accept"]) == (f"{own}:make", "mine")
    keys = json.loads((workdir / "config.json").read_text())["drafter"]
    assert (keys["shift"], keys["gamma"]) == (1, None)


@pytest.mark.slow
def test_in_a_bench_and_in_a_replay(cli, target, own, tmp_path):
    methods = f"--methods={own}:make,prompt_lookup"
    quick = ["--config.repeats=1", "--config.trace_prompts=0", "--config.report=False"]
    status, _, err, workdir = cli(
        BENCH,
        f"--config.target={target}",
        "--config.prompt=def add",
        "--config.max_new_tokens=4",
        *quick,
        methods,
        f"--config.grid.methods.{own}_make.gamma=1",
    )
    assert (status, err) == (0, "")
    rows = results(workdir)["rows"]
    assert {row["method"] for row in rows} == {f"{own}:make", "prompt_lookup"}
    assert all(row["lossless"]["passed"] for row in rows)
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"prompt_ids": [1, 2], "output_ids": [2, 2, 2, 3]}\n')
    replay = [f"--config={ROOT}/configs/replay.py", f"--config.traces={traces}"]
    status, _, err, workdir = cli(*replay, f"--config.drafter.name={own}:make")
    assert (status, err) == (0, "") and results(workdir)["rows"][0]["tokens"] == 4


def test_inside_another_drafter(own):
    stages = {"first": {"name": "prompt_lookup"}, "second": {"name": f"{own}:make", "gamma": 3}}
    target = types.LM(None, None, None, 50)
    drafters.check("escalate", drafters=stages)
    assert drafters.make("escalate", target, drafters=stages).nodes == 10
    stages["second"]["size"] = 1
    with pytest.raises(UserError, match="does not take the key 'size'"):
        drafters.check("escalate", drafters=stages)


def test_rules_by_name_and_ready_made(own):
    assert accept.load(f"{own}:rule", unused=0.1).name == "mine"
    assert accept.load(f"{own}:ready").name == "mine"


def test_the_explanation_of_ones_own(capsys, own):
    from specjax import run

    assert run.main(["specjax", f"--explain={own}:make"]) == 0
    out = capsys.readouterr().out
    assert f"{own}:make: drafter outside specjax" in out and "config.drafter.shift" in out
    assert "is added to its id." in out and f"{own}.py" in out
    assert run.main(["specjax", f"--explain={own}:rule"]) == 0
    assert "config.accept_keys.unused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["drafter.name=no_module:make"], "there is no module no_module in the working directory"),
        (["drafter.name={own}:mak"], "has no mak; did you mean make?"),
        (["drafter.name={own}:"], "is no object's name; give module:attribute, as my_module:make"),
        (["drafter.name=broken_module:make"], "importing broken_module failed: ZeroDivisionError"),
        (["drafter.name={own}:number"], "gives 7; it must give a specjax.Drafter"),
        (["drafter.name={own}:nothing"], "gives 7; it must give a specjax.Drafter"),
        (["drafter.name={own}:failing"], "cannot be made: KeyError: 'a key' (own_"),
        (["drafter.name={own}:bare"], "cannot be made: too many positional arguments"),
        (["drafter.name={own}:make", "drafter.size=1"], "unknown configuration key 'size'"),
        (["drafter.name={own}:make", "drafter.max_ngram=1"], "does not take the key 'max_ngram'"),
        (["drafter.name={own}:make", "drafter.shift=x"], "'x' is not a whole number (int)"),
        (["accept=no_module:make"], "there is no module no_module"),
        (["accept={own}:bare"], "gives None; it must give a specjax.Accept"),
        (["accept={own}:make"], "cannot be made: missing a required argument: 'target'"),
        (["accept={own}:misspelt"], "class 'l1'; it must be one of L1, L2, L3"),
    ],
)
def test_a_mistake_is_one_line(cli, target, own, arguments, message):
    keys = [f"--config.{each.format(own=own)}" for each in arguments]
    status, out, err, workdir = cli(
        GENERATE, f"--config.target={target}", "--config.prompt=def add", *keys
    )
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not workdir.exists()


def test_the_default_rule(own):
    target = types.LM(None, None, None, 50)
    expected = {
        types.CHAIN: "chain",
        types.DETERMINISTIC: "deterministic",
        types.IID: "recursive",
        types.INDEPENDENT: "recursive",
        types.WITHOUT_REPLACEMENT: "recursive",
        types.COUPLED: "coupled",
    }
    drafter = drafters.make("prompt_lookup", target)
    for siblings in types.SIBLINGS:
        name = accept.default_rule(drafter._replace(siblings=siblings))
        assert name == expected[siblings] and accept.load(name).lossless_class == "L1"
        accept.check_pair(drafter._replace(siblings=siblings), accept.load(name))
    with pytest.raises(UserError, match="declares siblings 'twins'"):
        accept.default_rule(drafter._replace(siblings="twins"))
    assert registry.imported(f"{own}:make")(target).name == "repeat"
