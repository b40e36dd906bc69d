"""A head of one's own in one file: trained, resumed, saved, decoded, measured and cited."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import count
import jax
import numpy as np
import pytest
from commandline import BENCH, GENERATE, TEXT

import specjax
from specjax import drafters, registry, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf

MODULE = '''
"""Clover: a recurrent head on the target's last feature. L1 with a rule that takes its siblings."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.control import Controller
from specjax.declare import key
from specjax.drafters import files, growth
from specjax.drafters.growth.plans import Method
from specjax.drafters.shared_keys import StoredKeys
from specjax.models import lm
from specjax.topology import shapes
from specjax.types import Training

NAME = "clover"
REFERENCE = "@misc{clover2026,\\n  title = {Clover},\\n}"


class Keys(StoredKeys):
    """The keys of ``clover``."""

    inner: int = key(0, "width of the state; 0: as in the files, or the target's", least=0,
                     size=lambda params: params["out"].shape[0])
    residual: bool = key(False, "whether the state keeps its old value", fact="residual")


class Loss(declare.Keys):
    """The keys of config.loss."""

    pull: float = key(1.0, "weight of the cross-entropy", least=0)


class State(struct.PyTreeNode):
    feature: jax.Array  # [B,E] of the token before the pending one
    known: jax.Array  # bool[B] whether there is one


@declare.method(Keys, Loss)
def make(target, keys: Keys):
    """Drafts with a recurrent head."""
    given, keys = files.read(NAME, target, keys)
    plan = growth.read(Method(NAME, shapes.chain(3), "iid", target.vocab_size), keys)
    cell = Bound(_cell, given.ends, keys.residual)
    stepper = growth.Stepper(
        init=_init, begin=Bound(_begin, cell), step=Bound(_step, cell), commit=_commit, lazy=True
    )
    width = given.ends.width
    training = Training(
        loss=Bound(_loss, target, cell),
        start=Bound(_start, width, keys.inner or width),
        facts=(("residual", keys.residual), ("hidden_size", width)),
    )
    return growth.build(
        NAME, stepper, plan, given.init_params(NAME), training=training, features=True
    )


def _start(width, inner, target_params, key):
    ins, outs = jax.random.split(key)
    draw = jax.nn.initializers.glorot_normal()
    return {"mix": {"in": draw(ins, (2 * width, inner))}, "out": draw(outs, (inner, width))}


def _cell(ends, residual, params, state, tokens):
    """([...,E], i32[...]) -> (logits, the new state)."""
    read = jnp.concatenate([state, ends.embed(params.target, tokens)], -1)
    new = jnp.tanh(read @ params.draft["mix"]["in"]) @ params.draft["out"]
    new = new + state if residual else new
    return ends.unembed(params.target, new), new


def _init(params, context, target_out, slots):
    last = jnp.maximum(context.length - 2, 0)
    return State(_at(target_out.hidden, last), context.length > 1)


def _begin(cell, params, context, kept):
    logits, state = cell(params, kept.feature[:, None], context.pending[:, None])
    return growth.Begun(logits[:, 0], kept, state, kept.known)


def _step(cell, params, kept, nodes, block):
    return cell(params, growth.at(block, nodes.parents), nodes.tokens)


def _commit(params, kept, drafted, verdict, target_out):
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    last = jnp.maximum(verdict.count - 1, 0)
    place = jnp.take_along_axis(fed, last[:, None], 1)[:, 0]
    alive = verdict.count > 0
    feature = jnp.where(alive[:, None], _at(target_out.hidden, place), kept.feature)
    return State(feature, kept.known | alive)


def _at(values, index):
    return jnp.take_along_axis(values, index[:, None, None], 1)[:, 0]


def _loss(target, cell, params, target_params, batch, key, *, pull: float = 1.0):
    from specjax.types import ModelParams

    pair, tokens = ModelParams(target_params, params), batch.tokens
    features = jax.lax.stop_gradient(lm.forward(target, target_params, tokens[:, :-1]).hidden)
    logits, _ = cell(pair, features[:, :-1], tokens[:, 1:-1])
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 2:, None], -1)
    return -pull * right.mean(), {"agreement_1": (logits.argmax(-1) == tokens[:, 2:]).mean()}


def unnamed(target):
    return make(target)._replace(name="medusa")


def halves(*, part: int = 2) -> Controller:
    """Every draft has at most ``part`` levels."""
    return Controller(
        "halves",
        limit=lambda state: state,
        init=lambda context: jnp.full(context.length.shape, part, jnp.int32),
    )
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    name = f"head_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)
    registry.imported.cache_clear()


def train(own, target, text, *more, name="make"):
    return [
        f"--config=heads:{own}:{name}",
        f"--config.target={target}",
        f"--config.data.files={text}",
        *("--config.train.steps=20", "--config.train.length=16", "--config.train.batch_size=4"),
        *("--config.train.log_every=10", "--config.examine.prompts=0"),
        *("--config.data.packing=documents", "--config.train.eval_batches=1"),
        *more,
    ]


def test_from_one_file_to_a_table(cli, own, target, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join([TEXT] * 200))
    heads = tmp_path / "heads"
    more = "--config.drafter.residual=True", "--config.loss.pull=2.0", "--config.drafter.inner=8"
    status, _, err, _ = cli(*train(own, target, text, *more), workdir=heads)
    assert status == 0, err
    # The same command has nothing left to do; a longer run resumes from the last checkpoint.
    longer = *more, "--config.train.steps=30"
    status, out, err, _ = cli(*train(own, target, text, *longer), workdir=heads)
    assert status == 0 and "resum" in out + err
    # Files: names of the tree, and what the head states of itself.
    config = json.loads((heads / "model/config.json").read_text())
    assert (config["drafter"], config["residual"], config["vocabulary"] != "") == (
        "clover",
        True,
        True,
    )
    head = head_files.read(heads, "clover")
    assert head.params["mix"]["in"].shape[1] == 8
    loaded = hf.load(target)
    made = drafters.make(f"{own}:make", loaded.lm, model=heads)
    assert made.training.facts[0] == ("residual", True)
    with pytest.raises(UserError, match="inner is 9, and the given clover has 8; leave it out"):
        drafters.make(f"{own}:make", loaded.lm, model=heads, inner=9)
    # It decodes what plain decoding does, alone and with a controller of one's own.
    use = f"--config.drafter.name={own}:make", f"--config.drafter.model={heads}"
    base = GENERATE, f"--config.target={target}", "--config.prompt=def add"
    base += ("--config.max_new_tokens=12",)
    _, plain, _, _ = cli(*base)
    ways = (), ("--config.drafter.tree=2x2",), (f"--config.drafter.control={own}:halves:1",)
    for number, more in enumerate(ways):
        status, out, err, _ = cli(*base, *use, *more, workdir=tmp_path / f"way{number}")
        assert status == 0 and out.splitlines()[0] == plain.splitlines()[0], err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(["def add", "return a", "sub(a, b"] * 4))
    bench = [BENCH, f"--config.target={target}", f"--config.prompts={prompts}", *use]
    bench += ["--config.grid.temperatures=(0.0,1.0)", "--config.batch_size=3"]
    bench += ["--config.repeats=1", "--config.max_new_tokens=36", "--config.report=False"]
    status, _, err, workdir = cli(*bench, workdir=tmp_path / "bench")
    rows = json.loads((workdir / "results.json").read_text())["rows"]
    assert status == 0 and [row["temperature"] for row in rows] == [0, 1]
    assert all(row["lossless"]["passed"] for row in rows), [row["lossless"] for row in rows]
    assert {row["class_status"] for row in rows} == {"declared"}
    assert "title = {Clover}" in specjax.cite(f"{own}:make")
    # It learns while it decodes, and is saved again.
    stream = ["--config=online", f"--config.target={target}", f"--config.prompts={prompts}", *use]
    stream += ["--config.max_new_tokens=8", "--config.online.every=4", "--config.report=False"]
    status, _, err, _ = cli(*stream, workdir=tmp_path / "online")
    assert status == 0, err
    learnt = head_files.read(tmp_path / "online", "clover").params
    assert (learnt["out"] != head.params["out"]).any()
    # Further training begins with these heads.
    init = f"--config.init={heads}", "--config.drafter.residual=True"
    status, _, err, _ = cli(*train(own, target, text, *init), workdir=tmp_path / "more")
    assert status == 0, err
    assert cli(f"--explain={own}:make")[1].count("width of the state") == 1


def test_the_head_of_the_page(cli, target, tmp_path, monkeypatch):
    """docs/extending.md: the file is written, trained, examined, measured and cited as there."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8")
    [code] = re.findall(r"%%writefile my_head.py\n(.*?)```", page, re.DOTALL)
    assert count.code_lines(code) <= 60
    name = f"head_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "text.txt").write_text("\n".join([TEXT] * 200))
    (tmp_path / "prompts.txt").write_text("\n".join(["def add", "return a", "sub(a, b"]))
    monkeypatch.chdir(tmp_path)
    small = "--config.drafter.inner=8", "--config.examine.every=20", "--config.examine.prompts=2"
    small += "--config.examine.prompt_tokens=8", "--config.examine.new_tokens=8"
    heads = tmp_path / "heads"
    status, _, err, _ = cli(*train(name, target, "text.txt", *small), workdir=heads)
    assert status == 0, err
    summary = json.loads((heads / "summary.json").read_text())
    assert summary["heldout_decoded_tau_t0"] >= 1
    bench = [BENCH, f"--config.target={target}", "--config.prompts=prompts.txt"]
    bench += [f"--config.drafter.name={name}:make", f"--config.drafter.model={heads}"]
    bench += ["--config.repeats=1", "--config.max_new_tokens=12", "--config.report=False"]
    for number, more in enumerate(((), ("--config.drafter.tree=4x2x1",))):
        status, _, err, workdir = cli(*bench, *more, workdir=tmp_path / f"bench{number}")
        [row] = json.loads((workdir / "results.json").read_text())["rows"]
        assert status == 0 and row["lossless"]["passed"], err
    assert "A Recurrent Head" in specjax.cite(f"{name}:make")
    sys.modules.pop(name, None)
    registry.imported.cache_clear()


def test_what_cannot_be_saved_is_refused_before_the_first_step(cli, own, target, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join([TEXT] * 200))
    status, _, err, workdir = cli(*train(own, target, text, name="unnamed"))
    assert status == 2 and "gives a drafter with the name medusa, which is one of specjax" in err
    assert not (workdir / "checkpoints").exists()
    status, _, err, _ = cli(*train(own, target, text, "--config.loss.push=1.0"))
    assert status == 2 and "unknown configuration key 'push'" in err
    status, _, err, _ = cli(*train(own, target, text, "--config.loss.pull=x"))
    assert status == 2 and "'x' is not a number" in err


@pytest.mark.parametrize(
    "params, message",
    [
        ([1, 2], "must be a dict of arrays"),
        ({"a.b": np.zeros(1)}, "is called 'a.b'; use texts without dots"),
        ({"a": 1.0}, "the parameter a of clover is an object of type float"),
        ({}, "clover has no parameters that can be saved"),
    ],
)
def test_trees_that_no_file_holds(tmp_path, params, message):
    with pytest.raises(UserError, match=message):
        head_files.write(tmp_path / "heads", "clover", params, {})
    assert not (tmp_path / "heads").exists()


def test_the_law_of_an_own_head(own):
    """Exact, by enumeration, with trees and chains, as the heads of specjax."""
    target = testing.tabular(3)
    registry.imported(f"{own}:make")
    table = testing.random_table(0, 3)
    fresh = drafters.make(f"{own}:make", target, gamma=2)
    params = jax.tree.map(np.asarray, fresh.training.start(table, jax.random.key(0)))
    for keys in ({"gamma": 2}, {"tree": "2x1"}):
        drafter = drafters.make(f"{own}:make", target, params=params, **keys)
        report = testing.check_drafter(
            drafter,
            target,
            specjax.ModelParams(table, drafter.init_params(None)),
            quick=True,
            progress=False,
        )
        assert report.passed, report
