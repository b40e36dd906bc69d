"""One continuation, round by round: the drafted tokens, the accepted ones, and their probabilities.

The rounds are those of ``decode.stream`` (the same functions, the same tokens); the probabilities
are computed between the two halves of a round. A trace is one line of ``trace.jsonl`` and what
reports show; ``record`` defines its schema. ``distance`` is of all continuations of a job: how far
the tokens of a lossy rule are from the target's law.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, outcome, sampling, step, tree
from specjax.accept import verdict
from specjax.bench import lossless, methods, passes
from specjax.bench.methods import Given, Text
from specjax.bench.results import SCHEMA
from specjax.checks import number as check_number
from specjax.checks import whole
from specjax.data.spelling import spell
from specjax.models import hf
from specjax.types import CHAIN, DETERMINISTIC, LM, DecodeState, Draft, Drafter, StepInfo

ORIGINS = ("accepted", "residual", "bonus", "plain")
ACCEPTED, RESIDUAL, BONUS, PLAIN = range(4)

# (position in the text, token) -> the drafter's probability of the token there.
DraftProb = Callable[[int, int], float]
Decoder = Callable[[list[int]], str]  # token ids to text


class Scores(NamedTuple):
    """Target probabilities and ranks of K tokens per row."""

    probs: jax.Array  # f32[B,K]
    ranks: jax.Array  # i32[B,K] 0 for the most probable token


class Round(NamedTuple):
    """A round, with the probabilities of its M+1 emitted tokens and of its N nodes."""

    info: StepInfo
    exist: jax.Array  # bool[B,N] nodes that could be tested
    parents: jax.Array  # i32[B,N]
    path: jax.Array  # i32[B,M] nodes whose tokens were emitted, -1 beyond
    emitted: Scores
    nodes: Scores
    draft_probs: jax.Array  # f32[B,N] with which each node was drawn, nan if that is unknown


def record(job: passes.Job, method: passes.Method, number: int = 0) -> dict[str, Any]:
    """Decodes prompt ``number`` of the job with the method, and returns the trace.

    Probabilities are those of the sampling settings. For greedy decoding, where they would all be 0
    or 1, they are those of temperature 1.

    Returns:
        The trace::

            {"schema", "method", "drafter", "accept", "class", "temperature", "category",
            "prompt": text, "rounds": [{
                "out": [[text, id, origin, target_prob, draft_prob, rank], ...],
                "draft": [[text, id, parent, target_prob, draft_prob, rank, accepted], ...]}, ...]}

        ``origin`` is an index of ORIGINS; ``parent`` an index of the round's nodes, -1 = child of
        the pending token. ``draft_prob`` is 1 for deterministic drafts, and None if the drafter
        has no ``probs``.

    Raises:
        NonFiniteLogits, and ValueError for a job without ``spell``.
    """
    job, method = passes.one_part(job, method)
    if job.spell is None:
        raise ValueError("a trace shows text; give the job a spell")
    prompt = list(job.prompts[number])
    rounds = list(_rounds(job, method, number))
    return {
        "schema": SCHEMA,
        "method": method.name,
        "drafter": method.drafter.name,
        "accept": method.accept.name,
        "class": method.accept.lossless_class,
        "temperature": float(job.settings["temperature"]),
        "category": job.categories[number] if job.categories else None,
        "prompt": job.spell(prompt),
        "rounds": _to_json(job, method, prompt, rounds),
    }


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
        A trace as in trace.jsonl: see ``record``. ``origin`` is an index of
        ``ORIGINS``: accepted, residual, bonus, plain.

    Raises:
        UserError: objects and numbers that do not fit; NonFiniteLogits.
    """
    model = methods.model_of(target)
    whole("max_new_tokens", max_new_tokens, 1)
    check_number("temperature", temperature, ">= 0 (0 = greedy)", lambda x: x >= 0)
    sampling.make_sampling(1, temperature, **settings)
    one = methods.method_of(
        model, method, name=name or "the method", seed=seed, temperatures=(temperature,)
    )
    [chosen] = methods.prompts_of(model, [prompt]).prompts
    methods.check_length(model, [chosen], max_new_tokens)
    how = {"temperature": temperature, **settings}
    job = passes.Job(model.lm, model.params, [chosen.ids], how, 1, max_new_tokens, model.eos_ids)
    job = job._replace(seed=seed, categories=[chosen.category], spell=model.spell)
    return record(job, one._replace(name=name or one.drafter.name))


def compile(job: passes.Job, method: passes.Method) -> None:
    """Compiles the programs of ``record`` for this method."""
    next(_rounds(*passes.one_part(job, method), 0))


# Decoding ---------------------------------------------------------------------------------------


def _rounds(job: passes.Job, method: passes.Method, number: int) -> Iterator[Round]:
    # The keys, and so the text, of this prompt in the first pass of a bench.
    state = passes.begin(job, method.drafter, method.params, [number], [list(job.prompts[number])])
    stop = outcome.stop_ids(job.eos_id)
    while not bool(state.done.all()):
        state, one = _step(*method.pair(job.target), state, stop)
        decode.check(state)
        yield jax.device_get(one)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _step(
    target, drafter: Drafter, accept, params, state: DecodeState, eos_id
) -> tuple[DecodeState, Round]:
    """``step.speculative_step``, with the probabilities of its tokens."""
    draft, scored, after, info = _played(target, drafter, accept, params, state, eos_id)
    temperature = jnp.where(state.sampling.greedy, 1.0, state.sampling.temperature)
    how = state.sampling.replace(temperature=temperature)
    # [B,N+1,V]: row 0 follows the pending token, row n + 1 node n.
    probs = sampling.to_probs(scored.out.logits, how)
    parents = verdict.parents(draft)
    exist = tree.exists(draft.valid, draft.parents)
    path = _path(draft, exist, info)
    emitted = _scores(probs, jnp.pad(path + 1, ((0, 0), (1, 0))), info.tokens)
    nodes = _scores(probs, parents + 1, draft.tokens)
    draft_probs = _draft_probs(draft, state)
    return after, Round(info, exist, parents, path, emitted, nodes, draft_probs)


def _played(
    target, drafter: Drafter, accept, params, state: DecodeState, eos_id
) -> tuple[Draft, step.Scored, DecodeState, StepInfo]:
    """``step.speculative_step``, with its draft and the target's output for it."""
    step.check_pair(drafter, accept)
    fixed = step.Round(target, drafter, accept, step.keys_of(drafter, state), eos_id)
    draft, draft_state = step.propose(target, drafter, params, state, fixed.keys)
    state = state.replace(draft=draft_state)
    scored = step.score(target, drafter, params, state, draft)
    after, info = step.decide(fixed, params, state, draft, scored)
    return draft, scored, after, info


def _scores(probs: jax.Array, rows: jax.Array, tokens: jax.Array) -> Scores:
    """Scores of tokens i32[B,K]; token k follows row ``rows[b,k]`` of probs f32[B,N+1,V]."""
    chosen = jnp.take_along_axis(probs, jnp.maximum(rows, 0)[..., None], 1)
    own = jnp.take_along_axis(chosen, jnp.maximum(tokens, 0)[..., None], -1)
    return Scores(own[..., 0], (chosen > own).sum(-1))


def _path(draft: Draft, exist: jax.Array, info: StepInfo) -> jax.Array:
    """i32[B,M]: the nodes whose tokens were emitted, -1 beyond; identified by their tokens."""
    count = jnp.minimum(info.accepted, info.emitted)
    if draft.parents is None:
        node = jnp.broadcast_to(jnp.arange(exist.shape[1]), exist.shape)
        return jnp.where(node < count[:, None], node, -1)
    here = tree.nodes_at(info.tokens[:, :-1], count, draft.tokens, exist, draft.parents)
    return tree.path_to(jnp.argmax(here, -1) - 1, draft.parents, draft.longest)


def _draft_probs(draft: Draft, state: DecodeState) -> jax.Array:
    """f32[B,N]: the probability with which each node was drawn; nan in greedy rows."""
    if draft.probs is None:
        return jnp.ones(draft.tokens.shape)
    own = jnp.take_along_axis(draft.probs, jnp.maximum(draft.tokens, 0)[..., None], -1)[..., 0]
    return jnp.where(state.sampling.greedy[:, None], jnp.nan, own)


# The distance of a lossy rule's tokens from the target's law --------------------------------------


def distance(job: passes.Job, method: passes.Method) -> dict[str, float | None]:
    """How far what a lossy rule emits is from the target's law, in the first pass of a bench.

    The texts are decoded once more. At each place where the rule tested a draft token,
    ``Accept.law`` is compared with the target's probabilities under the sampling settings. On a
    tree the token is the accepted one of the siblings, or the first.

    Returns:
        {"total_variation", "kl_divergence"}: means over these places; KL(law || target) in nats.
        Both are None at temperature 0, for a rule of class L1 or without a ``law``, where nothing
        was tested, and for several siblings that are drawn: one place has several tests then.

    Raises:
        NonFiniteLogits.
    """
    job, method = passes.one_part(job, method)
    drafter, rule = method.drafter, method.accept
    single = drafter.siblings in (CHAIN, DETERMINISTIC) and drafter.nodes > 0
    sums = np.zeros(3)
    if job.settings["temperature"] > 0 and rule.law and rule.lossless_class != "L1" and single:
        stop = outcome.stop_ids(job.eos_id)
        for rows, prompts in passes.batches(job):
            state = passes.begin(job, drafter, method.params, rows, prompts)
            while not bool(state.done.all()):
                state, new = _far(*method.pair(job.target), state, stop)
                decode.check(state)
                sums += np.asarray(new, np.float64)
    means = [float(x / sums[2]) if sums[2] else None for x in sums[:2]]
    return dict(zip(("total_variation", "kl_divergence"), means, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _far(
    target, drafter: Drafter, accept, params, state: DecodeState, eos_id
) -> tuple[DecodeState, jax.Array]:
    """A round, and f32[3] of its tested places: sums of both distances, and their number."""
    draft, scored, after, info = _played(target, drafter, accept, params, state, eos_id)
    exist = tree.exists(draft.valid, draft.parents)
    path = _path(draft, exist, info)
    depth = jnp.arange(path.shape[1])
    tested = depth < jnp.minimum(info.tested, info.emitted)[:, None]
    # Depth d is tested in row ``place`` of the probs: after the accepted node above it.
    place = jnp.pad(path + 1, ((0, 0), (1, 0)))[:, :-1]
    below = exist[:, None] & (verdict.parents(draft)[:, None] + 1 == place[..., None])
    node = jnp.where(path >= 0, path, jnp.argmax(below, -1))[..., None]
    probs = outcome.target_probs(scored.out.logits, state.sampling)
    probs = jnp.take_along_axis(probs, place[..., None], 1)
    if draft.probs is None:
        tokens = jnp.take_along_axis(draft.tokens, node[..., 0], 1)
        drawn = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
    else:
        drawn = jnp.take_along_axis(draft.probs, node, 1)
    law = accept.law(probs, drawn, jnp.broadcast_to(depth + 1, path.shape))
    far = jnp.stack([*distances(law, probs), jnp.ones_like(tested, probs.dtype)])
    return after, jnp.where(tested, far, 0).sum((1, 2))


def distances(law: jax.Array, probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f[...] each, of probabilities f[...,V]: total variation, and KL(law || probs) in nats."""
    some = law > 0
    ratio = jnp.where(some, law, 1) / jnp.where(some, probs, 1)
    kl = jnp.where(some, law * jnp.log(ratio), 0).sum(-1)
    return jnp.abs(law - probs).sum(-1) / 2, jnp.maximum(kl, 0)


# As JSON ----------------------------------------------------------------------------------------


def _to_json(
    job: passes.Job, method: passes.Method, prompt: list[int], rounds: Sequence[Round]
) -> list[dict]:
    """The rounds of row 0 as plain lists."""
    decoder = job.spell
    assert decoder is not None
    emitted = [[int(t) for t in one.info.tokens[0][: int(one.info.emitted[0])]] for one in rounds]
    output = [t for tokens in emitted for t in tokens]
    texts = iter(spell(output, decoder, prompt))
    # Without draft probs (deterministic drafts) the probabilities of the draws are complete.
    draft_prob = None
    if rounds[0].info.draft.probs is not None and method.drafter.probs is not None:
        draft_prob = _draft_prob(job, method, prompt, output)
    result, text = [], list(prompt)
    for one, tokens in zip(rounds, emitted, strict=True):
        path = [n for n in one.path[0].tolist() if n >= 0]
        out = []
        for j, token in enumerate(tokens):
            accepted = j < len(path)
            prob = float(one.draft_probs[0][path[j]]) if accepted else float("nan")
            if draft_prob is not None:
                prob = draft_prob(len(text) + j, token)
            origin = ACCEPTED if accepted else _origin(one.info)
            out.append(_entry(next(texts), token, origin, one.emitted, j, prob))
        nodes = _nodes(one, set(path), text, draft_prob, decoder)
        result.append({"out": out, "draft": nodes})
        text += tokens
    return result


def _origin(info: StepInfo) -> int:
    """The origin of the last token of a round, which is the target's own."""
    if not int(info.drafted[0]):
        return PLAIN
    return RESIDUAL if int(info.tested[0]) > int(info.accepted[0]) else BONUS


def _nodes(
    one: Round, path: set[int], text: list[int], draft_prob: DraftProb | None, decoder: Decoder
) -> list[list]:
    """The nodes of a round; ``path`` has the numbers of those that were emitted."""
    draft, parents = one.info.draft, one.parents[0].tolist()
    # By node, -1 for the pending token: its index in the result, and the draft tokens up to it.
    index, tokens = {-1: -1}, {-1: []}
    result = []
    for node in np.flatnonzero(one.exist[0]).tolist():
        parent, token = parents[node], int(draft.tokens[0][node])
        before = [*text, *tokens[parent]]
        prob = float(one.draft_probs[0][node])
        # ``draft_prob`` covers the committed text, so only nodes whose parent was emitted.
        committed = parent == -1 or parent in path
        if np.isnan(prob) and draft_prob is not None and committed:
            prob = draft_prob(len(before), token)
        index[node], tokens[node] = len(result), [*tokens[parent], token]
        [spelt] = spell([token], decoder, before)
        entry = _entry(spelt, token, index[parent], one.nodes, node, prob)
        result.append([*entry, int(node in path)])
    return result


def _entry(text: str, token: int, link: int, scores: Scores, place: int, prob: float) -> list:
    """[text, id, origin or parent, target_prob, draft_prob, rank] of the token at ``place``."""
    target_prob = _number(scores.probs[0][place])
    return [text, token, link, target_prob, _number(prob), int(scores.ranks[0][place])]


def _draft_prob(
    job: passes.Job, method: passes.Method, prompt: list[int], output: list[int]
) -> DraftProb:
    """The probabilities along the text of a drafter with ``probs``."""
    settings = job.settings | {"temperature": job.settings["temperature"] or 1.0}
    # One shape for all outputs, so that one program serves every length.
    width = job.width + job.max_new_tokens
    context = lossless.pack([[*prompt, *output]], [len(prompt)], 1, width, settings)
    probs = _call_probs(method.drafter, method.params, context)
    return lambda position, token: float(probs[0, position - 1, token])


@functools.partial(jax.jit, static_argnums=0)
def _call_probs(drafter: Drafter, params, context):
    assert drafter.probs is not None
    return drafter.probs(params, context)


def _number(value: Any) -> float | None:
    """Four significant digits; None for nan and infinity, which JSON does not have."""
    value = float(value)
    return float(f"{value:.4g}") if np.isfinite(value) else None
