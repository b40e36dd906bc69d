"""experiments/programs: its reader on small texts, and the study where libtpu is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.programs import facts, hlo
from experiments.programs import run as study
from specjax.errors import UserError
from specjax.models import layers

ROOT = Path(__file__).parents[1]

TEXT = """HloModule jit_loop, is_scheduled=true

FileNames
1 "a file.py"

%slice_of (param_0.1: bf16[1024,256], param_1.1: s32[]) -> bf16[1,256] {
  %param_0.1 = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = s32[] parameter(1)
  ROOT %row = bf16[1,256]{1,0:S(1)} dynamic-slice(%param_0.1, %param_1.1), dynamic_slice_sizes={1,256}
}

%update (param_0.2: bf16[1,8,64,128], param_1.2: bf16[1,8,1,128], param_2.2: s32[]) -> bf16[1,8,64,128] {
  %param_0.2 = bf16[1,8,64,128]{3,2,1,0} parameter(0)
  %param_1.2 = bf16[1,8,1,128]{3,2,1,0:S(1)} parameter(1)
  %param_2.2 = s32[] parameter(2)
  ROOT %put = bf16[1,8,64,128]{3,2,1,0} dynamic-update-slice(%param_0.2, %param_1.2, %param_2.2)
}

%short (p: s32[]) -> f32[] {
  %p = s32[]{:S(2)} parameter(0)
  ROOT %little = f32[]{:S(1)} convert(%p), backend_config={"window_config":{"estimated_cycles":"3"}}
}

%long (p.1: s32[]) -> f32[] {
  %p.1 = s32[]{:S(2)} parameter(0)
  ROOT %much = f32[]{:S(1)} convert(%p.1), backend_config={"window_config":{"estimated_cycles":"70"}}
}

%body (carry: (bf16[1,8,64,128], bf16[1024,256], s32[])) -> (bf16[1,8,64,128], bf16[1024,256], s32[]) {
  %carry = (bf16[1,8,64,128]{3,2,1,0}, bf16[1024,256]{1,0}, s32[]) parameter(0)
  %cache = bf16[1,8,64,128]{3,2,1,0} get-tuple-element(%carry), index=0
  %weight = bf16[1024,256]{1,0} get-tuple-element(%carry), index=1
  %step = s32[]{:S(2)} get-tuple-element(%carry), index=2
  %fetch = (bf16[1024,256]{1,0:S(1)}, bf16[1024,256]{1,0}, u32[]{:S(2)}) copy-start(%weight)
  %fetched = bf16[1024,256]{1,0:S(1)} copy-done(%fetch)
  %gathered = bf16[1,256]{1,0:S(1)} fusion(%weight, %step), kind=kLoop, calls=%slice_of, backend_config={"window_config":{"estimated_cycles":"100"}}
  %wide = f32[1024,256]{1,0} convert(%fetched)
  %moved = bf16[1,8,64,128]{3,2,1,0} copy(%cache)
  %back = bf16[1,8,64,128]{3,2,1,0:S(1)} copy(%moved)
  %home = bf16[1,8,64,128]{3,2,1,0} copy(%back)
  %new = bf16[1,8,1,128]{3,2,1,0:S(1)} constant({...})
  %put.1 = bf16[1,8,64,128]{3,2,1,0} fusion(%home, %new, %step), kind=kLoop, calls=%update
  %sum = f32[8]{0:S(1)} all-reduce(%gathered), replica_groups={{0,1}}, to_apply=%adds
  %pick = f32[]{:S(1)} conditional(%step, %step, %step), branch_computations={%short, %long}
  ROOT %out = (bf16[1,8,64,128]{3,2,1,0}, /*index=1*/bf16[1024,256]{1,0}, s32[]) tuple(%put.1, %weight, %step)
}

%until (carry.1: (bf16[1,8,64,128], bf16[1024,256], s32[])) -> pred[] {
  %carry.1 = (bf16[1,8,64,128]{3,2,1,0}, bf16[1024,256]{1,0}, s32[]) parameter(0)
  ROOT %go = pred[]{:S(2)} constant(true)
}

ENTRY %main (cache.1: bf16[1,8,64,128], weight.1: bf16[1024,256]) -> bf16[1,8,64,128] {
  %cache.1 = bf16[1,8,64,128]{3,2,1,0} parameter(0), metadata={op_name="cache"}
  %weight.1 = bf16[1024,256]{1,0} parameter(1)
  %zero = s32[]{:S(2)} constant(0)
  %first = bf16[1,8,64,128]{3,2,1,0} copy(%cache.1)
  %gather = f32[16]{0:S(1)} all-gather-start(%zero), dimensions={0}
  %carry.2 = (bf16[1,8,64,128]{3,2,1,0}, bf16[1024,256]{1,0}, s32[]) tuple(%first, %weight.1, %zero)
  %loop = (bf16[1,8,64,128]{3,2,1,0}, bf16[1024,256]{1,0}, s32[]) while(%carry.2), condition=%until, body=%body
  %host = s32[]{:S(5)} copy(%zero)
  ROOT %result = bf16[1,8,64,128]{3,2,1,0} get-tuple-element(%loop), index=0
}
"""  # noqa: E501
CACHE, WEIGHT = 8 * 64 * 128 * 2, 1024 * 256 * 2
SHAPES = [("bf16", (1, 8, 64, 128)), ("bf16", (1024, 256))]


@pytest.fixture(scope="module")
def program():
    return hlo.read(TEXT)


@pytest.mark.fast
def test_instructions(program):
    assert program.entry == "main"
    body = program.computations["body"]
    assert body.root.operands == ("put.1", "weight", "step") and len(body.root.arrays) == 3
    fetch = body.instructions["fetch"]
    assert [each.memory for each in fetch.arrays] == [1, 0, 2]
    assert fetch.arrays[0].dims == (1024, 256) and fetch.arrays[0].bytes == WEIGHT
    assert body.instructions["gathered"].number("estimated_cycles") == 100
    assert body.instructions["pick"].called("branch") == ["short", "long"]
    entry = program.computations["main"]
    assert entry.instructions["loop"].called("body", "condition") == ["until", "body"]
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.read("HloModule nothing")


@pytest.mark.fast
def test_bytes_and_cycles_of_a_round(program):
    assert facts.main_loop(program) == "body"
    part = facts.sums(program, "body")
    # Read: the fetched weight, one row of it, and the cache twice (the copy and the fetch of it).
    assert part.read == WEIGHT + 256 * 2 + 2 * CACHE
    # Written: the float32 weight, the copy, the way back, and one slot.
    assert part.written == 2 * WEIGHT + 2 * CACHE + 8 * 128 * 2
    # The costlier branch counts.
    assert part.cycles == 170
    assert facts.sums(program).read == part.read + CACHE
    often = TEXT.replace(
        "body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}\n'
    )
    assert facts.sums(hlo.read(often)).cycles == 5 * 170
    # Of a round: all that is executed but constants, tuples and ends of transfers.
    one = facts.launches(program, "body")
    assert one.conditionals == 1 and one.loops == 0
    # Around the loop: two copies and an exchange.
    whole, five = facts.launches(program), facts.launches(hlo.read(often))
    assert whole == (one.kernels + 3, 1, 1)
    assert five == (5 * one.kernels + 3, 5, 5)


@pytest.mark.fast
def test_copies_collectives_and_transfers(program):
    assert facts.copies(program, SHAPES) == {"within_main": 1, "to_chip": 2, "from_chip": 1}
    assert facts.copies(program, SHAPES[1:]) == {"within_main": 0, "to_chip": 1, "from_chip": 0}
    counts = facts.collectives(program)
    assert (counts["inside_loops"], counts["outside_loops"]) == (1, 1)
    assert counts["kinds"] == {"all-reduce": 1, "all-gather": 1}
    assert facts.wider_copies(program, SHAPES) == 1
    assert facts.transfers(program) == 1


def test_the_text_of_a_compiled_program():
    def loop(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ w, x)

    x, w = jnp.ones((4, 64)), jnp.ones((64, 64))
    read = hlo.read(jax.jit(loop).lower(x, w).compile().as_text() or "")
    assert facts.main_loop(read) is not None
    assert facts.collectives(read)["kinds"] == {} and facts.transfers(read) == 0


@pytest.mark.fast
@pytest.mark.parametrize(
    "shape", [(1, 1, 8), (3, 1, 8), (1, 5, 8), (2, 16, 8), (4, 8), (2, 2, 1, 8)]
)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_short_blocks_with_further_rows(shape, platform):
    """At least so many rows are computed; the result is that of the rows alone."""
    rows = []

    def product(x):
        rows.append(x.size // 8)
        return x @ weight

    weight = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, 4)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 9, shape), jnp.float32)
    np.testing.assert_array_equal(layers._with_rows(product, platform, x), x @ weight)
    assert rows[0] >= layers.ROWS[platform]
    np.testing.assert_array_equal(layers.product(product, x), x @ weight)


@pytest.mark.parametrize("ahead", [(), ("tpu",), ("cuda",), ("tpu", "cuda")])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_short_blocks_change_programs_for_named_platforms_only(monkeypatch, ahead, tokens):
    """One row gets a second one on NVIDIA GPUs, every short block 8 rows on TPUs."""
    monkeypatch.setattr(layers, "_ahead", {*ahead})

    def text(platform):
        function = jax.jit(lambda x, w: layers.product(lambda x: x @ w, x))
        traced = function.trace(jnp.ones((1, tokens, 8)), jnp.ones((8, 4)))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    changed = {"cpu": False, "tpu": "tpu" in ahead, "cuda": "cuda" in ahead and tokens == 1}
    for platform, expected in changed.items():
        assert ("pad" in text(platform) and "barrier" in text(platform)) == expected


@pytest.mark.fast
def test_study_without_libtpu(monkeypatch):
    def missing(name):
        raise study.PackageNotFoundError(name)

    monkeypatch.setattr(study, "version", missing)
    with pytest.raises(UserError, match=r'libtpu is not installed; pip install "jax\[tpu\]=='):
        study.devices.__wrapped__("v5e:2x2")


@pytest.mark.fast
def test_study_without_the_file_of_a_gpu(tmp_path):
    with pytest.raises(
        UserError, match=r"there is no file .*none\.txtpb; give a GpuTargetConfigProto"
    ):
        study.gpu(tmp_path / "none.txtpb")


ONE_CHIP = ("pass over 1", "pass over 6", "plain loop")  # also with layers as a loop


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """The rows of the study at small sizes, by program and mesh."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    out = tmp_path_factory.mktemp("tpu") / "results.json"
    programs = ["pass over", "plain loop, 1 chip", "plain loop, data:4", "chain loop, data:4"]
    programs += ["nested loop"]
    command = [sys.executable, "experiments/programs/run.py", "--small", "--chips", "v5e"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run(
        [*command, f"--out={out}", "--only", *programs, "training step, 1 chip"],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    return {(row["program"], row["mesh"]): row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.slow
def test_one_token_is_not_slower_than_six_on_a_tpu(rows):
    cycles = {n: rows[f"pass over {n}", "1 chip"]["estimated_cycles"] for n in (1, 6, 8, 16)}
    assert 0 < cycles[1] <= cycles[6] and cycles[6] < 1.1 * cycles[16]


@pytest.mark.slow
def test_passes_and_loops_on_a_tpu_move_no_more_than_they_must(rows):
    decoding = {key: row for key, row in rows.items() if key[0] != "training step"}
    scanned = {f"{of}{name}" for of in ("8B ", "8B scanned ", "scanned ") for name in ONE_CHIP}
    passes = {f"pass over {n}" for n in (8, 16)}
    on_one = {"nested loop", *ONE_CHIP, *passes, *scanned}
    on_four = {("plain loop", "data:4"), ("chain loop", "data:4")}
    assert {*decoding} == {(name, "1 chip") for name in on_one} | on_four
    assert len(rows) == len(decoding) + 1
    for key, row in decoding.items():
        assert row["traffic"] <= 1.3, key
        assert row["copies_in_loops"]["within_main"] == 0, key
        assert row["float32_of_bfloat16"] == 0, key
        assert row["host_transfers"] == 0, key


@pytest.mark.slow
def test_loops_with_divided_rows_have_no_collective_on_a_tpu(rows):
    for program in ("plain loop", "chain loop"):
        assert rows[program, "data:4"]["collectives"]["kinds"] == {}
