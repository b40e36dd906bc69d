"""Rollouts in tunix; where it is installed, as ``tests/models/test_tunix.py`` says."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from specjax import decode
from specjax.errors import UserError
from specjax.generation import rollouts

VOCAB, PAD, BOS, EOS = 33, 0, 1, 2


class Letters:
    """A tokenizer: each letter is a token."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i - 3) for i in ids if i >= 3)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def test_without_tunix():
    """One line; with it there is a class."""
    try:
        import tunix  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(UserError, match=r"tunix is missing \(.*\); pip install google-tunix"):
            rollouts.for_tunix()


def actor():
    module = pytest.importorskip("tunix.models.llama3.model")
    keys = {"num_layers": 2, "vocab_size": VOCAB, "embed_dim": 32, "hidden_dim": 64}
    keys |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-5}
    config = module.ModelConfig(**keys, rope_theta=1_000_000, weight_tying=True)
    model, draw = module.Llama3(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape) * 0.4), state))
    return model


def config(**changes):
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

    keys = {"max_tokens_to_generate": 24, "max_prompt_length": 8, "kv_cache_size": 64}
    return base_rollout.RolloutConfig(**keys | {"temperature": 0.0, "top_p": None} | changes)


def test_greedy_rollouts_are_those_of_tunix():
    """Texts, tokens without the end, and left-padded prompts, of rows of several lengths."""
    model = actor()
    from tunix.rl.rollout import base_rollout, vanilla_rollout  # pyright: ignore[reportMissingImports]

    cache = base_rollout.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8)
    theirs = vanilla_rollout.VanillaRollout(model, Letters(), cache)
    prompts = ["abcabc", "z", "hello"]
    expected = theirs.generate(prompts, config())
    for drafter in ("none", "suffix", "token_recycling"):
        ours = rollouts.for_tunix(drafter)(rollout_actor=model, tokenizer=Letters())
        found = ours.generate(prompts, config())
        assert found.text == expected.text
        for one, other in zip(found.tokens, expected.tokens, strict=True):
            np.testing.assert_array_equal(one, other)
        padded = found.left_padded_prompt_tokens
        np.testing.assert_array_equal(padded, expected.left_padded_prompt_tokens)


def test_logprobs_and_samples():
    """Those of tunix's own pass; samples differ; new weights and texts compile nothing."""
    model = actor()
    kind = rollouts.for_tunix("suffix", warm=True)
    ours = kind(rollout_actor=model, tokenizer=Letters())
    how = config(temperature=1.0, return_logprobs=True, eos_tokens=[VOCAB - 1])
    prompts = ["abab"] * 4 + ["xy"] * 4
    for step in range(2):
        found = ours.generate(prompts, how)
        if not step:
            before = decode._generate._cache_size()
        assert decode._generate._cache_size() == before
        assert len(set(found.text[:4])) > 1
        width = max(map(len, found.tokens))
        padded = [np.pad(tokens, (0, width - len(tokens))) for tokens in found.tokens]
        prompt = jnp.asarray(found.left_padded_prompt_tokens)
        expected = ours.get_per_token_logps(prompt, jnp.asarray(np.stack(padded)))
        for row, values in enumerate(found.logprobs):
            # tunix's pass does not see a token of padding that was sampled.
            known = 1 + [*found.tokens[row].tolist(), PAD].index(PAD)
            np.testing.assert_allclose(
                values[:known], expected[row][: len(values)][:known], atol=1e-5
            )
        state = nnx.state(model, nnx.Param)
        ours.update_params(jax.tree.map(lambda x: 0.9 * x, state))


def test_steps_of_grpo():
    """tunix's trainer with these rollouts: the reward, letters a, grows."""
    model = actor()
    from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
    from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    role = rl_cluster.Role
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3), eval_every_n_steps=100, max_steps=4
    )
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=actor(),
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine=rollouts.for_tunix("suffix"),
            training_config=training,
            rollout_config=config(temperature=1.0, top_p=1.0),
        ),
    )
    rewards = []

    def count(prompts, completions, **_):
        values = [collections.Counter(text)["a"] / 24 for text in completions]
        rewards.append(float(np.mean(values)))
        return values

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        algo_config=grpo_learner.GRPOConfig(num_generations=8, num_iterations=1, beta=0.0),
        reward_fns=count,
    )
    learner.train([{"prompts": np.asarray(["abc", "xyz"])} for _ in range(4)])
    assert len(rewards) >= 4 and rewards[-1] > rewards[0]
