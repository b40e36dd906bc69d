"""The two sides of the comparison: one function each, which decodes all prompts one after the other and counts rounds.

Both are given the same directories, prompts and settings. Time is taken by the caller; prefill is part of it on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax import accept, decode, drafters, rng, sampling
from specjax.models import hf
from specjax.types import ModelParams

AUTOREGRESSIVE, DRAFT_MODEL, PROMPT_LOOKUP = "autoregressive", "draft_model", "prompt_lookup"
GAMMA = {
    AUTOREGRESSIVE: 0,
    DRAFT_MODEL: 5,
    PROMPT_LOOKUP: 10,
}  # draft tokens a round, constant on both sides
MAX_NGRAM = 2  # what transformers looks up if nobody says otherwise


class Answer(NamedTuple):
    """The new tokens of each prompt, and the passes of the target that they took."""

    texts: list[list[int]]
    rounds: int


Run = Callable[[int], Answer]  # of a seed


def ours(
    target: hf.Loaded,
    draft: hf.Loaded,
    method: str,
    prompts: Sequence[list[int]],
    new: int,
    heat: float,
) -> Run:
    """specjax. The prompts have one width, so that their lengths do not compile anew."""
    if method == DRAFT_MODEL:
        drafter = drafters.make(
            method, target.lm, model=draft.lm, params=draft.params, gamma=GAMMA[method]
        )
    elif method == PROMPT_LOOKUP:
        drafter = drafters.make(
            method, target.lm, rule="transformers", gamma=GAMMA[method], max_ngram=MAX_NGRAM
        )
    else:
        drafter = drafters.make("none", target.lm)
    params = ModelParams(target.params, draft.params if method == DRAFT_MODEL else {})
    rule, width = accept.load("chain"), max(map(len, prompts))
    settings = sampling.make_sampling(1, temperature=heat)

    def run(seed: int) -> Answer:
        texts, rounds = [], 0
        for row, prompt in enumerate(prompts):
            tokens, lengths = decode.pack_prompts([prompt], width)
            keys, end = rng.row_keys(seed, [row]), {"max_len": width + new, "limit": lengths + new}
            state = decode.prefill(
                target.lm, drafter, params, tokens, lengths, keys, sampling=settings, **end
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
    """A model of transformers as it comes: eager, dynamic cache. It has no end-of-sequence token, as ours has none here."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # it would say in every call that nothing stops the text
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    )
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.num_assistant_tokens = GAMMA[DRAFT_MODEL]  # read from the assistant
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0  # it never stops a draft early
    return model


def theirs(
    target: Any, draft: Any, method: str, prompts: Sequence[list[int]], new: int, heat: float
) -> Run:
    """transformers: ``generate``, alone, with ``assistant_model`` or with ``prompt_lookup_num_tokens``."""
    import torch

    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "use_cache": True,
        "pad_token_id": 0,
        "do_sample": heat > 0,
    }
    if heat > 0:
        settings |= {"temperature": heat, "top_k": 0, "top_p": 1.0}
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


def best_threads(runs: Sequence[Run], choices: Sequence[int]) -> int:
    """With how many of torch's threads these take the least time together. Warms up first."""
    import torch

    seconds = {}
    for threads in choices:
        torch.set_num_threads(threads)
        for run in runs:
            run(0)
        began = time.perf_counter()
        for run in runs:
            run(0)
        seconds[threads] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)
