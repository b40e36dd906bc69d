"""P-EAGLE against the plain reference, round by round; its law, its training, mistakes, errors."""

from __future__ import annotations

import functools

import cases
import eagle_cases as shared
import eagle_reference as reference
import growth_cases
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import heads_masked_text as _masked_text
from internals import heads_network_drafter as _network_drafter
from internals import network_of as trained_by
from marks import by_default
from mutants.networks import with_stepper

from specjax import drafters, step, testing
from specjax.drafters.heads.eagle import eagle3
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing.claims import widen
from specjax.train import examine
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "p_eagle": (
        "eagle3",
        {"parallel": 2, "layers": 2, "draft_ids": (0, 2), "fc_norm": True},
        ("rejection",),
    ),
    "p_eagle tree": (
        "eagle3",
        {"parallel": 2, "layers": 1, "tree": "best_parents", "nodes": 4, "top_k": 2},
        (),
    ),
}

VOCAB, TOKENS, SHARP = shared.VOCAB, shared.DEPTH, 30.0
# Without the switch that has no effect on masks.
REDUCED = {key: value for key, value in shared.REDUCED.items() if key != "norm_output"}
# Label -> keys of a network.
NETWORKS = {
    "all switches": {**shared.SMALL, **REDUCED, "embeddings": True, "mask_id": 6},
    "plain": {"layers": 2, "norm_before_residual": True, "taps": "2,0"},
    "no shift": {"layers": 1, "shift": 0},
}
quick = pytest.mark.parametrize(
    "label",
    [
        pytest.param(each, marks=[] if each == "all switches" else pytest.mark.slow)
        for each in NETWORKS
    ],
)


@functools.cache
def made(label="all switches", **keys):
    keys = {"parallel": TOKENS} | NETWORKS[label] | keys
    drafter = cases.random_heads("eagle3", shared.TARGET, shared.TABLE, scale=0.25, **keys)
    params = drafter.init_params(None)
    # Sharp attention: with weights that are nearly equal, positions and masks hardly matter.
    for layer in params["layers"].values():
        part = layer["attention"].get("q_norm", layer["attention"]["q"])
        for name in part:
            part[name] = SHARP * part[name]
    drafter = drafters.make("eagle3", shared.TARGET, params=params, **keys)
    return drafter, ModelParams(shared.TABLE, params)


def network_of(drafter):
    return shared.network_of(drafter)


def reader_of(drafter):
    return trained_by(drafter)


@functools.partial(jax.jit, static_argnums=0)
def _forward(target, params, tokens):
    return lm.forward(target, params, tokens)


def expected(drafter, params, text) -> np.ndarray:
    """f64[K,V]: after the text [n], from the slots and the masks behind them in one causal pass."""
    net, network = shared.plain_of(drafter, params), network_of(drafter)
    tapped, fed = (
        shared.TARGET.with_taps(network.shape.taps),
        np.zeros((1, 2 * shared.SIZE), np.int32),
    )
    fed[0, : len(text)] = text
    out = _forward(tapped, params.target, jnp.asarray(fed))
    stacked = np.stack(out.taps, -2)[0, : len(text) - 1].astype(np.float64)
    unknown = np.asarray(params.draft["mask_hidden"], np.float64).reshape(
        1, len(network.shape.taps), -1
    )
    masks, masked = TOKENS - 1, reference.read(net, None, unknown)
    features = np.concatenate([reference.read(net, None, stacked), masked.repeat(masks, 0)])
    slots = [*text[network.shape.shift :][: len(text) - 1], *[network.shape.mask_id] * masks]
    hidden, _ = reference.run(net, np.array(slots), features)
    return np.stack([reference.logits(net, each, VOCAB) for each in hidden[-TOKENS:]])


def begun(drafter, params, state):
    stepper = shared.stepper_of(drafter)
    return _begun(stepper.begin, params, state)


@functools.partial(jax.jit, static_argnums=0)
def _begun(begin, params, state):
    return begin(params, step.context_of(state), state.draft.kept)


def largest_error(drafter, params, rounds=4) -> float:
    """Of the log-probs of all depths in ragged rounds, from those of the reference."""
    worst, seen, accepted = 0.0, 0, 0
    for state, info, fresh in shared.rounds(drafter, "chain", params, rounds):
        ours, right = (begun(drafter, params, each) for each in (state, fresh))
        accepted += int(info.accepted.sum())
        for row in np.flatnonzero(~np.asarray(state.done)):
            text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()
            assert bool(ours.ready[row]) == (len(text) > 1)
            if len(text) == 1:
                continue
            # A state after rounds is that of a fresh prefill.
            np.testing.assert_array_equal(ours.kept.cache.length[row], len(text) - 1)
            seen += 1
            plain = jax.nn.log_softmax(expected(drafter, params, text))
            for each in (ours, right):
                got = np.asarray(jax.nn.log_softmax(each.reads[row]))
                inside = np.isfinite(plain)
                assert (np.isfinite(got) == inside).all()
                worst = max(worst, float(np.abs(got[inside] - plain[inside]).max()))
    assert seen >= 2 * rounds and (accepted or rounds < 3)
    return worst


@quick
def test_rounds_follow_the_reference(label):
    """Positions, what masks see, their feature, what is committed: in rounds and after prefills."""
    assert largest_error(*made(label)) < 2e-3


def with_methods(network, **methods):
    """A network of a class with these methods."""
    return type("Changed", (type(network),), methods)(*network)


def last_feature(drafter):
    """Masks read the newest feature in the place of their own."""
    network = network_of(drafter)

    def change(right):
        def begin(params, context, kept):
            last = jnp.clip(context.length - 2 - kept.cache.length, 0)[:, None, None]
            newest = jnp.take_along_axis(kept.features, last, 1)
            wrong = with_methods(network, masked=lambda self, params: newest)
            return _network_drafter._begin_parallel(wrong, TOKENS, params, context, kept)

        return right._replace(begin=begin)

    return with_stepper(drafter, change)


def with_layout(change):
    """``change(layout, width)`` of a draft's pass."""

    def wrong(drafter):
        network = network_of(drafter)

        def apply(self, params, tokens, features, cache, layout, *more):
            width = tokens.shape[1] - TOKENS + 1
            layout = change(layout, width)
            return network.apply(params, tokens, features, cache, layout, *more)

        def begin(params, context, kept):
            other = with_methods(network, apply=apply)
            return _network_drafter._begin_parallel(other, TOKENS, params, context, kept)

        return with_stepper(drafter, lambda right: right._replace(begin=begin))

    return wrong


MISTAKES = {
    "last feature": last_feature,
    "positions one later": with_layout(
        lambda layout, width: layout.replace(
            depth=layout.depth + (jnp.arange(layout.depth.shape[1]) >= width)
        )
    ),
    # The places behind the text have the tokens and features of an earlier round.
    "places of no text": with_layout(
        lambda layout, width: layout.replace(visible=layout.visible.at[:, width:, :width].set(True))
    ),
    "no earlier masks": with_layout(
        lambda layout, width: layout.replace(
            visible=layout.visible.at[:, width:, width:].set(
                jnp.eye(layout.visible.shape[2] - width, dtype=bool)
            )
        )
    ),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(each, marks=[] if each == "last feature" else pytest.mark.slow)
        for each in MISTAKES
    ],
)
def test_mistakes_of_drafting_are_caught(mistake):
    """The text would be right with them; only acceptance would fall."""
    drafter, params = made()
    assert largest_error(MISTAKES[mistake](drafter), params, rounds=2) > 2e-2


# Along a text ------------------------------------------------------------------------------------


def error_along(drafter, params) -> float:
    """Of the probs that training computes at places of a text, from those of the reference."""
    text = np.random.default_rng(0).integers(0, VOCAB, (2, 12))
    reader, worst = reader_of(drafter), 0.0
    every = list(_masked_text.along(reader, params, Batch(jnp.asarray(text)), TOKENS))
    for row, place in ((0, 0), (0, 6), (1, 9)):
        plain = jax.nn.softmax(expected(drafter, params, text[row, : place + 2].tolist()))
        for depth, (_, logits, _) in enumerate(every):
            got = jax.nn.softmax(logits[row, place])
            worst = max(worst, float(jnp.abs(got - plain[depth]).max()))
    return worst


@quick
def test_training_computes_what_is_drafted(label):
    assert error_along(*made(label)) < 1e-3


def changed_masks(kind):
    def layout(text, masks):
        right = _LAYOUT(text, masks)
        size = text.depth.shape[1]
        if kind == "later tokens":
            later = masks._replace(places=jnp.minimum(masks.places + 1, size - 1))
            return right.replace(visible=_LAYOUT(text, later).visible)
        if kind == "other masks":
            one = masks._replace(columns=np.zeros_like(masks.columns))
            return right.replace(visible=_LAYOUT(text, one).visible)
        behind = jnp.arange(right.depth.shape[1]) >= size
        return right.replace(depth=right.depth + behind)

    return layout


_LAYOUT = _masked_text.layout_of_masks


@pytest.mark.parametrize(
    "kind", by_default(["later tokens", "other masks", "positions one later"], ["later tokens"])
)
def test_mistakes_of_training_are_caught(kind, monkeypatch):
    drafter, params = made()
    monkeypatch.setattr(_masked_text, "layout_of_masks", changed_masks(kind))
    assert error_along(drafter, params) > 1e-2


@pytest.mark.slow
def test_loss_with_dropped_masks():
    """Against the logits along the text, at the entries that are kept; gradients of all leaves."""
    drafter, params = made()
    batch = Batch(jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (3, 12))))
    weights = {"ce": 0.5, "teacher": 1.0, "decay": 0.7, "keep": 0.6, "floor": 0.2}
    key = jax.random.key(3)
    loss = jax.jit(functools.partial(drafter.training.loss, **weights))
    value, metrics = loss(params.draft, params.target, batch, key)
    masks = _masked_text.random_masks(key, batch, 2, [0.6, 0.36])
    ids, first, total = np.array(shared.REDUCED["draft_ids"]), 3 * 10, 0.0
    texts = _masked_text.along(reader_of(drafter), params, batch, TOKENS)
    for depth, (labels, logits, teacher) in enumerate(texts):
        labels, logits, teacher = (np.asarray(x) for x in (labels, logits, teacher))
        agreed = counted = 0
        for row in range(3):
            places = range(11)
            if depth:
                places = np.asarray(masks.places)[row, masks.depths == depth].tolist()
            for place in places:
                if place + depth + 2 > 11:
                    continue
                best = int(teacher[row, place].argmax())
                counted += 1
                agreed += best == int(logits[row, place].argmax())
                if best not in ids or labels[row, place] not in ids:
                    continue
                q = reference.log_softmax(logits[row, place][ids])
                p = reference.log_softmax(teacher[row, place][ids])
                ce = -q[ids.tolist().index(labels[row, place])]
                kl = (np.exp(p) * (p - q)).sum()
                total += 0.7**depth * (0.5 * ce + kl) / first
        np.testing.assert_allclose(metrics[f"agreement_{depth + 1}"], agreed / counted, rtol=1e-5)
    np.testing.assert_allclose(value, total, rtol=1e-3)
    gradient = jax.grad(lambda own: loss(own, params.target, batch, key)[0])(params.draft)
    leaves = jax.tree.leaves_with_path(gradient)
    assert all(np.abs(np.asarray(leaf)).max() > 0 for _, leaf in leaves)


@functools.partial(jax.jit, static_argnums=0)
def learnt(training, params, table, batch):
    """The parameters after 150 steps on this batch."""
    rule = optax.adam(0.02)

    def one(carry, key):
        params, state = carry
        gradient = jax.grad(lambda own: training.loss(own, table, batch, key)[0])(params)
        updates, state = rule.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), 150)
    return jax.lax.scan(one, (params, rule.init(params)), keys)[0][0]


@pytest.mark.slow
def test_learns():
    """Of a target that counts, every mask predicts the token at its own distance."""
    vocab, size = 6, 12
    target, table = testing.tabular(vocab), head_cases.counting(vocab)
    training = drafters.make("eagle3", target, parallel=3, layers=1).training
    batch = Batch((jnp.arange(vocab)[:, None] + jnp.arange(size + 1)) % vocab)
    start = training.start(table, jax.random.key(0))
    for own, right in ((start, False), (learnt(training, start, table, batch), True)):
        ranks = np.asarray(training.ranks(ModelParams(table, own), batch))
        assert ((ranks[:, 1 : size - 3] == 0).mean() > 0.95) == right, ranks


@pytest.mark.slow
def test_forecast_is_decoded():
    """Of a network that has learnt greedy texts of the target, which seldom have the token 2."""
    prompts = [[1, 2, 3], [4], [5, 1, 0, 2, 3, 1], [3, 3]] * 375
    keys = {"parallel": TOKENS, "layers": 1}
    training = drafters.make("eagle3", shared.TARGET, **keys).training
    texts = examine.write(shared.TARGET, ModelParams(shared.TABLE), prompts[:4], 12, 0.0)
    start = training.start(shared.TABLE, jax.random.key(0))
    params = learnt(training, start, shared.TABLE, texts.batch)
    drafter = drafters.make("eagle3", shared.TARGET, params=params, **keys)
    head_cases.assert_forecast_is_decoded(drafter, shared.TARGET, shared.TABLE, prompts, 12, eos=2)


# The law ------------------------------------------------------------------------------------------

IDS = {"draft_ids": (0, 2)}
LAWS = {
    "chain": (IDS, "chain"),
    "tree": ({"tree": "2x1", "siblings": "without_replacement"}, "recursive"),
    "best first": ({"tree": "best_first", "nodes": 4}, "traversal"),
    "best parents": ({"tree": "best_parents", "nodes": 4, "top_k": 2}, "deterministic"),
    "control": ({"gamma": 2, "control": "threshold:0.4"}, "block"),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", LAWS)
def test_exact_law(label):
    """Enumerated in float64; the case "p_eagle" of test_conformance.py is one by default."""
    keys, rule = LAWS[label]
    with jax.enable_x64(True):
        table, target = cases.table(0), testing.tabular(cases.VOCAB)
        keys = {"parallel": 2, "layers": 1} | keys
        drafter = cases.random_heads("eagle3", target, table, **keys)
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
            error = growth_cases.law_error(drafter, rule, target, params, **settings)
            assert error < growth_cases.EXACT


# Files and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"embeddings": True, "mask_id": 2, "draft_ids": (0, 2, 3)}])
def test_files_round_trip(keys, tmp_path):
    keys = {"parallel": 3, "layers": 2} | keys
    head_cases.assert_files_round_trip("eagle3", tmp_path / "head", **keys)
    target = testing.tabular(head_cases.VOCAB)._replace(vocabulary="words")
    drafter = drafters.make("eagle3", target, model=tmp_path / "head")
    assert drafter.longest == 3 and not dict(drafter.training.facts).get("norm_output")
    for wrong, message in (
        ({"parallel": 2}, "parallel is 2, and the given eagle3 has 3"),
        ({"mask_id": 1}, "mask_id is 1, and the given eagle3 has"),
        ({"gamma": 4}, "gamma is 4, and eagle3 drafts at most 3 tokens ahead; give at most 3"),
    ):
        with pytest.raises(UserError, match=message):
            drafters.make("eagle3", target, model=tmp_path / "head", **wrong)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"parallel": -1}, "parallel is -1"),
        ({"parallel": 2, "norm_output": True}, "norm_output is True and has no effect on a"),
        ({"parallel": 2, "mask_id": 5}, r"mask_id is 5; the target's tokens are 0..4"),
        ({"mask_id": 2}, "mask_id is 2 and has no effect"),
        ({"parallel": 2, "tree": "chain:3"}, "the tree is 3 levels deep"),
        ({"parallel": 2, "embeddings": 3}, "embeddings is 3"),
    ],
    ids=str,
)
def test_errors(keys, message):
    with pytest.raises(UserError, match=message) as caught:
        drafters.make("eagle3", testing.tabular(5), **keys)
    assert "\n" not in str(caught.value)


def test_default_is_a_chain_of_four_layers():
    drafter = drafters.make("eagle3", testing.tabular(5), parallel=6)
    assert drafter.nodes == drafter.longest == 6
    assert set(
        jax.eval_shape(drafter.training.start, cases.table(0, 5), jax.random.key(0))["layers"]
    ) == set("0123")
    assert eagle3.PARALLEL["keep"] == 0.8
