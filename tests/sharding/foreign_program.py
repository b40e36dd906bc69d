"""Models of other libraries on several devices; run by test_decoding.py with four fake devices."""

from __future__ import annotations

import foreign_cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import specjax as sj
from specjax import accept, decode, drafters, rng, sampling, sharding, testing
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import adapter
from specjax.types import ModelParams

NEW = 14
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 5, 6, 7, 5], [8, 9]]


def check_from_call(mesh: jax.sharding.Mesh) -> None:
    """The rows are divided: texts, rounds and samples are those of one device."""
    lm, params = foreign_cases.masked(), foreign_cases.foreign_params()
    drafter = drafters.make("token_recycling", lm)
    pair = ModelParams(params, drafter.init_params(jax.random.key(0)))
    tokens, lengths = decode.pack_prompts(PROMPTS)
    how = sampling.make_sampling(len(PROMPTS), jnp.asarray([0.0, 1.0] * 2))
    keys, limit = rng.row_keys(0, len(PROMPTS)), lengths + NEW
    options = {"max_len": tokens.shape[1] + NEW, "limit": limit, "sampling": how}
    results = []
    for part in ((), (mesh,)):
        use = sharding if part else decode
        own = sharding.place(mesh, lm, pair) if part else pair
        state = use.prefill(*part, lm, drafter, own, tokens, lengths, keys, **options)
        rule = accept.load("deterministic")
        state, records = use.generate(*part, lm, drafter, rule, own, state, max_steps=NEW)
        texts = decode.outputs(state, list(map(len, PROMPTS)))
        results.append((texts, np.asarray(records.accepted).sum(0).tolist()))
    assert results[0] == results[1] and sum(results[0][1]) > 0
    assert {len(text) for text in results[0][0]} == {NEW}


def rename(treedef, theirs):
    """The parameters of ``testing.tiny`` from numbered ones in which kernels have one axis more."""
    ours = [x.reshape(x.shape[0], -1) if x.ndim == 3 else x for x in theirs["weights"]]
    return jax.tree.unflatten(treedef, ours)


def check_params() -> None:
    """``params=`` that another library has divided, with axes of other names."""
    lm, params = testing.tiny(vocab_size=32, width=16)
    split = lambda x: x.reshape(*x.shape[:-1], 2, -1) if x.ndim == 2 else x  # noqa: E731
    leaves, treedef = jax.tree.flatten(params)
    theirs = {"weights": list(map(split, leaves))}
    renamed = Bound(rename, treedef)
    own = sj.Model.from_lm(adapter.mapped(lm, renamed), theirs)
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def divided(x):
        return NamedSharding(mesh, PartitionSpec(*((None, "columns") if x.ndim == 3 else ())))

    placed = jax.device_put(theirs, jax.tree.map(divided, theirs))
    text = lambda model, **keys: [  # noqa: E731
        each.tokens
        for each in sj.generate_text(
            model, PROMPTS, drafter="prompt_lookup", max_new_tokens=NEW, **keys
        ).completions
    ]
    expected = text(own)
    assert text(own, params=placed) == expected
    other = jax.tree.map(lambda x: -x, placed)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **more: compiled.append(event) if "backend_compile" in event else None
    )
    found = text(own, params=other)
    assert not compiled
    assert found == text(own, params=jax.device_get(other)) != expected
    kernel = next(x for x in placed["weights"] if x.ndim == 3)
    assert len({shard.device for shard in kernel.addressable_shards}) == 4
    assert kernel.addressable_shards[0].data.shape[1] == 1
    # Foreign names are refused. Mapped first, the parameters are placed.
    tensor = sharding.make_mesh("tensor:2")
    try:
        sharding.place(tensor, own.lm, ModelParams(theirs))
    except UserError as error:
        assert "no parameter of lm has a name that tensor:2 divides (the first is" in str(error)
        assert "\n" not in str(error)
    else:
        raise AssertionError("foreign names were placed")
    mapped = sharding.place(tensor, lm, ModelParams(renamed(theirs))).target
    assert mapped["layers"][0]["mlp"]["up"]["kernel"].sharding.spec[-1] == "tensor"
    assert text(sj.Model.from_lm(lm, mapped)) == expected


if __name__ == "__main__":
    check_from_call(sharding.make_mesh("data:4"))
    check_params()
