"""Heads with every shape of a draft: dynamic and best-first trees, controllers, the output law."""

from __future__ import annotations

import functools
import itertools

import cases
import growth_cases as shared
import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import drafters_growth_plans, drafters_keys

from specjax import drafters, rng, sampling, testing
from specjax.drafters import growth
from specjax.errors import UserError
from specjax.testing import loop
from specjax.types import Context, ModelParams, Output

TARGET, TABLE = testing.tabular(head_cases.VOCAB), cases.table(0, head_cases.VOCAB)

# Name of the heads, their keys, rule.
LAWS = [
    ("medusa", {"tree": "best_first", "nodes": 4, "depth": 2}, "deterministic"),
    ("medusa", {"tree": "dynamic", "nodes": 4, "depth": 2, "top_k": 2}, "match"),
    ("medusa", {"siblings": "iid", "control": "threshold:0.5"}, "chain"),
    ("medusa", {"tree": "best_first", "nodes": 5, "control": "threshold:0.5"}, "recursive"),
    ("hydra", {"tree": "dynamic", "nodes": 4, "depth": 2, "top_k": 2}, "deterministic"),
    ("hydra", {"tree": "2x1", "siblings": "iid", "control": "threshold:0.5"}, "recursive"),
    ("hydra", {"siblings": "without_replacement", "control": "threshold:0.5"}, "block"),
    ("mlp_speculator", {"tree": "dynamic", "nodes": 4, "control": "threshold:0.5"}, "recursive"),
]


def law_cases():
    for name, keys, rule in LAWS:
        label = f"{name} {keys.get('tree', 'chain')} {keys.get('siblings', '')} {rule}"
        yield pytest.param(name, keys, rule, id=label)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys", "rule"), list(law_cases()))
def test_exact_law(name, keys, rule):
    target = cases.models(3)[0]
    with jax.enable_x64(True):
        table = cases.table(0)
        own = {"inner": 4} if name == "mlp_speculator" else {}
        drafter = cases.random_heads(name, target, table, heads=2, **own, **keys)
        params = ModelParams(table, drafter.init_params(None))
        assert shared.law_error(drafter, rule, target, params) < shared.EXACT


KERNELS = [
    ("medusa", {}),
    ("bpd", {}),
    ("hydra", {"layers": 2, "heads": 2}),
    ("mlp_speculator", {"heads": 3}),
    ("redrafter", {"tree": "chain:3"}),
    ("redrafter", {"top_k": 2, "depth": 3}),
    ("eagle", {"gamma": 2}),
    ("eagle3", {"nodes": 4, "depth": 2, "top_k": 2}),
]


@pytest.mark.fast
@pytest.mark.parametrize(("name", "keys"), KERNELS, ids=str)
def test_no_kernel_is_copied(name, keys):
    """A draft reads every matrix of the parameters in place: it takes no part of a stack."""
    target, params = testing.tiny(layers=1, width=32, vocab_size=97)
    training = drafters.make(name, target, **keys).training

    def draft(params):
        own = training.start(params, jax.random.key(0))
        drafter = drafters.make(name, target, params=own, **keys)
        context = Context(jnp.zeros((1, 8), jnp.int32), jnp.full(1, 4), sampling.make_sampling(1))
        hidden = jnp.zeros((1, 3, 32))
        out = Output(jnp.zeros((1, 0, 97)), hidden, (hidden,) * len(drafter.taps))
        pair, keys_of_row = (
            ModelParams(params, own),
            rng.RowKeys(rng.row_keys(0, 1), 0, jnp.ones(1)),
        )
        state = drafter.init(pair, context, out, 8)
        return jax.make_jaxpr(drafter.propose)(pair, keys_of_row, context, state)

    parts = [
        (each.outvars[0].aval.size, each.invars[0].aval.size)
        for each in equations(draft(params))
        if each.primitive.name in ("slice", "dynamic_slice", "gather")
    ]
    assert parts and not [size for size, whole in parts if 32 * 32 <= size < whole]


def equations(program):
    """Those of a jaxpr and of all jaxprs inside it."""
    program = getattr(program, "jaxpr", program)
    for each in getattr(program, "eqns", ()):
        yield each
        for inner in jax.tree.leaves(
            tuple(each.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            yield from equations(inner)


def marginal_tree(log_probs, nodes, **keys):
    """The best-first draft of these log-probabilities f[B,D,V]."""
    depth, vocab = log_probs.shape[1:]
    stepper = growth.Stepper(
        init=lambda params, context, out, slots: log_probs,
        begin=lambda params, context, kept: growth.Begun(kept[:, 0], kept),
        step=lambda params, kept, nodes, block: (kept[:, nodes.depth][:, None], None),
        commit=lambda params, kept, drafted, verdict, out: kept,
        independent=True,
    )
    method = drafters_growth_plans.Method("marginals", "", "top_k", vocab, depth, independent=True)
    plan = growth.read(
        method, drafters_keys.TreeKeys(tree=drafters_growth_plans.BEST_FIRST, nodes=nodes, **keys)
    )
    drafter = growth.build("marginals", stepper, plan, lambda key: {})
    batch = log_probs.shape[0]
    one = jnp.ones((batch,), jnp.int32)
    context = Context(jnp.zeros((batch, 4), jnp.int32), one, sampling.make_sampling(batch))
    state = drafter.init(None, context, None, 8)
    keys = rng.RowKeys(rng.row_keys(0, batch), jnp.zeros((), jnp.int32), one)
    return jax.jit(drafter.propose)(None, keys, context, state)[0]


def best_paths(log_probs, nodes, top_k):
    """The ``nodes`` paths of the highest score, of all paths with the first ``top_k`` tokens."""
    ranked = [np.argsort(-row, kind="stable")[:top_k] for row in log_probs]
    every = []
    for depth in range(1, len(log_probs) + 1):
        for path in itertools.product(*ranked[:depth]):
            score = sum(log_probs[d][token] for d, token in enumerate(path))
            every.append((score, tuple(int(token) for token in path)))
    return sorted(every, key=lambda each: -each[0])[:nodes]


def all_children_of_popped(log_probs, nodes, top_k):
    """JetSpec's builder: pops the best node and adds all its children; its sum of probabilities."""
    ranked = [np.argsort(-row, kind="stable")[:top_k] for row in log_probs]
    scores, waiting = [], [(0.0, 0)]
    while len(scores) < nodes and waiting:
        waiting.sort(key=lambda each: -each[0])
        score, depth = waiting.pop(0)
        if depth < len(ranked):
            below = [(score + log_probs[depth][token], depth + 1) for token in ranked[depth]]
            scores += [each for each, _ in below]
            waiting += below
    return np.exp(scores[:nodes]).sum()


def expected_length(log_probs, paths):
    return sum(np.exp(sum(log_probs[d][t] for d, t in enumerate(path))) for path in paths)


def marginals(depth=3, vocab=5):
    """f32[B,depth,vocab]: random log-probabilities, peaked ones, with ties, and all equal."""
    random, size = np.random.default_rng(0), (4, depth)
    ties = np.broadcast_to([0.4, 0.2, 0.2, 0.1, 0.1], (*size, vocab))
    parts = [
        random.dirichlet(np.ones(vocab), size),
        random.dirichlet(np.full(vocab, 0.2), size),
        random.permuted(ties, axis=-1),
        np.full((1, depth, vocab), 1 / vocab),
    ]
    return np.log(np.maximum(np.concatenate(parts), 1e-30)).astype(np.float32)


def test_best_first_is_the_best_tree():
    """Against all trees: the sum of the probabilities of all nodes is the largest possible."""
    log_probs, worse = marginals(), 0
    rows, _, vocab = log_probs.shape
    for nodes, top_k in ((1, 0), (7, 0), (20, 0), (155, 0), (9, 2)):
        draft = marginal_tree(jnp.asarray(log_probs), nodes, top_k=top_k)
        assert draft.tokens.shape == (rows, nodes) and bool(draft.valid.all())
        for row in range(rows):
            paths = shared.paths_of(draft, row)
            assert len(set(paths)) == nodes  # all different, and each after its parent
            best = [path for _, path in best_paths(log_probs[row], nodes, top_k or vocab)]
            length = expected_length(log_probs[row], paths)
            np.testing.assert_allclose(length, expected_length(log_probs[row], best), rtol=1e-5)
            if row < 4:  # no ties
                assert set(paths) == set(best)
            worse += all_children_of_popped(log_probs[row], nodes, top_k or vocab) < length - 1e-4
    assert worse > 10


def test_best_first_reads_the_heads():
    """Medusa's tree has the best nodes of its heads' probabilities, in ragged rows."""
    keys = {"tree": "best_first", "nodes": 9}
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=3, **keys)
    params = ModelParams(TABLE, drafter.init_params(None))
    drafts, texts = drafts_of(drafter, params)
    for row, text in enumerate(texts):
        if len(text) < 2:
            assert not bool(drafts.valid[row].any())  # it has no feature yet
            continue
        logits = head_cases.logits_along("medusa", TARGET, TABLE, params.draft, np.array([text]))[
            0, -1
        ]
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        expected = {path for _, path in best_paths(log_probs, 9, head_cases.VOCAB)}
        assert set(shared.paths_of(drafts, row)) == expected


def drafts_of(drafter, params):
    """The first draft after each prompt, and the prompts."""
    state = loop.begin(TARGET, drafter, params, head_cases.PROMPTS, 8, 0)
    context = Context(state.tokens, state.length, state.sampling)
    keys = rng.RowKeys(state.keys, state.round, state.length)
    return jax.jit(drafter.propose)(params, keys, context, state.draft)[0], head_cases.PROMPTS


def along_paths(name, params, row):
    """A function: the log-probabilities of the heads after a path, in the text of a prompt."""
    text = head_cases.PROMPTS[row]
    plain = head_cases.heads_of(name, TARGET, params=params.draft)
    step = jax.jit(plain.step, static_argnums=2)
    features = head_cases.features_of(TARGET, TABLE, np.array([text]))

    def after(path):
        state = plain.begin(params, jnp.asarray(features[0, -1], jnp.float32))
        logits = None
        for depth, token in enumerate([text[-1], *path]):
            logits, state = step(params, state, depth, jnp.asarray(token))
        return np.asarray(jax.nn.log_softmax(logits))

    return after


@pytest.mark.parametrize(
    "name", ["hydra", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mlp_speculator", "bpd"))]
)
def test_nodes_of_a_fixed_tree_continue_their_paths(name):
    own = {"inner": 4} if name == "mlp_speculator" else {}
    shape = cases.IRREGULAR
    drafter = cases.random_heads(name, TARGET, TABLE, heads=3, tree=shape, **own)
    params = ModelParams(TABLE, drafter.init_params(None))
    draft, _ = drafts_of(drafter, params)
    for row in (1, 3):
        after, paths = along_paths(name, params, row), shared.paths_of(draft, row)
        for node, path in enumerate(paths):
            best = np.argsort(-after(path[:-1]), kind="stable")
            assert path[-1] == best[shape.ranks[node]]


@pytest.mark.parametrize("name", ["medusa", pytest.param("hydra", marks=pytest.mark.slow)])
def test_dynamic_tree_is_that_of_eagle2(name):
    """Level by level with the heads as functions: the best nodes get children, the best stay."""
    nodes, top_k, heads = 7, 2, 3
    keys = {"tree": "dynamic", "nodes": nodes, "top_k": top_k}
    drafter = cases.random_heads(name, TARGET, TABLE, heads=heads, **keys)
    params = ModelParams(TABLE, drafter.init_params(None))
    drafts, _ = drafts_of(drafter, params)
    after = along_paths(name, params, 1)
    pool, frontier = [], [((), 0.0)]
    for _ in range(heads):
        level = []
        for path, score in frontier:
            scores = after(path)
            best = np.argsort(-scores, kind="stable")[:top_k]
            level += [((*path, int(token)), score + scores[token]) for token in best]
        pool += level
        frontier = sorted(level, key=lambda node: -node[1])[:top_k]
    expected = {path for path, _ in sorted(pool, key=lambda node: -node[1])[:nodes]}
    assert set(shared.paths_of(drafts, 1)) == expected


FOLLOWED = {
    "hydra, prefix, dynamic": ("hydra", {"tree": "dynamic", "nodes": 6, "top_k": 3}),
    "hydra, prefix, iid, stopped": (
        "hydra",
        {"tree": "3x2", "siblings": "iid", "control": "threshold:0.6"},
    ),
    "medusa, best first, stopped": (
        "medusa",
        {"tree": "best_first", "nodes": 30, "control": "threshold:0.5"},
    ),
}


# tests/drafters has the prefix layer's cache and a draft model's stopped drafts by default.
@pytest.mark.slow
@pytest.mark.parametrize("label", FOLLOWED)
def test_state_follows_text(label):
    name, keys = FOLLOWED[label]
    own = {"prefix": True, "head_dim": 16} if name == "hydra" else {}
    target, table = decoder()
    drafter = cases.random_heads(name, target, table, scale=0.3, heads=2, **own, **keys)
    params = ModelParams(table, drafter.init_params(None))
    depths = set()
    for temperature in (0.0, 1.0):
        drafts = shared.assert_state_follows_text(
            drafter, "recursive", target, params, temperature, least=1
        )
        for each in drafts:
            depths |= set(np.asarray(each.valid).sum(-1).tolist())
    assert "stopped" not in label or len(depths) > 2, depths


@functools.cache
def decoder():
    return testing.tiny(scale=20.0, layers=1, width=16, vocab_size=8)


@pytest.mark.fast
def test_keys():
    def make(name, heads=2, **keys):
        return cases.random_heads(name, TARGET, TABLE, heads=heads, **keys)

    assert make("medusa", tree="best_first").nodes == 30  # all nodes: 5 + 25
    assert make("bpd", tree="best_first", depth=1).nodes == 5
    assert make("hydra", heads=3, tree="dynamic").longest == 3
    assert make("medusa", tree="dynamic", nodes=3, top_k=2).whole
    refused = [
        ("hydra", {"tree": "best_first"}, "hydra reads the tokens of its draft"),
        ("mlp_speculator", {"tree": "best_first", "inner": 4}, "take 'dynamic'"),
        (
            "medusa",
            {"tree": "dynamic", "depth": 3},
            "3 levels deep and medusa drafts at most 2 tokens ahead",
        ),
        ("medusa", {"tree": "best_first", "nodes": 31}, "ask for at most 30 nodes"),
        ("medusa", {"tree": "best_first", "top_k": 6}, "top_k is 6 and the vocabulary has 5"),
        ("medusa", {"depth": 1}, "depth is 1 and has no effect on a tree of a fixed shape"),
        ("medusa", {"tree": "best_first", "siblings": "iid"}, "siblings is 'iid' and has no"),
        ("bpd", {"control": "threshold:2"}, "the threshold's least is 2; it must be a number in"),
    ]
    for name, keys, message in refused:
        with pytest.raises(UserError, match=message):
            make(name, **keys)
    with pytest.raises(UserError, match="unknown controller"):
        drafters.make("medusa", TARGET, control="hope:1")
