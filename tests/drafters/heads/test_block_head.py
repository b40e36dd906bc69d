"""Block drafters: what they draft, their corrections, their law, training, files, errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import cases
import growth_cases
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import heads_along_text as _along_text
from internals import heads_block as _block
from internals import heads_block_corrections as corrections
from internals import heads_block_network as _block_network
from internals import heads_network, network_of
from mutants.networks import with_stepper

from specjax import accept, drafters, sampling, step, testing
from specjax.drafters.files import codec, head_files
from specjax.errors import UserError
from specjax.testing import loop
from specjax.testing.claims import widen
from specjax.types import Batch, ModelParams

# Programs are shared with test_block_reference.py.
pytestmark = pytest.mark.xdist_group("block_head")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "block_head": ("block_head", {"block": 3}, ("chain",)),
    "block_head markov": (
        "block_head",
        {
            "block": 2,
            "anchor": True,
            "correction": "rnn",
            "rank": 4,
            "confidence": True,
            "tree": "2x1",
            "siblings": "iid",
            "control": "calibrated",
        },
        (),
    ),
    "block_head tree": (
        "block_head",
        {"causal": True, "tree": "best_parents", "nodes": 4, "top_k": 2},
        (),
    ),
    "block_head selector": (
        "block_head",
        {
            "block": 3,
            "conv": 2,
            "conv_group": 1,
            "correction": "selector",
            "rank": 4,
            "candidates": 2,
        },
        ("chain",),
    ),
    "block_head refiner": (
        "block_head",
        {
            "block": 2,
            "anchor": True,
            "correction": "refiner",
            "rank": 4,
            "tree": "2x1",
            "siblings": "without_replacement",
        },
        (),
    ),
}

VOCAB = 16
# Method -> keys of a network as it is published, in small.
METHODS = {
    "dflash": {"block": 4, "layers": 2, "qk_norm": True, "window": 4},
    "dspark": {
        "block": 3,
        "anchor": True,
        "correction": "markov",
        "rank": 4,
        "confidence": True,
    },
    "gated": {"block": 3, "anchor": True, "correction": "gated", "rank": 4},
    "rnn": {"block": 3, "anchor": True, "correction": "rnn", "rank": 4, "mask_id": 5},
    "jetspec": {"block": 4, "causal": True},
    "domino": {"block": 3, "anchor": True, "correction": "gru", "rank": 4, "state": 6},
    "dflare": {"block": 4, "layers": 2, "context": "mixed", "taps": "0,2,3"},
    "dflash2": {
        "block": 4,
        "layers": 2,
        "conv": 2,
        "conv_group": 8,
        "correction": "selector",
        "rank": 4,
        "candidates": 4,
    },
    "xpress": {"block": 4, "correction": "refiner", "rank": 4, "mask_id": 5},
}
QUICK = ("dflash", "domino")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3]]


def each_method(quick=QUICK):
    return pytest.mark.parametrize(
        "method",
        [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in METHODS],
    )


@functools.cache
def target_of():
    return testing.tiny("llama", 0, 8.0, layers=4, vocab_size=VOCAB)


@functools.cache
def made(method, **keys):
    target, params = target_of()
    keys = {"siblings": "iid"} | METHODS[method] | keys
    drafter = cases.random_heads("block_head", target, params, scale=0.4, **keys)
    return drafter, ModelParams(params, drafter.init_params(None))


def net_of(drafter):
    """The functions of its network."""
    return network_of(drafter)


def played(drafter, params, rule="chain", rounds=4, **settings):
    """(state before, ``StepInfo``) of each of several rounds of a ragged batch."""
    target, _ = target_of()
    state = loop.begin(target, drafter, params, PROMPTS, 24, 0, **settings)
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, accept.load(rule)))
    for _ in range(rounds):
        before = state
        state, info = play(params, state)
        yield before, info


def largest_error(drafter, params) -> float:
    """Of the probs of drafts in rounds, from those that training computes at the same places."""
    net, (target, _) = net_of(drafter), target_of()
    tapped, depth = target.with_taps(drafter.taps), drafter.longest

    @jax.jit
    def along(tokens):
        texts = _block.along(net, tapped, params, Batch(tokens), depth)
        return jnp.stack([jax.nn.softmax(logits) for _, logits, _ in texts], 2)

    worst, checked, accepted = 0.0, 0, 0
    for state, info in played(drafter, params, temperature=1.0):
        tokens, drafted = np.asarray(state.tokens), np.asarray(info.draft.tokens)
        accepted += int(info.accepted.sum())
        text = np.zeros((len(PROMPTS), tokens.shape[1] + depth + 1), np.int32)
        text[:, : tokens.shape[1]] = tokens
        for row, length in enumerate(np.asarray(state.length)):
            text[row, length : length + depth] = drafted[row]
        right = np.asarray(along(jnp.asarray(text)))
        for row, length in enumerate(np.asarray(state.length)):
            if length < 2:
                assert not info.draft.valid[row].any()
            elif not state.done[row]:
                error = np.asarray(info.draft.probs)[row] - right[row, length - 2]
                worst, checked = max(worst, float(np.abs(error).max())), checked + 1
    assert checked >= 12 and accepted
    return worst


@each_method()
def test_drafts_in_rounds_are_those_along_the_text(method):
    """The probs of a draft are those that training computes at its place of the text.

    So the cache after rounds is that of a text that was read at once, the blocks of training have
    the positions and masks of drafting, and ``Draft.probs`` are the corrected ones.
    """
    assert largest_error(*made(method)) < 3e-5


def late(right):
    """The block is one position too late."""

    def begin(params, context, cache):
        begun = right.begin(params, context, cache.replace(length=cache.length + 1))
        return begun._replace(kept=cache, ready=cache.length > 0)

    return right._replace(begin=begin)


def forgetful(right):
    """The taps of accepted tokens are not kept."""

    def commit(params, cache, *more):
        new = right.commit(params, cache, *more)
        return cache.replace(length=new.length)

    return right._replace(commit=commit)


@pytest.mark.parametrize("change", [pytest.param(late, marks=pytest.mark.slow), forgetful])
def test_wrong_caches_are_detected(change):
    """The text would be right with them; only acceptance would fall."""
    drafter, params = made("dflash")
    wrong = with_stepper(drafter, change)
    assert largest_error(wrong, params) > 1e-2


def test_blocks_stay_inside_their_document_and_see_no_later_token():
    drafter, params = made("dflash")
    net, tapped = net_of(drafter), target_of()[0].with_taps(drafter.taps)
    texts = np.random.default_rng(0).integers(0, VOCAB, (2, 9))

    @jax.jit
    def logits(batch):
        return jnp.stack([x for _, x, _ in _block.along(net, tapped, params, batch, 3)], 2)

    packed = Batch(
        jnp.asarray([[*texts[0, :5], *texts[1, :4]]]), segments=jnp.asarray([[0] * 5 + [1] * 4])
    )
    together, alone = logits(packed)[0], logits(Batch(jnp.asarray(texts)))
    np.testing.assert_allclose(together[2], alone[0, 2], atol=1e-4)
    np.testing.assert_allclose(together[7], alone[1, 2], atol=1e-4)
    # The first depth depends on the pending token (5 at place 4), and not on the one after it.
    changed = texts.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    other = logits(Batch(jnp.asarray(changed)))
    np.testing.assert_array_equal(other[:, :5, 0], alone[:, :5, 0])
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    other = logits(Batch(jnp.asarray(changed)))
    assert np.abs(np.asarray(other[:, 4, 0] - alone[:, 4, 0])).max() > 1e-3


def test_inside_a_block():
    """JetSpec's places do not see later masks: with fewer tokens the block is the same, cut."""
    for method, causal in (("dflash", False), ("jetspec", True)):
        drafter, params = made(method)
        draft = jax.jit(functools.partial(_block_network.draft, net_of(drafter)), static_argnums=2)
        cache = _block_network.init_cache(net_of(drafter), 1, 0)
        long, short = (draft(params, jnp.asarray([3]), size, cache) for size in (3, 2))
        assert (np.abs(np.asarray(long[:, :3] - short)).max() < 1e-5) == causal


def test_gru_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    own = {"w": draw.normal(size=(5, 12)), "u": draw.normal(size=(4, 12))}
    x = draw.normal(size=(7, 5))
    model = torch.nn.GRU(5, 4, bias=False)
    with torch.no_grad():
        model.weight_ih_l0.copy_(torch.tensor(own["w"].T))
        model.weight_hh_l0.copy_(torch.tensor(own["u"].T))
        right = model(torch.tensor(x, dtype=torch.float32))[0].numpy()
    state = jnp.zeros(4)
    for place in range(7):
        state = corrections.gru(jax.tree.map(jnp.asarray, own), state, jnp.asarray(x[place]))
        np.testing.assert_allclose(state, right[place], atol=1e-5)


# Label -> keys, rule.
LAWS = {
    "chain": ({"block": 3}, "chain"),
    "rnn chain": (
        {
            "block": 2,
            "anchor": True,
            "correction": "rnn",
            "rank": 3,
            "confidence": True,
            "control": "calibrated:draft=0.3",
        },
        "block",
    ),
    "gru tree": (
        {
            "block": 2,
            "anchor": True,
            "correction": "gru",
            "rank": 3,
            "plain": 0,
            "tree": "2x1",
            "siblings": "without_replacement",
        },
        "recursive",
    ),
    "markov dynamic": (
        {
            "block": 2,
            "anchor": True,
            "correction": "markov",
            "rank": 3,
            "tree": "dynamic",
            "nodes": 4,
            "top_k": 2,
        },
        "deterministic",
    ),
    "best first": ({"block": 3, "tree": "best_first", "nodes": 4}, "traversal"),
    "selector chain": (
        {
            "block": 3,
            "conv": 2,
            "conv_group": 1,
            "correction": "selector",
            "rank": 3,
            "candidates": 2,
        },
        "chain",
    ),
    "refiner tree": (
        {
            "block": 3,
            "correction": "refiner",
            "rank": 3,
            "tree": "2x1",
            "siblings": "without_replacement",
        },
        "recursive",
    ),
}


def law_error(keys, rule, change=lambda drafter: drafter, **settings) -> float:
    with jax.enable_x64(True):
        table = cases.table(0)
        target = testing.tabular(cases.VOCAB)
        drafter = change(cases.random_heads("block_head", target, table, **keys))
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        return growth_cases.law_error(drafter, rule, target, params, **settings)


# The kit proves the law of the cases of testing/cases.py by default.
@pytest.mark.slow
@pytest.mark.parametrize("label", list(LAWS))
def test_exact_law(label):
    """Enumerated in float64; the confidence ends drafts of "rnn chain" early."""
    keys, rule = LAWS[label]
    for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        assert law_error(keys, rule, **settings) < growth_cases.EXACT


def uncorrected(drafter):
    """A wrong drafter: it draws from the corrected probs, and declares those without correction."""
    net = net_of(drafter)

    def propose(params, row_keys, context, state):
        draft, new = drafter.propose(params, row_keys, context, state)
        size = drafter.longest
        outputs = _block_network.draft(net, params, context.pending, size, state.kept)
        hidden = outputs[:, net.shape.first :]
        logits = heads_network.logits(net.ends, params, hidden)
        return draft.replace(probs=sampling.to_probs(logits, context.sampling)), new

    return drafter._replace(propose=propose)


def test_probs_without_the_correction_are_caught():
    keys, rule = LAWS["rnn chain"]
    keys = keys | {"control": "", "confidence": False}
    assert law_error(keys, rule, temperature=1.0) < growth_cases.EXACT
    assert law_error(keys, rule, uncorrected, temperature=1.0) > 1e-3


def test_a_confidence_that_has_seen_the_token_is_caught():
    """Dropping a drawn token because it looks bad changes the law."""
    keys = LAWS["rnn chain"][0] | {"control": "", "confidence": False}

    def retrospective(drafter):
        def propose(params, row_keys, context, state):
            draft, new = drafter.propose(params, row_keys, context, state)
            own = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
            return draft.replace(valid=draft.valid & (own > 0.3)), new

        return drafter._replace(propose=propose, whole=False)

    assert law_error(keys, "chain", retrospective, temperature=1.0) > 1e-3


# Training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"block": 4},
        pytest.param(
            {"block": 3, "anchor": True, "correction": "markov", "rank": 4}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_learns(keys):
    head_cases.assert_learns("block_head", steps=150, rate=0.01, **keys)


def test_loss_of_random_blocks():
    """Against the logits along the text, at all places; the confidence learns the overlap."""
    drafter, params = made("dspark")
    target, _ = target_of()
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 8))))
    weights = {
        "ce": 0.1,
        "teacher": 0.9,
        "divergence": "total_variation",
        "decay": 0.5,
        "confidence": 1.0,
        "places": 32,
    }
    loss = jax.jit(functools.partial(drafter.training.loss, **weights))
    value, metrics = loss(params.draft, params.target, batch, jax.random.key(0))
    net, tapped = net_of(drafter), target.with_taps(drafter.taps)
    texts = jax.jit(lambda: list(_block.along(net, tapped, params, batch, 3)))()
    total = 0.0
    for depth, (labels, logits, teacher) in enumerate(texts):
        counted = np.arange(7)[None] + depth + 2 <= 7
        p, q = (np.asarray(jax.nn.softmax(x)) for x in (teacher, logits))
        ce = -np.log(np.take_along_axis(q, np.asarray(labels)[..., None], -1)[..., 0])
        shared = np.minimum(p, q).sum(-1)
        each = (0.1 * ce + 0.9 * (1 - shared)) * counted
        total += 0.5**depth * each.sum() / 12
        mean = (shared * counted).sum() / (counted.sum() * 2)
        np.testing.assert_allclose(metrics[f"alpha_{depth + 1}"], mean, rtol=1e-4)
    # What is left is the cross-entropy of the confidence, at least its entropy.
    assert 0 < float(value) - total < 5
    gradient = jax.grad(lambda own: loss(own, params.target, batch, jax.random.key(0))[0])
    leaves = jax.tree.leaves_with_path(gradient(params.draft))
    assert all(np.abs(np.asarray(leaf)).max() > 0 for _, leaf in leaves), leaves


@pytest.mark.parametrize("name", ["dspark", "hydra"])
def test_few_places_read_few_logits_of_the_target(name, monkeypatch):
    """The loss and its gradients are those of all logits, which are constants."""
    if name == "dspark":
        drafter, params = made("dspark")
        target, draft = params.target, params.draft
    else:
        drafter = cases.random_heads("hydra", *target_of(), heads=2)
        target, draft = target_of()[1], drafter.init_params(None)
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 8))))
    weights = {"ce": 0.5, "teacher": 1.0, "places": 2}

    def loss(own, of_target):
        return drafter.training.loss(own, of_target, batch, jax.random.key(0), **weights)[0]

    def measured():
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(draft, target).compile()
        return compiled(draft, target), compiled.cost_analysis()["flops"]

    def constant(drafts, depth):
        return jax.lax.stop_gradient(teachers(drafts, depth))

    some, fewer = measured()
    teachers = _along_text.Drafts.teachers
    equal = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(_along_text.Drafts, "teachers", constant)
    jax.tree.map(equal, some, measured()[0])
    monkeypatch.setattr(_along_text, "few", lambda *_: None)
    whole, more = measured()
    jax.tree.map(equal, some, whole)
    assert fewer < more


def test_the_base_loss_falls_to_nothing():
    """At first the loss of a network whose correction is 0, at the last step without ``base``."""
    drafter, params = made("domino")
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 8))))
    weights = {"decay": 0.7, "run_steps": 8}

    @functools.partial(jax.jit, static_argnums=2)
    def loss(own, step, base):
        args = (own, params.target, batch.replace(step=jnp.full(2, step)), jax.random.key(0))
        return drafter.training.loss(*args, **weights, base=base)[0]

    none = jax.tree.map(jnp.zeros_like, params.draft["prefix"]["out"])
    zero = params.draft | {"prefix": params.draft["prefix"] | {"out": none}}
    plain, corrected = float(loss(zero, 0, 0.0)), float(loss(params.draft, 0, 0.0))
    assert abs(plain - corrected) > 1e-2
    for number, share in ((0, 0.8), (4, 0.4), (8, 0.0)):
        expected = share * plain + (1 - share) * corrected
        assert float(loss(params.draft, number, 0.8)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_forecast_is_decoded():
    target, params = target_of()
    drafter, _ = made("dspark", siblings="iid", heads=1, head_dim=32, inner=88)
    head_cases.assert_forecast_is_decoded(drafter, target, params, PROMPTS * 60, 12)


# Files and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_files_round_trip(method, tmp_path):
    keys = METHODS[method] | ({"taps": "0,1"} if "taps" in METHODS[method] else {})
    if "mask_id" in keys:
        keys = keys | {"mask_id": 2}
    if "conv" in keys:
        keys = keys | {"conv_group": 1}  # of a width of 5
    head_cases.assert_files_round_trip("block_head", tmp_path / "head", **keys)


def test_files_that_do_not_name_the_mask(tmp_path):
    """The key names it then; with neither there is one clear line."""
    target, params = testing.tiny("llama", 0, vocab_size=5)
    drafter = drafters.make("block_head", target, block=3, mask_id=2)
    own = drafter.training.start(params, jax.random.key(0))
    head_files.write(tmp_path, "block_head", own, dict(drafter.training.facts))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mask_token_id"], config["dflash_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no embedding of its masks; give mask_id"):
        drafters.make("block_head", target, model=tmp_path)
    assert drafters.make("block_head", target, model=tmp_path, mask_id=2).longest == 2


def test_an_embedding_of_masks_wins_over_a_token(tmp_path):
    """A mask that config.json names besides is not read, and a key for one is refused."""
    target, params = testing.tiny("llama", 0, vocab_size=5)
    drafter = drafters.make("block_head", target, block=3)
    own = drafter.training.start(params, jax.random.key(0))
    head_files.write(tmp_path, "block_head", own, dict(drafter.training.facts))
    config = json.loads((tmp_path / "config.json").read_text())
    config["mask_token_id"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafters.make("block_head", target, model=tmp_path).longest == 2
    for given in ({"model": tmp_path}, {"params": own}):
        with pytest.raises(UserError, match="mask_id is 2, and the given block_head has an emb"):
            drafters.make("block_head", target, mask_id=2, **given)


def config_in(raw, leaves):
    """``Head.config`` of a config.json beside these leaves."""
    found = codec.Found(Path("x"), raw, {}, {}, False)
    return codec.of("block_head").decode(found, leaves, {"D": 8})[1]


def test_a_key_with_two_values_in_config_json_is_refused():
    """At the top level and in an object, or under two names; equal values are read."""
    keys = {"block_size": 4, "mask_token_id": 2, "num_attention_heads": 2, "layer_types": []}

    def refused(match, **more):
        with pytest.raises(UserError, match=match) as caught:
            config_in(keys | more, {})
        assert "\n" not in str(caught.value)

    twice = {"dflash_config": keys, "transformer_layer_config": keys, "dspark_block_size": 4}
    assert config_in(keys | twice, {})["mask_token_id"] == 2
    for key, other in (("block_size", 5), ("mask_token_id", 3), ("num_attention_heads", 4)):
        message = f"x: {key} is {keys[key]} and dflash_config.{key} is {other}; they must be equal"
        refused(message, dflash_config={key: other})
    layers = "transformer_layer_config"
    refused(f"num_attention_heads is 2 and {layers}.num_attention_heads is 32", **{layers: {}})
    wrong = {"num_attention_heads": 2, "layer_types": ["full_attention"]}
    refused(rf"layer_types is \[\] and {layers}.layer_types is", **{layers: wrong})
    nested = {"dflash_config": {"layer_types": None, "rope_theta": 2.0}}
    refused(f"rope_theta is 2.0 and {layers}", **nested, **{layers: keys | {"rope_theta": 3.0}})
    refused("block_size is 4 and dspark_block_size is 5", dspark_block_size=5)
    refused("and pard_token is 3; they must be equal", pard_token=3)
    refused(
        "causal_head is True and causal is False", causal_head=True, dflash_config={"causal": False}
    )


MARKOV = {("markov", "table"): np.zeros((5, 2), np.float32)}
# Label -> config.json, tensors, whether the pending token's place predicts.
ANCHORS = {
    "dflash": ({}, {}, False),
    "dflash of a container": ({"speculators_model_type": "dflash"}, {}, False),
    "deepspec": ({}, MARKOV, True),
    "domino": ({"projector_type": "domino"}, {("gru", "u"): np.zeros((2, 6), np.float32)}, True),
    # Exports of before the key have the other layout.
    "container": ({"speculators_model_type": "dspark"}, MARKOV, False),
    "container, null": (
        {"speculators_model_type": "dspark", "sample_from_anchor": None},
        MARKOV,
        False,
    ),
    "container, stated": (
        {"speculators_model_type": "dspark", "sample_from_anchor": True},
        MARKOV,
        True,
    ),
    "other name": ({"query_zero_predicts_next": True}, {}, True),
    "other name, nested": ({"dflash_config": {"query_zero_predicts_next": True}}, {}, True),
    "other name, false": ({"query_zero_predicts_next": False}, MARKOV, False),
    "both names": ({"query_zero_predicts_next": True, "sample_from_anchor": True}, {}, True),
}


@pytest.mark.parametrize("label", list(ANCHORS))
def test_which_place_predicts_first_in_files(label):
    raw, leaves, anchor = ANCHORS[label]
    config = config_in(raw, leaves)
    assert config["sample_from_anchor"] is anchor and "query_zero_predicts_next" not in config


def test_names_of_the_anchor_that_differ_are_refused():
    for more in ({"sample_from_anchor": False}, {"dflash_config": {"shift_label": False}}):
        with pytest.raises(UserError, match="they must be equal") as caught:
            raw = {"query_zero_predicts_next": True} | more
            config_in(raw, {})
        assert "query_zero_predicts_next" in str(caught.value) and "\n" not in str(caught.value)


def with_config(folder, drafter, layout, change):
    """A directory with the drafter's network, and a changed config.json."""
    facts, params = dict(drafter.training.facts), drafter.init_params(None)
    head_files.write(folder, "block_head", params, facts, layout=layout)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(raw)))
    return functools.partial(drafters.make, "block_head", target_of()[0], model=folder)


def without_anchor(raw):
    """config.json of before the key, in the object ``dflash_config`` too."""
    raw = {key: x for key, x in raw.items() if key != "sample_from_anchor"}
    assert "sample_from_anchor" not in raw.get("dflash_config", {})
    return raw


def drafts(drafter):
    """Its drafts in the rounds of ``played``, as arrays."""
    params = ModelParams(target_of()[1], drafter.init_params(None))
    return jax.device_get([info.draft for _, info in played(drafter, params, temperature=1.0)])


def equal(one, other) -> bool:
    one, other = jax.tree.leaves(one), jax.tree.leaves(other)
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("stated", [False, True])
def test_the_key_anchor_replaces_that_of_the_files(tmp_path, stated):
    """The drafts are then those of files that state it; no other file shows the difference."""
    written = made("dflash", mask_id=5)[0]
    wrong = with_config(
        tmp_path / "a", written, "dflash", lambda raw: raw | {"sample_from_anchor": stated}
    )
    right = with_config(
        tmp_path / "b", written, "dflash", lambda raw: raw | {"sample_from_anchor": not stated}
    )()
    message = f"anchor is {not stated}, and the given block_head has {stated} by its files"
    with pytest.warns(UserWarning, match=message):
        replaced = wrong(anchor=not stated)
    assert replaced.longest == right.longest == 3 + (not stated)
    assert replaced.training.facts == right.training.facts
    assert equal(drafts(replaced), drafts(right))
    with pytest.warns(UserWarning, match=message):
        replaced = wrong(anchor=not stated, gamma=3)
    assert not equal(drafts(wrong(gamma=3)), drafts(replaced))


def test_an_anchor_as_in_the_files_gives_no_warning(tmp_path, recwarn):
    make = with_config(tmp_path / "a", made("dflash")[0], "dflash", lambda raw: raw)
    assert make(anchor=False).longest == make().longest == 3
    assert not [each for each in recwarn if each.category is UserWarning]
    with pytest.raises(UserError, match="anchor is 3; it must be True or False"):
        make(anchor=3)
    with pytest.raises(UserError, match="causal is None; it must be True or False"):
        make(causal=None)


@pytest.mark.parametrize("anchor", [False, True])
def test_our_exports_to_the_speculators_library_state_the_anchor(tmp_path, anchor):
    """So they are read rightly by every program, and without the key they are of the old layout."""
    written = made("dspark", mask_id=5, anchor=anchor, block=4 - anchor)[0]
    states = {"speculators_model_type": "dspark", "sample_from_anchor": anchor}

    def checked(raw):
        assert states.items() <= raw.items()
        return raw

    read = with_config(tmp_path / "a", written, "speculators", checked)()
    assert read.longest == 3 and equal(drafts(read), drafts(written))
    old = with_config(tmp_path / "b", written, "speculators", without_anchor)()
    assert equal(drafts(old), drafts(written)) != anchor
    assert dict(old.training.facts)["sample_from_anchor"] is False


def test_files_that_do_not_state_whether_sliding_layers_are_causal():
    """Other programs read them as causal and full layers as not."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

    def causal(**more):
        config = config_in(sliding | more, {})
        return config["causal_head"], config.get("causal_sliding", False)

    for key, value in (("causal_head", True), ("causal_head", False), ("is_causal", True)):
        expected = value, False
        assert causal(**{key: value}) == expected == causal(dflash_config={key: value})
    assert causal(layer_types=["full_attention"]) == (False, False)
    assert causal() == (False, True)
    library = {"speculators_model_type": "dflash", "causal_head": False}
    assert causal(**library) == causal(**library, sliding_window_non_causal=False) == (False, True)
    assert causal(**library, sliding_window_non_causal=True) == (False, False)


def test_sliding_layers_alone_may_be_causal():
    """Without the attention of one of the two layers it drafts as with one mask for both."""
    keys = {"block": 4, "layers": 2, "window": 3, "mask_id": 5, "siblings": "iid"}
    target, params = target_of()
    own = cases.random_heads("block_head", target, params, scale=0.4, **keys).init_params(None)

    def drafted(without, **more):
        layers = dict(own["layers"])
        attention = layers[without]["attention"]
        none = jax.tree.map(jnp.zeros_like, attention["o"])
        layers[without] = layers[without] | {"attention": attention | {"o": none}}
        changed = own | {"layers": layers}
        return drafts(drafters.make("block_head", target, params=changed, **keys, **more))

    sliding, causal = {"causal_sliding": True}, {"causal": True}
    assert equal(drafted("1", **sliding), drafted("1", **causal))
    assert not equal(drafted("1", **sliding), drafted("1"))
    assert equal(drafted("0", **sliding), drafted("0"))
    assert not equal(drafted("0", **sliding), drafted("0", **causal))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"causal_sliding": True}, "causal_sliding has no effect with causal or without window"),
        ({"block": 4, "gamma": 4}, "gamma is 4, and block_head drafts at most 3 tokens ahead"),
        (
            {"block": 4, "tree": "chain:5"},
            "the tree is 5 levels deep and block_head drafts at most 3 tokens ahead",
        ),
        ({"block": 1}, "block is 1, which drafts no token"),
        ({"mask_id": 5}, "mask_id is 5; the target's tokens are 0..4"),
        ({"rank": 4}, "rank is 4 and has no effect on the correction 'none'"),
        ({"correction": "markov", "state": 4}, "state is 4 and has no effect"),
        ({"correction": "wrong"}, "correction is 'wrong'"),
        (
            {"correction": "gru", "block": 4, "plain": 3},
            "plain is 3 and a block drafts 3 tokens: the correction has no effect",
        ),
        ({"window": 4}, "the only layer has none"),
        ({"taps": "9"}, "block_head reads the layers"),
        ({"candidates": 4}, "candidates is 4 and has no effect on the correction 'none'"),
        ({"correction": "selector", "expansion": 4}, "expansion is 4 and has no effect"),
        ({"conv_group": 4}, "conv_group is 4 and conv is 0, so it has no effect"),
        ({"conv": 2}, "conv_group is 16; it must divide the width, 5"),
        (
            {"correction": "markov", "tree": "best_first"},
            "block_head reads the tokens of its draft",
        ),
        ({"confidence": 3}, "confidence is 3"),
    ],
    ids=str,
)
def test_errors(keys, message):
    with pytest.raises(UserError, match=message) as caught:
        drafters.make("block_head", testing.tabular(5), **keys)
    assert "\n" not in str(caught.value)


def test_errors_of_the_loss_and_of_missing_networks():
    target = testing.tabular(5)
    drafter = drafters.make("block_head", target)
    with pytest.raises(UserError, match="block_head has no parameters yet"):
        drafter.init_params(None)
    batch = Batch(jnp.zeros((1, 8), jnp.int32))
    with pytest.raises(UserError, match="loss.base is 0.5, and the network has no correction"):
        drafter.training.loss({}, {}, batch, None, base=0.5)
    with pytest.raises(UserError, match="loss.consistency is 0.5, and the network has no corr"):
        drafter.training.loss({}, {}, batch, None, consistency=0.5)
    with pytest.raises(UserError, match="loss.selector is 0.5 and has no effect on the correction"):
        drafter.training.loss({}, {}, batch, None, selector=0.5)
    selector = drafters.make("block_head", target, correction="selector")
    with pytest.raises(UserError, match="loss.uncorrected is 0.6, and the network has a selector"):
        selector.training.loss({}, {}, batch, None, uncorrected=0.6)
    own = cases.random_heads("block_head", target, target_of()[1], correction="selector", mask_id=4)
    width = target.width
    own = own.init_params(None) | {"head": {"kernel": jnp.zeros((width, 3))}}
    with pytest.raises(UserError, match="a selector and an LM head of 3 draft tokens"):
        drafters.make("block_head", target, params=own, correction="selector", mask_id=4)
    with pytest.raises(UserError, match="the network has no confidence"):
        drafter.training.loss({}, {}, batch, None, confidence=1.0)
    with pytest.raises(UserError, match="loss.ce and loss.teacher are both 0"):
        drafter.training.loss({}, {}, batch, None, ce=0.0)
