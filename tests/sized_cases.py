"""Trees whose size a controller chooses: drafters, random trees, and what is checked of them."""

from __future__ import annotations

import functools
import json

import cases
import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, drafters, rng, sampling, testing, tree
from specjax.control import costs, ltd
from specjax.testing import claims, exact
from specjax.types import ModelParams

NODES, DEPTH = 9, 4

KEYS = {
    "dynamic": ("draft_model", {"tree": "dynamic", "nodes": 6, "depth": 3, "top_k": 2}),
    "beam": ("draft_model", {"tree": "beam", "depth": 3, "top_k": 2}),
    "top_k": ("draft_model", {"tree": "2x2x1", "siblings": "top_k"}),
    "best_first": ("medusa", {"tree": "best_first", "nodes": 6, "heads": 3}),
    "trie": ("trie", {"nodes": 6, "depth": 3}),
    "token_recycling": ("token_recycling", {"tree": "2x2x1", "top_k": 2}),
}


def random_tree(draw):
    """The parents of a random tree, and bool[N] with some nodes that do not exist."""
    parents, depth = [-1], [1]
    while len(parents) < NODES:
        above = int(draw.integers(-1, len(parents)))
        if (0 if above < 0 else depth[above]) < DEPTH:
            parents.append(above)
            depth.append(1 + (0 if above < 0 else depth[above]))
    return parents, draw.random(NODES) > 0.1


def ancestors_of(parents, node):
    while node >= 0:
        yield node
        node = parents[node]


def exist_of(parents, valid):
    return [all(valid[each] for each in ancestors_of(parents, n)) for n in range(len(parents))]


def accepted_path(draw, parents, kept, exist, good):
    """The nodes of a random path of the verified tree."""
    path, end = [], -1
    while below := [n for n in kept if exist[n] and parents[n] == end]:
        if draw.random() > good:
            break
        end = int(draw.choice(below))
        path.append(end)
    return path


def made(name, target, draft, params, text):
    """The drafter; heads on the target's ``params`` have random parameters."""
    method, keys = KEYS[name]
    if method == "medusa":
        return cases.random_heads(method, target, params, control=text, **keys)
    own = {"model": draft} if method == "draft_model" else {}
    return drafters.make(method, target, control=text, **keys, **own)


def compiled(drafter):
    """The same drafter; a draft, which draws nothing, and an update are one program each."""
    propose = jax.jit(lambda params, *args: drafter.propose(params, None, *args))
    update = jax.jit(drafter.update)

    def in_one(function, *args):
        with jax.disable_jit(False):
            return function(*args)

    return drafter._replace(
        propose=lambda params, keys, *args: in_one(propose, params, *args),
        update=lambda *args: in_one(update, *args),
    )


def two_rounds(name, text):
    """The law of two rounds, enumerated."""
    target, draft, _ = cases.models()
    drafter = compiled(made(name, target, draft, cases.table(0), text))
    own = cases.table(1) if KEYS[name][0] == "draft_model" else drafter.init_params(None)
    with jax.enable_x64(True):
        wide = jax.tree.map(claims.widen, ModelParams(cases.table(0), own))
        rule = accept.load("deterministic")
        return exact.enumerated(
            target, drafter, rule, wide, cases.REPEATED, 3, rounds=2, temperature=0.9
        )


PROMPTS, NEW = [[1, 2, 3, 1, 2, 3, 1], [4], [5, 6, 7, 5, 6], [3, 3, 3, 3]], [20, 3, 24, 11]


def decoded(target, drafter, params, temperature=0.0):
    packed, lengths = decode.pack_prompts(PROMPTS, 8)
    keys = rng.row_keys(0, len(PROMPTS))
    state = decode.prefill(
        *(target, drafter, params, packed, lengths, keys),
        max_len=8 + max(NEW),
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )
    rule = accept.load("deterministic")
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=32)
    decode.check(state)
    return decode.outputs(state, [len(each) for each in PROMPTS]), jax.device_get(records)


def check_texts(name, text):
    """Ragged rows: the texts of plain decoding, at widths of the sizes.

    Returns (widths, accepted tokens) of each temperature.
    """
    target, params = testing.tiny("llama", 0, 20.0)
    noise = np.random.default_rng(5)
    noisy = jax.tree.map(
        lambda x: x + 0.05 * np.std(x) * noise.normal(size=x.shape).astype(np.float32), params
    )
    drafter = made(name, target, target._replace(name="draft"), params, text)
    own = noisy if KEYS[name][0] == "draft_model" else drafter.init_params(None)
    plain, _ = decoded(target, drafters.make("none", target), ModelParams(params))
    found = []
    for temperature in (0.0, 1.0):
        texts, records = decoded(target, drafter, ModelParams(params, own), temperature)
        assert [len(text) for text in texts] == NEW
        assert temperature or texts == plain
        widths = {1 + size for size in (0, *costs.sizes(drafter.nodes))}
        assert set(tree.widths(drafter)) == widths
        verified = records.verified.max(1)
        ran = verified > 0
        assert set(verified[ran]) <= widths
        # A whole tree or a smaller one: never more nodes than were chosen.
        assert (records.drafted <= np.maximum(verified - 1, 0)[:, None]).all()
        found.append((set(verified[ran].tolist()), int(records.accepted.sum())))
    return found


# Policies of ``ltd``.

WIDTHS = ltd.CANDIDATES + 2, len(ltd.PLACES) + 2


def weights(draw, width, actions):
    """A random network whose answers differ from tree to tree."""
    shapes = (width, ltd.HIDDEN), (ltd.HIDDEN,), (ltd.HIDDEN, actions)
    network = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    some = -np.sort(draw.exponential(0.3, (200, width))).astype(np.float32)
    return *network, -np.median(answer((*network, 0), some), 0)


def written(folder, nodes, seed=0, policies=True):
    """The file of a profile with random policies, of 1 to 8 rows or ``loop_fit``."""
    sizes, draw = costs.sizes(nodes), np.random.default_rng(seed)
    kinds = []
    for _ in range(2):
        policy = tuple(map(functools.partial(weights, draw), WIDTHS, (1, len(sizes) - 1)))
        kind = costs.RoundCosts((1.0,) * len(sizes), (0.7,) * nodes)
        kinds.append(kind._replace(policy=policy) if policies else kind)
    own = dict.fromkeys((*range(1, 9), 60_000), costs.Costs(sizes, *kinds))
    path = folder / f"{nodes}_{seed}.json"
    own_profile = costs.Profile(costs.device(), "target", "drafter", own, costs.NODES)
    path.write_text(json.dumps(own_profile.to_json()))
    return f"ltd:profile={path}", own[1]


def answer(network, values):
    hidden = np.maximum(values @ network[0] + network[1], 0)
    return hidden @ network[2] + network[3]
