"""Decodes on several devices and on one; run by test_decoding.py in a process with fake devices.

    python decode_program.py MESH CASE [CASE ...]

Ragged prompts, greedy and sampled rows, limits, an end-of-sequence token, and two calls of the
loop. Texts, records and states' lengths must be equal.
"""

from __future__ import annotations

import dataclasses
import re
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import quantised_cases

from specjax import accept, decode, rng, sampling, sharding, testing
from specjax.bound import Bound
from specjax.cache import KVCache
from specjax.errors import UserError
from specjax.logit_maps import grammar
from specjax.models import lm
from specjax.models.transformer_config import Experts
from specjax.sharding import decoding, groups
from specjax.sharding import mesh as mesh_lib

ROWS, NEW, EOS = 8, 14, 2
STEPS = NEW // 2  # of one call of the loop; in two calls every row ends
EXCHANGE = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


# After the name of a case: with all maps of logits, and with logprobs; with a target with experts,
# with recurrent layers, or with kernels in int8.
MAPPED, EXPERTS, INT8 = ", mapped", ", experts", ", int8"
RECURRENT, MAMBA = ", recurrent", ", mamba"


def case_of(name: str) -> cases.Case:
    """A case of the kit, perhaps with another target."""
    if name.endswith(RECURRENT):
        return cases.real(name.removesuffix(RECURRENT), "qwen3_next", 2)
    if name.endswith(MAMBA):
        return cases.real(name.removesuffix(MAMBA), "nemotron_h", 2)
    if name.endswith(INT8):
        case = cases.real(name.removesuffix(INT8))
        rounded = quantised_cases.in_int8(case.params.target)
        return case._replace(params=case.params._replace(target=rounded))
    case = cases.real(name.removesuffix(MAPPED).removesuffix(EXPERTS))
    if not name.endswith(EXPERTS):
        return case
    config = dataclasses.replace(
        testing.tiny_config("qwen3_moe", case.target.vocab_size, width=16),
        experts=Experts(experts=4, chosen=2, intermediate_size=8, layers=(1,), shared_size=12),
    )
    params = lm.init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    return case._replace(target=lm.from_config(config), params=case.params._replace(target=params))


def inputs(vocab: int, mapped: bool = False):
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, vocab, size).tolist() for size in (1, 3, 9, 4, 2, 9, 6, 5)]
    tokens, lengths = decode.pack_prompts(prompts)
    limit = lengths + jnp.asarray([NEW, 1, NEW, 3, NEW, 7, NEW, 0])
    maps = {
        "repetition_penalty": np.linspace(1, 2, ROWS),
        "presence_penalty": np.linspace(-0.5, 1, ROWS),
        "frequency_penalty": 0.3,
        "logit_bias": [None, *[{0: 0.5}] * (ROWS - 1)],
        "grammar": [None, *[automaton(vocab, seed) for seed in range(ROWS - 1)]],
        "min_new_tokens": np.arange(ROWS),
        "end_ids": EOS,
        "vocab_size": vocab,
    }
    temperature = jnp.asarray([0.0, 1.0, 0.7, 0.0] * 2)
    how = sampling.make_sampling(ROWS, temperature, **(maps if mapped else {}))
    keys = rng.row_keys(3, list(range(ROWS)))
    options = {"max_len": 9 + NEW, "limit": limit, "sampling": how, "logprobs": mapped}
    return (tokens, lengths, keys), options


def automaton(vocab: int, seed: int) -> grammar.Automaton:
    """A random one, in which the text may end at any place and may always go on."""
    draw, ends = np.random.default_rng(seed), np.isin(np.arange(vocab), EOS)
    moves = draw.integers(0, 3 + seed, (3 + seed, vocab))
    allowed = (draw.random(moves.shape) < 0.7) & ~ends
    allowed[:, np.flatnonzero(~ends)[0]] = True
    return grammar.of_table(
        np.where(allowed, moves, -1), 0, range(len(moves)), np.flatnonzero(ends)
    )


def check(name: str, mesh: jax.sharding.Mesh) -> None:
    """Raises AssertionError unless a case gives the same on the mesh."""
    mapped = name.endswith(MAPPED)
    case = case_of(name)
    rule = accept.load(accept.default_rule(case.drafter))
    model, drafter = case.target, case.drafter
    arrays, options = inputs(model.vocab_size, mapped)
    texts, counts, logprobs = [], [], []
    placed = sharding.place(mesh, model, case.params)
    for part in (None, mesh):
        params, use = (case.params, decode) if part is None else (placed, sharding)
        first = () if part is None else (part,)
        state = use.prefill(*first, model, drafter, params, *arrays, **options)
        for _ in range(2):  # a loop that is continued has the same noise
            state, records = use.generate(
                *first, model, drafter, rule, params, state, max_steps=STEPS, eos_id=EOS
            )
        decode.check(state)
        texts.append(decode.outputs(state, np.asarray(arrays[1]).tolist()))
        counts.append(jax.device_get((records.emitted, records.accepted, state.round)))
        logprobs.append(np.asarray(state.logprobs) if mapped else 0)
    assert texts[0] == texts[1], (name, texts)
    jax.tree.map(np.testing.assert_array_equal, counts[0], counts[1])
    np.testing.assert_allclose(*logprobs, rtol=1e-5)
    assert len({len(text) for text in texts[0]}) > 2  # rows end at different times


def check_program(name: str, mesh: jax.sharding.Mesh) -> None:
    """The loop over parts of the rows has no exchange of data, and a second call no new program."""
    case = cases.real(name)
    rule = accept.load(accept.default_rule(case.drafter))
    model, drafter = case.target, case.drafter
    arrays, options = inputs(model.vocab_size)
    params = sharding.place(mesh, model, case.params)
    for _ in range(2):
        state = sharding.prefill(mesh, model, drafter, params, *arrays, **options)
        specs = decoding.states.specs_of(mesh, state)
        loop = Bound(decode.generate, model, drafter, rule, max_steps=6, verify_widths=None)
        program = decoding._program(mesh, loop, specs)
        state, _ = sharding.generate(
            mesh, model, drafter, rule, params, state, max_steps=6, eos_id=EOS
        )
    assert program._cache_size() == 1
    state = sharding.prefill(mesh, model, drafter, params, *arrays, **options)
    lowered = program.lower(params, state, decode.outcome.stop_ids(EOS))
    text = lowered.compile().as_text()
    assert "while" in text and not re.findall(rf" (?:{EXCHANGE})[.\w-]*\(", text)


def check_options(name: str, mesh: jax.sharding.Mesh) -> None:
    """The widths of ``verify_widths`` are used; a state is used up; parameters must be placed."""
    case = cases.real(name)
    rule = accept.load(accept.default_rule(case.drafter))
    model, drafter = case.target, case.drafter
    arrays, options = inputs(model.vocab_size)
    params = sharding.place(mesh, model, case.params)
    for widths in ((), (1, drafter.nodes + 1)):
        state = sharding.prefill(mesh, model, drafter, params, *arrays, **options)
        after, records = sharding.generate(
            *(mesh, model, drafter, rule, params, state),
            max_steps=STEPS,
            eos_id=EOS,
            verify_widths=widths,
        )
        seen = set(np.asarray(records.verified).ravel().tolist()) - {0}
        assert seen <= {1, drafter.nodes + 1} and (widths or seen == {drafter.nodes + 1}), seen
        assert state.cache.k[0].is_deleted() and not after.cache.k[0].is_deleted()
    for call, message in (
        (lambda: sharding.autoregressive(mesh, model, params, state, max_steps=1), "reused its"),
        (
            lambda: sharding.prefill(
                sharding.make_mesh("data:1"), model, drafter, params, *arrays, **options
            ),
            "another mesh",
        ),
    ):
        try:
            call()
        except UserError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def check_plain(name: str, mesh: jax.sharding.Mesh) -> None:
    """Plain decoding is the same too."""
    case = cases.real(name)
    arrays, options = inputs(case.target.vocab_size)
    state = decode.prefill(case.target, case.drafter, case.params, *arrays, **options)
    state = decode.autoregressive(case.target, case.params, state, max_steps=NEW, eos_id=EOS)
    params = sharding.place(mesh, case.target, case.params)
    other = sharding.prefill(mesh, case.target, case.drafter, params, *arrays, **options)
    other = sharding.autoregressive(mesh, case.target, params, other, max_steps=NEW, eos_id=EOS)
    np.testing.assert_array_equal(state.tokens, other.tokens)
    assert int(state.round) == int(other.round)


def check_shards(mesh: jax.sharding.Mesh) -> None:
    """Matrices, caches and rows are really divided."""
    case = cases.real("chain")
    arrays, options = inputs(case.target.vocab_size)
    params = sharding.place(mesh, case.target, case.params)
    state = sharding.prefill(mesh, case.target, case.drafter, params, *arrays, **options)
    data, tensor = mesh.shape["data"], mesh.shape["tensor"]
    caches = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KVCache))
    caches = [x for x in caches if isinstance(x, KVCache)]
    assert len(caches) == 2  # of the target and the draft model
    for cache in caches:
        shape = cache.k[0].shape
        divided = (shape[0] // data, shape[1] // tensor, *shape[2:])
        assert cache.k[0].addressable_shards[0].data.shape == divided
    for own in params:  # of the target and of the draft model
        kernel = next(iter(own["layers"].values()))["mlp"]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.shape == (16, 32 // tensor)


def check_settings(mesh: jax.sharding.Mesh) -> None:
    """Every part is computed with the settings of the thread that asks for it."""
    seen = []

    def program(part):
        return lambda: (seen.append((part.size, jax.config.jax_default_matmul_precision)), ())[1]

    with jax.default_matmul_precision("highest"):
        groups.run(mesh, program, (), ())
    parts = 1 if mesh.shape["data"] == mesh.size else mesh.shape["data"]
    assert seen == [(mesh.size // parts, "highest")] * parts


def main() -> None:
    # Devices in another order than their numbers.
    mesh = sharding.make_mesh(sys.argv[1], jax.devices()[::-1])
    names = cases.NAMES if sys.argv[2:] == ["all"] else sys.argv[2:]
    for name in names:
        check(name, mesh)
        print(name, flush=True)
        jax.clear_caches()
    first = names[0].partition(",")[0]
    turned = jax.sharding.Mesh(mesh.devices[:, 0].T, ("tensor", "data"))
    assert mesh_lib.with_all_axes(turned) == mesh
    check_plain(first, mesh)
    check_options(first, mesh)
    if mesh.shape["data"] == mesh.size:
        check_program(first, mesh)
    check_shards(mesh)
    check_settings(mesh)


if __name__ == "__main__":
    main()
