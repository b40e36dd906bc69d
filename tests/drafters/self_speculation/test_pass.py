"""PaSS: the embeddings in the target's input, both variants of a round, training, files, errors."""

from __future__ import annotations

import functools

import cases
import exit_cases
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing, tree
from specjax.drafters import files
from specjax.errors import UserError
from specjax.models import hf
from specjax.testing import drafter_checks, laws
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "pass": ("pass", {"heads": 2}, ()),
    "pass tree": ("pass", {"heads": 2, "tree": "best_first", "nodes": 5}, ()),
    "pass merged": (
        "pass",
        {"heads": 2, "calls": 1, "tree": "2x1", "siblings": "without_replacement"},
        ("recursive",),
    ),
}

# Python cannot import a module of this name.
module = drafters.load("pass")
TARGET, TABLE = testing.tabular(head_cases.VOCAB), cases.table(0, head_cases.VOCAB)
NEW = 12
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3]]


def setup_of(target, rows, calls=2):
    return module.Setup(target, files.ends("pass", target), rows, calls)


def prefilled(target, drafter, params, temperature=0.0, prompts=PROMPTS):
    packed, lengths = decode.pack_prompts(prompts)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(prompts)),
        max_len=packed.shape[1] + NEW,
        limit=lengths + NEW,
        sampling=sampling.make_sampling(len(prompts), temperature),
    ), lengths


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_an_embedding_of_a_token_is_that_token(family):
    """A row that is a token's own embedding gives the token's output, bit for bit."""
    target, params = testing.tiny(family, 0)
    tokens = jnp.asarray([[3, 7, 1, 9], [2, 2, 8, 0]], jnp.int32)
    rows = target.embed(params, jnp.asarray([9, 1]))
    fed = tokens.at[0, 3].set(32).at[0, 2].set(33)
    cache = target.init_cache(2, 0)
    expected = jax.jit(target.apply)(params, tokens, cache)[0].logits
    result = jax.jit(target.inside.extended)((params, rows), fed, cache)[0].logits
    np.testing.assert_array_equal(result, expected)


@functools.partial(jax.jit, static_argnums=0)
def behind(target, params, rows, text, length):
    """f[L+1,V]: the logits after the last of ``length`` tokens, and after L embeddings behind it.

    The embeddings' ids are put into the text i32[1,S], and it is read in one pass.
    """
    place = jnp.arange(text.shape[1]) - length
    fed = jnp.where((place >= 0) & (place < len(rows)), target.vocab_size + place, text)
    logits = target.inside.extended((params, rows), fed, target.init_cache(1, 0))[0].logits[0]
    return jax.lax.dynamic_slice_in_dim(logits, length - 1, len(rows) + 1, 0)


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_marginals_are_those_of_the_text(calls):
    """In rounds of a ragged batch: the embeddings behind a token see the text up to it alone."""
    target, params = exit_cases.tiny()
    drafter = cases.random_heads("pass", target, params, heads=3, calls=calls, scale=0.3)
    pair, accepted = ModelParams(params, drafter.init_params(None)), 0
    rows, rule = module.rows_of(pair), accept.default_rule(drafter)
    for state, info in exit_cases.played(drafter, pair, rule):
        accepted += int(info.accepted.sum())
        for row, text in enumerate(exit_cases.texts_of(state)):
            length = len(text) - (calls == 1)
            if not length:
                assert not info.draft.valid[row].any()
                continue
            padded = np.zeros((1, exit_cases.LONGEST), np.int32)
            padded[0, : len(text)] = text
            logits = behind(target, params, rows, jnp.asarray(padded), jnp.asarray(length))
            expected = jax.nn.softmax(logits[2 - calls :])
            np.testing.assert_allclose(info.draft.probs[row, : len(expected)], expected, atol=5e-5)
    assert accepted


@pytest.mark.slow
def test_marginals_along_a_text():
    target, params = testing.tiny("llama", 0, vocab_size=16)
    drafter = cases.random_heads("pass", target, params, heads=3, scale=0.3)
    pair = ModelParams(params, drafter.init_params(None))
    rows, setup = module.rows_of(pair), setup_of(target, 3)
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 8)), jnp.int32))
    places = jnp.asarray([[0, 4], [6, 2]])
    _, hidden = module.outputs(setup, pair, batch, places)
    for row, column in np.ndindex(2, 2):
        text = batch.tokens[row : row + 1, : int(places[row, column]) + 1]
        fed = jnp.concatenate([text, module.ids(setup, 1)], 1)
        out = target.inside.extended((params, rows), fed, target.init_cache(1, 0))[0].hidden[0, -3:]
        np.testing.assert_allclose(hidden[row, column], out, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_embeddings_stay_inside_their_document():
    target, params = testing.tiny("llama", 0, vocab_size=16)
    drafter = cases.random_heads("pass", target, params, heads=2, scale=0.3)
    pair, setup = ModelParams(params, drafter.init_params(None)), setup_of(target, 2)
    texts = np.random.default_rng(0).integers(0, 16, (2, 7))
    numbers = jnp.asarray([[0] * 4 + [1] * 3])
    packed = Batch(jnp.asarray([[*texts[0, :4], *texts[1, :3]]]), segments=numbers)
    _, together = module.outputs(setup, pair, packed, jnp.asarray([[2, 5]]))
    for column, (row, place) in enumerate(((0, 2), (1, 1))):
        own = Batch(jnp.asarray(texts[row : row + 1, :4]))
        _, alone = module.outputs(setup, pair, own, jnp.asarray([[place]]))
        np.testing.assert_allclose(together[0, column], alone[0, 0], rtol=1e-4, atol=1e-4)


def test_layout_of_one_call():
    """The embeddings behind each node are a chain below it, at the positions that follow it."""
    drafter = cases.random_heads("pass", TARGET, TABLE, heads=2, calls=1, tree="2x1")
    parents = np.asarray(module._parents(4, 2))
    assert drafter.nodes == 14 and drafter.longest == 2 and drafter.whole
    assert parents.tolist() == [-1, 4, 0, 6, 1, 8, 2, 10, 3, 12]
    whole = jnp.asarray([[-1, -1, 0, 1, *parents]])
    assert tree.depths(whole, 1, 14)[0, 4:].tolist() == [0, 1, 1, 2, 1, 2, 2, 3, 2, 3]


@pytest.mark.parametrize(
    "keys",
    [
        {"calls": 1, "tree": "2x2"},
        pytest.param({"calls": 2}, marks=pytest.mark.slow),
        pytest.param({"calls": 1}, marks=pytest.mark.slow),
        pytest.param({"calls": 1, "tree": "best_first", "nodes": 5}, marks=pytest.mark.slow),
        pytest.param({"calls": 2, "tree": "best_first", "nodes": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_text_is_the_targets(keys):
    """With trained-like embeddings some tokens are accepted; the cache has no embedding."""
    target, params = testing.tiny("llama", 0)
    drafter = cases.random_heads("pass", target, params, heads=2, scale=0.1, **keys)
    pair = ModelParams(params, drafter.init_params(None))
    rule = accept.load(accept.default_rule(drafter))
    state, lengths = prefilled(target, drafter, pair)
    state, records = decode.generate(target, drafter, rule, pair, state, max_steps=NEW)
    decode.check(state)
    plain = drafters.make("none", target)
    other, _ = prefilled(target, plain, ModelParams(params))
    other, _ = decode.generate(
        target, plain, accept.load("chain"), ModelParams(params), other, max_steps=NEW
    )
    assert decode.outputs(state, lengths) == decode.outputs(other, lengths)
    if keys["calls"] == 2:
        # The first token of each draft is the target's own.
        emitted = np.asarray(records.emitted)
        left = NEW - np.cumsum(emitted, 0) + emitted
        assert (emitted[(emitted > 0) & (left > 1)] >= 2).all()
    for ours, theirs in zip(state.cache.k, other.cache.k, strict=True):
        for row in range(4):
            size = int(min(state.cache.length[row], other.cache.length[row]))
            np.testing.assert_allclose(ours[row, :, :size], theirs[row, :, :size], atol=2e-5)


LAWS = [
    ({"heads": 2}, "chain"),
    ({"heads": 2, "control": "matchness:0.4"}, "block"),
    ({"heads": 2, "tree": "2x1", "siblings": "without_replacement"}, "recursive"),
    ({"heads": 2, "tree": "best_first", "nodes": 5}, "deterministic"),
    ({"heads": 2, "calls": 1}, "recursive"),
    ({"heads": 2, "calls": 1}, "k_seq"),
    ({"heads": 2, "calls": 1, "tree": "2x1", "siblings": "without_replacement"}, "traversal"),
    ({"heads": 2, "calls": 1, "tree": "best_first", "nodes": 4}, "deterministic"),
    ({"heads": 2, "calls": 1, "tree": "2x1", "siblings": "iid"}, "k_seq"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "rule"), LAWS, ids=str)
def test_exact_law(keys, rule):
    """Of two rounds together: the second draft comes from the outputs of the first round."""
    target = cases.models()[0]
    with jax.enable_x64(True):
        table = cases.table(0)
        drafter = cases.random_heads("pass", target, table, **keys)
        params, chosen = ModelParams(table, drafter.init_params(None)), accept.load(rule)
        for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}):
            law = testing.exact_law(
                target, drafter, chosen, params, [2, 1], 3, rounds=2, **settings
            )
            truth = laws.sequence_law(target, table, [2, 1], 3, **settings)
            assert testing.total_variation(law, truth) < 1e-12


@pytest.mark.parametrize("control", ["bandit", pytest.param("goodput", marks=pytest.mark.slow)])
def test_a_controller_of_one_pass_per_round(control):
    """The embeddings are fed also in a round without a draft: the next draft is made of them."""
    target, params = testing.tiny("llama", 0, vocab_size=16)
    keys = {"heads": 2, "calls": 1, "control": control}
    drafter = cases.random_heads("pass", target, params, scale=0.3, **keys)
    pair = ModelParams(params, drafter.init_params(None))
    state, lengths = prefilled(target, drafter, pair)
    state, records = decode.generate(
        target, drafter, accept.load("recursive"), pair, state, max_steps=NEW
    )
    decode.check(state)
    # The pass of every round has one width.
    drafted = np.asarray(records.drafted)
    assert drafted.any() and not drafted.all()
    plain = decode.autoregressive(target, pair, prefilled(target, drafter, pair)[0], max_steps=NEW)
    assert decode.outputs(state, lengths) == decode.outputs(plain, lengths)


# Training ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_on_a_real_target(data_dir):
    """The loss falls far below that of random tokens' embeddings and below the uniform guess."""
    loaded = hf.load(data_dir / "models" / "stories260K")
    text = (data_dir / "text" / "tinystories" / "TinyStories-valid-30KB.txt").read_text()
    ids = loaded.tokenizer.encode(text).ids[: 8 * 97]
    batch = Batch(jnp.asarray(ids, jnp.int32).reshape(8, 97))
    training, rule = drafters.make("pass", loaded.lm, heads=2).training, optax.adam(2e-2)

    def one(carry, key):
        own, state = carry
        loss = lambda own: training.loss(own, loaded.params, batch, key)  # noqa: E731
        (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(own)
        updates, state = rule.update(slope, state)
        sizes = value / metrics["scale"], metrics["uniform"] / metrics["scale"]
        return (optax.apply_updates(own, updates), state), sizes

    start = training.start(loaded.params, jax.random.key(2))
    keys = jax.random.split(jax.random.key(0), 80)
    run = jax.jit(lambda own: jax.lax.scan(one, (own, rule.init(own)), keys)[1])
    values, uniform = map(np.asarray, run(start))
    assert values[-1] < 0.8 * values[0] and values[-1] < uniform[-1]


@pytest.mark.slow
def test_the_loss_is_the_mean_over_random_places():
    """All places: the mean cross-entropy of the tokens that follow, by a plain pass for each."""
    target, params = testing.tiny("llama", 0, vocab_size=16)
    drafter = cases.random_heads("pass", target, params, heads=2, scale=0.3)
    own, setup = drafter.init_params(None), setup_of(target, 2)
    labelled = np.ones((2, 6), bool)
    labelled[0, :4] = False
    batch = Batch(
        jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 6)), jnp.int32),
        labelled=jnp.asarray(labelled),
    )
    result, _ = drafter.training.loss(own, params, batch, jax.random.key(0), decay=0.5)
    rows, expected, first = own["look_ahead"], 0.0, 0
    for row, place in np.ndindex(2, 5):
        text = batch.tokens[row : row + 1, : place + 1]
        fed = jnp.concatenate([text, module.ids(setup, 1)], 1)
        out = target.inside.extended((params, rows), fed, target.init_cache(1, 0))[0].logits[0, -2:]
        for depth in range(2):
            at = place + 2 + depth
            if at < 6 and labelled[row, at]:
                own_loss = -jax.nn.log_softmax(out[depth])[batch.tokens[row, at]]
                expected, first = expected + 0.5**depth * float(own_loss), first + (depth == 0)
    assert float(result) == pytest.approx(expected / first, rel=1e-4)
    gradient = jax.grad(lambda own: drafter.training.loss(own, params, batch, jax.random.key(0))[0])
    assert all(np.abs(np.asarray(gradient(own)["look_ahead"])).max(-1) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{}, {"calls": 1}, {"tree": "2x2x1", "siblings": "top_k"}], ids=str
)
def test_forecast_is_decoded(keys):
    drafter = cases.random_heads("pass", TARGET, TABLE, heads=2, **keys)
    head_cases.assert_forecast_is_decoded(drafter, TARGET, TABLE, head_cases.PROMPTS * 300, 24)


# Files and errors -------------------------------------------------------------------------------


@pytest.mark.fast
def test_files_and_errors(tmp_path):
    drafter = cases.random_heads("pass", TARGET, TABLE, heads=3)
    params = drafter.init_params(None)

    def refused(match, target=TARGET, **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("pass", target, **keys).init_params(None)
        assert "\n" not in str(caught.value)

    refused("pass has no parameters yet; give model=, a directory of trained ones")
    refused("calls is 3; it must be a number from 1 to 2", calls=3)
    refused("calls is 0; it must be a whole number >= 1", calls=0)
    refused("heads is 2, and the given pass has 3; leave it out", params=params, heads=2)
    refused(
        "the tree is 5 levels deep and pass drafts at most 4 tokens ahead",
        params=params,
        tree="chain:5",
    )
    refused(
        "4 levels deep and pass drafts at most 3 tokens ahead",
        params=params,
        tree="chain:4",
        calls=1,
    )
    refused(
        "has its own input embeddings, and tabular takes none",
        TARGET._replace(inside=TARGET.inside._replace(extended=None)),
    )
    head_cases.assert_foreign_is_refused("pass", TARGET, params)
    head_cases.assert_files_round_trip("pass", tmp_path / "rows", heads=2)


@pytest.mark.fast
def test_names():
    """The name is a keyword: the registry imports the file by its name."""
    assert drafters.load("pass").__name__.endswith("self_speculation.pass")
    assert "pass" in drafters.families()["self_speculation"]
    drafter = cases.random_heads("pass", TARGET, TABLE, heads=2)
    assert drafter.siblings == "chain" and drafter.nodes == 3 and drafter.gaps
    assert cases.case("pass tree").drafter.siblings == "deterministic"


@pytest.mark.fast
def test_nodes_of_embeddings_are_fed():
    """They are invalid, and drafts are whole all the same."""
    _, target, drafter, params = cases.case("pass merged")
    finding = drafter_checks.well_formed(drafter, target, params)
    assert finding.passed, str(finding)


@pytest.mark.fast
def test_a_target_with_other_taps_is_refused():
    """``Inside.extended`` would not have them."""
    tapped = testing.tiny("llama", 0)[0].with_taps((0,))
    with pytest.raises(UserError, match="has its own input embeddings, and lm takes none"):
        drafters.make("pass", tapped)
