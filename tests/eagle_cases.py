"""What the tests of EAGLE share: networks, ragged rounds of real decoding, the plain reference."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cases
import eagle_reference as reference
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
from internals import drafters_growth, setup_of
from internals import heads_vocabulary as _vocabulary

from specjax import accept, decode, drafters, rng, sampling, step, testing, tree
from specjax.models import lm
from specjax.types import ModelParams

VOCAB, EOS, SIZE, DEPTH = 8, 7, 28, 3
TARGET, TABLE = testing.tiny(scale=20.0, layers=3, width=16, vocab_size=VOCAB)
# Rows of unequal length, greedy and sampled; the second one cannot draft in its first round.
PROMPTS = [[1, 2, 3], [4], [5, 1, 0, 2, 3, 1], [3, 3]]
TEMPERATURES, LIMITS = [1.0, 0.0, 0.7, 0.0], [SIZE, SIZE, 13, SIZE]

SMALL = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "qk_norm": True}
REDUCED = {"fc_norm": True, "norm_output": True, "draft_ids": (0, 2, 3, 5, 7)}
# Label -> name and keys of a network.
NETWORKS = {
    "eagle": ("eagle", {}),
    "eagle, two layers": ("eagle", SMALL),
    "eagle, no shift": ("eagle", {"shift": 0}),
    "eagle3": ("eagle3", {"inner": 12}),
    "eagle3, all switches": ("eagle3", {**SMALL, **REDUCED}),
    "eagle3, one norm": ("eagle3", {"norm_before_residual": True, "taps": "2,0"}),
}
GROWTHS = {
    "dynamic": {"nodes": 8, "depth": DEPTH, "top_k": 3},
    "tree": {"tree": "2x2x1", "siblings": "without_replacement"},
    "chain": {"gamma": DEPTH, "siblings": "iid"},
}
RULES = {"dynamic": "deterministic", "tree": "recursive", "chain": "chain"}


@functools.cache
def made(label: str, growth: str = "dynamic"):
    """The drafter of a network with random parameters; "one norm" has ``input_norm`` too."""
    name, keys = NETWORKS[label]
    keys = keys | GROWTHS[growth]
    drafter = cases.random_heads(name, TARGET, TABLE, scale=0.25, **keys)
    if label == "eagle3, one norm":
        scale = jnp.linspace(0.5, 1.5, 2 * TARGET.width)
        params = drafter.init_params(None) | {"input_norm": {"scale": scale}}
        drafter = drafters.make(name, TARGET, params=params, **keys)
    return drafter, ModelParams(TABLE, drafter.init_params(None))


def stepper_of(drafter):
    return setup_of(drafter).stepper


def network_of(drafter):
    return stepper_of(drafter).init.args[0]


def plain_of(drafter, params) -> reference.Plain:
    """The same network for the plain reference."""
    network, facts = network_of(drafter), dict(drafter.training.facts)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params.draft)
    with jax.default_matmul_precision("highest"):
        embedding = TARGET.embed(params.target, jnp.arange(VOCAB))
        unembed = TARGET.unembed(params.target, jnp.eye(TARGET.width))
    flags = {key: facts.get(key, False) for key in ("norm_output", "norm_before_residual")}
    ends = (np.asarray(each, np.float64) for each in (embedding, unembed))
    return reference.Plain(
        wide, facts["head_dim"], *ends, network.ids, shift=facts.get("shift", 1), **flags
    )


class Seen(NamedTuple):
    """What the stepper computes at the beginning of a round."""

    kept: object
    ready: jax.Array
    logits: jax.Array  # f[B,DEPTH+1,V] after the pending token and along a path


@functools.partial(jax.jit, static_argnums=0)
def look(drafter, params, state, path) -> Seen:
    """``path`` i32[B,DEPTH] are drafted tokens."""
    stepper, block = stepper_of(drafter), None
    begun = stepper.begin(params, step.context_of(state), state.draft.kept)
    logits = [begun.logits[:, None]]
    for place in range(DEPTH):
        layout = tree.chain_layout(len(path), 1, place)
        nodes = drafters_growth.Nodes(
            path[:, place : place + 1], np.array([place - 1]), place + 1, layout
        )
        out, memory = stepper.step(params, begun.kept, nodes, block)
        block = memory if block is None else tree.join(block, memory)
        logits.append(out)
    return Seen(begun.kept, begun.ready, jnp.concatenate(logits, 1))


def prefilled(drafter, params, tokens, lengths):
    """The state after a prefill of texts i32[B,SIZE]."""
    return decode.prefill(
        TARGET,
        drafter,
        params,
        tokens,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=SIZE,
        limit=jnp.asarray(LIMITS),
        sampling=sampling.make_sampling(len(PROMPTS), TEMPERATURES),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def play(drafter, rule, params, state):
    return step.speculative_step(
        TARGET, drafter, rule, params, state, eos_id=jnp.asarray([EOS], jnp.int32)
    )


class Round(NamedTuple):
    """A state before its round, the draft of the round, and the state of a fresh prefill."""

    state: object
    info: object
    fresh: object


def rounds(drafter, growth: str, params, most: int = 12):
    """Rounds of decoding until all rows have ended, as host values."""
    packed, lengths = decode.pack_prompts(PROMPTS, SIZE)
    state, rule = prefilled(drafter, params, packed, lengths), accept.load(RULES[growth])
    for _ in range(most):
        tokens = jnp.where(jnp.arange(SIZE) < state.length[:, None], state.tokens[:, :SIZE], -1)
        fresh = prefilled(drafter, params, tokens, state.length)
        after, info = play(drafter, rule, params, state)
        yield Round(state, info, fresh)
        state = after
        if bool(state.done.all()):
            return


@functools.partial(jax.jit, static_argnums=0)
def _forward(target, params, tokens):
    out = lm.forward(target, params, tokens)
    return out.hidden, out.taps


def features(drafter, net: reference.Plain, text: list[int]) -> np.ndarray:
    """[n-1,D]: the target's features of a text but its last token, as the network reads them."""
    padded = np.zeros((1, SIZE), np.int32)
    padded[0, : len(text)] = text
    hidden, taps = _forward(drafter.tapped(TARGET), TABLE, padded)
    hidden, *taps = (np.asarray(x, np.float64)[0, : len(text) - 1] for x in (hidden, *taps))
    return reference.read(net, hidden, np.stack(taps, 1) if taps else None)


def assert_same_tree(drafter, net, draft, row: int, text: list[int]) -> None:
    """The draft of a row is EAGLE-2's tree of the plain reference."""
    own = features(drafter, net, text)
    tree_of = reference.eagle2(
        lambda path: reference.after(net, text, own, path), **GROWTHS["dynamic"]
    )
    assert growth_cases.paths_of(draft, row) == tree_of


def trained(name: str, target, target_params, steps: int, **keys):
    """The drafter of a network that was trained for a few steps on the target's own text.

    The loss is the cross-entropy with the target's probabilities, of the draft vocabulary, with
    true features.
    """
    drafter = drafters.make(name, target, **keys)
    network, tapped = network_of(drafter), drafter.tapped(target)
    start, tokens = drafter.training.start, sampled_text(target, target_params)
    rule = optax.adam(3e-3)

    @jax.jit
    def learn(params):
        out = lm.forward(tapped, target_params, tokens[:, :-1])
        labels = jax.nn.softmax(_vocabulary.gather(network.ids, out.logits[:, 1:]))

        def loss(own):
            both = ModelParams(target_params, own)
            features = network.read(both, out)[:, :-1]
            cache = network.init_cache(len(tokens), 0)
            fed, _ = network.apply(both, tokens[:, 1:-1], features, cache)
            own_logits = jax.nn.log_softmax(network.logits(both, fed.hidden))
            return -(labels * own_logits).sum(-1).mean()

        def one(carry, _):
            params, state = carry
            updates, state = rule.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, rule.init(params)), None, steps)[0][0]

    own = learn(start(target_params, jax.random.key(0)))
    return drafters.make(name, target, params=own, **keys)


def sampled_text(target, params, rows: int = 64, size: int = 64):
    """i32[rows,size]: text of the target at temperature 1."""
    state = decode.prefill(
        target,
        drafters.make("none", target),
        ModelParams(params),
        jnp.ones((rows, 1), jnp.int32),
        jnp.ones((rows,), jnp.int32),
        rng.row_keys(5, rows),
        max_len=size,
    )
    state = decode.autoregressive(target, ModelParams(params), state, max_steps=size)
    return state.tokens[:, :size]
