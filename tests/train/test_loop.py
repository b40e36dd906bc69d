"""The training loop: resumed runs, batches in parts, averages, the best step, errors, records."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import (
    MODES,
    E,
    Steps,
    V,
    bigram_loss,
    close,
    equal,
    initial,
    make_optimiser,
    metrics,
    noisy_loss,
    train,
)

from specjax.errors import UserError
from specjax.theory import devices
from specjax.train import checkpoint, display, evaluate, loop, records
from specjax.train.settings import Schedule, Settings
from specjax.types import Batch

fast = pytest.mark.fast


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    """Runs with the same loss, optimiser and settings share their compiled programs."""
    compile_programs, known = loop.compile_programs, {}

    def compiled(*options):
        *key, stored = options  # shardings: these follow from the others
        if tuple(key) not in known:
            known[tuple(key)] = compile_programs(*key, stored)
        return known[tuple(key)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compile_programs", compiled)
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_is_bit_identical(tmp_path, capfd, mode):
    options = {"loss": noisy_loss} | MODES[mode]
    straight = train(tmp_path / "a", **options)
    train(tmp_path / "b", 12, **options)
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        # Logged after the checkpoint, then killed.
        file.write('{"step": 13, "loss": 0.0}\n{"step": 14, "lo')
    batches = Steps()
    resumed = train(tmp_path / "b", batches=batches, **options)
    # Step 0 may be requested for its size.
    assert batches.asked[-8:] == list(range(12, 20)) and set(batches.asked[:-8]) <= {0}
    assert equal(straight, resumed)
    one, other = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert [record["step"] for record in one] == [4, 6, 8, 10, 12, 16, 18, 20]
    assert [record["step"] for record in other] == [4, 6, 8, 10, 12, 16, 18, 20]
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == b["loss"] and a["lr"] == b["lr"]
        assert ("heldout_loss" in a) == (a["step"] in (10, 20))
        assert a.get("heldout_loss") == b.get("heldout_loss") or a["step"] == 12
    assert one[-1]["tokens_per_second"] > 0 and set(one[-1]["time_share"]) == set(records.PARTS)
    assert sum(one[-1]["time_share"].values()) == pytest.approx(1)
    err = capfd.readouterr().err
    assert "resuming from step 12 of 20" in err and "first evaluation (mostly compilation)" in err
    finished = Steps()
    assert equal(train(tmp_path / "b", batches=finished, **options), resumed)
    assert set(finished.asked) <= {0}  # no step is left
    with pytest.raises(UserError, match="a was 1, is 2"):
        train(tmp_path / "b", config={"a": 2}, **options)


def test_a_run_that_cannot_be_resumed(tmp_path, capfd):
    result = train(tmp_path)
    assert metrics(tmp_path)[-1]["loss"] < metrics(tmp_path)[0]["loss"]
    with pytest.raises(UserError, match=r"run of 20 steps, but config.train.steps is 12"):
        train(tmp_path, 12)
    with pytest.raises(UserError, match=r"ema\.embed\.embedding is new"):
        train(tmp_path, ema=0.9)
    assert equal(train(tmp_path, config={"a": 2}, resume_changed=True), result)
    assert "resumed with a changed config: a was 1, is 2" in capfd.readouterr().err


def test_parts_make_the_whole_batch(tmp_path):
    whole = train(tmp_path / "1", 6)
    parts = train(tmp_path / "4", 6, accumulate=4)
    assert close(whole, parts) and not equal(whole, initial())
    for one, other in zip(metrics(tmp_path / "1"), metrics(tmp_path / "4"), strict=True):
        for name in ("loss", "accuracy", "grad_norm", "heldout_loss", "heldout_accuracy"):
            assert one.get(name) == pytest.approx(other.get(name), abs=1e-5)
    # Evaluation weighs the labels too: two batches are one of twice the size.
    batches = [Steps().batch(3), Steps().batch(4)]
    together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
    measure = evaluate.evaluator(bigram_loss)
    assert measure(whole, {}, batches) == pytest.approx(measure(whole, {}, [together]), abs=1e-6)


def test_average_precision_and_the_parameters_of_the_caller(tmp_path):
    seen, params = [], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial())

    def loss(params, target_params, batch, key):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves((params, target_params)))
        return bigram_loss(params, target_params, batch, key)

    kept = jax.tree.map(np.array, params)
    after = []
    train(
        tmp_path / "s",
        3,
        params=params,
        eval_every=1,
        examine=lambda params: after.append(jax.tree.map(np.array, params)) or {},
    )
    average = train(tmp_path / "e", 3, params=params, ema=0.5)
    expected = jax.tree.map(lambda a, b, c: (a + 2 * b + 4 * c) / 7, *after)
    assert close(average, expected, 1e-6) and equal(params, kept)
    # The parameters themselves are float32.
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {jnp.dtype("float32")}
    measure = evaluate.evaluator(bigram_loss)
    evaluated = measure(average, {}, [Steps().batch(77), Steps().batch(78)])
    heldout = metrics(tmp_path / "e")[-1]["heldout_loss"]
    assert heldout == pytest.approx(evaluated["loss"], abs=1e-6)
    rounded = train(tmp_path / "h", 3, params=params, precision="bfloat16", loss=loss)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
    assert close(rounded, after[2], 0.05) and not equal(rounded, after[2])


def test_held_out_batches_may_have_a_loss_without_noise(tmp_path):
    params = train(tmp_path, 2, loss=noisy_loss, held_out_loss=bigram_loss, eval_every=1)
    record = metrics(tmp_path)[-1]
    plain, noisy = (
        evaluate.evaluator(loss)(params, {}, [Steps().batch(77), Steps().batch(78)])
        for loss in (bigram_loss, noisy_loss)
    )
    assert record["heldout_loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert abs(plain["loss"] - noisy["loss"]) > 1e-4


def test_the_best_is_kept_and_recorded(tmp_path):
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3])
    examined = []

    def examine(params):
        examined.append(jax.tree.map(np.array, params))
        return {"tau": next(scores)}

    options = {"eval_every": 4, "checkpoint_every": 7, "best": "heldout_tau", "examine": examine}
    options["examine_every"] = 100  # what decides is measured at every evaluation
    last = train(tmp_path, **options)
    logged = [record for record in metrics(tmp_path) if "heldout_tau" in record]
    assert [record["heldout_tau"] for record in logged] == [0.2, 0.9, 0.5, 0.4, 0.3]
    best_so_far = [(record["best_step"], record["best_value"]) for record in logged]
    assert best_so_far == [(4, 0.2)] + [(8, 0.9)] * 4
    assert equal(last, examined[-1])
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [8, 14, 20]
    best = train(tmp_path, keep="best", **options)  # finished: only the result is different
    assert equal(best, examined[1]) and not equal(best, last)
    with pytest.raises(
        UserError, match="best is 'heldout_x'; it must be one of heldout_accuracy, heldout_loss"
    ):
        train(tmp_path / "x", 4, best="heldout_x", keep="best")
    with pytest.raises(UserError, match="nothing is evaluated"):
        train(tmp_path / "y", 4, keep="best", eval_batches=())
    assert not (tmp_path / "y").exists()


def test_tokens_per_round_are_measured_less_often_than_the_loss(tmp_path):
    train(tmp_path, 5, eval_every=1, examine_every=2, examine=lambda params: {"tau": 1.0})
    logged = metrics(tmp_path)
    assert all("heldout_loss" in record for record in logged)
    assert [record["step"] for record in logged if "heldout_tau" in record] == [2, 4, 5]
    assert not Settings().examine_always
    assert Settings(best="heldout_tau").examine_always and Settings(keep="best").examine_always


@fast
@pytest.mark.parametrize(
    ("steps", "evaluations"),
    [(60, [60]), (250, [100, 200, 250]), (4000, list(range(200, 4001, 200)))],
)
def test_evaluations_are_spread_over_the_run(steps, evaluations):
    schedule = Schedule(steps=steps)
    assert [step for step in range(1, steps + 1) if schedule.evaluates(step)] == evaluations
    assert all(schedule.examines(step) for step in evaluations)
    # Where an interval skips multiples, the next evaluation measures.
    uneven = Schedule(steps=20, eval_every=4, examine_every=6)
    assert [step for step in (4, 8, 12, 16, 20) if uneven.examines(step)] == [8, 12, 20]


@fast
def test_a_sum_over_heads_is_shown_per_token():
    """Two batches with other numbers of head tokens per label: the quotient of the sums."""
    batches = [
        {"loss": 8.0, "scale": 2.0, "uniform": 4.0, "weight": 3.0},
        {"loss": 2.0, "scale": 1.0, "uniform": 2.0, "weight": 1.0},
    ]
    values = evaluate.mean(batches)
    assert values == pytest.approx(
        {"loss": 6.5, "loss_per_token": 26 / 7, "uniform_per_token": 14 / 7}
    )
    joint = evaluate.mean([{**batch, "heads": 5.0} for batch in batches])
    assert joint["loss"] == 6.5 and joint["loss_per_token"] == pytest.approx(5.0 / 1.75)
    empty = evaluate.mean([{"loss": 0.0, "scale": 0.0, "uniform": 0.0, "weight": 0.0}])
    assert empty == {"loss": 0.0, "loss_per_token": 0.0, "uniform_per_token": 0.0}
    alone = evaluate.mean([{"loss": 2.0, "uniform": 3.0, "weight": 1.0}])
    assert alone == {"loss": 2.0, "uniform_per_token": 3.0}


@fast
def test_what_a_line_of_progress_has(capfd, monkeypatch):
    now = iter([100.0, 100.0, 112.0, 600.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(now))
    record = {"loss": 32.9, "tokens_per_second": 1234.0}
    heads = {"loss_per_token": 8.225, "uniform_per_token": 6.238}
    with display.Display(0, 61) as shown:
        start = {"step": 1, "loss": 32.9, "tokens_per_second": None, "uniform_per_token": 40.0}
        shown.show(start)
        shown.reach(1)
        shown.show({"step": 11, **record, **heads})
        held_out = {"heldout_loss_per_token": 8.1, "heldout_tau_t0": 1.5, "heldout_tau_t0.5": 1.2}
        shown.show({"step": 61, **record, **heads, **held_out})
    lines = capfd.readouterr().err.splitlines()
    assert lines[1:] == [
        "step 11/61, loss 8.225 per head token (uniform guess 6.238), 1,234 tokens/s, 60 s left",
        "step 61/61, loss 8.225 per head token (uniform guess 6.238), held-out 8.100, tau 1.50 at "
        "temperature 0, tau 1.20 at temperature 0.5, 1,234 tokens/s",
    ]
    assert lines[0] == "step 1/61, loss 32.900 (uniform guess 40.000)"


@fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "train.steps is 0; it must be a whole number >= 1"),
        ({"eval_every": -1}, "train.eval_every is -1; it must be a whole number >= 0"),
        ({"examine_every": 0}, "examine_every is 0; it must be a whole number >= 1"),
        (
            {"accumulate": 3},
            r"4 rows cannot be divided among 3 parts \(accumulate\); take a multiple of 3",
        ),
        ({"ema": 1.0}, "train.ema is 1.0"),
        ({"precision": "float16"}, "precision is 'float16'; it must be one of float32, bfloat16"),
        ({"keep": "first"}, "keep is 'first'; it must be one of last, best"),
        (
            {"optimiser": make_optimiser(target_rate=0.25)},
            "target_rate and target_from are for objectives that train the target",
        ),
    ],
)
def test_invalid_runs(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as error:
        train(tmp_path / "work", **changes)
    assert "\n" not in str(error.value) and not (tmp_path / "work").exists()


@fast
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    def loss(params, target_params, batch, key):
        step = batch.tokens[0, 0]  # see below
        return (params["w"] ** 2).sum() * jnp.where(step == 14, jnp.nan, 1.0), {}

    class Numbered:
        def batch(self, step):
            return Batch(np.full((2, 5), step, np.int32))

    task = loop.Task(loss, {"w": jnp.ones(3)}, {}, Numbered())
    schedule = Schedule(steps=20, log_every=4, checkpoint_every=6)
    with pytest.raises(
        UserError, match="loss is nan at step 15; the last good checkpoint is step 12"
    ) as error:
        loop.train(task, make_optimiser(learning_rate=0.1), schedule, tmp_path)
    assert "\n" not in str(error.value)
    # At a checkpoint too: a run that goes on from it has the records of one that was not stopped.
    assert [record["step"] for record in metrics(tmp_path)] == [4, 6, 8, 12]
    assert all(np.isfinite(record["loss"]) for record in metrics(tmp_path))


@fast
def test_a_full_disk_stops_the_run(tmp_path, monkeypatch):
    sums = checkpoint.checksums

    def full(folder):
        if folder.name == "12":
            raise OSError(28, "No space left on device")
        return sums(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "checksums", full)
        with pytest.raises(
            UserError, match="checkpoint 12 .*No space left on device.*checkpoint 10 is intact"
        ) as error:
            train(tmp_path)
    assert "\n" not in str(error.value)
    straight = train(tmp_path / "a")
    assert equal(train(tmp_path), straight)


@fast
def test_labels_are_the_predictions_of_all_depths():
    depths = {"loss": 4.0, "agreement_1": 4.0, "alpha_1": 4.0, "agreement_2": 3.0}
    assert evaluate.labels([{"loss": 1.0, "weight": depths}, {"weight": 9.0}]) == {"labels": 8.0}
    joint = {"loss": 1.0, "language": 6.0, "heads": 5.0}
    assert evaluate.labels([{"weight": joint}]) == {"labels": 1.0}
    assert evaluate.labels([{"loss": 1.0}]) == {}
    # A loss of a user's own may name its metrics alone.
    assert evaluate.labels([{"weight": {"seen": 3.0}}]) == {"labels": 3.0}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mfu_is_the_share_of_the_operations_of_a_known_device(tmp_path, monkeypatch, accumulate):
    """Of two matrices of E x E and E x V: six operations per parameter and token."""
    device = devices.named("H100 SXM")._replace(flops=1e9, kinds=("cpu",))
    monkeypatch.setattr(devices, "DEVICES", (device,))
    train(tmp_path, 12, accumulate=accumulate)
    with_rate = [each for each in metrics(tmp_path) if each["tokens_per_second"]]
    assert len(with_rate) >= 2
    operations = 6 * (E * E + E * V)  # of a token
    for record in with_rate:
        tokens = record["flops"] // operations
        assert tokens > 1 and record["flops"] == tokens * operations
        expected = record["tokens_per_second"] * operations / 1e9
        assert record["mfu"] == pytest.approx(expected, rel=1e-9)
    monkeypatch.undo()
    train(tmp_path / "unknown", 12)
    assert not any("mfu" in record for record in metrics(tmp_path / "unknown"))
