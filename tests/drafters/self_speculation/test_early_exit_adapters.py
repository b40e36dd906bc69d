"""Adapters of early exits: what they compute, their state, their loss, wrong ones, their files."""

from __future__ import annotations

import functools

import cases
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exit_cases import largest_error, outputs, tiny, with_inner
from marks import by_default

from specjax import divergences, drafters, testing
from specjax.drafters import files
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import drafter_checks, forecast_checks, state_checks
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "early_exit layer": ("early_exit", {"exit_layer": 1, "adapter": "layer", "gamma": 2}, ()),
    "early_exit linear": (
        "early_exit",
        {
            "exit_layer": 1,
            "adapter": "linear",
            "head": "own",
            "nodes": 4,
            "tree": "dynamic",
            "depth": 2,
        },
        (),
    ),
}

# Label -> keys of an adapter after two of three layers.
ADAPTERS = {
    "norm": {"adapter": "norm"},
    "linear, own head": {"adapter": "linear", "head": "own"},
    "layer": {"adapter": "layer", "head_dim": 4},
    "none, own head": {"head": "own"},
}


def made(label, **more):
    target, params = tiny()
    keys = {"exit_layer": 2, "gamma": 3, **ADAPTERS[label], **more}
    drafter = cases.random_heads("early_exit", target, params, scale=0.3, **keys)
    return drafter, ModelParams(params, drafter.init_params(None))


# What they compute ----------------------------------------------------------------------------


def rms(x, scale, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotated(x, theta=1e4):
    """Rotary positions of [T,H,D]: pairs of entries i and i + D/2."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = [first * np.cos(angle) - second * np.sin(angle)]
    return np.concatenate([*turned, second * np.cos(angle) + first * np.sin(angle)], -1)


def attention(own, x, dim):
    """Causal attention with heads of width ``dim``, [T,E] -> [T,E]."""
    q, k, v = ((x @ own[name]["kernel"]).reshape(len(x), -1, dim) for name in ("q", "k", "v"))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = np.einsum("thd,shd->hts", rotated(q), rotated(k)) / np.sqrt(dim)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    mixed = np.einsum("hts,shd->thd", head_cases.softmax(scores), v)
    return mixed.reshape(len(x), -1) @ own["o"]["kernel"]


@functools.cache
def head_kernel():
    target, params = tiny()
    return np.asarray(files.ends("a head", target).output_kernel(params), np.float64)


def expected_probs(label, pair, text):
    """f[T,V] after each token of a text, in NumPy from the target's hidden states."""
    x, normed, _ = (each.astype(np.float64) for each in outputs(pair.target, 1, text))
    own = jax.tree.map(lambda x: np.asarray(x, np.float64), pair.draft)
    x = normed if label == "none, own head" else x
    if "linear" in label:
        x = x + x @ own["linear"]["kernel"]
    if label == "layer":
        x = x + attention(own["attention"], rms(x, own["attention_norm"]["scale"]), 4)
    if "norm" in own:
        x = rms(x, own["norm"]["scale"])
    if "head" in own:
        return head_cases.softmax(x @ own["head"]["kernel"])
    return head_cases.softmax(x @ head_kernel())


@pytest.mark.parametrize("label", by_default(ADAPTERS, ("layer", "linear, own head")))
def test_drafts_have_the_probs_of_the_formula(label):
    """In several rounds of a ragged batch, all draft tokens."""
    drafter, params = made(label)
    assert drafter.features == (label == "layer") and drafter.gaps != drafter.features
    assert drafter.taps == (() if label == "none, own head" else (1,))
    reference = functools.partial(expected_probs, label, params)
    assert largest_error(drafter, params, reference) < 1e-4


TREE = {"gamma": None, "tree": "3x1x1", "siblings": "iid"}


def test_a_tree_reads_and_keeps_its_paths():
    """Nodes of a level attend to their own ancestors; kept are the states of the accepted path."""
    drafter, params = made("layer", **TREE)
    reference = functools.partial(expected_probs, "layer", params)
    assert largest_error(drafter, params, reference, "recursive") < 1e-4


def test_new_parameters_draft_like_the_exit_without_an_adapter():
    target, params = tiny()
    plain = drafters.make("early_exit", target, exit_layer=2)
    batch = Batch(jnp.asarray(head_cases.text(2, 9, target.vocab_size)))
    ranks = plain.training.ranks(ModelParams(params), batch)
    for adapter, head in (("norm", "shared"), ("linear", "own")):
        drafter = drafters.make("early_exit", target, exit_layer=2, adapter=adapter, head=head)
        own = drafter.training.start(params, jax.random.key(0))
        same = drafter.training.ranks(ModelParams(params, own), batch) == ranks
        assert same.mean() > 0.97, (adapter, head)


# The state of the layer -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_state_of_a_layer_follows_the_text():
    _, target, drafter, params = cases.real("early_exit layer")
    finding = state_checks.state_follows_text(drafter, target, params)
    assert finding.passed, str(finding)


def features_of_the_draft(inner):
    """Keeps the hidden states of the first nodes of the block, not those of the path."""

    def commit(params, kept, drafted, verdict, target_out):
        first = jnp.arange(verdict.path.shape[1]) - 1
        wrong = verdict.replace(path=jnp.broadcast_to(first, verdict.path.shape))
        return inner.commit(params, kept, drafted, wrong, target_out)

    return inner._replace(commit=commit)


def a_stale_layer(inner):
    """Never adds the newest tokens to the layer's cache."""

    def view(params, context, kept):
        both, after = inner.view(params, context, kept)
        length = jnp.minimum(both.own.length, 2)
        return both._replace(own=both.own.replace(length=length)), after

    return inner._replace(view=view)


def positions_after_the_draft(inner):
    """The layer's positions go on one too late in the draft."""

    def apply(params, tokens, cache, layout=None, block=None):
        own = cache.own.replace(length=cache.own.length + 1)
        return inner.model.apply(params, tokens, cache._replace(own=own), layout, block)

    return inner._replace(model=inner.model._replace(apply=apply))


MUTANTS = (features_of_the_draft, a_stale_layer, positions_after_the_draft)


@pytest.mark.parametrize("change", by_default(MUTANTS, MUTANTS[:1]))
def test_wrong_states_are_detected(change):
    target, _ = tiny()
    _, params = made("layer")
    keys = {"exit_layer": 2, "gamma": 3, **ADAPTERS["layer"]}
    drafter = with_inner(change)(target, params=params.draft, **keys)
    reference = functools.partial(expected_probs, "layer", params)
    assert largest_error(drafter, params, reference) > 1e-3


def features_of_the_first_nodes(inner):
    """Keeps the hidden states of the first nodes of a tree, which in a chain are the path."""

    def commit(params, kept, drafted, verdict, target_out):
        wrong = jnp.broadcast_to(jnp.arange(verdict.path.shape[1]), verdict.path.shape)
        return inner.commit(params, kept, drafted, verdict.replace(path=wrong), target_out)

    return inner._replace(commit=commit)


def levels_as_chains(inner):
    """The nodes of a level attend to those before them in the level."""

    def apply(params, tokens, cache, layout=None, block=None):
        if layout is not None and tokens.shape[1] > 1:
            before = jnp.tri(tokens.shape[1], dtype=bool)
            visible = layout.visible.at[:, :, -tokens.shape[1] :].set(before)
            layout = layout.replace(visible=visible)
        return inner.model.apply(params, tokens, cache, layout, block)

    return inner._replace(model=inner.model._replace(apply=apply))


@pytest.mark.slow
@pytest.mark.parametrize("change", [features_of_the_first_nodes, levels_as_chains])
def test_wrong_paths_of_a_tree_are_detected(change):
    target, _ = tiny()
    _, params = made("layer")
    keys = {"exit_layer": 2, **ADAPTERS["layer"], **TREE}
    drafter = with_inner(change)(target, params=params.draft, **keys)
    reference = functools.partial(expected_probs, "layer", params)
    assert largest_error(drafter, params, reference, "recursive") > 1e-3


# Forecasts and losses -------------------------------------------------------------------------


@pytest.mark.parametrize("label", by_default(("layer", "norm"), ()))
def test_probs_of_a_text(label):
    drafter, params = made(label)
    finding = drafter_checks.probs_of_text(drafter, tiny()[0], params)
    assert finding.passed, str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["early_exit", "early_exit layer"])
def test_the_forecast_is_decoded(name):
    _, target, drafter, params = cases.case(name)
    finding = forecast_checks.forecast_equals_decoding(drafter, target, params)
    assert finding.passed, str(finding)


def test_the_loss_is_its_formula():
    """ce and teacher, with labels that do not count; documents are separate."""
    target, _ = tiny()
    drafter, params = made("layer")
    tokens = head_cases.text(2, 8, target.vocab_size)
    labelled = np.random.default_rng(1).random((2, 8)) < 0.6
    batch = Batch(jnp.asarray(tokens), jnp.asarray(labelled))
    weights = {"ce": 0.5, "teacher": 2.0, "divergence": "total_variation"}
    loss = jax.jit(functools.partial(drafter.training.loss, **weights))
    value, metrics = loss(params.draft, params.target, batch, None)
    theirs = lm.forward(target, params.target, batch.tokens[:, :-1]).logits
    ours = np.stack([expected_probs("layer", params, row[:-1].tolist()) for row in tokens])
    picked = np.take_along_axis(ours, tokens[:, 1:, None], -1)[..., 0]
    apart = np.asarray(divergences.total_variation(theirs, jnp.log(ours)))
    each = 0.5 * -np.log(picked) + 2 * apart
    expected = each[labelled[:, 1:]].mean()
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    np.testing.assert_allclose(metrics["alpha"], 1 - apart[labelled[:, 1:]].mean(), rtol=1e-3)
    assert metrics["weight"] == labelled[:, 1:].sum() and metrics["scale"] == 2.5
    # Two documents in a row are read as two rows.
    joined = Batch(
        jnp.asarray(np.concatenate([tokens[0], tokens[1]])[None]),
        segments=jnp.asarray([[0] * 8 + [1] * 8]),
    )
    both = loss(params.draft, params.target, joined, None)[0]
    apart_rows = [
        loss(params.draft, params.target, Batch(batch.tokens[i : i + 1]), None)[0] for i in range(2)
    ]
    np.testing.assert_allclose(both, np.mean(apart_rows), rtol=1e-4)


def test_an_adapter_learns():
    """On text that counts: without training, the first layers prefer other tokens."""
    vocab = 6
    target, table = testing.tabular(vocab), head_cases.counting(vocab)
    drafter = drafters.make("early_exit", target, exit_layer=1, adapter="linear", head="own")
    batch = Batch((jnp.arange(vocab)[:, None] + jnp.arange(9)) % vocab)
    rule = optax.adam(0.05)
    params = drafter.training.start(table, jax.random.key(0))

    @jax.jit
    def trained(params):
        def step(carry, _):
            params, state = carry
            loss = lambda p: drafter.training.loss(p, table, batch, None)[0]  # noqa: E731
            updates, state = rule.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, rule.init(params)), None, 150)[0][0]

    before, after = (
        drafter.training.loss(each, table, batch, None)[1] for each in (params, trained(params))
    )
    assert before["agreement"] < 1 or before["alpha"] < 0.9
    assert after["agreement"] == 1 and after["alpha"] > 0.95


# Files and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"adapter": "layer"},
        {"adapter": "linear", "head": "own"},
        {"adapter": "norm"},
        {"head": "own"},
    ],
)
def test_files(keys, tmp_path):
    target = head_cases.assert_files_round_trip("early_exit", tmp_path, exit_layer=2, **keys)
    with pytest.raises(UserError, match="exit_layer is 1, and the given early_exit has 2; leave"):
        drafters.make("early_exit", target, model=tmp_path, exit_layer=1)
    other = "norm" if keys.get("adapter") != "norm" else "linear"
    with pytest.raises(UserError, match=f"adapter is '{other}', and the given early_exit has"):
        drafters.make("early_exit", target, model=tmp_path, adapter=other)


@pytest.mark.fast
def test_foreign_parameters_are_refused():
    vocab = head_cases.VOCAB
    target = testing.tabular(vocab)
    drafter = cases.random_heads(
        "early_exit", target, cases.table(0, vocab), exit_layer=1, adapter="layer", head="own"
    )
    params = drafter.init_params(None)

    def refused(params, match):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("early_exit", target, params=params)
        assert "\n" not in str(caught.value)

    for wrong in ({}, 3.0, {"block": {"kernel": np.zeros((2, 1, 5, 5))}}):
        refused(wrong, "the parameters are not those of early_exit heads .*give the parameters")
    for part in params:
        left = {name: leaf for name, leaf in params.items() if name != part}
        if part != "head":
            refused(left, "the parameters are not those of")
    leaves, tree = jax.tree.flatten(params)
    for at in range(len(leaves)):
        wrong = list(leaves)
        wrong[at] = np.zeros((*leaves[at].shape[:-1], leaves[at].shape[-1] + 2), np.float32)
        refused(jax.tree.unflatten(tree, wrong), "on this target it must be")


@pytest.mark.fast
def test_losses_without_effect_are_refused():
    drafter, params = made("norm")
    batch = Batch(jnp.zeros((1, 4), jnp.int32))
    for keys, match in (
        ({"teacher": 0.0}, "loss.ce and loss.teacher are both 0"),
        ({"ce": -1.0}, "loss.ce is -1.0; it must be a number >= 0"),
        (
            {"ce": 1.0, "teacher": 0.0, "divergence": "lk"},
            "loss.teacher is 0.0, so it has no effect",
        ),
    ):
        with pytest.raises(UserError, match=match):
            drafter.training.loss(params.draft, params.target, batch, None, **keys)
