"""The training engine: optimisers, one step in parts and on devices, and runs that are killed, resumed, measured, stopped."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UserError
from specjax.train import checkpoint, display, loop, optimise
from specjax.types import Batch

ROOT = Path(__file__).parents[2]
fast = pytest.mark.fast
V, E, B, T = 11, 8, 4, 6


def equal(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def close(a, b, tolerance=2e-6) -> bool:
    return all(
        np.allclose(x, y, atol=tolerance)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


class Steps:
    """Batches with ragged labels, a pure function of the step, counting what was asked for."""

    def __init__(self):
        self.asked: list[int] = []

    def batch(self, step: int) -> Batch:
        self.asked.append(step)
        random = np.random.default_rng(step)
        labelled = random.random((B, T + 1)) < np.linspace(0.1, 0.9, B)[:, None]
        return Batch(random.integers(0, V, (B, T + 1), dtype=np.int32), labelled)


def initial() -> dict:
    """A bigram model with one hidden layer."""
    keys = jax.random.split(jax.random.key(7), 3)
    shapes = {
        "embed": {"embedding": (V, E)},
        "layers": [{"kernel": (E, E), "scale": (E,)}],
        "head": {"kernel": (E, V)},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    draw = [
        jax.random.normal(jax.random.fold_in(keys[0], i), shape) * 0.5
        for i, shape in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, draw)


def bigram_loss(params, target_params, batch, key, noise=0.0):
    """Cross-entropy where labelled; with ``noise`` it depends on the key."""
    x = params["embed"]["embedding"][batch.tokens[:, :-1]]
    x = x + jnp.tanh(x @ params["layers"][0]["kernel"]) * params["layers"][0]["scale"]
    x = x + noise * jax.random.normal(key, x.shape, x.dtype)
    laws = jax.nn.log_softmax((x @ params["head"]["kernel"]).astype(jnp.float32))
    right = jnp.take_along_axis(laws, batch.tokens[:, 1:, None], -1)[..., 0]
    mask = batch.labelled[:, 1:]
    weight = mask.sum().astype(jnp.float32)

    def mean(values):
        return jnp.where(mask, values, 0).sum() / jnp.maximum(weight, 1)

    return -mean(right), {"accuracy": mean(jnp.exp(right)), "weight": weight}


noisy_loss = functools.partial(bigram_loss, noise=0.1)


def rewrite(params, target_params, batch, key):
    """Half of the text in the model's own words."""
    laws = params["embed"]["embedding"][batch.tokens] @ params["head"]["kernel"]
    own = jax.random.categorical(key, laws)
    return batch.replace(
        tokens=jnp.where(jnp.arange(T + 1) % 2, own, batch.tokens).astype(jnp.int32)
    )


def _optimiser(name="adamw", **changes):
    return optimise.optimiser(name, **{"steps": 20, "learning_rate": 3e-2} | changes)


def _train(workdir, steps=20, *, loss=bigram_loss, optimiser="adamw", params=None, **changes):
    options = {
        "log_every": 4,
        "eval_every": 10,
        "checkpoint_every": 6,
        "config": {"a": 1},
        "batches": Steps(),
    } | changes
    optimiser = _optimiser(optimiser) if isinstance(optimiser, str) else optimiser
    evaluated = options.pop("eval_batches", [Steps().batch(77), Steps().batch(78)])
    params = initial() if params is None else params
    batches = options.pop("batches")
    return loop.train(
        loss,
        params,
        {},
        batches,
        optimiser=optimiser,
        steps=steps,
        workdir=workdir,
        eval_batches=evaluated,
        **options,
    )


def _metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


# --- optimisers ------------------------------------------------------------------------------------------------------


@fast
def test_heads_are_stacked():
    """Muon takes each matrix of a stack as it would take it alone, and no bias is decayed for having two dimensions."""
    draw = jax.random.normal(
        jax.random.key(0), (2, 3, 1, E, E)
    )  # weights and gradients of three heads of one block
    stack, single = (
        {"block": {"kernel": x, "bias": jnp.ones(x.shape[:-1])}} for x in (draw[0], draw[0, 1, 0])
    )
    slopes = (
        {"block": {"kernel": x, "bias": jnp.zeros(x.shape[:-1])}} for x in (draw[1], draw[1, 1, 0])
    )
    changes = []
    for params, slope in zip((stack, single), slopes, strict=True):
        muon = optimise.optimiser(
            "muon", steps=10, learning_rate=0.1, warmup=0.0, clip=0.0, weight_decay=0.5
        )
        changes.append(
            muon.transform.update(slope, muon.transform.init(params), params)[0]["block"]
        )
    assert (
        np.allclose(changes[0]["kernel"][1, 0], changes[1]["kernel"], atol=1e-6)
        and changes[1]["kernel"].any()
    )
    assert not changes[0]["bias"].any() and not changes[1]["bias"].any()


@fast
def test_schedules():
    def rates(name, **changes):
        options = {"steps": 100, "learning_rate": 2.0, "warmup": 0.1, "final": 0.25} | changes
        schedule = optimise.optimiser("sgd", schedule=name, **options).schedule
        return [float(schedule(step)) for step in (0, 5, 10, 55, 100)]

    assert rates("cosine") == pytest.approx([0, 1, 2, 1.25, 0.5])
    assert rates("linear") == pytest.approx([0, 1, 2, 1.25, 0.5])
    assert rates("constant") == pytest.approx([0, 1, 2, 2, 2])
    assert rates("rsqrt") == pytest.approx([0, 1, 2, 2 / 5.5**0.5, 2 / 10**0.5])
    assert rates("linear", warmup=0) == pytest.approx([2, 1.925, 1.85, 1.175, 0.5])
    assert rates("rsqrt", warmup=0)[0] == 2


def _one_update(optimiser, params, grads):
    state = optimiser.transform.init(params)
    return optimiser.transform.update(grads, state, params)[0]


@fast
def test_clipping_and_decay():
    params = {"kernel": jnp.full((1, 2), 10.0), "scale": jnp.full(2, 10.0)}
    grads = {"kernel": jnp.array([[3.0, -9.0]]), "scale": jnp.array([4.0, 0.0])}
    plain = {"warmup": 0, "learning_rate": 1.0, "weight_decay": 0.0, "b1": 0.0}
    by_norm = _one_update(
        _optimiser("sgd", **plain, clip=1.0, clip_value=3.0), params, grads
    )  # [3, -3], [3, 0]
    assert close(
        by_norm, {"kernel": -np.array([[3, -3]]) / 27**0.5, "scale": -np.array([3, 0]) / 27**0.5}
    )
    by_value = _one_update(_optimiser("sgd", **plain, clip=0, clip_value=3.0), params, grads)
    assert close(by_value, {"kernel": -np.array([[3, -3]]), "scale": -np.array([3, 0])})
    assert close(
        _one_update(_optimiser("sgd", **plain, clip=0), params, grads),
        jax.tree.map(lambda x: -x, grads),
    )
    still = jax.tree.map(jnp.zeros_like, grads)
    for name in optimise.NAMES:
        decayed = _one_update(
            _optimiser(name, warmup=0, learning_rate=1.0, weight_decay=0.1), params, still
        )
        assert close(decayed, {"kernel": np.full((1, 2), -1.0), "scale": np.zeros(2)}), name
    # lion and adamw take steps of the rate, whatever the gradient; b2 and eps are theirs
    for name, options in (("lion", {"b2": 0.9}), ("adamw", {"b2": 0.9, "eps": 1e-10})):
        options = {"warmup": 0, "learning_rate": 1.0, "weight_decay": 0.0} | options
        assert close(
            _one_update(_optimiser(name, **options), params, grads)["kernel"],
            np.array([[-1, 1]]),
            1e-4,
        )


@fast
@pytest.mark.parametrize("name", optimise.NAMES)
def test_the_target_has_a_rate_of_its_own(name):
    pair = {"target": initial(), "draft": initial()}
    optimiser = _optimiser(
        name, target_rate=0.25, target_from=3, warmup=0.5, weight_decay=0.0, clip=0.5
    )
    alone = _optimiser(name, warmup=0.5, weight_decay=0.0, clip=0.5)
    apply = jax.jit(lambda grads, state, params: optimiser.transform.update(grads, state, params))
    apply_alone = jax.jit(lambda grads, state, params: alone.transform.update(grads, state, params))
    state, state_alone = optimiser.transform.init(pair), alone.transform.init(initial())
    for step in range(5):
        grads = jax.tree.map(functools.partial(jnp.multiply, step + 1), initial())
        updates, state = apply({"target": grads, "draft": grads}, state, pair)
        expected, state_alone = apply_alone(grads, state_alone, initial())
        if step < 3:  # as if there were no target
            assert close(updates["draft"], expected)
            assert not any(leaf.any() for leaf in jax.tree.leaves(updates["target"]))
    # From the fourth step on both move, the target at a quarter of the rate (in the fifth both have momentum).
    whole, part = (np.linalg.norm(updates[key]["head"]["kernel"]) for key in ("draft", "target"))
    assert 0.05 < part / whole < 0.5
    with pytest.raises(UserError, match="target_rate and target_from"):
        optimiser.transform.init(initial())


@fast
@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("sgdd", {}, "name is 'sgdd'; it must be 'adamw', 'muon', 'sgd' or 'lion'"),
        (
            "adamw",
            {"schedule": "cos"},
            "schedule is 'cos'; it must be 'cosine', 'linear', 'constant' or 'rsqrt'",
        ),
        ("adamw", {"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ("adamw", {"warmup": 1.0}, "warmup is 1.0; it must be at least 0 and below 1"),
        ("adamw", {"b2": 1.5}, "b2 is 1.5"),
        ("adamw", {"clip": -1.0}, "clip is -1.0; it must be at least 0"),
        ("adamw", {"target_from": -1}, "target_from is -1"),
        ("sgd", {"b2": 0.9}, "sgd averages no squares"),
        ("lion", {"eps": 1e-8}, "lion does not divide"),
    ],
)
def test_optimisers_that_cannot_be(name, changes, told):
    with pytest.raises(UserError, match=told) as error:
        _optimiser(name, **changes)
    assert "\n" not in str(error.value)


# --- a run -----------------------------------------------------------------------------------------------------------

MODES = {
    "adamw": {},
    "muon, average, parts": {"optimiser": "muon", "ema": 0.9, "accumulate": 2},
    "rewritten, bfloat16": {"rewrite": rewrite, "precision": "bfloat16"},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_bit_identical(tmp_path, capfd, mode):
    options = {"loss": noisy_loss} | MODES[mode]
    straight = _train(tmp_path / "a", **options)
    _train(tmp_path / "b", 12, **options)
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(
            '{"step": 13, "loss": 0.0}\n{"step": 14, "lo'
        )  # logged after the checkpoint, then killed
    batches = Steps()
    resumed = _train(tmp_path / "b", batches=batches, **options)
    assert batches.asked[-8:] == list(range(12, 20)) and set(batches.asked[:-8]) <= {0}  # its size
    assert equal(straight, resumed)
    steps = [record["step"] for record in _metrics(tmp_path / "b")]
    assert (
        steps == [4, 8, 10, 12, 16, 20] == [record["step"] for record in _metrics(tmp_path / "a")]
    )
    for one, other in zip(_metrics(tmp_path / "a"), _metrics(tmp_path / "b"), strict=True):
        assert one["loss"] == other["loss"] and one["lr"] == other["lr"]
        assert ("heldout_loss" in one) == (one["step"] in (10, 20))
        assert one.get("heldout_loss") == other.get("heldout_loss") or one["step"] == 12
    last = _metrics(tmp_path / "a")[-1]
    assert last["tokens_per_second"] > 0 and set(last["time_share"]) == set(display.PARTS)
    assert sum(last["time_share"].values()) == pytest.approx(1)
    err = capfd.readouterr().err
    assert "resuming from step 12 of 20" in err and "tokens/s; wall time: data" in err
    finished = Steps()
    assert equal(_train(tmp_path / "b", batches=finished, **options), resumed)
    assert set(finished.asked) <= {0}  # nothing left to do
    with pytest.raises(UserError, match="a was 1, is 2"):
        _train(tmp_path / "b", config={"a": 2}, **options)
    if mode == "adamw":
        assert last["loss"] < _metrics(tmp_path / "a")[0]["loss"]
        with pytest.raises(UserError, match="run of 20 steps, more than the 12 asked for"):
            _train(tmp_path / "b", 12, **options)
        with pytest.raises(UserError, match=r"ema\.embed\.embedding is new"):
            _train(tmp_path / "b", ema=0.9, **options)
        assert equal(
            _train(tmp_path / "b", config={"a": 2}, resume_changed=True, **options), resumed
        )
        assert "goes on with a changed config: a was 1, is 2" in capfd.readouterr().err


def test_parts_make_the_whole_batch(tmp_path):
    whole = _train(tmp_path / "1", 6)
    parts = _train(tmp_path / "4", 6, accumulate=4)
    assert close(whole, parts) and not equal(whole, initial())
    for one, other in zip(_metrics(tmp_path / "1"), _metrics(tmp_path / "4"), strict=True):
        for name in ("loss", "accuracy", "grad_norm", "heldout_loss", "heldout_accuracy"):
            assert one.get(name) == pytest.approx(other.get(name), abs=1e-5)
    # Evaluation, too, weighs the labels: two batches are one twice as long.
    batches = [Steps().batch(3), Steps().batch(4)]
    together = Batch(
        *(
            np.concatenate(parts)
            for parts in zip(*((b.tokens, b.labelled) for b in batches), strict=True)
        )
    )
    evaluate = loop.evaluator(bigram_loss)
    assert evaluate(whole, {}, batches) == pytest.approx(evaluate(whole, {}, [together]), abs=1e-6)


def test_average_precision_and_the_callers_parameters(tmp_path):
    seen, params = [], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial())

    def loss(params, target_params, batch, key):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves((params, target_params)))
        return bigram_loss(params, target_params, batch, key)

    kept = jax.tree.map(np.array, params)
    after = []
    _train(
        tmp_path / "s",
        3,
        params=params,
        eval_every=1,
        examine=lambda params: after.append(params) or {},
    )
    after = [jax.tree.map(np.array, params) for params in after]
    average = _train(tmp_path / "e", 3, params=params, ema=0.5)
    expected = jax.tree.map(lambda a, b, c: (a + 2 * b + 4 * c) / 7, *after)
    assert close(average, expected, 1e-6) and equal(params, kept)
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {
        jnp.dtype("float32")
    }  # the master copy
    evaluated = loop.evaluator(bigram_loss)(average, {}, [Steps().batch(77), Steps().batch(78)])
    assert _metrics(tmp_path / "e")[-1]["heldout_loss"] == pytest.approx(
        evaluated["loss"], abs=1e-6
    )
    rounded = _train(tmp_path / "h", 3, params=params, precision="bfloat16", loss=loss)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
    assert close(rounded, after[2], 0.05) and not equal(rounded, after[2])


def test_the_best_is_kept_and_told(tmp_path):
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3])
    examined = []

    def examine(params):
        examined.append(jax.tree.map(np.array, params))
        return {"tau": next(scores)}

    options = {"eval_every": 4, "checkpoint_every": 7, "best": "heldout_tau", "examine": examine}
    last = _train(tmp_path, **options)
    records = _metrics(tmp_path)
    assert [record.get("heldout_tau") for record in records] == [0.2, 0.9, 0.5, 0.4, 0.3]
    assert [(record["best_step"], record["best_value"]) for record in records] == [(4, 0.2)] + [
        (8, 0.9)
    ] * 4
    assert equal(last, examined[-1])
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [8, 14, 20]
    best = _train(tmp_path, keep="best", **options)  # finished: only the answer is another
    assert equal(best, examined[1]) and not equal(best, last)
    with pytest.raises(
        UserError, match="best is 'heldout_x'; it must be one of heldout_accuracy, heldout_loss"
    ):
        _train(tmp_path / "x", 4, best="heldout_x", keep="best")
    with pytest.raises(UserError, match="nothing is evaluated"):
        _train(tmp_path / "y", 4, keep="best", eval_batches=())
    assert not (tmp_path / "y").exists()


@fast
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 0}, "train.steps is 0; it must be at least 1"),
        ({"eval_every": 0}, "train.eval_every is 0"),
        (
            {"accumulate": 3},
            r"4 rows cannot be divided among 3 parts \(accumulate\); take a multiple of 3",
        ),
        ({"ema": 1.0}, "train.ema is 1.0"),
        ({"precision": "float16"}, "precision is 'float16'; it must be 'float32' or 'bfloat16'"),
        ({"keep": "first"}, "keep is 'first'; it must be 'last' or 'best'"),
        (
            {"optimiser": _optimiser(target_rate=0.25)},
            "target_rate and target_from are for training the target along",
        ),
    ],
)
def test_runs_that_cannot_be(tmp_path, changes, told):
    with pytest.raises(UserError, match=told) as error:
        _train(tmp_path / "work", **changes)
    assert "\n" not in str(error.value) and not (tmp_path / "work").exists()


@fast
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    def loss(params, target_params, batch, key):
        tokens = batch.tokens[0, 0]  # a step number in disguise, see below
        return (params["w"] ** 2).sum() * jnp.where(tokens == 14, jnp.nan, 1.0), {}

    class Numbered:
        def batch(self, step):
            return Batch(np.full((2, 5), step, np.int32))

    options = {"optimiser": _optimiser(learning_rate=0.1), "steps": 20, "workdir": tmp_path}
    with pytest.raises(
        UserError, match="loss is nan at step 15; the last good checkpoint is step 12"
    ) as error:
        loop.train(
            loss, {"w": jnp.ones(3)}, {}, Numbered(), **options, log_every=4, checkpoint_every=6
        )
    assert "\n" not in str(error.value)
    assert [record["step"] for record in _metrics(tmp_path)] == [4, 8, 12]
    assert all(np.isfinite(record["loss"]) for record in _metrics(tmp_path))


@fast
def test_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    sums = checkpoint._checksums

    def full(folder):
        if folder.name == "12":
            raise OSError(28, "No space left on device")
        return sums(folder)

    monkeypatch.setattr(checkpoint, "_checksums", full)
    with pytest.raises(
        UserError, match="checkpoint 12 .*No space left on device.*checkpoint 10 is intact"
    ) as error:
        _train(tmp_path)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    straight = _train(tmp_path / "a")
    assert equal(_train(tmp_path), straight)
    with (
        display.Log(tmp_path / "a", 20) as log,
        pytest.raises(UserError, match="of step 21 .*No space left on device"),
    ):
        log._lines.close()
        log._lines = open("/dev/full", "w")  # noqa: SIM115 (the log closes it, though that fails as well)
        log.write({"step": 21})


def test_events_for_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    _train(tmp_path, 8)
    _train(tmp_path, 12)
    found = {}
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        raw, at = path.read_bytes(), 0
        while at < len(raw):  # a length in 8 bytes, its checksum in 4, the event, its checksum in 4
            size = int.from_bytes(raw[at : at + 8], "little")
            event = Event.FromString(raw[at + 12 : at + 12 + size])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            at += 16 + size
    for record in _metrics(tmp_path):
        assert found["loss", record["step"]] == pytest.approx(record["loss"], rel=1e-5)
        assert found["time_step", record["step"]] == pytest.approx(
            record["time_share"]["step"], rel=1e-5
        )
    assert {step for _, step in found} == {4, 8, 10, 12} and ("heldout_loss", 12) in found


# --- other processes -------------------------------------------------------------------------------------------------


def _python(script: str, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)


def test_two_devices_make_the_same_parameters_as_one(tmp_path):
    script = f"""
        import sys; sys.modules["torch"] = None  # TensorBoard's writer would import it, which takes seconds
        import jax, pytest, test_engine as t
        from pathlib import Path
        root = Path({str(tmp_path)!r})
        options = {{"loss": t.noisy_loss, "accumulate": 2, "ema": 0.9, "rewrite": t.rewrite}}
        one = t._train(root / "1", 6, devices=jax.local_devices()[:1], **options)
        two = t._train(root / "2", 6, **options)
        assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(two))
        assert t.close(one, two)
        straight, losses = t._metrics(root / "1"), t._metrics(root / "2")
        assert losses[-1]["heldout_loss"] == pytest.approx(straight[-1]["heldout_loss"], abs=1e-5)
        with pytest.raises(t.UserError, match="4 rows cannot be divided among 4 parts .accumulate. on 2 devices"):
            t._train(root / "x", accumulate=4)
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    assert _python(script, XLA_FLAGS=flags).wait(120) == 0


def test_a_run_killed_while_it_saves_goes_on(tmp_path):
    options = {"loss": noisy_loss, "rewrite": rewrite, "ema": 0.9}
    moment = np.random.default_rng(time.time_ns()).uniform(
        0, 0.03
    )  # from before the files are begun to after the last
    script = f"""
        import os, signal, sys, threading; sys.modules["torch"] = None  # as above
        import test_engine as t
        begin = t.checkpoint.Checkpoints.save
        def save(self, step, *rest):
            if step == 12:
                threading.Timer({moment}, os.kill, (os.getpid(), signal.SIGKILL)).start()
            begin(self, step, *rest)
        t.checkpoint.Checkpoints.save = save
        options = dict(loss=t.noisy_loss, rewrite=t.rewrite, ema=0.9)
        t._train(t.Path({str(tmp_path / "b")!r}), 2000, **options)
    """
    assert _python(script).wait(120) == -signal.SIGKILL
    straight = _train(tmp_path / "a", **options)
    assert equal(_train(tmp_path / "b", **options), straight), moment
    steps = [record["step"] for record in _metrics(tmp_path / "b")]
    assert steps == [record["step"] for record in _metrics(tmp_path / "a")]
    assert not list((tmp_path / "b" / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_process_resumes_bit_identical(tmp_path, mode):
    script = f"""
        import test_engine as t
        t._train(t.Path({str(tmp_path / "b")!r}), 600, loss=t.noisy_loss, checkpoint_every=5, **t.MODES[{mode!r}])
    """
    options = {"loss": noisy_loss} | MODES[mode]
    straight = _train(tmp_path / "a", 600, checkpoint_every=300, **options)
    log, reached = tmp_path / "b" / "metrics.jsonl", 0
    for kill in range(4):
        process, before = _python(script), reached
        while reached <= before + 4 and process.poll() is None:  # until it has logged twice
            time.sleep(0.02)
            lines = log.read_text().splitlines() if log.exists() else []
            reached = max([before, *(json.loads(line)["step"] for line in lines[:-1])])
        time.sleep(0.037 * kill)  # somewhere in a step, a save or a log line
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run was over before it was killed"
    assert equal(_train(tmp_path / "b", 600, checkpoint_every=5, **options), straight)
    steps = [record["step"] for record in _metrics(tmp_path / "b")]
    assert steps == [record["step"] for record in _metrics(tmp_path / "a")]
