"""Training on a mesh of fake devices: the curves of one device, divided states, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from mesh_cases import python
from safetensors.numpy import load_file, save_file
from train_cases import metrics

from specjax.models import tensor_files
from specjax.train import placement

CURVES = """
    import jax, numpy as np
    import mesh_cases as m, train_cases as t
    from pathlib import Path
    from specjax.train import checkpoint, loop
    root = Path({root!r})
    kept, save, compile_programs = [], checkpoint.Checkpoints.save, loop.compile_programs

    def seen(self, step, state, *rest):
        kept.append(jax.tree.map(lambda x: (x.shape, x.addressable_shards[0].data.shape), state))
        save(self, step, state, *rest)

    def compiled(*args):
        programs.append(compile_programs(*args))
        return programs[-1]

    checkpoint.Checkpoints.save, loop.compile_programs = seen, compiled
    programs = []
    one = m.train(root / "one", "data:1", ema=0.9)
    kept, programs = [], []
    other = m.train(root / "other", {mesh!r}, ema=0.9)
    assert t.close(one, other, 1e-5)
    assert programs[0].advance._cache_size() == 1, "the step was compiled twice"
    adam = next(x for x in kept[0]["opt_state"][1] if hasattr(x, "mu"))
    for tree in (kept[0]["params"], kept[0]["ema"], adam.mu, adam.nu):
        layer = next(iter(tree["layers"].values()))
        for name in ("q", "o"):
            whole, part = layer["attention"][name]["kernel"]
            assert np.prod(whole) == {parts} * np.prod(part), (name, whole, part)
"""
# The number of parts of a matrix.
MESHES = {"data:8": 1, "fsdp:8": 8, "data:2,fsdp:2,tensor:2": 4}
slow = pytest.mark.slow


def _losses(records):
    return [record["loss"] for record in records]


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=slow if "," not in m else ()) for m in MESHES]
)
def test_curves_are_those_of_one_device_and_states_are_divided(tmp_path, mesh):
    script = CURVES.format(root=str(tmp_path), mesh=mesh, parts=MESHES[mesh])
    assert python(script).wait(200) == 0
    one, other = metrics(tmp_path / "one"), metrics(tmp_path / "other")
    np.testing.assert_allclose(_losses(other), _losses(one), rtol=2e-6)
    assert other[-1]["heldout_loss"] == pytest.approx(one[-1]["heldout_loss"], rel=2e-6)


def test_checkpoints_of_one_mesh_restore_on_another_and_export_in_parts(tmp_path):
    script = f"""
        import jax, numpy as np, weakref
        import mesh_cases as m, train_cases as t
        from pathlib import Path
        from specjax.models import hf, tensor_files
        root = Path({str(tmp_path)!r})
        first = m.train(root / "a", "data:1", 3)
        for mesh in ("fsdp:4", "data:2,tensor:2", "data:1"):
            # No step is left: what is returned was restored.
            assert t.equal(m.train(root / "a", mesh, 3), first), mesh
        divided = m.train(root / "a", "fsdp:4", 3)
        leaf = divided["embed"]["embedding"]
        assert len(leaf.sharding.device_set) == 4 and not leaf.is_fully_replicated

        gather, live, most = tensor_files.gather, [], []
        def watched(value):
            most.append(sum(x() is not None for x in live))
            result = gather(value)
            live.append(weakref.ref(result))
            return result
        tensor_files.gather = watched
        hf.save(root / "model", m.SHAPE, divided)
        assert len(most) == len(jax.tree.leaves(divided)) and max(most) == 0
        # No copy stays on the host.
        assert all(x._npy_value is None for x in jax.tree.leaves(divided))
        assert t.equal(hf.load(root / "model").params, jax.tree.map(np.asarray, first))
    """
    assert python(script).wait(200) == 0


def test_a_step_gathers_parameters_and_no_activations():
    script = """
        import functools, re
        import jax, jax.numpy as jnp, numpy as np
        import mesh_cases as m, train_cases as t
        from specjax.train import placement, update
        from specjax.train.settings import Settings
        from specjax.types import Batch
        where, optimiser = placement.place("data:2,fsdp:4"), t.make_optimiser()
        params = jax.eval_shape(functools.partial(m.lm.init_params, m.SHAPE), jax.random.key(0))
        begin = functools.partial(update.fresh, optimiser=optimiser, ema=0.0)
        state = jax.eval_shape(begin, params)
        made = update.compile_programs(
            m.LOSS, None, None, optimiser, Settings(), where, where.state(state)
        )
        tokens = jax.ShapeDtypeStruct((16, m.LENGTH + 1), jnp.int32, sharding=where.rows)
        step = made.advance.lower(where.like(state), {}, Batch(tokens), jax.random.key(0))
        moved = 0
        for result in re.findall("= (.*?) (?:all-gather|all-to-all)[(]", step.compile().as_text()):
            for dims in re.findall("f32.([0-9,]*)", result):
                moved += np.prod([int(size) for size in dims.split(",") if size])
        assert moved <= sum(leaf.size for leaf in jax.tree.leaves(params)), moved
    """
    assert python(script).wait(100) == 0


def test_bad_meshes(tmp_path):
    script = f"""
        import pytest
        import mesh_cases as m
        from pathlib import Path
        from specjax.errors import UserError
        from specjax.train.placement import place
        root = Path({str(tmp_path)!r})
        for mesh, rows, message in (
            ("data:8", 12, "12 rows cannot be divided among 8 devices; take a multiple of 8"),
            ("data:4,fsdp:4", 8, "needs 16 devices, and there are 8"),
            ("rows:4", 8, "must be axes with their sizes"),
        ):
            with pytest.raises(UserError, match=message):
                m.train(root / "x", mesh, rows=rows)
        message = "tensor:4, and the target has 2 key/value heads; take a divisor of 2"
        with pytest.raises(UserError, match=message):
            place("tensor:4").check_decoder("the target", m.SHAPE)
        assert not (root / "x").exists()
    """
    assert python(script).wait(100) == 0


@pytest.mark.fast
def test_files_have_the_bytes_of_the_library(tmp_path):
    random = np.random.default_rng(0)
    arrays = {
        "é": random.random((3, 4), np.float32),
        "half": random.random((5,)).astype(np.float16),
        "map": np.arange(7),
        "marks": np.array([True, False]),
        "columns": np.asfortranarray(random.random((3, 4), np.float32)),
        "empty": np.zeros((2, 0), np.float32),
    }
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, tmp_path / "a", metadata={"format": "pt"})
    tensor_files.write(tmp_path / "b", {k: tensor_files.tensor(v) for k, v in arrays.items()})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_file(tmp_path / "b").keys() == arrays.keys()


@pytest.mark.fast
def test_one_device_divides_nothing():
    one = placement.place("data:1")
    assert not one.divides and not one.spread and one.parts == 1
