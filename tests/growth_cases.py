"""What the tests of growth share: every shape and kind of siblings, and two checks of a drafter."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling, step, testing

EXACT = 1e-12
# Label -> keys of growth with small trees for a vocabulary of 3, and a rule for it.
SHAPES = {
    "chain, iid": ({"tree": "chain:2", "siblings": "iid"}, "chain"),
    "chain, without replacement": (
        {"tree": "chain:2", "siblings": "without_replacement"},
        "block",
    ),
    "chain, top_k": ({"tree": "chain:2", "siblings": "top_k"}, "chain"),
    "tree, iid": ({"tree": "2x1", "siblings": "iid"}, "recursive"),
    "tree, without replacement": (
        {"tree": "2x1", "siblings": "without_replacement"},
        "recursive",
    ),
    "tree, top_k": ({"tree": "2x2x1", "siblings": "top_k"}, "deterministic"),
    "irregular, iid": ({"tree": cases.IRREGULAR, "siblings": "iid"}, "recursive"),
    "dynamic": ({"tree": "dynamic", "nodes": 6, "depth": 3, "top_k": 2}, "deterministic"),
    "dynamic, two levels": (
        {"tree": "dynamic", "nodes": 4, "depth": 2, "top_k": 2},
        "deterministic",
    ),
}
CONTROL = "threshold:0.55"


def law_error(drafter, rule, target, params, prompt=(2, 1), **settings) -> float:
    """Total variation between the law of a round's text and the target's law, in float64."""
    settings = settings or {"temperature": 0.9}
    rule, steps = accept.load(rule), drafter.longest + 1
    emitted = testing.exact_law(target, drafter, rule, params, prompt, steps, rounds=1, **settings)
    truth = testing.sequence_law(target, params.target, prompt, steps, **settings)
    assert abs(emitted.sum() - 1) < 1e-12
    return testing.total_variation(emitted, truth)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, context, round_, keys, state):
    return drafter.propose(params, rng.RowKeys(keys, round_, context.length), context, state)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefilled(target, drafter, params, tokens, lengths, keys, settings):
    """The drafter's state after a prefill of these texts."""
    width = tokens.shape[1] - drafter.nodes - 1
    state = decode.prefill(
        target,
        drafter,
        params,
        jnp.maximum(tokens[:, :width], 0),
        lengths,
        keys,
        max_len=width,
        sampling=settings,
    )
    return state.draft


def assert_state_follows_text(drafter, rule, target, params, temperature, rounds=5, least=5):
    """In each round the draft is that of a drafter that has just read the whole text.

    Returns the drafts, one for each round.
    """
    prompts = [[1, 2, 3], [4], [5, 1, 0, 2, 3, 1], [3, 3]]
    packed, lengths = decode.pack_prompts(prompts)
    settings = sampling.make_sampling(len(prompts), temperature)
    keys = rng.row_keys(0, len(prompts))
    state = decode.prefill(
        target, drafter, params, packed, lengths, keys, max_len=40, sampling=settings
    )
    drafts, accepted = [], 0
    rule = accept.load(rule)
    for _ in range(rounds):
        fresh = _prefilled(target, drafter, params, state.tokens, state.length, keys, settings)
        context = step.context_of(state)
        expected = _propose(drafter, params, context, state.round, keys, fresh)
        state, info = _step(target, drafter, rule, params, state)
        draft, accepted = info.draft, accepted + int(info.accepted.sum())
        for name in ("tokens", "valid", "parents"):
            if getattr(draft, name) is not None:
                ours, right = (np.asarray(getattr(d, name)) for d in (draft, expected))
                # The token of a node that does not exist has no meaning.
                if name == "tokens":
                    ours, right = (np.where(draft.valid, x, -1) for x in (ours, right))
                np.testing.assert_array_equal(ours, right, err_msg=name)
        if draft.probs is not None:
            kept = np.asarray(draft.valid)
            np.testing.assert_allclose(
                np.asarray(draft.probs)[kept], np.asarray(expected.probs)[kept], atol=2e-4
            )
        drafts.append(draft)
    assert not bool(state.done.any())
    assert accepted >= least
    return drafts


_step = jax.jit(step.speculative_step, static_argnums=(0, 1, 2))


def noisy_copy(params, noise=0.05, seed=5):
    """Parameters of a draft model that is often right."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + noise * np.std(x) * random.normal(size=x.shape).astype(np.float32), params
    )


def paths_of(draft, row=0) -> list[tuple[int, ...]]:
    """The paths of the draft's valid nodes, as tokens."""
    paths: list[tuple[int, ...]] = []
    parents = np.asarray(draft.parents)[row]
    for node, token in enumerate(np.asarray(draft.tokens)[row].tolist()):
        above = paths[parents[node]] if parents[node] >= 0 else ()
        paths.append((*above, token))
    return [p for p, ok in zip(paths, np.asarray(draft.valid)[row], strict=True) if ok]
