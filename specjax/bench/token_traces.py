"""One continuation, round by round: which tokens were drafted, which were kept, who wrote each, and how probable each was.

The rounds are those of ``decode.stream`` (the same functions, the same tokens); between the two halves of a round the laws are
looked at. The record is what ``trace.jsonl`` holds and what reports show; its schema stands in ``record``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sampling, step, tree
from specjax.bench import passes
from specjax.data.spelling import spell
from specjax.rng import RowKeys
from specjax.types import Context, DecodeState, Draft, Drafter, StepInfo

SCHEMA = 1
ORIGINS = ("accepted", "residual", "bonus", "plain")
ACCEPTED, RESIDUAL, BONUS, PLAIN = range(4)


class Seen(NamedTuple):
    """A round, and how probable its tokens were: [B,M+1] of those emitted, [B,N] of the nodes; nan where nobody knows."""

    info: StepInfo
    there: jax.Array  # bool[B,N] nodes that could be tested
    path: jax.Array  # i32[B,M] nodes whose tokens were emitted, -1 beyond
    target: tuple[
        jax.Array, jax.Array
    ]  # of emitted tokens: the target's probability, and its rank (0 the best)
    nodes: tuple[jax.Array, jax.Array]  # the same of the nodes
    drafted: jax.Array  # the probability with which each node was drawn


def record(
    job: passes.Job, method: passes.Method, number: int = 0, *, category: str | None = None
) -> dict[str, Any]:
    """Decodes one prompt of the job with the method, and returns the trace.

    Probabilities are under the sampling settings; of greedy decoding, where they would all be 0 or 1, at temperature 1.

    Returns:
        {"schema", "method", "drafter", "accept", "class", "temperature", "category", "prompt": text, "rounds": [{"out":
        [[text, id, origin, target_prob, draft_prob, rank], ...], "draft": [[text, id, parent, target_prob, draft_prob, rank,
        kept], ...]}, ...]}: ``origin`` an index of ORIGINS, ``parent`` an index of the round's nodes, -1 = child of the
        pending token; draft_prob 1 of deterministic drafts, None where the drafter states no law.

    Raises:
        NonFiniteLogits, and ValueError for a job without ``spell``.
    """
    if job.spell is None:
        raise ValueError("a trace shows text; give the job a spell")
    seen = list(_rounds(job, method, number))
    found = {
        "schema": SCHEMA,
        "method": method.name,
        "drafter": method.drafter.name,
        "accept": method.accept.name,
        "class": method.accept.lossless_class,
        "temperature": float(job.settings["temperature"]),
        "category": category,
        "prompt": job.spell(list(job.prompts[number])),
    }
    return found | {"rounds": _tell(job, method, list(job.prompts[number]), seen, job.spell)}


def compile(job: passes.Job, method: passes.Method) -> None:
    """Compiles what ``record`` runs for this method."""
    next(_rounds(job, method, 0))


def _rounds(job: passes.Job, method: passes.Method, number: int):
    # The keys, and so the text, of this prompt in the bench's first pass.
    state = passes.begin(job, method.drafter, method.params, [number], [list(job.prompts[number])])
    stop = step.stop_ids(job.eos_id)
    while not bool(state.done.all()):
        state, seen = _step(job.target, method.drafter, method.accept, method.params, state, stop)
        decode.check(state)
        yield jax.device_get(seen)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _step(target, drafter: Drafter, accept, params, state: DecodeState, eos_id):
    step.check_pair(drafter, accept)
    keys = RowKeys(state.keys, state.round, state.length)
    scored = step.propose(target, drafter, params, state, keys)
    after, info = step.decide(target, drafter, accept, params, state, keys, scored, eos_id)
    how = state.sampling.replace(
        temperature=jnp.where(state.sampling.greedy, 1.0, state.sampling.temperature)
    )
    laws = sampling.to_probs(scored.out.logits, how)  # [B,N+1,V]; row 0 follows the pending token
    draft, nodes = info.draft, drafter.nodes
    batch = state.length.shape[0]
    above = (
        jnp.broadcast_to(jnp.arange(nodes) - 1, (batch, nodes))
        if draft.parents is None
        else draft.parents
    )
    there = tree.exists(draft.valid, draft.parents)
    path = _path(draft, there, info)
    seen = Seen(
        info,
        there,
        path,
        _look(laws, jnp.pad(path + 1, ((0, 0), (1, 0))), info.tokens),
        _look(laws, above + 1, draft.tokens),
        _drawn(draft, state),
    )
    return after, seen


def _look(laws: jax.Array, rows: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of tokens i32[B,K], each after row rows[b,k] of laws f32[B,N+1,V]: probability and rank [B,K]."""
    law = jnp.take_along_axis(laws, jnp.maximum(rows, 0)[..., None], 1)
    own = jnp.take_along_axis(law, jnp.maximum(tokens, 0)[..., None], -1)
    return own[..., 0], (law > own).sum(-1)


def _path(draft: Draft, there: jax.Array, info: StepInfo) -> jax.Array:
    """i32[B,M]: the nodes whose tokens were emitted, -1 beyond. Which they were is not told, but their tokens are."""
    count = jnp.minimum(info.accepted, info.emitted)
    if draft.parents is None:
        node = jnp.broadcast_to(jnp.arange(there.shape[1]), there.shape)
        return jnp.where(node < count[:, None], node, -1)
    here = tree.standing(draft.tokens, there, draft.parents, info.tokens[:, :-1], count)
    return tree.path_to(jnp.argmax(here, -1) - 1, draft.parents, draft.longest)


def _drawn(draft: Draft, state: DecodeState) -> jax.Array:
    """f32[B,N]: the probability with which each node was drawn; greedy rows state none."""
    if draft.probs is None:
        return jnp.ones(draft.tokens.shape)
    own = jnp.take_along_axis(draft.probs, jnp.maximum(draft.tokens, 0)[..., None], -1)[..., 0]
    return jnp.where(state.sampling.greedy[:, None], jnp.nan, own)


def _tell(
    job: passes.Job,
    method: passes.Method,
    prompt: list[int],
    seen: Sequence[Seen],
    decoder: Callable,
) -> list[dict]:
    """The rounds as lists."""
    emitted = [[int(t) for t in s.info.tokens[0][: int(s.info.emitted[0])]] for s in seen]
    said = [t for tokens in emitted for t in tokens]
    texts = iter(spell(said, decoder, prompt))
    law = None if seen[0].info.draft.probs is None else _stated(job, method, prompt, said)
    rounds, text = [], list(prompt)
    for s, tokens in zip(seen, emitted, strict=True):
        info = s.info
        path = [n for n in s.path[0].tolist() if n >= 0]
        out = []
        for j, token in enumerate(tokens):
            origin = ACCEPTED if j < len(path) else _own(info)
            known = float(s.drafted[0][path[j]]) if j < len(path) else float("nan")
            drawn = _number(known if law is None else law(len(text) + j, token))
            out.append(
                [
                    next(texts),
                    token,
                    origin,
                    _number(s.target[0][0][j]),
                    drawn,
                    int(s.target[1][0][j]),
                ]
            )
        rounds.append({"out": out, "draft": _nodes(s, set(path), text, law, decoder)})
        text += tokens
    return rounds


def _parents(s: Seen) -> list[int]:
    draft = s.info.draft
    return (
        list(range(-1, draft.tokens.shape[1] - 1))
        if draft.parents is None
        else draft.parents[0].tolist()
    )


def _own(info: StepInfo) -> int:
    """Why the target wrote the last token itself."""
    if not int(info.drafted[0]):
        return PLAIN
    return RESIDUAL if int(info.tested[0]) > int(info.accepted[0]) else BONUS


def _nodes(
    s: Seen, path: set[int], text: list[int], law: Callable | None, decoder: Callable
) -> list[list]:
    draft, parents = s.info.draft, _parents(s)
    place, above, found = {-1: -1}, {-1: []}, []
    for node in np.flatnonzero(s.there[0]).tolist():
        parent, token = parents[node], int(draft.tokens[0][node])
        place[node], above[node] = len(found), [*above[parent], token]
        drawn = float(s.drafted[0][node])
        if (
            np.isnan(drawn) and law is not None and (parent == -1 or parent in path)
        ):  # behind text that was committed
            drawn = law(len(text) + len(above[parent]), token)
        found.append(
            [
                spell([token], decoder, [*text, *above[parent]])[0], token, place[parent],
                _number(s.nodes[0][0][node]), _number(drawn), int(s.nodes[1][0][node]), int(node in path),
            ]
        )  # fmt: skip
    return found


def _stated(
    job: passes.Job, method: passes.Method, prompt: list[int], said: list[int]
) -> Callable | None:
    """(place in the text, token) -> the drafter's probability of it there; None if the drafter states no law."""
    if method.drafter.probs is None:
        return None
    # One shape whatever was said, so that nothing is compiled for every length.
    tokens = np.zeros((1, job.width + job.max_new_tokens), np.int32)
    tokens[0, : len(prompt) + len(said)] = [*prompt, *said]
    settings = job.settings | ({"temperature": 1.0} if job.settings["temperature"] == 0 else {})
    context = Context(
        jnp.asarray(tokens),
        jnp.asarray([len(prompt) + len(said)]),
        sampling.make_sampling(1, **settings),
    )
    laws = _law(method.drafter, method.params, context)
    return lambda place, token: float(laws[0, place - 1, token])


@functools.partial(jax.jit, static_argnums=0)
def _law(drafter: Drafter, params, context):
    assert drafter.probs is not None
    return drafter.probs(params, context)


def _number(value: Any) -> float | None:
    """Four digits, as JSON knows them."""
    value = float(value)
    return float(f"{value:.4g}") if np.isfinite(value) else None
