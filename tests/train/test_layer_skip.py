"""LayerSkip and adapters of early exits: formulas, and runs from text to a drafter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import equal, small_config

from specjax import drafters, testing
from specjax.drafters.files import head_files
from specjax.drafters.self_speculation import early_exit
from specjax.errors import UserError
from specjax.models import families, hf, lm
from specjax.train import layer_skip, objectives, recipes
from specjax.train.layer_skip import Settings
from specjax.types import Batch

# The formulas ---------------------------------------------------------------------------------


@pytest.mark.fast
def test_rates_of_layer_dropout():
    rates = functools.partial(layer_skip.dropout_rates, layers=5, steps=101)
    constant = np.asarray(rates(Settings(dropout=0.2, dropout_schedule="constant"), step=3))
    np.testing.assert_allclose(constant, 0.2 * (2 ** (np.arange(5) / 4) - 1), rtol=1e-5)
    assert constant[0] == 0 and constant[-1] == pytest.approx(0.2)
    growing = Settings(dropout=0.2, dropout_schedule="exponential")
    for step, share in ((0, 0.0), (50, 2**0.5 - 1), (100, 1.0)):
        np.testing.assert_allclose(rates(growing, step=step), share * constant, rtol=1e-5)


@pytest.mark.fast
def test_weights_of_exits():
    """e(l) = .5 (0, 1, 3), and 3 + .5 * 3 for the last of four layers."""
    every = np.array([0, 0.5, 1.5, 4.5])
    weights = functools.partial(layer_skip.exit_weights, layers=4, steps=80)

    def chosen(*layers):
        kept = np.where(np.isin(np.arange(4), [*layers, 3]), every, 0)
        return kept / kept.sum()

    for settings, step, expected in (
        (Settings(exits=0.5, curriculum="all"), 7, chosen(0, 1, 2)),
        (Settings(exits=0.5, rotation=2), 0, chosen(0, 2)),
        (Settings(exits=0.5, rotation=2), 1, chosen(1)),
        (Settings(exits=0.5, rotation=8), 6, chosen()),
        # Layer l is trained from step (L - l) T / 2L on.
        (Settings(exits=0.5, curriculum="gradual"), 0, chosen()),
        (Settings(exits=0.5, curriculum="gradual"), 19, chosen()),
        (Settings(exits=0.5, curriculum="gradual"), 20, chosen(2)),
        (Settings(exits=0.5, curriculum="gradual"), 30, chosen(1, 2)),
        (Settings(exits=0.5, curriculum="gradual"), 40, chosen(0, 1, 2)),
        (Settings(exits=0.0), 3, chosen()),
    ):
        np.testing.assert_allclose(weights(settings, step=step), expected, rtol=1e-6)
    assert layer_skip.exit_weights(Settings(), 1, 0, 10).tolist() == [1]


@functools.cache
def small():
    shape = testing.tiny_config(vocab_size=16, layers=3)
    return shape, lm.from_config(shape), lm.init_params(shape, jax.random.key(0))


def batch_at(step, rows=4):
    tokens = np.random.default_rng(0).integers(0, 16, (rows, 9))
    labelled = np.random.default_rng(1).random((rows, 9)) < 0.7
    number = jnp.full((rows,), step, jnp.int32)
    return Batch(jnp.asarray(tokens), jnp.asarray(labelled), step=number)


def test_a_layer_that_is_left_out_passes_its_input_on():
    shape, model, params = small()
    tokens = batch_at(0).tokens[:, :-1]
    kept = jnp.asarray([[True, True, True], [True, False, True], [False] * 3, [True, True, False]])
    x = lm.layers_left_out(shape, params, tokens, kept)
    whole = lm.forward(model.with_taps((0, 1, 2)), params, tokens)
    for ours, expected in zip(x, whole.taps, strict=True):
        np.testing.assert_allclose(ours[0], expected[0], atol=1e-5)
    np.testing.assert_array_equal(x[1][1], x[0][1])
    np.testing.assert_array_equal(x[2][3], x[1][3])
    np.testing.assert_allclose(x[2][2], model.embed(params, tokens)[2], atol=1e-6)
    # Layer 2 after layer 0.
    alone = families.shape(**{**vars_of(shape), "num_layers": 2})
    own = {**params, "layers": {0: params["layers"][0], 1: params["layers"][2]}}
    skipped = lm.forward(lm.from_config(alone).with_taps((1,)), own, tokens).taps[0]
    np.testing.assert_allclose(x[2][1], skipped[1], atol=1e-5)


def vars_of(shape):
    names = "family vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads"
    return {name: getattr(shape, name) for name in [*names.split(), "head_dim", "max_positions"]}


def test_the_loss_is_its_formula():
    shape, model, params = small()
    make = functools.partial(layer_skip.layer_skip_loss, model, shape, 10, False, curriculum="all")
    batch = batch_at(3)
    value, metrics = make(dropout=0.0, exits=0.5)(params, {}, batch, jax.random.key(0))
    taps = lm.forward(model.with_taps((0, 1, 2)), params, batch.tokens[:, :-1]).taps
    each = [
        objectives.cross_entropy(
            model.unembed(params, model.inside.last_norm(params, x)),
            batch.tokens[:, 1:],
            batch.labelled[:, 1:],
        )
        for x in taps
    ]
    weights = np.array([0, 0.5, 2 + 0.5]) / 3
    np.testing.assert_allclose(value, np.dot(weights, each), rtol=1e-5)
    np.testing.assert_allclose(metrics["last"], each[-1], rtol=1e-5)
    plain, _ = objectives.pretrain_loss(model)(params, {}, batch, None)
    np.testing.assert_allclose(each[-1], plain, rtol=1e-5)
    # Each row leaves out its own layers: of equal texts, the loss depends on the row that counts.
    text, last = jnp.tile(batch.tokens[:1], (4, 1)), set()
    dropped = jax.jit(make(dropout=0.6, dropout_schedule="constant", exits=0.5))
    for row in range(4):
        only = jnp.broadcast_to(jnp.arange(4)[:, None] == row, text.shape)
        own = batch.replace(tokens=text, labelled=only)
        last.add(round(float(dropped(params, {}, own, jax.random.key(0))[1]["last"]), 4))
    assert len(last) > 1


WRONG = {
    "loss.dropout is 1.0; it must be a number in": {"dropout": 1.0},
    "loss.exits is -0.5; it must be a number >= 0": {"exits": -0.5},
    "loss.curriculum is 'random'; it must be one of": {"curriculum": "random"},
    "loss.rotation is 0; it must be a whole number >= 1": {"rotation": 0},
    "loss.dropout and loss.exits are both 0, which is plain": {"dropout": 0.0, "exits": 0.0},
    "loss.curriculum is 'all' and loss.exits is 0": {"exits": 0.0, "curriculum": "all"},
    "loss.rotation is 3 and has no effect where": {"rotation": 3, "curriculum": "all"},
    "loss.dropout_schedule is 'constant' and loss.dropout is 0": {
        "dropout": 0.0,
        "dropout_schedule": "constant",
    },
}


@pytest.mark.fast
@pytest.mark.parametrize("message", WRONG)
def test_wrong_keys_are_one_line(message):
    shape, model, _ = small()
    with pytest.raises(UserError, match=message) as caught:
        layer_skip.layer_skip_loss(model, shape, 10, False, **WRONG[message])
    assert "\n" not in str(caught.value)


# Runs -----------------------------------------------------------------------------------------


def skip_config(text_file, **changes):
    sizes = {"model__vocab_size": 320, "model__num_layers": 3}
    return small_config("layer_skip", data__files=text_file, **sizes, **changes)


@pytest.fixture(scope="module")
def skipping(tmp_path_factory, text_file):
    """The workdir of a target that was trained with LayerSkip."""
    workdir = tmp_path_factory.mktemp("runs") / "skipping"
    summary = recipes.run(skip_config(text_file), workdir)
    assert 0 < summary["heldout_loss"] < np.log(320) and summary["heldout_bits_per_byte"] > 0
    return workdir


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(text_file, tmp_path):
    """The curriculum and the dropout depend on the step, which goes on."""
    changes = {"train__checkpoint_every": 2, "optimiser__schedule": "constant"}
    changes |= {"loss__dropout_schedule": "constant", "loss__dropout": 0.4, "loss__rotation": 3}

    def run(steps, workdir):
        recipes.run(skip_config(text_file, train__steps=steps, **changes), workdir)
        return hf.load(workdir).params

    whole = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    assert equal(whole, run(4, tmp_path / "parts"))


@pytest.mark.slow
def test_an_adapter_from_text_to_a_chain(skipping, text_file, tmp_path):
    """What was measured at the end is what the files give."""
    changes = {"target": str(skipping), "data__files": text_file, "data__packing": "documents"}
    small = {"drafter__exit_layer": 1, "drafter__head_dim": 8, "drafter__gamma": 3}
    summary = recipes.run(small_config("early_exit", **changes, **small), tmp_path)
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    assert summary["heldout_loss_per_token"] < summary["heldout_uniform_per_token"]
    assert 0 < summary["heldout_alpha"] <= 1
    head, target = head_files.read(tmp_path, "early_exit"), hf.load(skipping)
    assert head.config["exit_layer"] == 1 and head.config["vocabulary"] == target.lm.vocabulary
    drafter = drafters.make("early_exit", target.lm, model=tmp_path, gamma=3)
    assert drafter.taps == (0,) and drafter.features
    with pytest.raises(UserError, match="early_exit has no parameters with these keys; give"):
        recipes.run(
            small_config("early_exit", drafter__adapter="none", **changes), tmp_path / "none"
        )


@pytest.mark.slow
def test_early_exits_are_better_after_layer_skip(data_dir, tmp_path):
    """As many steps, the same text: the exits of the model that was trained to exit agree more."""
    import lzma

    plain = tmp_path / "text.txt"
    with lzma.open(data_dir / "text" / "tinystories" / "tinystories.txt.xz") as file:
        plain.write_bytes(file.read(1_000_000))
    settings = {
        "data__files": str(plain),
        "model__vocab_size": 1024,
        "model__hidden_size": 128,
        "model__intermediate_size": 384,
        "model__num_layers": 6,
        "model__num_heads": 4,
        "model__num_kv_heads": 2,
        "model__max_positions": 128,
        "train__steps": 300,
        "train__length": 128,
        "train__batch_size": 8,
        "train__eval_every": 300,
        # With this optimiser the model learns more than the frequency of tokens in so few steps;
        # the exits of one that has not agree anyway.
        "optimiser__name": "muon",
        "optimiser__learning_rate": 0.02,
    }
    alpha, loss = {}, {}
    for name, more in (("pretrain", {}), ("layer_skip", {"loss__rotation": 2})):
        loss[name] = recipes.run(small_config(name, **settings, **more), tmp_path / name)[
            "heldout_loss"
        ]
        target = hf.load(tmp_path / name)
        ids = target.tokenizer.encode(plain.read_text()[:2000]).ids
        pieces = [ids[i : i + 64] for i in range(0, 448, 64)]
        exits = early_exit.acceptance_by_layer(
            target.lm,
            target.params,
            [piece[:8] for piece in pieces],
            [piece[8:] for piece in pieces],
            {"temperature": 1.0},
        )
        alpha[name] = exits.mean(-1)
    print(alpha, loss)
    assert (alpha["layer_skip"][:5] > alpha["pretrain"][:5]).all(), alpha
    # Exits in the middle.
    assert (alpha["layer_skip"][2:4] > alpha["pretrain"][2:4] + 0.1).all(), alpha
    assert loss["layer_skip"] < loss["pretrain"] + 0.5, loss
