"""Does a tree pay, and when: chains and trees, of fixed size and controlled, under modelled costs.

    PYTHONPATH=. python experiments/goodput/trees.py        (20 minutes on two cores)

A trained pair (default: ``assets``) and held-out prompts. The target writes a text for each prompt,
greedily and at temperature 1, and a draft is made at every place of these texts. Rounds are then
played along the texts with the real controllers: the accepted path is the longest one of the
verified tree that the text goes on with. This is what decoding does with the rule "match", and for
trees that are a function of the text with any lossless rule, in law. The accepted tokens of a drawn
chain have the law of the rule "chain", given the text. No time is measured: that of a round follows
from what it verifies and drafts, by a cost setting. ``speed`` is the number of tokens that a row
writes in the time of a plain step. Settings:

- "H100" and "4 x v5e": a Llama of 8B in bfloat16 with texts of ``--context`` tokens, by the
  roofline model. "1B": drafted by a Llama of 1B; "one layer": by one layer of the target with its
  head, as EAGLE does. **The acceptance is that of the pair**, not of models of 8B.
- "two CPU cores": passes of a GPT-2 shape over 1, 8 and 65 tokens that ``experiments/tree_cost``
  measured on an idle machine; a draft pass costs as much as the pair's parameters say.

A pass over n tokens in B rows costs what n tokens in B rows cost, and a level of a dynamic tree a
draft pass over ``TOP_K`` tokens. The number of rows is that of the cost setting: one row is played
alone, otherwise all prompts together, whose mean row stands for more. Counted are the rounds until
the first row is finished, so finished rows are replaced.

Of fixed sizes all are played; "best" of them is chosen afterwards. ``goodput`` and ``budget`` read
a profile with the times of the setting. The policies of ``ltd`` are fitted with these times, for
each half of the prompts to the drafts of the other half. Lookups draft for nothing. Writes
``trees.json`` beside this file; ``trees_smollm2.json`` has lookups alone:

    PYTHONPATH=. python experiments/goodput/trees.py --target=DIR/SmolLM2-135M-Instruct --draft= \\
        --rows=8 --new=96 --batches 1 16 --out=experiments/goodput/trees_smollm2.json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from experiments.common import Stopwatch, options, record, without_folder
from experiments.goodput.run import LLAMA_1B, LLAMA_8B
from specjax import control, decode, drafters, rng, sampling
from specjax.control import Controller, costs, ltd
from specjax.control._controller import FOREVER
from specjax.files import write_json
from specjax.models import hf
from specjax.theory import roofline
from specjax.theory.devices import named
from specjax.types import Context, Draft, Drafter, ModelParams, Verdict

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "assets"
CHAINS, TREES, DEPTH, TOP_K = (2, 4, 8), (8, 16, 32, 60), 6, 8
TRIE = {"nodes": 32, "depth": 8}
TEMPERATURES = (0.0, 1.0)
MOST = 64  # rows that are played together
MARGIN = 10  # more tokens of a text than are played: those of a whole draft


class Setting(NamedTuple):
    """What passes cost, in passes of the target over one token in each row."""

    name: str
    rows: int
    verify: Callable[[int], float]  # of so many tokens in each row
    draft: Callable[[int], float]

    def chain(self, length: int) -> float:
        """A round with a chain of so many tokens."""
        return self.verify(length + 1) + length * self.draft(1)

    def tree(self, nodes: int, levels: int = DEPTH) -> float:
        """A round with a dynamic tree of which so many nodes are verified."""
        if not nodes:
            return self.verify(1)
        return self.verify(nodes + 1) + self.draft(1) + (levels - 1) * self.draft(TOP_K)

    def lookup(self, nodes: int) -> float:
        """A round with a draft that cost nothing."""
        return self.verify(nodes + 1)


def modelled(device: str, chips: int, small: Any, rows: int, context: float, name: str) -> Setting:
    """By the roofline of a device, or of several that share the layers."""
    machine = named(device).machine()
    parts = [
        roofline.tensor_parallel(config, chips) if chips > 1 else roofline.model_of(config)
        for config in (LLAMA_8B, small)
    ]
    unit = roofline.pass_time(machine, parts[0], rows, context, 1)
    target, draft = (
        functools.partial(_share, machine, model, rows, context, unit) for model in parts
    )
    return Setting(name, rows, target, draft)


def _share(machine: Any, model: Any, rows: int, context: float, unit: float, n: int) -> float:
    return roofline.pass_time(machine, model, rows, context, n) / unit


def measured() -> Setting:
    """By the passes of ``experiments/tree_cost``."""
    path = HERE.parent / "tree_cost" / "results.json"
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    at = {1: 1.0}
    at |= {n: rows[f"forward_chain_{n}"]["of_one_token_forward"] for n in (8, 65)}
    share = 823_872 / 7_671_168

    def verify(n: int) -> float:
        return float(np.interp(n, list(at), list(at.values())))

    return Setting("two CPU cores", 1, verify, lambda n: share * verify(n))


def settings(context: float, rows: Sequence[int]) -> list[Setting]:
    """All cost settings."""
    layer = dataclasses.replace(LLAMA_8B, num_layers=1)
    found = []
    for name, device, chips, small in (
        ("H100, 1B", "H100 SXM", 1, LLAMA_1B),
        ("H100, one layer", "H100 SXM", 1, layer),
        ("4 x v5e, one layer", "TPU v5e", 4, layer),
    ):
        found += [modelled(device, chips, small, many, context, name) for many in rows]
    return [*found, measured()]


def profile(path: Path, times: Callable[[int], float], sizes: Sequence[int], unit: str) -> str:
    """A file of costs for the controllers, for a batch of any number of rows that is decoded."""
    kind = costs.RoundCosts(tuple(map(times, sizes)), (costs.ACCEPTANCE,) * sizes[-1])
    each = costs.Costs(tuple(sizes), kind, kind)
    batches = dict.fromkeys(range(1, MOST + 1), each)
    own = costs.Profile(costs.device(), "modelled", "modelled", batches, unit)
    write_json(path, own.to_json())
    return str(path)


class Places(NamedTuple):
    """The drafts at every place of every text: arrays [B,T,...]."""

    tokens: Any
    valid: Any
    parents: Any
    # Zeros for lookups; of ``ltd.recorder`` what the policies read of candidates, and of nodes.
    log_prob: Any


class Recorded(struct.PyTreeNode):
    """The state of ``recorder``."""

    log_prob: jax.Array  # f32[B,N]


def recorder(nodes: int) -> Controller:
    """Keeps the log-probabilities of whole trees in its state."""

    def init(context: Any) -> Recorded:
        return Recorded(jnp.zeros((len(context.length), nodes)))

    def size(state: Recorded, draft: Draft, log_prob: Any) -> tuple:
        order = jnp.broadcast_to(jnp.arange(nodes), draft.valid.shape)
        every = jnp.full(order.shape[:1], nodes)
        state = state if log_prob is None else state.replace(log_prob=log_prob)
        return order, every, state

    return Controller("recorder", init=init, size=size, limit=_unlimited, most_nodes=nodes)


def _unlimited(state: Any) -> jax.Array:
    return jnp.full(len(jax.tree.leaves(state)[0]), FOREVER)


class Models(NamedTuple):
    """The pair, and the prompts."""

    target: hf.Loaded
    draft: hf.Loaded | None
    prompts: list[list[int]]
    new: int

    def make(self, name: str, **keys: Any) -> Drafter:
        """A drafter of this pair."""
        own = {"model": self.draft.lm} if name == "draft_model" and self.draft else {}
        return drafters.make(name, self.target.lm, **own, **keys)

    def params(self, drafter: Drafter) -> ModelParams:
        """The parameters of the pair."""
        if drafter.name == "draft_model" and self.draft is not None:
            return ModelParams(self.target.params, self.draft.params)
        return ModelParams(self.target.params, drafter.init_params(jax.random.key(0)))


def texts_of(models: Models, temperature: float) -> list[list[int]]:
    """Each prompt with the target's text."""
    packed, lengths = decode.pack_prompts(models.prompts)
    target, drafter = models.target, models.make("none")
    state = decode.prefill(
        *(target.lm, drafter, models.params(drafter), packed, lengths),
        rng.row_keys(0, len(lengths)),
        max_len=packed.shape[1] + models.new + MARGIN,
        limit=lengths + models.new + MARGIN,
        sampling=sampling.make_sampling(len(lengths), temperature),
    )
    state = decode.autoregressive(
        target.lm, models.params(drafter), state, max_steps=models.new + MARGIN
    )
    decode.check(state)
    outputs = decode.outputs(state, [len(prompt) for prompt in models.prompts])
    return [[*prompt, *out] for prompt, out in zip(models.prompts, outputs, strict=True)]


def trees_of(models: Models, drafter: Drafter, texts: list[list[int]]) -> Places:
    """The drafts of a drafter with the controller ``recorder``, or of a chain without probs."""
    slots = max(map(len, models.prompts)) + models.new
    params, empty = models.params(drafter), models.target.lm.no_output(models.new)

    @jax.jit
    def draft(params: ModelParams, tokens: jax.Array, lengths: jax.Array) -> Places:
        context = Context(tokens, lengths, sampling.make_sampling(models.new, 0.0))
        state = drafter.init(params, context, empty, slots)
        keys = rng.RowKeys(rng.row_keys(0, models.new), jnp.zeros((), jnp.int32), lengths)
        draft, after = drafter.propose(params, keys, context, state)
        parents = draft.parents
        if parents is None:
            parents = jnp.broadcast_to(jnp.arange(drafter.nodes) - 1, draft.tokens.shape)
        kinds = Recorded | ltd.Recorded
        leaves = jax.tree.leaves(after, is_leaf=lambda x: isinstance(x, kinds))
        kept = next((x for x in leaves if isinstance(x, kinds)), None)
        if isinstance(kept, ltd.Recorded):
            return Places(draft.tokens, draft.valid, parents, (kept.candidates, kept.nodes))
        probs = jnp.zeros(parents.shape) if kept is None else kept.log_prob
        return Places(draft.tokens, draft.valid, parents, probs)

    found = []
    for prompt, text in zip(models.prompts, texts, strict=True):
        lengths = len(prompt) + np.arange(models.new, dtype=np.int32)
        whole = np.broadcast_to(np.pad(text, (0, slots))[:slots], (models.new, slots))
        tokens = np.where(np.arange(slots) < lengths[:, None], whole, -1).astype(np.int32)
        found.append(jax.device_get(draft(params, jnp.asarray(tokens), jnp.asarray(lengths))))
    return jax.tree.map(lambda *each: np.stack(each), *found)


def grown_of(models: Models, texts: list[list[int]]) -> ltd.Rounds:
    """What ``ltd`` reads at every place of every text, and what it would get: arrays [B,T,...]."""
    most, rows = max(TREES), Rows(models, texts)
    keys = {"tree": "dynamic", "depth": DEPTH, "top_k": TOP_K, "nodes": most}
    sizes, nodes, tokens = np.array(costs.sizes(most)[1:]), [], []
    candidates = None
    for depth in range(1, DEPTH + 1):
        control = ltd.recorder(depth, most)
        places = trees_of(models, models.make("draft_model", **keys, control=control), texts)
        candidates, own = places.log_prob
        nodes.append(own)
        accepted = np.zeros((*own.shape[:2], len(sizes)))
        for row, place in np.ndindex(*own.shape[:2]):
            rows.at[row] = place
            path = rows.path(row, *(x[row, place] for x in places[:3]))
            # Nodes are in the order in which they are verified.
            accepted[row, place] = (np.array(path)[:, None] < sizes).sum(0) if path else 0
        tokens.append(1 + accepted)
    assert candidates is not None
    return ltd.Rounds(candidates, np.stack(nodes, 2), np.stack(tokens, 2).astype(np.float32))


def chains_of(models: Models, texts: list[list[int]], temperature: float) -> np.ndarray:
    """i[B,T]: how many tokens of a drawn chain are accepted at each place.

    Given that the target emits x, the rule "chain" has accepted it with probability
    min(1, q(x) / p(x)).
    """
    assert models.draft is not None
    chances = []
    for prompt, text in zip(models.prompts, texts, strict=True):
        tokens = jnp.asarray([text], jnp.int32)
        logits = [
            np.asarray(each.lm.apply(each.params, tokens, each.lm.init_cache(1, 0))[0].logits[0])
            for each in (models.target, models.draft)
        ]
        here = np.arange(len(prompt), len(text))
        if temperature:
            p, q = (np.exp(x - np.logaddexp.reduce(x, -1, keepdims=True)) for x in logits)
            chance = np.minimum(1, q[here - 1, tokens[0, here]] / p[here - 1, tokens[0, here]])
        else:
            chance = (logits[1][here - 1].argmax(-1) == np.asarray(tokens)[0, here]) * 1.0
        chances.append(chance)
    ahead = np.arange(models.new)[:, None] + np.arange(max(CHAINS))
    flips = np.random.default_rng(0).random((len(texts), *ahead.shape))
    return (flips < np.stack(chances)[:, ahead]).cumprod(-1).sum(-1)


class Rows:
    """Rows that are played together along their texts."""

    def __init__(self, models: Models, texts: list[list[int]]):
        self.begins = [len(prompt) for prompt in models.prompts]
        self.texts, self.new, self.at = texts, models.new, np.zeros(len(texts), int)
        self.tokens, self.nodes, self.spent, self.rounds = 0.0, 0.0, 0.0, 0

    @property
    def running(self) -> bool:
        """Whether all rows are live."""
        return bool((self.at < self.new).all())

    def path(self, row: int, tokens: np.ndarray, valid: np.ndarray, parents: np.ndarray) -> list:
        """The accepted nodes of a tree at the row's place."""
        place, path, end = self.begins[row] + self.at[row], [], -1
        while True:
            here = valid & (parents == end) & (tokens == self.texts[row][place + len(path)])
            if not here.any():
                return path
            end = int(np.argmax(here))
            path.append(end)

    def emit(self, counts: np.ndarray, nodes: int, time: float) -> None:
        """Ends a round."""
        counts = np.minimum(counts, self.new - self.at)
        self.at = self.at + counts
        self.tokens, self.nodes = self.tokens + counts.mean(), self.nodes + nodes
        self.spent, self.rounds = self.spent + time, self.rounds + 1


def summary(groups: Sequence[Rows]) -> dict[str, float]:
    """Tokens per round, mean verified nodes, and tokens of a row in the time of a plain step."""
    tokens, nodes, spent, rounds = (
        sum(getattr(each, name) for each in groups)
        for name in ("tokens", "nodes", "spent", "rounds")
    )
    values = {"tau": tokens / rounds, "nodes": nodes / rounds, "speed": tokens / spent}
    return {name: float(value) for name, value in values.items()}


def play_fixed(rows: Rows, places: Places, size: int, time: Callable[[int], float]) -> None:
    """Rounds that verify the ``size`` most probable nodes of each tree; of a lookup all there are.

    The verified width is that of the largest draft.
    """
    while rows.running:
        counts, widest = np.ones(len(rows.at), int), 0
        for row, place in enumerate(rows.at):
            tokens, valid, parents, log_prob = (x[row, place] for x in places)
            if size:
                valid = np.zeros_like(valid)
                valid[largest(parents, log_prob)[:size]] = True
            counts[row] += len(rows.path(row, tokens, valid, parents))
            widest = max(widest, int(np.flatnonzero(valid).max(initial=-1)) + 1)
        rows.emit(counts, size or widest, time(size or widest))


def largest(parents: np.ndarray, log_prob: np.ndarray) -> np.ndarray:
    """The nodes by the draft's probability of their paths, as EAGLE-2 chooses them."""
    total = np.zeros(len(parents))
    for node, above in enumerate(parents):
        total[node] = log_prob[node] + (total[above] if above >= 0 else 0)
    return np.argsort(-total, kind="stable")


def play_chain(rows: Rows, chains: np.ndarray, length: int, time: Callable[[int], float]) -> None:
    """Rounds with chains of so many tokens."""
    while rows.running:
        accepted = chains[np.arange(len(rows.at)), rows.at]
        rows.emit(1 + np.minimum(accepted, length), length, time(length))


def played(own: Controller) -> tuple:
    """The compiled functions of a controller: its start, its limits, its trees, its updates."""
    sized = jax.jit(functools.partial(control.sized, own)) if own.size else None
    longest = jax.jit(functools.partial(control.longest, own))
    return jax.jit(own.init), longest, sized, jax.jit(own.update)


def context_of(rows: Rows, temperature: float) -> Context:
    """What a controller reads when it begins."""
    count = len(rows.at)
    length = jnp.asarray(rows.begins, jnp.int32)
    settings = sampling.make_sampling(count, temperature)
    return Context(jnp.zeros((count, 1), jnp.int32), length, settings, limit=length + rows.new)


def verdict_of(paths: list[list[int]], depth: int) -> Verdict:
    """The verdict of these accepted nodes."""
    ids = np.full((len(paths), depth), -1, np.int32)
    for row, path in enumerate(paths):
        ids[row, : len(path)] = path
    counts = jnp.asarray([1 + len(path) for path in paths], jnp.int32)
    return Verdict(jnp.zeros((len(paths), depth + 1), jnp.int32), counts, jnp.asarray(ids))


def play_budget(
    rows: Rows, places: Places, functions: tuple, temperature: float, setting: tuple
) -> None:
    """Rounds with trees that ``budget`` cuts; ``setting``: (time by nodes, depth, has probs)."""
    init, longest, sized, update = functions
    time, depth, probs = setting
    state, count = init(context_of(rows, temperature)), len(rows.at)
    none = Draft(jnp.zeros((count, 0), jnp.int32), jnp.zeros((count, 0), bool))
    while rows.running:
        if int(longest(state).max()) == 0:
            state = update(state, none, verdict_of([[]] * count, 0))
            rows.emit(np.ones(count, int), 0, 1.0)
            continue
        here = [x[np.arange(count), rows.at] for x in places]
        draft = Draft(*map(jnp.asarray, here[:3]), depth=depth)
        small, _, state = sized(state, draft, jnp.asarray(here[3]) if probs else None)
        kept = [np.asarray(x) for x in (small.tokens, small.valid, small.parents)]
        paths = [rows.path(row, *(x[row] for x in kept)) for row in range(count)]
        state = update(state, small, verdict_of(paths, depth))
        # The round verifies one of the sizes.
        widest = int(np.flatnonzero(kept[1].any(0)).max(initial=-1)) + 1
        size = next(n for n in costs.sizes(kept[0].shape[1]) if n >= widest)
        rows.emit(np.array([1 + len(path) for path in paths]), size, time(size))


def play_ltd(
    rows: Rows, own: list[int], rounds: ltd.Rounds, policies: tuple, setting: Setting
) -> None:
    """Rounds with trees whose depth and size ``ltd`` chooses; ``policies``: one for each row."""
    each = [ltd.chosen(policies[row], ltd.Rounds(*(x[row] for x in rounds))) for row in own]
    levels, places = (np.stack(x) for x in zip(*each, strict=True))
    sizes, every = np.array(costs.sizes(max(TREES))[1:]), np.arange(len(own))
    while rows.running:
        level, place = levels[every, rows.at], places[every, rows.at]
        counts = rounds.tokens[own, rows.at, level - 1, place].astype(int)
        size = int(sizes[place].max())
        rows.emit(counts, size, setting.tree(size, int(level.max())))


def policies_of(rounds: ltd.Rounds, setting: Setting) -> tuple:
    """The policies of each row, fitted to the other half of the rows."""
    sizes = costs.sizes(max(TREES))[1:]
    times = np.array([[setting.tree(n, level + 1) for n in sizes] for level in range(DEPTH)])
    half = len(rounds.tokens) // 2
    fitted = []
    for others in (np.s_[half:], np.s_[:half]):
        flat = (x[others].reshape(-1, *x.shape[2:]) for x in rounds)
        fitted.append(ltd.fit(ltd.Rounds(*flat), times))
    return (*[fitted[0]] * half, *[fitted[1]] * (len(rounds.tokens) - half))


def play_goodput(
    rows: Rows,
    chains: np.ndarray,
    drafted: np.ndarray,
    functions: tuple,
    temperature: float,
    time: Callable[[int], float],
) -> None:
    """Rounds with chains that ``goodput`` limits; ``drafted`` i[B,T] are the tokens there are."""
    init, longest, _, update = functions
    state, count, most = init(context_of(rows, temperature)), len(rows.at), max(CHAINS)
    lookup = (drafted < most).any()
    while rows.running:
        every = np.arange(count)
        there = drafted[every, rows.at]
        limit = np.asarray(longest(state, jnp.asarray(there)) if lookup else longest(state))
        own = np.minimum(there, limit)
        accepted = np.minimum(chains[every, rows.at], own)
        valid = jnp.arange(most) < own[:, None]
        draft = Draft(jnp.zeros((count, most), jnp.int32), jnp.asarray(valid))
        paths = [list(range(n)) for n in accepted]
        state = update(state, draft, verdict_of(paths, most))
        size = next(n for n in (*costs.LENGTHS, most) if n >= own.max())
        rows.emit(1 + accepted, int(size), time(size))


class Drafts(NamedTuple):
    """Everything that is played at one temperature."""

    temperature: float
    texts: list[list[int]]
    trie: Places
    lookup: tuple[np.ndarray, np.ndarray]  # accepted and drafted tokens of a chain, i[B,T] each
    tree: Places | None = None  # None: no draft model
    chains: np.ndarray | None = None
    grown: ltd.Rounds | None = None


def drafts_of(models: Models, temperature: float) -> Drafts:
    """The texts of a temperature, and the drafts at their places."""
    texts = texts_of(models, temperature)
    trie = trees_of(models, models.make("trie", **TRIE, control=recorder(TRIE["nodes"])), texts)
    found = trees_of(models, models.make("prompt_lookup", gamma=max(CHAINS)), texts)
    rows, shape = Rows(models, texts), found.valid.shape[:2]
    accepted = np.zeros(shape, int)
    for row, place in np.ndindex(*shape):
        rows.at[row] = place
        accepted[row, place] = len(rows.path(row, *(x[row, place] for x in found[:3])))
    lookup = accepted, found.valid.sum(-1)
    if models.draft is None:
        return Drafts(temperature, texts, trie, lookup)
    most = max(TREES)
    keys = {"tree": "dynamic", "depth": DEPTH, "top_k": TOP_K, "nodes": most}
    tree = trees_of(models, models.make("draft_model", **keys, control=recorder(most)), texts)
    chains, grown = chains_of(models, texts, temperature), grown_of(models, texts)
    return Drafts(temperature, texts, trie, lookup, tree, chains, grown)


def groups_of(models: Models, drafts: Drafts, setting: Setting) -> list[tuple[list[int], Rows]]:
    """The rows that are played together, and their numbers: each alone, or all."""
    every = list(range(len(models.prompts)))
    groups = [[row] for row in every] if setting.rows == 1 else [every]
    return [
        (
            own,
            Rows(
                models._replace(prompts=[models.prompts[i] for i in own]),
                [drafts.texts[i] for i in own],
            ),
        )
        for own in groups
    ]


Play = Callable[[list[int], Rows], None]  # (the numbers of the rows, the rows): plays their texts
Method = tuple[str, str, int, Play]  # kind, controller, size


def some(values: Any, own: list[int]) -> Any:
    """The rows of arrays."""
    return jax.tree.map(lambda x: x[own], values)


def lookups(drafts: Drafts, setting: Setting, controllers: dict) -> list[Method]:
    """The methods without a draft model."""
    (accepted, there), free = drafts.lookup, setting.lookup

    def chain(functions: tuple) -> Play:
        return lambda own, rows: play_goodput(
            rows, accepted[own], there[own], functions, drafts.temperature, free
        )

    def whole(own: list[int], rows: Rows) -> None:
        play_fixed(rows, some(drafts.trie, own), 0, free)

    def budget(own: list[int], rows: Rows) -> None:
        shape = free, TRIE["depth"], False
        trie, functions = some(drafts.trie, own), controllers["free budget"]
        play_budget(rows, trie, functions, drafts.temperature, shape)

    return [
        ("prompt lookup", "", 0, chain(NO_CONTROL)),
        ("prompt lookup", "goodput", 0, chain(controllers["free goodput"])),
        ("trie", "", 0, whole),
        ("trie", "budget", 0, budget),
    ]


def modelled_drafts(drafts: Drafts, setting: Setting, controllers: dict) -> list[Method]:
    """The methods with a draft model."""
    chains, trees, grown = drafts.chains, drafts.tree, drafts.grown
    assert chains is not None and trees is not None and grown is not None
    policies = policies_of(grown, setting)
    full = np.full_like(chains, max(CHAINS))

    def chain(length: int) -> Play:
        return lambda own, rows: play_chain(rows, chains[own], length, setting.chain)

    def tree(size: int) -> Play:
        return lambda own, rows: play_fixed(rows, some(trees, own), size, setting.tree)

    def goodput(own: list[int], rows: Rows) -> None:
        given = chains[own], full[own], controllers["goodput"], drafts.temperature
        play_goodput(rows, *given, setting.chain)

    def budget(own: list[int], rows: Rows) -> None:
        shape = setting.tree, DEPTH, True
        play_budget(rows, some(trees, own), controllers["budget"], drafts.temperature, shape)

    return [
        *(("chain", "", length, chain(length)) for length in CHAINS),
        ("chain", "goodput", 0, goodput),
        *(("tree", "", size, tree(size)) for size in TREES),
        ("tree", "budget", 0, budget),
        ("tree", "ltd", 0, lambda own, rows: play_ltd(rows, own, grown, policies, setting)),
    ]


def rows_of(models: Models, drafts: Drafts, setting: Setting, controllers: dict) -> list[dict]:
    """A row of results for each method."""
    found, methods = [], lookups(drafts, setting, controllers)
    if models.draft is not None:
        methods += modelled_drafts(drafts, setting, controllers)
    for kind, name, size, play in methods:
        groups = groups_of(models, drafts, setting)
        for own, rows in groups:
            play(own, rows)
        facts = {"setting": setting.name, "rows": setting.rows, "temperature": drafts.temperature}
        facts |= {"kind": kind, "control": name, "size": size}
        found.append(facts | summary([rows for _, rows in groups]))
        print(found[-1], flush=True)
    return found


NO_CONTROL = (
    lambda context: (),
    lambda state, reach: jnp.full(len(reach), max(CHAINS)),
    None,
    lambda state, *_: state,
)


def controlled(setting: Setting, folder: Path) -> dict[str, tuple]:
    """The controllers of a setting, which read its times from files."""
    lengths = [n for n in costs.LENGTHS if n <= max(CHAINS)]
    kinds = {
        "goodput": (setting.chain, lengths, costs.LEVELS, "goodput:rows=open,"),
        "budget": (setting.tree, costs.sizes(max(TREES)), costs.NODES, "budget:"),
        "free goodput": (setting.lookup, lengths, costs.LEVELS, "goodput:rows=open,"),
        "free budget": (setting.lookup, costs.sizes(TRIE["nodes"]), costs.NODES, "budget:"),
    }
    found = {}
    for name, (*given, text) in kinds.items():
        own = control.parse(f"{text}profile={profile(folder / f'{name}.json', *given)}")
        assert own is not None
        found[name] = played(own)
    return found


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.set_defaults(out=HERE / "trees.json")
    add = parser.add_argument
    add("--target", default=str(ASSETS / "target"), help="its directory")
    add("--draft", default=str(ASSETS / "draft"), help="of a draft model; '': lookups alone")
    add("--prompts", type=Path, default=ASSETS / "prompts.jsonl", help='lines with "prompt"')
    add("--rows", type=int, default=16, help="prompts")
    add("--new", type=int, default=128, help="tokens of each text")
    add("--context", type=float, default=1024, help="tokens of the texts whose costs are modelled")
    add("--batches", type=int, nargs="+", default=(1, 16, 128), help="rows of the cost settings")
    args = parser.parse_args(argv)
    stopwatch, target = Stopwatch(), hf.load(args.target)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.rows]
    prompts = [target.text_tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    models = Models(target, hf.load(args.draft) if args.draft else None, prompts, args.new)
    played_at = [drafts_of(models, temperature) for temperature in TEMPERATURES]
    rows = []
    for setting in settings(args.context, args.batches):
        with tempfile.TemporaryDirectory() as folder:
            controllers = controlled(setting, Path(folder))
        for drafts in played_at:
            rows += rows_of(models, drafts, setting, controllers)
        jax.clear_caches()
    names = [Path(path).name for path in (args.target, args.draft) if path]
    result = record(__file__, [without_folder(each) for each in argv], stopwatch)
    facts = {"models": names, "context": args.context, "prompts": len(prompts), "new": args.new}
    write_json(args.out, result | facts | {"rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
