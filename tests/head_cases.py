"""What the tests of heads share: the heads without their drafter, a text to learn, files."""

from __future__ import annotations

from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import heads_along_text as _along_text
from internals import heads_heads as _heads

from specjax import drafters, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import lm
from specjax.train import examine
from specjax.types import Batch, ModelParams

# Two of them have one token, so no feature yet.
PROMPTS = [[0], [1, 2, 3], [4, 4], [2, 1, 0, 3, 3], [3]]
VOCAB = 5


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms_normal(x, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def heads_of(name, target, **keys) -> _heads.Heads:
    """The heads as functions, without the drafter that runs them."""
    with mock.patch.object(_heads, "build", lambda target, heads, keys, given: heads):
        return drafters.make(name, target, **keys)


def logits_along(name, target, target_params, params, tokens, **keys) -> np.ndarray:
    """f[B,T,K,V] of every head at every feature of a text i32[B,T+1]."""
    heads = heads_of(name, target, params=params, **keys)
    batch = Batch(jnp.asarray(tokens))

    @jax.jit
    def read(*pair):
        texts = _heads.along(heads, target, ModelParams(*pair), batch, heads.depth)
        return [logits for _, logits, _ in texts]

    return np.stack(jax.device_get(read(target_params, params)), 2)


def expected_along(read, features, tokens, depth) -> np.ndarray:
    """f[B,T,K,V] of ``read(feature [E], tokens since) -> logits [V]`` at every feature.

    Beyond the end of the text the last token repeats, as in ``_along_text.ahead``; no label counts
    there.
    """
    rows, size = features.shape[:2]
    tokens = np.pad(tokens, ((0, 0), (0, depth)), mode="edge")
    return np.array(
        [
            [
                [read(features[b, s], tokens[b, s + 1 : s + 2 + d].tolist()) for d in range(depth)]
                for s in range(size)
            ]
            for b in range(rows)
        ]
    )


def hydra_formula(params, embedding):
    """R x + SiLU(W x + b) of x = [s, e(tokens)], blocks y + SiLU(W y + b), a map with a bias."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def linear(part, x):
        return x @ part["kernel"] + part["bias"]

    def read(feature, since):
        head = params["mlp"][str(len(since) - 1)]
        x = np.concatenate([feature, *embedding[since]])
        x = linear(head["skip"], x) + silu(linear(head["in"], x))
        for block in head.get("blocks", {}).values():
            x = x + silu(linear(block, x))
        return linear(params["head"][str(len(since) - 1)], x)

    return read


def features_of(target, params, tokens) -> np.ndarray:
    """[B,T,E] of all tokens but the last, i32[B,T+1]."""
    read = jax.jit(lambda params: lm.forward(target, params, jnp.asarray(tokens)[:, :-1]).hidden)
    return np.asarray(read(params), np.float64)


def text(rows=2, size=7, vocab=VOCAB, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (rows, size))


def assert_forecast_is_decoded(
    drafter, target, params, prompts, new_tokens, temperatures=(0.0, 1.0), eos=0
):
    """The forecast along a text equals the decoding of the text.

    Exactly for greedy text, else on average (of 1500 rows that end early, 0.8% either side).
    """
    look = examine.examiner(
        target,
        drafter,
        params,
        prompts,
        new_tokens=new_tokens,
        temperatures=temperatures,
        eos_id=(eos,),
    )
    result = look(drafter.init_params(None))
    assert 1.1 < result["tau_t0"] < drafter.longest + 1, result
    assert result["tau_t0"] == result["decoded_tau_t0"], result
    if 1.0 in temperatures:
        assert abs(result["tau_t1"] / result["decoded_tau_t1"] - 1) < 0.05, result
    return result


def counting(vocab: int = 6) -> jax.Array:
    """A table that counts upwards, almost surely."""
    return jnp.broadcast_to(
        8 * jax.nn.one_hot((jnp.arange(vocab) + 1) % vocab, vocab), (vocab + 1, vocab, vocab)
    )


def assert_learns(name, steps=80, rate=0.05, **keys) -> None:
    """Trained on text that counts, every head predicts the token at its own distance.

    With labels one token too late it does not.
    """
    vocab, size = 6, 12
    target, table = testing.tabular(vocab), counting(vocab)
    drafter = drafters.make(name, target, **keys)
    batch = Batch((jnp.arange(vocab)[:, None] + jnp.arange(size + 1)) % vocab)
    rule, label = optax.adam(rate), _along_text.label

    @jax.jit
    def ranks_after_training(shift):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(lambda p: drafter.training.loss(p, table, batch, key)[0])(params)
            updates, state = rule.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        params = drafter.training.start(table, jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), steps)
        with mock.patch.object(
            _along_text, "label", lambda batch, by, *more: label(batch, by + shift, *more)
        ):
            (params, _), _ = jax.lax.scan(step, (params, rule.init(params)), keys)
        return drafter.training.ranks(ModelParams(table, params), batch)

    for shift, right in ((0, True), (1, False)):
        ranks = np.asarray(ranks_after_training(shift))
        assert (ranks[:, 0] == -1).all()
        accepted = (ranks[:, 1 : size - ranks.shape[-1]] == 0).mean()
        assert accepted > 0.99 if right else accepted < 0.5, accepted


def assert_foreign_is_refused(name, target, params) -> None:
    """Wrong parameters are one line of error.

    Wrong are those of other heads, those for another target, and any leaf that is missing,
    unexpected or of the wrong shape.
    """

    def refused(params, match):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make(name, target, params=params)
        assert "\n" not in str(caught.value), caught.value

    other_heads = f"the parameters are not those of {name} heads .*give the parameters"
    other_target = "on this target it must be"
    other = "bpd" if name in ("medusa", "redrafter") else "medusa"
    start = drafters.make(other, target).training.start
    foreign = jax.eval_shape(start, cases.table(0, VOCAB), jax.random.key(0))
    for wrong in ({}, [], {0: np.zeros(3)}, 3.0, foreign):
        refused(wrong, other_heads)
    leaves, tree = jax.tree.flatten(params)
    for at in range(len(leaves)):
        shapes = [(*leaves[at].shape[:-1], leaves[at].shape[-1] + 2), leaves[at].shape[:-1], ()]
        for shape in shapes:
            changed = [
                np.zeros(shape, np.float32) if i == at else leaf for i, leaf in enumerate(leaves)
            ]
            refused(jax.tree.unflatten(tree, changed), f"{other_target}|{other_heads}")
    refused(params | {"more": np.zeros(3)}, other_heads)
    wider = testing.tabular(VOCAB + 2)
    start = drafters.make(name, wider).training.start
    foreign = jax.eval_shape(start, cases.table(0, VOCAB + 2), jax.random.key(0))
    refused(foreign, other_target)


def assert_files_round_trip(name, directory, **keys):
    """Files with a drafter's parameters and facts make the same drafter again."""
    target = testing.tabular(VOCAB)._replace(vocabulary="words")
    written = cases.random_heads(name, target, cases.table(0, VOCAB), **keys)
    params = written.init_params(None)
    accuracy = np.full((written.longest, 2), 0.3).tolist()
    facts = dict(written.training.facts)
    head_files.write(directory, name, params, facts, "words", {"accuracy": accuracy})
    read = drafters.make(name, target, model=directory)
    assert read.training.facts == written.training.facts and read.longest == written.longest
    jax.tree.map(np.testing.assert_array_equal, read.init_params(None), params)
    # A tree that is searched with the measured accuracies.
    assert drafters.make(name, target, model=directory, nodes=3).nodes == 3
    return target
