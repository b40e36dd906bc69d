"""The compiled loops copy no cache, no weight and no logits: one program or more of every family.

Such a copy costs as much as reading the buffer, in every pass, and changes no text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import cases
import foreign_cases
import jax
import jax.numpy as jnp
import pytest
from marks import by_default

from experiments import loops
from experiments.draft_cost import run as draft_cost
from experiments.programs import facts, hlo
from experiments.t5 import run as t5_study
from specjax import accept, decode, drafters, outcome, testing, tree
from specjax.bench import timing
from specjax.cache import KVCache
from specjax.decode import beams
from specjax.generation import refill
from specjax.models import lm
from specjax.sharding import states
from specjax.testing import loop
from specjax.testing.models import prompts_of, tiny_t5
from specjax.types import LM, Drafter, ModelParams

# No two sizes are equal, so that no small array has the shape of a buffer.
VOCAB, WIDTH, NEW, WINDOW = 77, 24, 20, 9
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5]]
# The flags of the tests switch this off; XLA:CPU then transposes a tied head in every pass.
OPTIONS = {"xla_cpu_multi_thread_eigen": True}


def buffers(*trees: Any) -> set[tuple[int, ...]]:
    """The shapes of matrices, and of the keys and values of all caches, in parameters or states."""
    is_cache = lambda x: isinstance(x, KVCache)  # noqa: E731
    shapes = set()
    for one in trees:
        found = [x for x in jax.tree.leaves(one, is_leaf=is_cache) if is_cache(x)]
        arrays = [(x.k, x.v) for x in found] if found else one
        shapes |= {x.shape for x in jax.tree.leaves(arrays) if x.ndim > 1}
    return shapes


def copies(lowered: Any, shapes: Iterable[tuple[int, ...]], rows: int = len(PROMPTS)) -> int:
    """Copies inside the loops of a program of whole buffers with these shapes, and of logits."""
    program = hlo.read(lowered.compile(OPTIONS).as_text())
    assert any(looped for *_, looped in hlo.walk(program)), "the program has no loop"
    logits = {(rows, size, VOCAB) for size in range(1, 33)}
    found = facts.copies(program, [("f32", shape) for shape in {*shapes, *logits}])
    return sum(found.values())


@functools.cache
def decoder(family: str = "llama", seed: int = 0, layers: int = 2) -> tuple[LM, Any]:
    return testing.tiny(family, seed, layers=layers, vocab_size=VOCAB, width=WIDTH)


@functools.cache
def with_windows() -> tuple[LM, Any]:
    """A decoder whose first layer has a ring as its cache."""
    config = dataclasses.replace(
        testing.tiny_config(vocab_size=VOCAB, width=WIDTH), windows=(WINDOW, None)
    )
    return lm.from_config(config), lm.init_params(config, jax.random.key(0))


@functools.cache
def t5(seed: int = 0, layers: int = 2) -> tuple[LM, Any]:
    return tiny_t5(seed, vocab_size=VOCAB, num_layers=layers)


TARGETS = {"decoder": decoder, "ring": with_windows, "T5": t5}


def pair_of(target: str, name: str) -> tuple[LM, Drafter, ModelParams]:
    """A target, and the drafter of a case of the exactness kit for it."""
    model, params = TARGETS[target]()
    small = (t5(1, 1), t5(2, 1)) if target == "T5" else (decoder("gpt2", 1, 1), decoder(seed=2))
    (draft, first), (other, second) = small
    drafter = cases.build(name, cases.Models(model, draft, other, (params, first, second)))
    own = first if name in cases.MODELS else drafter.init_params(jax.random.key(0))
    return model, drafter, ModelParams(params, own)


def state_of(target: LM, drafter: Drafter, params: ModelParams) -> Any:
    return loop.begin(target, drafter, params, prompts_of(target, PROMPTS), NEW, 0)


def rounds(parts: tuple[LM, Drafter, ModelParams], state: Any) -> Any:
    """The loop of ``decode.generate``."""
    target, drafter, params = parts
    rule, stop = accept.load(accept.default_rule(drafter)), outcome.stop_ids(2)
    static = {"max_steps": 5, "verify_widths": None}
    return decode._generate.lower(target, drafter, rule, params, state, stop, **static)


# Target, drafter.
ROUNDS = [
    ("decoder", "chain"),
    ("ring", "prompt_lookup"),
    ("T5", "prompt_lookup"),
    ("decoder", "medusa"),
    ("decoder", "eagle chain"),
    ("decoder", "escalate"),
    ("decoder", "cascade"),
    ("decoder", "none"),
    ("decoder", "without_replacement"),
    ("decoder", "suffix"),
    ("decoder", "early_exit"),
    ("decoder", "eagle3"),
    ("decoder", "hydra"),
    ("decoder", "block_head"),
    ("decoder", "mtp_module"),
    ("decoder", "staged"),
    ("decoder", "triforce"),
    ("ring", "chain"),
    ("T5", "chain"),
    ("T5", "medusa"),
]


@pytest.mark.parametrize(("target", "name"), by_default(ROUNDS, ROUNDS[:6]))
def test_rounds(target, name):
    parts = pair_of(target, name)
    state = state_of(*parts)
    assert copies(rounds(parts, state), buffers(parts[2], state)) == 0


@pytest.mark.parametrize("target", by_default(TARGETS, ("decoder",)))
def test_plain_decoding(target):
    model, drafter, params = pair_of(target, "none")
    state = state_of(model, drafter, params)
    lowered = decode._autoregressive.lower(model, params, state, jnp.int32(5), outcome.stop_ids(2))
    assert copies(lowered, buffers(params, state)) == 0


def written(program: hlo.Program, shape: tuple[int, ...]) -> int:
    """Instructions inside loops that write a whole buffer of this shape, not a part of it."""

    def in_place(each: hlo.Instruction) -> bool:
        inside = program.of(each, "calls")[0]
        update, operands = inside.root.opcode == "dynamic-update-slice", inside.root.operands
        return update and inside.instructions[operands[0]].opcode == "parameter"

    return sum(
        each.opcode in ("concatenate", "copy", "pad", "transpose")
        or (each.opcode == "fusion" and not in_place(each))
        for _, each, looped in hlo.walk(program)
        if looped and each.arrays[0].dims == shape
    )


@pytest.mark.parametrize(("kind", "times"), [("masked", 1), ("of_chains", 2)])
def test_another_librarys_pass(kind, times):
    """``from_call``: a pass copies each buffer once, with the slots of the block behind the text.

    A foreign program that writes at another place in each row copies it once more.
    """
    model = getattr(foreign_cases, kind)()
    drafter = drafters.make("prompt_lookup", model)
    params = ModelParams(foreign_cases.foreign_params(), drafter.init_params(jax.random.key(0)))
    state = loop.begin(model, drafter, params, [*PROMPTS, [1]], NEW, 0)
    program = hlo.read(rounds((model, drafter, params), state).compile(OPTIONS).as_text())
    batch, slots, layers, *rest = state.cache.leaves[0].shape
    widths = tree.widths(drafter, None)
    assert len(widths) > 1 and written(program, (batch, slots, layers, *rest)) == 0
    for width in widths:
        # The foreign arrays have layers first, and slots before rows.
        shape = (layers, slots + width, batch, *rest)
        assert written(program, shape) == times * len(state.cache.leaves)


def test_refill():
    """The segment of rounds has no copies; a row of the state is replaced in place."""
    target, drafter, params = parts = pair_of("decoder", "chain")
    state = state_of(*parts).replace(round=jnp.zeros((len(PROMPTS),), jnp.int32))
    assert copies(rounds(parts, state), buffers(params, state)) == 0
    width = len(PROMPTS[0])
    prefill = refill.make_prefill(target, drafter, width + NEW)
    one = loop.begin(target, drafter, params, PROMPTS[:1], NEW, 0)
    prompt = jnp.zeros((len(PROMPTS), width), jnp.int32)
    arrays = (prompt, state.length, state.limit, state.keys, state.sampling)
    axes = states.row_axes(drafter, prefill, params, arrays, "")[0]
    compiled = refill._inserted.lower(state, one, jnp.asarray(0), axes).compile(OPTIONS)
    assert compiled.memory_analysis().temp_size_in_bytes < state.cache.k[0].nbytes


@pytest.mark.parametrize("drafted", (False, True))
def test_beams(drafted, monkeypatch):
    """The prompts' caches, and the keys and values of the beams."""
    target, params = decoder()
    draft, own = decoder("gpt2", 1, 1)
    packed, lengths = decode.pack_prompts(PROMPTS)
    calls: list[tuple] = []
    search = beams._beam_search
    monkeypatch.setattr(beams, "_beam_search", lambda *given: calls.append(given))
    decode.beam_search(
        *(target, ModelParams(params, own if drafted else {}), packed, lengths),
        beams=3,
        max_new_tokens=11,
        draft=decode.BeamDraft(draft, gamma=2, beams=4) if drafted else None,
    )
    width = packed.shape[1]
    caches = [model.init_cache(len(PROMPTS), width) for model in (target, draft)]
    sizes = calls[0][0]
    # Places of the beams, and these with the tokens of a pass.
    grown = [
        model.init_cache(len(PROMPTS), more + sizes.places)
        for model, more in (
            (target, 0),
            (draft, sizes.beams),
            (target, sizes.first(sizes.gamma + 1)),
        )
    ]
    assert copies(search.lower(*calls[0]), buffers(params, own, *caches, *grown)) == 0


# Timed passes --------------------------------------------------------------------------------


def timed(target: str, name: str, size: int) -> int:
    """Copies in the loop of ``timing.of_pass`` and ``timing.of_verify``; "none": a chain."""
    model, drafter, params = pair_of(target, name)
    state = state_of(model, drafter, params)
    layout = None if name == "none" else timing._proposed(drafter, size - 1, params, state)

    # Not the jitted function, which would not be traced again for a mutant.
    def passes(layout, params, state, iterations):
        own, draft = (None, None) if drafter.rare.lower is None else (drafter, state.draft)
        given = params, state.tokens[:, :1], state.cache, draft
        return timing._pass_loop.__wrapped__(model, own, size, layout, *given, iterations)

    return copies(jax.jit(passes).lower(layout, params, state, 5), buffers(params.target, state))


def in_study(module: Any, make: Any, params: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Copies in the loop that ``make`` builds with the name ``repeat`` of a module."""

    def program(body, iterations, carry, *arguments):
        lowered = loops.program(body, iterations).lower(carry, arguments)
        return copies(lowered, buffers(params, carry), len(carry[0]))

    monkeypatch.setattr(module, "repeat", program)
    return make()


def tree_of_study(monkeypatch: pytest.MonkeyPatch) -> int:
    """A tree of ``experiments.loops.forward``."""
    model, drafter, params = pair_of("decoder", "without_replacement")
    state = state_of(model, drafter, params)
    layout = timing._proposed(drafter, drafter.nodes, params, state)
    make = functools.partial(
        loops.forward, model, params.target, state, drafter.nodes + 1, layout, 5
    )
    return in_study(loops, make, params.target, monkeypatch)


def t5_of_study(monkeypatch: pytest.MonkeyPatch) -> int:
    model, params = t5()
    return in_study(t5_study, lambda: t5_study.passes(model, params, 4), params, monkeypatch)


def costs_of_study(monkeypatch: pytest.MonkeyPatch) -> int:
    model, params = decoder()
    make = functools.partial(draft_cost.passes, model, params, 30, 4, 5)
    return in_study(draft_cost, make, params, monkeypatch)


TIMED = {
    "one token": lambda patch: timed("decoder", "none", 1),
    "a chain": lambda patch: timed("decoder", "none", 4),
    "a tree": lambda patch: timed("decoder", "without_replacement", 4),
    "ring": lambda patch: timed("ring", "none", 4),
    "T5": lambda patch: timed("T5", "none", 4),
    "a tree, studies": tree_of_study,
    "T5, study": t5_of_study,
    "costs of drafts, study": costs_of_study,
}


@pytest.mark.fast
@pytest.mark.parametrize("name", TIMED)
def test_timed_passes(name, monkeypatch):
    assert TIMED[name](monkeypatch) == 0


@pytest.mark.parametrize("name", TIMED)
def test_a_count_that_the_compiler_knows_is_detected(name, monkeypatch):
    """With a constant 0 every buffer of keys and values is copied."""

    def constant(target, cache, block):
        return target.commit(cache, block, jnp.zeros_like(cache.length))

    for module in (timing, loops, t5_study, draft_cost):
        monkeypatch.setattr(module, "commit_none", constant)
    assert TIMED[name](monkeypatch) >= 4
