"""What the tests of heads share: their description without the drafter around it, a text to learn, files."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import drafters, testing
from specjax.drafters.heads import _loss, _shared
from specjax.errors import UserError
from specjax.models import head_files, lm
from specjax.testing import cases
from specjax.train import examine
from specjax.types import Batch, ModelParams

PROMPTS = [
    [0],
    [1, 2, 3],
    [4, 4],
    [2, 1, 0, 3, 3],
    [3],
]  # two of them have one token, and thus no feature yet
VOCAB = 5


def described(name, target, **keys) -> _shared.Heads:
    """The heads as functions, which a drafter keeps to itself."""
    with mock.patch.object(_shared, "build", lambda target, family, **_: family):
        return drafters.make(name, target, **keys)


def logits_along(name, target, target_params, params, tokens, **keys) -> np.ndarray:
    """f[B,T,K,V] of every head at every feature of a text i32[B,T+1]."""
    heads = described(name, target, params=params, **keys)

    @jax.jit
    def read(*pair):
        return [
            x
            for _, x, _ in _loss.along(
                heads, target, ModelParams(*pair), Batch(jnp.asarray(tokens)), heads.depth
            )
        ]

    return np.stack(jax.device_get(read(target_params, params)), 2)


def retold(read, features, tokens, depth) -> np.ndarray:
    """f[B,T,K,V]: ``read(feature [E], tokens known since) -> logits [V]`` at every feature, where the text is long enough."""
    rows, size = features.shape[:2]
    tokens = np.pad(
        tokens, ((0, 0), (0, depth)), mode="edge"
    )  # beyond the end nothing is counted; ``along`` says the same
    return np.array(
        [
            [
                [read(features[b, s], tokens[b, s + 1 : s + 2 + d].tolist()) for d in range(depth)]
                for s in range(size)
            ]
            for b in range(rows)
        ]
    )


def features_of(target, params, tokens) -> np.ndarray:
    """[B,T,E] of the T tokens but the last."""
    read = jax.jit(lambda params: lm.forward(target, params, jnp.asarray(tokens)[:, :-1]).hidden)
    return np.asarray(read(params), np.float64)


def text(rows=2, size=7, vocab=VOCAB, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (rows, size))


def assert_foreseen_is_decoded(
    drafter, target, params, prompts, new_tokens, temperatures=(0.0, 1.0), eos=0
):
    """Training's view of a text and the decoding of it are the same computation: exactly in greedy text, else on average (of
    1500 rows that end early, 0.8% either side)."""
    look = examine.examiner(
        target,
        drafter,
        params,
        prompts,
        new_tokens=new_tokens,
        temperatures=temperatures,
        eos_id=(eos,),
    )
    found = look(drafter.init_params(None))
    assert (
        1.1 < found["tau_t0"] < drafter.longest + 1 and found["tau_t0"] == found["decoded_tau_t0"]
    ), found
    if 1.0 in temperatures:
        assert abs(found["tau_t1"] / found["decoded_tau_t1"] - 1) < 0.05, found
    return found


def counting(vocab: int = 6) -> jax.Array:
    """A table that counts upwards, as good as surely."""
    return jnp.broadcast_to(
        8 * jax.nn.one_hot((jnp.arange(vocab) + 1) % vocab, vocab), (vocab + 1, vocab, vocab)
    )


def assert_learns(name, steps=80, **keys) -> None:
    """Trained on text that counts, every head is right about what it can see; with labels that are one too far, it is not."""
    vocab, size = 6, 12
    target, table = testing.tabular(vocab), counting(vocab)
    drafter = drafters.make(name, target, **keys)
    batch = Batch((jnp.arange(vocab)[:, None] + jnp.arange(size + 1)) % vocab)
    rule, label = optax.adam(0.05), _loss._label

    @jax.jit
    def ranks_after_training(shift):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(lambda p: drafter.training.loss(p, table, batch, key)[0])(params)
            updates, state = rule.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        params = drafter.training.start(table, jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), steps)
        with mock.patch.object(_loss, "_label", lambda batch, by: label(batch, by + shift)):
            (params, _), _ = jax.lax.scan(step, (params, rule.init(params)), keys)
        return drafter.training.ranks(ModelParams(table, params), batch)

    for shift, right in ((0, True), (1, False)):
        ranks = np.asarray(ranks_after_training(shift))
        assert (ranks[:, 0] == -1).all()
        accepted = (ranks[:, 1 : size - ranks.shape[-1]] == 0).mean()
        assert accepted > 0.99 if right else accepted < 0.5, accepted


def assert_foreign_is_refused(name, target, params) -> None:
    """Parameters of other heads, of another target's, with a leaf too few, too many or too short: one line."""

    def refused(params, match):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make(name, target, params=params)
        assert "\n" not in str(caught.value), caught.value

    none_of_these = f"the parameters are not those of {name} heads .*give what such heads train"
    other = "bpd" if name == "medusa" else "medusa"
    start = drafters.make(other, target).training.start
    for foreign in (
        {},
        [],
        {0: np.zeros(3)},
        3.0,
        jax.eval_shape(start, cases.table(0, VOCAB), jax.random.key(0)),
    ):
        refused(foreign, none_of_these)
    leaves, tree = jax.tree.flatten(params)
    for at in range(len(leaves)):
        shapes = [(*leaves[at].shape[:-1], leaves[at].shape[-1] + 2), leaves[at].shape[:-1], ()]
        for shape in shapes:
            changed = [
                np.zeros(shape, np.float32) if i == at else leaf for i, leaf in enumerate(leaves)
            ]
            refused(jax.tree.unflatten(tree, changed), f"on this target it must be|{none_of_these}")
    refused(params | {"more": np.zeros(3)}, none_of_these)
    wider = testing.tabular(VOCAB + 2)
    start = drafters.make(name, wider).training.start
    refused(
        jax.eval_shape(start, cases.table(0, VOCAB + 2), jax.random.key(0)),
        "on this target it must be",
    )


def assert_files_round_trip(name, directory, **keys):
    """What was written beside a drafter's parameters makes the same drafter again."""
    target = testing.tabular(VOCAB)._replace(vocabulary="words")
    mine = cases.random_heads(name, target, cases.table(0, VOCAB), **keys)
    params = mine.init_params(None)
    accuracy = np.full((mine.longest, 2), 0.3).tolist()
    head_files.write(
        directory, name, params, dict(mine.training.facts), "words", {"accuracy": accuracy}
    )
    again = drafters.make(name, target, model=directory)
    assert again.training.facts == mine.training.facts and again.longest == mine.longest
    jax.tree.map(np.testing.assert_array_equal, again.init_params(None), params)
    assert (
        drafters.make(name, target, model=directory, nodes=3).nodes == 3
    )  # a tree from the measured accuracies
    return target
