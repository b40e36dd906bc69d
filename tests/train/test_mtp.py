"""Targets that are trained together with heads: loss, gradients, schedule, whole runs."""

from __future__ import annotations

import functools

import cases
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import heads_rollout as _rollout
from internals import setup_of
from train_cases import equal, metrics, small_config

from specjax import drafters, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.train import checkpoint, objectives, recipes, with_heads
from specjax.types import Batch, ModelParams

VOCAB, STEPS = 8, 10
TEXT_LABELS = {"mtp": {}, "mtp_module": {"ce": 1.0, "weight": 0.0}}
COUNT = {"mtp": {"heads": 3}, "mtp_module": {"modules": 2}}


@functools.cache
def small(name):
    """A target of three layers, its heads with random parameters, and both parameters."""
    target, params = testing.tiny(layers=3, width=16, vocab_size=VOCAB)
    drafter = cases.random_heads(name, target, params, scale=0.25, **COUNT[name])
    return target, drafter, {"target": params, "draft": drafter.init_params(None)}


def batch_at(step=None, rows=2):
    random = np.random.default_rng(0)
    tokens, labelled = random.integers(0, VOCAB, (rows, 9)), random.random((rows, 9)) < 0.7
    number = None if step is None else jnp.full((rows,), step, jnp.int32)
    return Batch(jnp.asarray(tokens), jnp.asarray(labelled), step=number)


def logits_of_heads(name, batch):
    """f[B,T,D,V]: at feature s the probs of token s + 2 + k."""
    target, drafter, params = small(name)
    pair = ModelParams(params["target"], params["draft"])
    if name == "mtp":
        tapped = target.with_taps(drafter.taps)
        return head_cases.logits_along("mtp", tapped, *pair, batch.tokens)
    network = setup_of(drafter).stepper.init.args[0]
    texts = jax.jit(lambda pair: list(_rollout.along(network, target, pair, batch, 2)))(pair)
    return np.stack([logits for _, logits, _ in texts], 2)


@functools.cache
def plain_losses(name):
    """(the main loss, that of the heads) of ``batch_at`` in float64, label by label."""

    def nats(logits, label):
        logits = np.asarray(logits, np.float64)
        return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label]

    target, _, params = small(name)
    batch = batch_at()
    forward = jax.jit(functools.partial(lm.forward, target))
    main = np.asarray(forward(params["target"], batch.tokens[:, :-1]).logits)
    heads, tokens = logits_of_heads(name, batch), np.asarray(batch.tokens)
    rows, size = tokens.shape
    labelled = np.asarray(batch.labelled)

    def total(logits, ahead):
        """The sum over labels ``ahead`` tokens behind the token that is read, and their number."""
        places = [
            (b, s) for b in range(rows) for s in range(size - ahead) if labelled[b, s + ahead]
        ]
        return sum(nats(logits[b, s], tokens[b, s + ahead]) for b, s in places), len(places)

    own, count = total(main, 1)
    each = [total(heads[:, :, k], k + 2) for k in range(heads.shape[2])]
    further = sum(value for value, _ in each) / each[0][1]
    return own / count, further / len(each)


def joint(name, text="0.3,0.1@0.67"):
    target, drafter, _ = small(name)
    count = next(iter(COUNT[name].values()))
    weight = with_heads.parse("weight", text)
    return with_heads.joint(target, drafter, count, weight, STEPS, TEXT_LABELS[name])


@pytest.mark.parametrize("name", COUNT)
def test_the_loss_is_the_formula(name):
    """Ragged labels; the weight of a step, and the last one for text without a step.

    On held-out text the loss is that of the target alone.
    """
    loss, params = jax.jit(joint(name)), small(name)[2]
    for step, factor in ((0, 0.3), (6, 0.3), (7, 0.1), (None, 0.1)):
        batch = batch_at(step)
        main, further = plain_losses(name)
        value, sizes = loss(params, {}, batch, jax.random.key(0))
        assert float(value) == pytest.approx(main + factor * further, rel=1e-4)
        assert float(sizes["language"]) == pytest.approx(main, rel=1e-4)
    own = jax.jit(with_heads.of_target(joint(name)))
    value, sizes = own(params, {}, batch, jax.random.key(0))
    assert float(value) == pytest.approx(main, rel=1e-4)
    assert sizes["weight"]["loss"] == np.asarray(batch.labelled)[:, 1:].sum()


def test_shared_parts_get_gradients_from_all_terms():
    """The gradient is that of both terms; the target's last layer has none from the heads."""
    target, drafter, params = small("mtp")
    batch, key = batch_at(0), jax.random.key(0)

    def heads(params):
        return drafter.training.loss(params["draft"], params["target"], batch, key)[0]

    def main(params):
        return objectives.pretrain_loss(target)(params["target"], {}, batch, key)[0]

    def whole(params):
        return joint("mtp", 3)(params, {}, batch, key)[0]

    own, further, both = jax.jit(lambda p: [jax.grad(f)(p) for f in (main, heads, whole)])(params)
    added = jax.tree.map(jnp.add, own, further)
    for a, b in zip(jax.tree.leaves(added), jax.tree.leaves(both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
    shared = further["target"]
    for part in (shared["embed"], shared["norm"], shared["layers"][0], shared["layers"][1]):
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(part))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(shared["layers"][2]))


@pytest.mark.slow
def test_modules_share_the_ends_of_the_target():
    _, drafter, params = small("mtp_module")
    batch, key = batch_at(0), jax.random.key(0)

    def heads(target_params):
        keys = TEXT_LABELS["mtp_module"]
        return drafter.training.loss(params["draft"], target_params, batch, key, **keys)[0]

    slope = jax.jit(jax.grad(heads))(params["target"])
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slope))


@pytest.mark.fast
def test_stages():
    read = with_heads.parse("config.drafter.weight", "0.3,0.1@0.67")
    assert read == ((0.3, 0.1), (0.0, 0.67)) and read.values[-1] == 0.1
    assert [round(float(with_heads.at(read, step, 9)), 6) for step in range(9)] == [0.3] * 7 + [
        0.1
    ] * 2
    three = with_heads.parse("config.drafter.weight", "1,0.5@0.25,0@0.5")
    assert [float(with_heads.at(three, step, 4)) for step in range(4)] == [1, 0.5, 0, 0]
    assert with_heads.parse("config.drafter.weight", 2) == ((2.0,), (0.0,))
    wrong = ("", "x", "0.3,0.1", "0.3@0.5", "0.3,0.1@1", "0.3,0.1@0", "1,2@0.5,3@0.4", "-1")
    for text in (*wrong, "nan", "1,2@", "1,2@-0.5", True, "1;2@0.5"):
        with pytest.raises(UserError, match="config.drafter.weight is .* such as") as caught:
            with_heads.parse("config.drafter.weight", text)
        assert "\n" not in str(caught.value)


def config_of(method, text_file, **changes):
    sizes = {"model__vocab_size": 320, "model__num_layers": 2, "model__hidden_size": 16}
    quick = {"train__steps": 8, "train__eval_every": 8, "train__checkpoint_every": 4}
    changes = {"data__files": text_file, **sizes, **quick, **changes}
    return small_config("mtp_pretrain", method, **changes)


@pytest.mark.parametrize("method", ["mtp", pytest.param("mtp_module", marks=pytest.mark.slow)])
def test_a_target_with_its_heads(text_file, tmp_path, method):
    """The target is a plain directory; the heads draft."""
    summary = recipes.run(config_of(method, text_file, examine__prompts=0), tmp_path)
    target, heads = hf.load(tmp_path), head_files.read(tmp_path / "heads", method)
    assert heads.config["vocabulary"] == target.lm.vocabulary
    size = sum(leaf.size for leaf in jax.tree.leaves((target.params, heads.params)))
    assert summary["parameters"] == size
    # The held-out loss is the target's own.
    record = metrics(tmp_path)[-1]
    assert record["heldout_loss"] == summary["heldout_loss"] < np.log(320)
    assert record["heldout_heads"] > 0 and record["language"] < record["loss"]
    drafter = drafters.make(method, target.lm, model=tmp_path / "heads")
    assert drafter.longest == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mtp", "mtp_module"])
def test_a_killed_run_ends_with_the_same_bits(text_file, tmp_path, monkeypatch, method):
    """Of the target and of its heads."""
    examined = {"examine__prompts": 0}
    recipes.run(config_of(method, text_file, **examined), tmp_path / "a")
    written = checkpoint.Checkpoints.save
    with monkeypatch.context() as patch:

        def killed(self, step, *rest):
            if step == 8:
                raise KeyboardInterrupt
            written(self, step, *rest)

        patch.setattr(checkpoint.Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            recipes.run(config_of(method, text_file, **examined), tmp_path / "b")
    assert not (tmp_path / "b" / "heads").exists()
    recipes.run(config_of(method, text_file, **examined), tmp_path / "b")
    one, other = (hf.load(tmp_path / name) for name in "ab")
    heads, again = (head_files.read(tmp_path / name / "heads", method) for name in "ab")
    assert equal(one.params, other.params) and equal(heads.params, again.params)


def test_the_weight_is_that_of_the_mean_over_the_losses(text_file, tmp_path, monkeypatch):
    """Of as many losses as there are heads or unrolled steps; ``slots`` "one" is a mean already."""
    seen, weights = [], []

    def joint(target, drafter, heads, weight, *rest):
        seen.append(heads)
        weights.append(weight.values)
        raise UserError("stopped here")

    monkeypatch.setattr(with_heads, "joint", joint)
    cases = (("mtp", {}, 3), ("mtp", {"slots": "one"}, 1), ("mtp_module", {}, 1))
    for method, changes, losses in (*cases, ("mtp_module", {"steps": 5}, 5)):
        config = config_of(method, text_file)
        with config.unlocked():
            config.loss.update(changes)
            config.drafter.weight = None
        with pytest.raises(UserError, match="stopped here"):
            recipes.run(config, tmp_path / f"{len(seen)}")
        assert seen[-1] == losses, (method, changes)
        # By default each loss counts as much as that of the target.
        assert weights[-1] == ({"mtp": 3, "mtp_module": losses}[method],), (method, changes)


@pytest.mark.slow
def test_heads_beside_a_frozen_target(text_file, tmp_path):
    """What was measured at the end is what the files give, of a run of both recipes."""
    run = recipes.run(config_of("mtp", text_file, train__steps=30), tmp_path / "target")
    assert run["heldout_tau_t0"] == run["heldout_decoded_tau_t0"] >= 1
    changes = {"target": str(tmp_path / "target"), "data__files": text_file}
    summary = recipes.run(small_config("mtp_heads", **changes), tmp_path / "heads")
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    records = [record for record in metrics(tmp_path / "heads") if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < records[0]["heldout_loss"]
    target = hf.load(tmp_path / "target")
    drafter = drafters.make("mtp", target.lm, model=tmp_path / "heads", nodes=5)
    assert drafter.nodes == 5 and drafter.depth <= 3


def test_errors(text_file, tmp_path, target_run):
    def refused(match, method="mtp", **changes):
        config = config_of(method, text_file, **changes)
        with pytest.raises(UserError, match=match) as caught:
            recipes.run(config, tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run" / "config.json").exists()

    refused(
        "config.drafter.name is 'medusa'; it must be one of mtp, mtp_module", drafter__name="medusa"
    )
    refused("config.drafter.weight is '0.3,0.1'; give a value >= 0", drafter__weight="0.3,0.1")
    refused("leave config.target out", target=str(target_run[0]))
    refused("heads is -1; it must be a whole number", drafter__heads=-1)
    refused("last layer but one, and lm has 1 layer", model__num_layers=1)
    refused("loss.slots is 'two'; it must be one of all, one", loss__slots="two")
    wrong = config_of("mtp", text_file)
    wrong.loss.exits = 0.2
    with pytest.raises(UserError, match="config.loss.exits is not a key of the loss of mtp with a"):
        recipes.run(wrong, tmp_path / "run")
    config = small_config("distill", target=str(target_run[0]), data__files=text_file)
    config.drafter = {"name": "mtp"}
    with pytest.raises(UserError, match="config.drafter.name is 'mtp'; objective distill trains"):
        recipes.run(config, tmp_path / "run")
