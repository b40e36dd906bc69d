"""Who proposed each token of a continuation, for objects in Python."""

from __future__ import annotations

from typing import Any

from specjax import sampling
from specjax.bench import objects, token_traces
from specjax.bench.objects import Given, Text
from specjax.bench.passes import Job
from specjax.checks import number, whole
from specjax.models import hf
from specjax.types import LM


def trace(
    target: hf.Loaded | tuple[LM, Any],
    method: Given,
    prompt: Text,
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    name: str = "",
    temperature: float = 0.0,
    **settings: Any,
) -> dict[str, Any]:
    """Decodes a prompt, and returns for each token who proposed it and how probable it was.

        one = bench.trace(target, (drafter, accept.load("chain")), "Once upon a time")
        for out in one["rounds"]:
            for text, id, origin, target_prob, draft_prob, rank in out["out"]: ...
        terminal.console().print(terminal.trace(one))  # coloured; from specjax.report

    Args:
        target: what ``hf.load`` returns, or (LM, its parameters).
        method: (drafter, rule), or (drafter, rule, params).
        prompt: a text, or token ids.
        max_new_tokens: the text ends earlier with an end-of-sequence token of the target.
        seed: of the noise.
        name: of the method; "" = the drafter's.
        temperature, settings: arguments of ``sampling.make_sampling``.

    Returns:
        A trace as in trace.jsonl: see ``token_traces.record``. ``origin`` is an index of
        ``token_traces.ORIGINS``: accepted, residual, bonus, plain.

    Raises:
        UserError: objects and numbers that do not fit; NonFiniteLogits.
    """
    model = objects.model_of(target)
    whole("max_new_tokens", max_new_tokens, 1)
    number("temperature", temperature, ">= 0 (0 = greedy)", lambda x: x >= 0)
    sampling.make_sampling(1, temperature, **settings)
    one = objects.method_of(
        model, method, name=name or "the method", seed=seed, temperatures=(temperature,)
    )
    [chosen] = objects.prompts_of(model, [prompt]).prompts
    objects.check_length(model, [chosen], max_new_tokens)
    job = Job(
        target=model.lm,
        params=model.params,
        prompts=[chosen.ids],
        settings={"temperature": temperature, **settings},
        batch_size=1,
        max_new_tokens=max_new_tokens,
        eos_id=model.eos_id,
        seed=seed,
        repeats=1,
        spell=model.spell,
    )
    one = one._replace(name=name or one.drafter.name)
    return token_traces.record(job, one, category=chosen.category)
