"""Rollouts of reinforcement learning: a worker for the library tunix.

    engine = rollouts.for_tunix(drafter="suffix")
    ClusterConfig(rollout_engine=engine, ...)

tunix stays as it is. The worker reads the parameters of its model at every call, so weights that
the trainer and the rollouts share are never copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax.errors import UserError
from specjax.generation.loading import Choice, Model
from specjax.generation.texts import Completion, generate_text
from specjax.models import tunix


def for_tunix(drafter: Choice = "suffix", accept: str = "", warm: bool = False) -> type:
    """A class for ``ClusterConfig.rollout_engine``: tunix's ``BaseRollout`` with a drafter.

    Args:
        drafter, accept: as of ``generate_text``; an L1 rule (every default) leaves the law of the
            rollouts unchanged.
        warm: whether the drafter learns from the rollouts of earlier steps (``generate_text``).

    Raises UserError where tunix is not installed.
    """
    try:
        from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"tunix is missing ({error}); pip install google-tunix==0.1.7") from None
    # Of two base classes the first one has the methods that the second one leaves open.
    how = {"drafter": drafter, "accept": accept, "warm": warm}
    return type("Rollout", (_Worker, base_rollout.BaseRollout), how)


class _Worker:
    """The methods of tunix's ``BaseRollout``.

    Prompts are strings; neighbours that are equal are samples of one prompt, which is read once.
    Texts end before the end-of-sequence token. Log-probabilities are those of the distribution that
    was sampled, after temperature, top_k and top_p. Noise depends on ``RolloutConfig.seed`` and on
    the number of the call. Programs are compiled for each 64 tokens of the longest prompt.
    """

    drafter: Choice
    accept: str
    warm: bool

    def __init__(self, rollout_actor: nnx.Module, tokenizer: Any, **_: Any):
        from tunix.generate import tokenizer_adapter  # pyright: ignore[reportMissingImports]

        adapter = tokenizer_adapter.TokenizerAdapter
        self._tokenizer = tokenizer if isinstance(tokenizer, adapter) else adapter(tokenizer)
        self._actor, self._calls = rollout_actor, 0
        self._pair = tunix.from_model(rollout_actor)
        self._models: dict[tuple[int, ...], Model] = {}

    def generate(self, prompts: Sequence[str], rollout_config: Any, **_: Any) -> Any:
        """One text for each prompt."""
        from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

        how, self._calls = rollout_config, self._calls + 1
        ends = tuple(how.eos_tokens or [self.eos_id()])
        if ends not in self._models:
            self._models[ends] = Model.from_lm(*self._pair, eos_ids=ends)
        ids = [self._encode(prompt) for prompt in prompts]
        groups = [(each, len(list(same))) for each, same in itertools.groupby(ids)]
        sizes = {size for _, size in groups}
        # Greedy samples of a prompt would be equal.
        several = len(sizes) == 1 and how.temperature > 0
        result = generate_text(
            self._models[ends],
            [each for each, _ in groups] if several else ids,
            n=sizes.pop() if several else 1,
            drafter=self.drafter,
            accept=self.accept,
            warm=self.warm,
            max_new_tokens=how.max_tokens_to_generate,
            temperature=how.temperature,
            top_k=max(how.top_k or 0, 0),
            top_p=1.0 if how.top_p is None else how.top_p,
            seed=_seed(how.seed, self._calls),
            logprobs="sampled" if how.return_logprobs else False,
            params=tunix.params_of(self._actor),
        )
        kept = [_without_end(each, ends) for each in result.completions]
        width = max(how.max_prompt_length, *map(len, ids))
        padded = [[self.pad_id()] * (width - len(each)) + each for each in ids]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(tokens.tolist()) for tokens, _ in kept],
            logits=[],
            tokens=[tokens for tokens, _ in kept],
            left_padded_prompt_tokens=np.asarray(padded, np.int32),
            logprobs=[values for _, values in kept] if how.return_logprobs else None,
        )

    def _encode(self, prompt: str) -> list[int]:
        ids, first = list(self._tokenizer.encode(prompt)), self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids(([first] if first else []) + ids)

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any:
        """tunix's own function, with the model's parameters."""
        from tunix.rl import common  # pyright: ignore[reportMissingImports]

        return common.compute_per_token_logps(
            *nnx.split(self._actor),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
        )

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Gives the model other parameters, if it does not share them with the trainer."""
        nnx.update(self._actor, params)

    def pad_id(self) -> int:
        """The token of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The model that writes."""
        return self._actor


def _seed(key: Any, call: int) -> int:
    """The seed of a call; ``key`` is that of the configuration: a key, a number, or None."""
    if key is None or isinstance(key, int):
        return ((key or 0) * 1_000_003 + call) % 2**32
    return int(jax.random.bits(jax.random.fold_in(key, call)))


def _without_end(completion: Completion, ends: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens before the end-of-sequence token, and their log-probabilities."""
    tokens = completion.tokens
    count = len(tokens) - (bool(tokens) and tokens[-1] in ends)
    values = np.asarray((completion.logprobs or [])[:count], np.float32)
    return np.asarray(tokens[:count], np.int32), values
