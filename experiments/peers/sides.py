"""The two sides of the comparison: each decodes all prompts one after the other and counts rounds.

Both have the same directories, prompts and settings. The caller takes the time, which includes
prefill on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax import accept, decode, drafters, rng, sampling
from specjax.models import hf
from specjax.types import Drafter, ModelParams

AUTOREGRESSIVE, DRAFT_MODEL, PROMPT_LOOKUP = "autoregressive", "draft_model", "prompt_lookup"
# Draft tokens per round, constant on both sides.
GAMMA = {AUTOREGRESSIVE: 0, DRAFT_MODEL: 5, PROMPT_LOOKUP: 10}
MAX_NGRAM = 2  # the default of transformers


class Answer(NamedTuple):
    """The new tokens of each prompt, and the target passes that they took."""

    texts: list[list[int]]
    rounds: int


Run = Callable[[int], Answer]  # seed -> answer


def _drafter(target: hf.Loaded, draft: hf.Loaded, method: str) -> Drafter:
    gamma = GAMMA[method]
    if method == DRAFT_MODEL:
        return drafters.make(method, target.lm, model=draft.lm, params=draft.params, gamma=gamma)
    if method == PROMPT_LOOKUP:
        return drafters.make(
            method, target.lm, rule="transformers", gamma=gamma, max_ngram=MAX_NGRAM
        )
    return drafters.make("none", target.lm)


def ours(
    target: hf.Loaded,
    draft: hf.Loaded,
    method: str,
    prompts: Sequence[list[int]],
    new: int,
    temperature: float,
) -> Run:
    """specjax. The prompts are padded to one width, so one compilation serves all lengths."""
    drafter = _drafter(target, draft, method)
    params = ModelParams(target.params, draft.params if method == DRAFT_MODEL else {})
    rule, width = accept.load("chain"), max(map(len, prompts))
    settings = sampling.make_sampling(1, temperature=temperature)

    def run(seed: int) -> Answer:
        texts, rounds = [], 0
        for row, prompt in enumerate(prompts):
            tokens, lengths = decode.pack_prompts([prompt], width)
            state = decode.prefill(
                target.lm,
                drafter,
                params,
                tokens,
                lengths,
                rng.row_keys(seed, [row]),
                max_len=width + new,
                limit=lengths + new,
                sampling=settings,
            )
            if method == AUTOREGRESSIVE:
                state = decode.autoregressive(target.lm, params, state, max_steps=new)
                rounds += new
            else:
                state, records = decode.generate(
                    target.lm, drafter, rule, params, state, max_steps=new
                )
                rounds += int((np.asarray(records.emitted) > 0).sum())
            texts += decode.outputs(state, [len(prompt)])
        return Answer(texts, rounds)

    return run


def load_theirs(directory: str, device: str, dtype: str) -> Any:
    """A model of transformers with its defaults: eager, dynamic cache. No end-of-sequence token."""
    import torch
    import transformers

    # Otherwise every call warns that no token ends the text.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    )
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    # The draft length is read from the draft model, and never changes.
    model.generation_config.num_assistant_tokens = GAMMA[DRAFT_MODEL]
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def theirs(
    target: Any,
    draft: Any,
    method: str,
    prompts: Sequence[list[int]],
    new: int,
    temperature: float,
) -> Run:
    """transformers: ``generate``, plain, with a draft model, or with prompt lookup."""
    import torch

    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "use_cache": True,
        "pad_token_id": 0,
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if method == DRAFT_MODEL:
        settings |= {"assistant_model": draft}
    elif method == PROMPT_LOOKUP:
        settings |= {
            "prompt_lookup_num_tokens": GAMMA[method],
            "max_matching_ngram_size": MAX_NGRAM,
        }
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    def run(seed: int) -> Answer:
        torch.manual_seed(seed)
        texts, calls[0] = [], 0
        hook = target.register_forward_pre_hook(count)
        with torch.inference_mode():
            for prompt in prompts:
                tokens = torch.tensor([prompt], dtype=torch.long, device=target.device)
                out = target.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
                texts.append(out[0, len(prompt) :].tolist())
        hook.remove()
        return Answer(texts, calls[0])

    return run


def best_threads(run: Run, choices: Sequence[int]) -> int:
    """The number of torch's threads with which ``run`` takes the least time, after a warm-up."""
    import torch

    seconds = {}
    for threads in choices:
        torch.set_num_threads(threads)
        run(0)
        began = time.perf_counter()
        run(0)
        seconds[threads] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)
