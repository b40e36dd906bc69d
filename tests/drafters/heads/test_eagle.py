"""EAGLE-1, -2 and -3 against the plain reference, round by round; the draft cache; the shift."""

from __future__ import annotations

import eagle_cases as shared
import eagle_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import drafters_growth, drafters_keys
from internals import heads_eagle_shape as _eagle_shape
from internals import heads_vocabulary as _vocabulary

from specjax import decode, drafters, step, tree
from specjax.drafters import files
from specjax.types import Output

# Programs are shared with test_eagle_mutants.py.
pytestmark = pytest.mark.xdist_group("eagle")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "eagle": ("eagle", {"tree": "2x1", "siblings": "without_replacement"}, ("recursive",)),
    "eagle chain": ("eagle", {"gamma": 2, "siblings": "iid"}, ()),
    "eagle dynamic": ("eagle", {"nodes": 5, "depth": 2, "top_k": 2}, ()),
}
# One by default, which has most parts; the others are slow.
DEFAULT = {("eagle3, all switches", "dynamic")}
EVERY = [(label, growth) for label in shared.NETWORKS for growth in shared.GROWTHS]


@pytest.mark.parametrize(
    ("label", "growth"),
    [
        pytest.param(*each, marks=[] if each in DEFAULT else [pytest.mark.slow], id=", ".join(each))
        for each in EVERY
    ],
)
def test_rounds_follow_the_reference(label, growth):
    """Ragged rows, greedy and sampled, that end at EOS and at limits.

    In every round the draft cache and the recycled feature are those of a fresh prefill on the
    committed text; the logits along a path, and a dynamic tree, are those of the plain reference.
    """
    drafter, params = shared.made(label, growth)
    net, random = shared.plain_of(drafter, params), np.random.default_rng(0)
    partial = seen = compared = 0
    for number, (state, info, fresh) in enumerate(shared.rounds(drafter, growth, params)):
        path = random.integers(0, shared.VOCAB, (len(shared.PROMPTS), shared.DEPTH))
        ours, right = (shared.look(drafter, params, each, path) for each in (state, fresh))
        for row in np.flatnonzero(~np.asarray(state.done)):
            text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()
            assert bool(ours.ready[row]) == bool(right.ready[row]) == (len(text) > 1)
            if len(text) == 1:
                continue
            seen += 1
            accepted = int(info.accepted[row])
            partial += 0 < accepted < drafter.longest
            assert_same_state(ours, right, row, len(text) - 1)
            # The reference is slow: every row in every second round.
            if number % 2 == 0 or compared < 2:
                compared += 1
                assert_logits(drafter, net, ours.logits[row], text, path[row].tolist())
                if growth == "dynamic":
                    shared.assert_same_tree(drafter, net, info.draft, row, text)
    assert seen >= 12 and partial >= 2, (seen, partial)


def assert_same_state(ours, right, row, size):
    """The cache and the recycled feature of a row whose text has size + 1 tokens."""
    assert int(ours.kept.cache.length[row]) == int(right.kept.cache.length[row]) == size
    pairs = zip(jax.tree.leaves(ours.kept.cache), jax.tree.leaves(right.kept.cache), strict=True)
    for result, expected in pairs:
        if result.ndim == 4:
            assert_close(result[row, :, :size], expected[row, :, :size])
    assert_close(ours.kept.recycled[row], right.kept.recycled[row])
    assert_close(ours.logits[row], right.logits[row])


def assert_close(result, expected):
    """The largest difference is 1e-4 of the largest number, or 1e-4 if all are below 1."""
    result, expected = np.asarray(result), np.asarray(expected)
    real = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(real, 0, result), np.where(real, 0, expected))
    scale = max(np.abs(expected[real]).max(), 1)
    assert np.abs(result[real] - expected[real]).max() <= 1e-4 * scale


def assert_logits(drafter, net, logits, text, path):
    features = shared.features(drafter, net, text)
    for depth in range(shared.DEPTH + 1):
        assert_close(logits[depth], reference.after(net, text, features, path[:depth]))


@pytest.mark.fast
def test_slot_reads_the_next_token():
    """Slot t depends on token t + 1 and not on token t + 2; without the shift not on t + 1."""
    text, t = np.random.default_rng(0).integers(0, shared.VOCAB, 9).tolist(), 3
    for label in ("eagle", "eagle3", "eagle, no shift"):
        drafter, params = shared.made(label)
        net = shared.plain_of(drafter, params)
        network, plain_text = shared.network_of(drafter), shared.features(drafter, net, text)

        @jax.jit
        def predicted(tokens, features, network=network, params=params):
            fed, _ = network.apply(params, tokens, features, network.init_cache(1, 0))
            return network.logits(params, fed.hidden)

        def slot(changed, net=net, drafter=drafter, predicted=predicted, network=network):
            features = shared.features(drafter, net, changed)
            tokens = jnp.asarray(changed[network.shape.shift :][: len(features)])[None]
            return np.asarray(predicted(tokens, jnp.asarray(features, jnp.float32)[None]))[0, t]

        def with_token(index):
            return [(x + 1) % shared.VOCAB if i == index else x for i, x in enumerate(text)]

        before = slot(text)
        assert plain_text.shape[0] == len(text) - 1
        assert np.abs(slot(with_token(t)) - before).max() > 1e-2
        np.testing.assert_array_equal(slot(with_token(t + 2)), before)
        moved = np.abs(slot(with_token(t + 1)) - before).max()
        assert moved == 0 if label == "eagle, no shift" else moved > 1e-3, (label, moved)


@pytest.mark.parametrize("label", [*shared.NETWORKS, "eagle, own embedding"])
def test_a_pass_is_that_of_the_reference(label):
    """Every formula and switch, over six slots at once."""
    drafter, params = shared.made(label.replace(", own embedding", ""))
    random = np.random.default_rng(0)
    if "own" in label:
        table = random.normal(size=(shared.VOCAB, shared.TARGET.width)).astype(np.float32)
        params = params._replace(draft=params.draft | {"embed": {"embedding": table}})
        drafter = drafters.make("eagle", shared.TARGET, params=params.draft, gamma=2)
    net, network = shared.plain_of(drafter, params), shared.network_of(drafter)
    tokens = random.integers(0, shared.VOCAB, (1, 6))
    features = random.normal(size=(1, 6, network.width)).astype(np.float32)
    fed, _ = jax.jit(network.apply)(params, tokens, features, network.init_cache(1, 0))
    hidden, feature = reference.run(net, tokens[0], features[0].astype(np.float64))
    assert_close(fed.hidden[0], hidden)
    assert_close(fed.feature[0], feature)
    ours = _vocabulary.spread(network.ids, network.logits(params, fed.hidden), shared.VOCAB)
    assert_close(ours[0, -1], reference.logits(net, hidden[-1], shared.VOCAB))
    read = [
        random.normal(size=(1, 6, shared.TARGET.width)) for _ in range(1 + len(network.shape.taps))
    ]
    out = Output(None, read[0], tuple(read[1:]))
    stacked = np.stack(read[1:], -2)[0] if network.shape.taps else None
    assert_close(network.read(params, out)[0], reference.read(net, read[0][0], stacked))


def test_config_reaches_the_layers():
    """What tensors do not show: a file's own rotary base, its scaling, and the norm's epsilon."""
    params = shared.made("eagle")[1].draft
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    stored = {"rope_theta": 500.0, "rms_norm_eps": 1e-2, "rope_scaling": scaling, "head_dim": 8}
    given = files.Given(files.ends("eagle", shared.TARGET), params, stored)
    config = _eagle_shape.config_of("eagle", shared.TARGET, given, drafters_keys.EagleKeys())
    assert (config.rope_theta, config.norm_eps, config.head_dim) == (500.0, 1e-2, 8)
    assert config.rope_scaling is not None and config.rope_scaling.factor == 8.0


def test_nan_stays_in_its_row_and_below_its_node():
    """A token whose embedding is NaN: in the text of one row, and as one of two draft nodes."""
    params = shared.made("eagle", "tree")[1]
    table = np.array(shared.TARGET.embed(params.target, jnp.arange(shared.VOCAB)))
    clean, broken = ({"embed": {"embedding": jnp.asarray(t)}} for t in (table, with_nan(table, 6)))
    prompts = [[1, 2, 3], [1, 6, 3], [5, 1, 0, 2, 3, 1], [3, 3]]
    packed, lengths = decode.pack_prompts(prompts, shared.SIZE)

    @jax.jit
    def logits(own):
        both = params._replace(draft=params.draft | own)
        drafter = drafters.make("eagle", shared.TARGET, params=both.draft, gamma=2)
        state = shared.prefilled(drafter, both, packed, lengths)
        stepper = shared.stepper_of(drafter)
        begun = stepper.begin(both, step.context_of(state), state.draft.kept)
        # Two children of the pending token, the first of which has the token 6; a child of each.
        parents = jnp.broadcast_to(jnp.asarray([-1, -1, 0, 1]), (4, 4))
        block, every = None, [begun.logits[:, None]]
        for tokens, above, depth in (([6, 2], [-1, -1], 1), ([1, 1], [0, 1], 2)):
            fed = tree.layout(parents[:, : 2 * depth], 2)
            tokens = jnp.broadcast_to(jnp.asarray(tokens), (4, 2))
            nodes = drafters_growth.Nodes(tokens, np.array(above), depth, fed)
            out, memory = stepper.step(both, begun.kept, nodes, block)
            block = memory if block is None else tree.join(block, memory)
            every.append(out)
        return jnp.concatenate(every, 1)

    expected, result = np.asarray(logits(clean)), np.asarray(logits(broken))
    wrong = np.zeros((4, 5), bool)
    wrong[1] = True
    wrong[:, [1, 3]] = True  # the node and its child
    np.testing.assert_array_equal(np.isnan(result).all(-1), wrong)
    np.testing.assert_allclose(result[~wrong], expected[~wrong], rtol=1e-5, atol=1e-5)


def with_nan(table, token):
    table = np.array(table)
    table[token] = np.nan
    return table
