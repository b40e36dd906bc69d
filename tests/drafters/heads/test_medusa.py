"""Medusa: the card's formula, training as decoding, the loss in plain NumPy, the laws of its drafts, and the mistakes."""

from __future__ import annotations

import dataclasses

import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, drafters, testing
from specjax.drafters.heads import _shared
from specjax.errors import UserError
from specjax.models import head_files, lm
from specjax.testing import cases, conformance
from specjax.testing.models import tiny_config
from specjax.types import Batch, ModelParams

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def plain(params):
    """The card: W2 (h + SiLU(W1 h + b)), block after block."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def read(feature, known):
        head = len(known) - 1
        for kernel, bias in zip(
            params["block"]["kernel"][head], params["block"]["bias"][head], strict=True
        ):
            feature = feature + silu(feature @ kernel + bias)
        return feature @ params["head"]["kernel"][head] if "head" in params else feature

    return read


@pytest.mark.fast
@pytest.mark.parametrize("own_head", [True, False])
def test_forward_is_the_card(own_head):
    params = cases.random_heads("medusa", TARGET, TABLE, heads=3, layers=2).init_params(None)
    if not own_head:
        del params["head"]  # the target's own, which is the identity here
    tokens = shared.text()
    got = shared.logits_along("medusa", TARGET, TABLE, params, tokens)
    want = shared.retold(plain(params), shared.features_of(TARGET, TABLE, tokens), tokens, 3)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.fast
def test_new_heads_repeat_the_target():
    model, params = testing.tiny(layers=1, width=16)
    fresh = drafters.make("medusa", model).training.start(params, jax.random.key(0))
    tokens = shared.text(vocab=32)
    got = shared.logits_along("medusa", model, params, fresh, tokens)
    want = np.asarray(
        model.unembed(params, jnp.asarray(shared.features_of(model, params, tokens), jnp.float32))
    )
    np.testing.assert_allclose(got, np.repeat(want[:, :, None], 4, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [pytest.param({}, marks=pytest.mark.slow), {"siblings": "iid"}, {"tree": "3x2x1"}]
)
def test_training_sees_what_decoding_does(shape):
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=3, **shape)
    shared.assert_foreseen_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_it_learns_and_a_wrong_label_is_noticed():
    shared.assert_learns("medusa", heads=3)


@pytest.mark.slow  # the same code as in the sampled cases of conformance
@pytest.mark.parametrize("tree", ["", "2x1"])
def test_exact_law_of_sampled_drafts(tree):
    """Drawn from the heads' laws: a chain, and siblings without replacement; the deterministic tree is a case of its own."""
    target, table = testing.tabular(3), cases.table(0)
    drafter = cases.random_heads(
        "medusa", target, table, heads=2, tree=tree, siblings="without_replacement"
    )
    rule = accept.load("recursive" if tree else "chain")
    params = ModelParams(table, drafter.init_params(None))
    found = conformance.check_law(target, drafter, rule, params, cases.PROMPTS[:2], temperature=0.8)
    assert found.passed, found


# --- the loss, for all heads -------------------------------------------------------------------------------------------

TOKENS = np.array([[0, 1, 2, 3, 4], [4, 3, 1, 1, 0]], np.int32)
LABELLED = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], bool)
SEGMENTS = np.array([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])


def loss_by_hand(params, labelled, segments, ce, teacher, decay, heads=2):
    table, read = np.asarray(TABLE, np.float64), plain(params)
    rows, size = TOKENS.shape[0], TOKENS.shape[1] - 1
    total, count = np.zeros(heads), np.zeros(heads)
    agreed = np.zeros(heads)
    for b in range(rows):

        def law(s, b=b):  # the target's logits after position s, within its document
            alone = s == 0 or segments[b, s - 1] != segments[b, s]
            return table[shared.VOCAB if alone else TOKENS[b, s - 1], TOKENS[b, s]]

        for s in range(size):
            for d in range(heads):
                at = s + 2 + d  # the token that head d of feature s guesses
                if at > size or not labelled[b, at] or segments[b, at] != segments[b, s]:
                    continue
                mine = read(law(s), [0] * (d + 1))
                log_q, p = np.log(softmax(mine)), softmax(law(at - 1))
                total[d] += ce * -log_q[TOKENS[b, at]] + teacher * (p * (np.log(p) - log_q)).sum()
                agreed[d] += mine.argmax() == p.argmax()
                count[d] += 1
    return (
        (decay ** np.arange(heads) * total).sum() / count[0],
        agreed / np.maximum(count, 1),
        count[0],
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("ce", "teacher", "decay"), [(1.0, 0.0, 1.0), (0.7, 0.4, 0.8), (0.0, 1.0, 0.5)]
)
@pytest.mark.parametrize("bounded", [False, True])
def test_loss_by_hand(ce, teacher, decay, bounded):
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
    params = drafter.init_params(None)
    batch = Batch(
        *(jnp.asarray(x) for x in ((TOKENS, LABELLED, SEGMENTS) if bounded else (TOKENS,)))
    )
    value, metrics = drafter.training.loss(
        params, TABLE, batch, jax.random.key(0), ce=ce, teacher=teacher, decay=decay
    )
    labelled, segments = (
        (LABELLED, SEGMENTS) if bounded else (np.ones_like(LABELLED), np.zeros_like(SEGMENTS))
    )
    want, agreed, count = loss_by_hand(params, labelled, segments, ce, teacher, decay)
    assert value == pytest.approx(want, rel=1e-5)
    assert [metrics["agreement_1"], metrics["agreement_2"]] == pytest.approx(agreed.tolist())
    assert metrics["weight"] == count


@pytest.mark.fast
@pytest.mark.parametrize("weights", [{"ce": 1.0}, {"ce": 0.5, "teacher": 1.0, "decay": 0.8}])
def test_gradients_are_finite_differences(weights):
    """Of the heads, and through the features of the target; what the teacher says is a constant."""
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)  # noqa: E731
        drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)
        batch = Batch(jnp.asarray(TOKENS), jnp.asarray(LABELLED), jnp.asarray(SEGMENTS))
        at = (wide(drafter.init_params(None)), wide(TABLE))
        call = jax.jit(
            lambda *both: drafter.training.loss(*both, batch, jax.random.key(0), **weights)[0]
        )
        slopes, draw, step = jax.grad(call, argnums=(0, 1))(*at), np.random.default_rng(0), 1e-5
        for part in (0,) if weights.get("teacher") else (0, 1):
            way = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), at[part])
            moved = [
                jax.tree.map(lambda x, w, e=e: x + e * w, at[part], way) for e in (step, -step)
            ]
            ends = [call(*(each if i == part else at[i] for i in (0, 1))) for each in moved]
            slope = sum(
                jax.tree.leaves(jax.tree.map(lambda g, w: (g * w).sum(), slopes[part], way))
            )
            assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-6)
        assert float(jnp.abs(slopes[1]).max()) > 0


@pytest.mark.fast
def test_mistakes(tmp_path):
    def refused(match, target=TARGET, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("medusa", target, **keys).init_params(None)

    mine = cases.random_heads("medusa", TARGET, TABLE, heads=3).init_params(None)
    refused("medusa has no heads yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and medusa has 3 heads; take a flatter one",
        params=mine,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the heads in the files have 3; leave it out", params=mine, heads=2)
    refused("layers is 2, and the heads in the files have 1; leave it out", params=mine, layers=2)
    refused("heads is -1; it must be a whole number >= 0", heads=-1)
    refused(
        "siblings is 'beam'; it must be one of without_replacement, iid, top_k",
        params=mine,
        siblings="beam",
    )
    refused("search is 'best'; it must be one of optimal, greedy", params=mine, search="best")
    refused("has no measured accuracies to search a tree of 9 nodes with", params=mine, nodes=9)
    refused("a tree and nodes=9; give one of them", params=mine, tree="2x1", nodes=9)
    refused(
        "search is 'greedy', and nothing is searched for; give nodes", params=mine, search="greedy"
    )
    refused(
        "search is 'greedy', and nothing is searched for; give nodes",
        params=mine,
        search="greedy",
        tree="2x1",
    )
    refused(
        "was given a dtype, in which files are read, and no files", params=mine, dtype=jnp.float32
    )
    shared.assert_foreign_is_refused("medusa", TARGET, mine)
    refused("7 siblings and the vocabulary 5 tokens", params=mine, tree="7x1")
    refused(
        "reads the features of its target, and tabular gives none",
        TARGET._replace(embed=None),
        params=mine,
    )
    head_files.write(tmp_path / "heads", "medusa", mine, {})
    refused("give one of them", params=mine, model=tmp_path / "heads")
    refused(
        "made for features of width 5, and the target has 6",
        testing.tabular(6),
        model=tmp_path / "heads",
    )
    refused(
        "made for tokens: 5, and the target has 6",
        TARGET._replace(vocab_size=6),
        model=tmp_path / "heads",
    )
    target = shared.assert_files_round_trip("medusa", tmp_path / "more", heads=3, layers=2)
    other = target._replace(vocabulary="other words")
    refused("was trained beside a target with other tokens", other, model=tmp_path / "more")
    refused("no medusa heads", model=tmp_path)


@pytest.mark.fast
def test_dtype_is_that_of_the_parameters(tmp_path):
    params = cases.random_heads("medusa", TARGET, TABLE, heads=2).init_params(None)
    head_files.write(tmp_path, "medusa", params, {})
    for dtype, want in ((None, "float32"), ("bfloat16", "bfloat16"), (jnp.float32, "float32")):
        found = drafters.make("medusa", TARGET, model=tmp_path, dtype=dtype).init_params(None)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {want}
    assert not {"dtype", "params"} & set(drafters.keys())  # they are none of a configuration's


@pytest.mark.fast
@pytest.mark.parametrize("search", ["optimal", "greedy"])
def test_no_more_siblings_than_tokens(tmp_path, search):
    """Accuracies of more ranks than the vocabulary has tokens: measured in one width, whatever the target."""
    params = cases.random_heads("medusa", TARGET, TABLE, heads=2).init_params(None)
    table = [[0.1] * 8] * 2  # a flat tree of eight siblings would be the best
    head_files.write(tmp_path, "medusa", params, {}, None, {"accuracy": table})
    drafter = drafters.make("medusa", TARGET, model=tmp_path, nodes=8, search=search)
    assert drafter.nodes == 8 and drafter.longest == 2
    head_files.write(tmp_path, "medusa", params, {}, None, {"accuracy": [["much"]]})
    with pytest.raises(UserError, match="acceptance is no table of numbers"):
        drafters.make("medusa", TARGET, model=tmp_path, nodes=8, search=search)


@pytest.mark.fast
@pytest.mark.parametrize("tied", [False, True])
def test_the_copied_head_is_exact(tied):
    """Accelerators multiply float32 in fewer bits, unless they are told not to."""
    config = dataclasses.replace(tiny_config(layers=1, width=16), tie_embeddings=tied)
    model, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    program = jax.make_jaxpr(lambda params: _shared.output_kernel(model, params))(params)
    products = [each for each in _equations(program.jaxpr) if each.primitive.name == "dot_general"]
    assert products and all(
        jax.lax.Precision.HIGHEST in each.params["precision"] for each in products
    )
    kernel = params["embed"]["embedding"].T if tied else params["head"]["kernel"]
    np.testing.assert_array_equal(_shared.output_kernel(model, params), kernel)


def _equations(jaxpr):
    """Those of the programs inside as well."""
    inner = [
        value for each in jaxpr.eqns for value in each.params.values() if hasattr(value, "jaxpr")
    ]
    return [*jaxpr.eqns, *(each for program in inner for each in _equations(program.jaxpr))]


@pytest.mark.fast
def test_mistakes_in_the_loss():
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=2)

    def refused(match, tokens=TOKENS, **weights):
        with pytest.raises(UserError, match=match):
            drafter.training.loss(
                drafter.init_params(None),
                TABLE,
                Batch(jnp.asarray(tokens)),
                jax.random.key(0),
                **weights,
            )

    refused("loss.ce is -1; it must be a number >= 0", ce=-1)
    refused("loss.teacher is nan; it must be a number >= 0", teacher=float("nan"))
    refused("loss.ce and loss.teacher are both 0; there is nothing to learn from", ce=0)
    refused("loss.slots is 'some'; it must be one of all, one", slots="some")
    refused("raise train.length to 2 or more", TOKENS[:, :2])
