"""Spec-Drafter: its network against one written in numpy, its files, glancing, and errors.

That it is lossless, in ragged batches too, is shown in tests/test_encoder_decoder.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from internals import draft_models_spec_network as network
from internals import heads_depth_loss as _depth_loss
from internals import network_of
from safetensors.numpy import load_file

from configs import spec_drafter as configured
from specjax import accept, decode, drafters, testing
from specjax.drafters.draft_models import spec_drafter
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import t5
from specjax.testing import law_checks, loop
from specjax.train.recipes import heads as recipe
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "spec_drafter": ("spec_drafter", {"block": 2, "encoder_layers": 1}, ()),
    "spec_drafter tree": ("spec_drafter", {"block": 2, "tree": "best_first", "nodes": 4}, ()),
    "spec_drafter siblings": (
        "spec_drafter",
        {"block": 2, "tree": "2x1", "siblings": "without_replacement"},
        (),
    ),
}


class Ragged(NamedTuple):
    """What a pass reads of a context."""

    tokens: jax.Array
    length: jax.Array
    done: jax.Array | None


BLOCK = 3
ROWS = ([4, 7, 9, 0, 5, 6, 8, 3], [7, 4, 5, 9, 6, 0, 4], [5, 0, 7, 7])


@pytest.fixture(scope="module")
def made():
    """(target, drafter, params) with a network of random parameters."""
    target, params = testing.tiny_t5(0, vocab_size=12, num_layers=1)
    keys = {"block": BLOCK, "layers": 2, "encoder_layers": 1}
    drafter = cases.random_heads("spec_drafter", target, params, scale=0.5, **keys)
    return target, drafter, ModelParams(params, drafter.init_params(None))


def normed(x, module):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * module["scale"]


def attended(part, x, y, bias):
    """x attends to all of y; bias [T,S,H]."""
    heads = bias.shape[-1]
    q, k, v = (
        (z @ part[name]["kernel"]).reshape(len(z), heads, -1)
        for name, z in (("q", x), ("k", y), ("v", y))
    )
    scores = np.einsum("thd,shd->tsh", q, k) + bias
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("tsh,shd->thd", weights, v).reshape(len(x), -1) @ part["o"]["kernel"]


def fed_forward(layer, x):
    own = normed(x, layer["mlp_norm"])
    return x + np.maximum(own @ layer["mlp"]["up"]["kernel"], 0) @ layer["mlp"]["down"]["kernel"]


def by_hand(config, params, row):
    """The logits [K,V] of the block after a source, the start token 0, and an output."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    start, table = row.index(0), params["embed"]["embedding"]

    def bias(name, place):
        distance = np.clip(place[:, None] - place, -config.max_distance, config.max_distance)
        bucket = t5.buckets(config, True)[distance + config.max_distance]
        return params[name]["table"]["embedding"][bucket]

    memory = table[row[:start]]
    for _, layer in sorted(params["source_layers"].items()):
        own = normed(memory, layer["attention_norm"])
        own = attended(layer["attention"], own, own, bias("source_bias", np.arange(start)))
        memory = fed_forward(layer, memory + own)
    memory = normed(memory, params["source_norm"])
    x = np.concatenate([table[row[start:]], params["masks"]])
    for _, layer in sorted(params["layers"].items()):
        own = normed(x, layer["attention_norm"])
        x = x + attended(layer["attention"], own, own, bias("bias", np.arange(len(x))))
        none = np.zeros((len(x), start, config.num_heads))
        x = x + attended(layer["cross"], normed(x, layer["cross_norm"]), memory, none)
        x = fed_forward(layer, x)
    return (normed(x, params["norm"])[-BLOCK:] * config.hidden_size**-0.5) @ table.T


def begun(made, change=None):
    """The logits of a draft after ragged texts, in a buffer that is wider than these."""
    target, drafter, params = made
    args = (target, drafter, params, [list(row) for row in ROWS], 40, 0)
    state = loop.begin(*args, temperature=1.0)
    draft = loop.propose(drafter, params, state)
    return np.log(np.asarray(draft.probs, np.float64))


def error(made):
    """The largest difference of a ragged batch from the rows computed by hand."""
    config = network_config(made)
    worst = 0.0
    for row, log_probs in zip(ROWS, begun(made), strict=True):
        expected = by_hand(config, made[2].draft, row)
        expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
        worst = max(worst, float(np.abs(log_probs - expected).max()))
    return worst


def network_config(made):
    return network_of(made[1]).shape.config


def test_a_ragged_batch_has_the_network_written_by_hand(made):
    assert error(made) < 1e-4


@pytest.mark.slow
def test_wrong_networks_are_not_the_one_written_by_hand(made, monkeypatch):
    """Masks one position later, padding of the output that is read, padding of the source."""
    fill, read, both = network.SpecNetwork.fill, t5.T5.read, t5.T5Attention.both_ways
    late = lambda self, tokens, count, *more: fill(self, tokens, count + 1, *more)  # noqa: E731

    def without_padding(self, x, real, bias, first=0):
        return both(self, x, jnp.ones_like(real), bias, first)

    def whole(self, tokens, count, remat=False):
        return read(self, tokens, jnp.full_like(count, tokens.shape[1]), remat)

    mutants = {"late": (network.SpecNetwork, "fill", late)}
    mutants["padding"] = (t5.T5Attention, "both_ways", without_padding)
    mutants["source"] = (network.SpecNetwork, "read", whole)
    for name, (owner, attribute, wrong) in mutants.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, wrong)
            jax.clear_caches()
            assert error(made) > 1e-2, name
    jax.clear_caches()


@pytest.mark.slow
def test_the_drafts_after_rounds_are_those_of_a_fresh_prefill(made, monkeypatch):
    """Nothing of a round is kept, and the room for the output has no effect."""
    target, drafter, params = made
    monkeypatch.setattr(spec_drafter, "PIECE", 4)
    prompts = [row[: row.index(0) + 1] for row in ROWS]
    rule = accept.load("chain")
    state = loop.begin(target, drafter, params, prompts, 45, 0, temperature=0.0)
    state, _ = decode.generate(target, drafter, rule, params, state, max_steps=14)
    # Outputs of 15 tokens: the third room of five.
    assert len(spec_drafter._widths(state.tokens.shape[1])) == 5
    lengths = np.asarray(state.length)
    texts = [np.asarray(row)[:n].tolist() for row, n in zip(state.tokens, lengths, strict=True)]
    fresh = loop.begin(target, drafter, params, texts, 20, 0, temperature=0.0)
    first, second = (loop.propose(drafter, params, each) for each in (state, fresh))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    # The longest row is finished: the room is that of the others.
    longest = int(np.argmax(lengths - np.asarray([len(each) for each in prompts])))
    done = state.replace(done=state.done.at[longest].set(True))
    jax.clear_caches()
    monkeypatch.setattr(spec_drafter, "PIECE", 64)
    assert len(spec_drafter._widths(state.tokens.shape[1])) == 1
    wide = loop.propose(drafter, params, state)
    np.testing.assert_array_equal(first.tokens, wide.tokens)
    np.testing.assert_array_equal(
        np.delete(loop.propose(drafter, params, done).tokens, longest, 0),
        np.delete(wide.tokens, longest, 0),
    )
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({}, "chain"),
        ({}, "block"),
        ({"tree": "2x1", "siblings": "without_replacement"}, "recursive"),
        ({"tree": "best_first", "nodes": 4}, "deterministic"),
    ],
)
def test_the_law_of_a_round_is_exact(keys, rule):
    """Enumerated in float64, after two sources and after two rounds."""
    with jax.enable_x64(True):
        small = {"vocab_size": 3, "dtype": jnp.float64, "num_layers": 1, "encoder_layers": 1}
        target, params = testing.tiny_t5(0, **small)
        drafter = cases.random_heads("spec_drafter", target, params, block=2, scale=0.5, **keys)
        pair = ModelParams(params, drafter.init_params(None))
        prompts = [[2, 1, 0], [1, 2, 2, 1, 2, 0]]
        own = (target, drafter, accept.load(rule), pair, prompts)
        finding = law_checks.check_law(*own, after=(2,), temperature=0.9)
    assert finding.passed, finding


def test_a_new_network_begins_with_the_encoder_and_the_ends_of_the_target():
    """Every array of them, and of each of these parts only if all of its shapes agree."""
    keys = {"vocab_size": 12, "num_layers": 1, "tie_embeddings": False, "scale_logits": False}
    target, params = testing.tiny_t5(0, **keys)
    # Norms would be ones in both.
    params = jax.tree.map(lambda x: x + 0.5, params)
    theirs = network._named(params)
    for changes, others in (({}, set()), ({"encoder_layers": 2}, set(network.SHARED[1:4]))):
        drafter = drafters.make("spec_drafter", target, block=BLOCK, layers=1, **changes)
        own = network._named(drafter.training.start(params, jax.random.key(0)))
        same = {path for path in own if path in theirs and np.array_equal(own[path], theirs[path])}
        parts = set(network.SHARED) - others
        assert same == {path for path in theirs if path[0] in parts}, changes
        assert parts == {path[0] for path in same}


def test_a_pass_has_the_smallest_room_for_the_longest_output(monkeypatch):
    """Of the rows that are not finished."""
    monkeypatch.setattr(spec_drafter, "PIECE", 4)
    assert [spec_drafter._widths(slots) for slots in (3, 4, 5, 20)] == [
        *([4], [4], [4, 5]),
        [4, 8, 16, 20],
    ]

    def room(net, params, tokens, count, source):
        return jnp.full((len(tokens), 1, 1), tokens.shape[1])

    monkeypatch.setattr(spec_drafter.network, "logits", room)
    source = network.Source((), (), jnp.asarray([3, 2]))
    begin = jax.jit(functools.partial(spec_drafter._begin, None, None))
    for lengths, done, right in (
        ([7, 4], None, 4),
        ([8, 2], [False, False], 8),
        ([2, 10], None, 8),
        ([3, 11], None, 16),
        ([20, 11], [True, False], 16),
        ([20, 2], None, 20),
        ([20, 11], [True, True], 4),
    ):
        own = None if done is None else jnp.asarray(done)
        context = Ragged(jnp.zeros((2, 20), jnp.int32), jnp.asarray(lengths), own)
        assert begin(context, source).logits.tolist() == [[right]] * 2, (lengths, done)


def test_glancing_gives_as_many_answers_as_the_rate_says(made, monkeypatch):
    """They are the text's, at masks with a label, and are not in the loss."""
    _, drafter, params = made
    net, seen = network_of(drafter), []
    right = network.logits

    def spy(*args):
        seen.append((args[2:], right(*args)))
        return seen[-1][1]

    monkeypatch.setattr(spec_drafter.network, "logits", spy)
    rows = np.zeros((4, 12), np.int32)
    labelled = np.zeros((4, 12), bool)
    for row, size in enumerate((3, 4, 6, 8)):
        rows[row, : size + 3] = [5, 7, 0, *range(1, size + 1)]
        labelled[row, 3 : size + 3] = True
    batch = Batch(jnp.asarray(rows), jnp.asarray(labelled), step=jnp.full(4, 5, jnp.int32))
    keys = {"places": 2, "glancing": 1.0, "fall": 0.4, "run_steps": 10}
    value, metrics = spec_drafter.loss(net, params.draft, {}, batch, jax.random.key(3), **keys)
    (first, guess), (second, logits) = seen
    tokens, read, _, answers, given, _ = second
    assert len(first) == 3
    counted = np.asarray(given) | (np.asarray(answers) > 0)
    for row in range(len(answers)):
        n = int(read[row])
        output = tokens[row, n : n + BLOCK]
        np.testing.assert_array_equal(answers[row][counted[row]], output[counted[row]])
        wrong = (np.argmax(guess[row], -1) != answers[row]) & counted[row]
        assert int(given[row].sum()) == int(np.floor(0.8 * wrong.sum()))
    assert int(given.sum()) > 0 and not (np.asarray(given) & ~counted).any()
    left = counted & ~np.asarray(given)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    own = np.take_along_axis(log_probs, np.asarray(answers)[..., None], -1)[..., 0]
    expected = -0.9 * own - 0.1 * log_probs.mean(-1)
    np.testing.assert_allclose(value, expected[left].mean(), rtol=1e-5)
    assert metrics["weight"]["loss"] == left.sum()


def test_the_first_free_places_are_chosen():
    free = jnp.asarray([[True, False, True, True], [False, False, True, False]])
    turn = jnp.asarray([[3, 0, 1, 2], [3, 0, 1, 2]])
    chosen = _depth_loss.first_free(free, turn, jnp.asarray([2, 2]))
    expected = [[False, False, True, True], [False, False, True, False]]
    np.testing.assert_array_equal(chosen, expected)


def test_files_give_the_network_back(made, tmp_path):
    target, drafter, params = made
    facts = dict(drafter.training.facts)
    head_files.write(tmp_path / "net", "spec_drafter", params.draft, facts)
    again = drafters.make("spec_drafter", target, model=tmp_path / "net", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again.init_params(None), dict(params.draft))
    assert again.training.loss.args == drafter.training.loss.args
    with pytest.raises(UserError, match="layers is 1, and the given spec_drafter has 2; leave"):
        drafters.make("spec_drafter", target, model=tmp_path / "net", layers=1)
    other = testing.tiny_t5(0, vocab_size=13, num_layers=1)[0]
    with pytest.raises(UserError, match="is made for a vocabulary of 12, and the target has 13"):
        drafters.make("spec_drafter", other, model=tmp_path / "net")
    # The network reads no features of the target: of another width, the same one can draft.
    assert "target_hidden_size" not in facts
    head_files.write(
        tmp_path / "net", "spec_drafter", params.draft, facts | {"target_hidden_size": 9}
    )
    for width in (16, 24):
        wide = testing.tiny_t5(0, vocab_size=12, num_layers=1, hidden_size=width)[0]
        again = drafters.make("spec_drafter", wide, model=tmp_path / "net", dtype=jnp.float32)
        assert again.training.loss.args == drafter.training.loss.args


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_files_of_gated_and_untied_networks(gated, tied, tmp_path):
    keys = {"vocab_size": 12, "gated": gated, "tie_embeddings": tied, "scale_logits": tied}
    target = testing.tiny_t5(0, num_layers=1, encoder_layers=3, **keys)[0]
    rng = np.random.default_rng(0)
    shape = network_of(drafters.make("spec_drafter", target, block=BLOCK)).shape
    leaves = {path: rng.normal(size=x.shape) for path, x in network.leaves(shape).items()}
    params = unflatten_dict({path: x.astype(np.float32) for path, x in leaves.items()})
    drafter = drafters.make("spec_drafter", target, block=BLOCK, params=params)
    head_files.write(tmp_path, "spec_drafter", params, dict(drafter.training.facts))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("lm_head.weight" in names) != tied
    assert ("decoder.block.1.layer.2.DenseReluDense.wi_0.weight" in names) == gated
    again = drafters.make("spec_drafter", target, model=tmp_path, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, dict(again.init_params(None)), params)
    assert again.training.loss.args == drafter.training.loss.args


@pytest.mark.slow
def test_ranks_are_those_of_the_network_written_by_hand(made):
    _, drafter, params = made
    row = [4, 7, 9, 0, 5, 6, 8, 3, 1, 2]
    ranks = np.asarray(drafter.training.ranks(params, Batch(jnp.asarray([row]))))
    assert ranks.shape == (1, 9, BLOCK)
    for pending in range(3, 7):
        logits = by_hand(network_config(made), params.draft, row[: pending + 1])
        for depth, own in enumerate(logits):
            right = (own > own[row[pending + 1 + depth]]).sum()
            assert ranks[0, pending, depth] == right, (pending, depth)


def test_errors_are_one_line(made):
    target, _, params = made
    decoder = testing.tiny("llama", 0)[0]
    for model, keys, message in (
        (decoder, {}, "drafts for encoder-decoder models, and lm is none"),
        (
            target,
            {"block": 3, "gamma": 4},
            "gamma is 4, and spec_drafter drafts at most 3 tokens ahead",
        ),
        (
            target,
            {"gamma": 2, "tree": "2x1"},
            "spec_drafter was given gamma=2, a chain, and tree='2x1'",
        ),
        (
            target,
            {"tree": "chain:8"},
            "8 levels deep and spec_drafter drafts at most 7 tokens ahead",
        ),
        (target, {"block": 2, "params": params.draft}, "masks of the spec_drafter network is"),
        (target, {"params": "runs/x"}, "those of spec_drafter: 'runs/x'; give a tree of arrays"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            drafters.make("spec_drafter", model, **keys)
        assert "\n" not in str(raised.value)


def test_keys_of_the_loss_have_an_effect_or_are_refused(made):
    """``fall`` without glancing, and ``train.remat`` in both parts of the network."""
    _, drafter, params = made
    batch = Batch(jnp.zeros((1, 8), jnp.int32))
    loss = functools.partial(drafter.training.loss, params.draft, {}, batch, jax.random.key(0))
    net = network_of(drafter)
    usual = {"places": 1, "smoothing": 0.1, "glancing": 0.5, "fall": 0.4}
    for key, good, wrong in (
        ("places", 1, (0, 1.5)),
        ("smoothing", 0, (-0.1, 1)),
        ("glancing", 1, (-0.1, 1.1)),
        ("fall", 0, (-0.1, 1.1)),
        ("fall", 1, (True, "a")),
    ):
        spec_drafter.LossKeys(**usual | {key: good})
        for value in wrong:
            with pytest.raises(UserError, match=f"loss.{key} is {value!r}; it must be a"):
                spec_drafter.LossKeys(**usual | {key: value})
    spec_drafter.LossKeys(**usual | {"glancing": 0, "fall": None})
    assert spec_drafter.FALL == 0.4
    spec_drafter._check(net, Batch(batch.tokens[:, : BLOCK + 1]))
    with pytest.raises(UserError, match="a block has 3 tokens; raise train.length to 3 or more"):
        spec_drafter._check(net, Batch(batch.tokens[:, :BLOCK]))
    with pytest.raises(UserError, match="not the depths of single tokens"):
        spec_drafter._check(net, batch.replace(depths=batch.tokens))
    with pytest.raises(UserError, match=r"loss.fall is 0.4 and loss.glancing is 0"):
        loss(fall=0.4, glancing=0.0)
    config = configured.get_config()
    config.train.remat, config.joint = True, False
    both = recipe._losses(config, None, drafter, drafter.training)
    found = [each.keywords for each in both]
    assert [(keys["remat"], keys["glancing"]) for keys in found] == [(True, 0.5), (True, 0.0)]
    config.loss.fall = 0.2
    both = recipe._losses(config, None, drafter, drafter.training)
    # The second one is for held-out text, which is read as it is.
    assert [each.keywords["fall"] for each in both] == [0.2, None]
    traced = jax.make_jaxpr(lambda key: both[0](params.draft, {}, batch, key)[0])
    program = str(traced(jax.random.key(0)))
    # An encoder of one layer and a decoder of two; the pass that counts has no gradients.
    assert program.count("= checkpoint[") + program.count("= remat2[") == 1 + 2
