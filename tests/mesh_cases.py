"""A small decoder, trained on a mesh of fake devices: run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from train_cases import make_optimiser, small_config

from configs import features, self_generate
from specjax.config import Config
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import loop, objectives
from specjax.train.settings import Schedule, Settings
from specjax.types import Batch

ROOT = Path(__file__).parents[1]
ROWS, LENGTH, VOCAB = 8, 12, 32
SHAPE = TransformerConfig("llama", VOCAB, 16, 32, 1, 4, 2, 4, 64)
LOSS = objectives.pretrain_loss(lm.from_config(SHAPE))


class Rows:
    """Batches with ragged labels, a pure function of the step."""

    def __init__(self, rows: int = ROWS):
        self._rows = rows

    def batch(self, step: int) -> Batch:
        random = np.random.default_rng(step)
        shape = (self._rows, LENGTH + 1)
        tokens: Any = random.integers(0, VOCAB, shape, dtype=np.int32) % 7
        labelled: Any = random.random(shape) < 0.7
        return Batch(tokens, labelled)


class Parts(Rows):
    """The same batches for processes that each read the rows of their own devices."""

    batch_size = ROWS

    def batch(self, step: int) -> Batch:
        assert step in (0, 77, 78), "a whole batch of a step was read"  # 0 shows its size
        return super().batch(step)

    def part(self, step: int, rows: list[int]) -> Batch:
        assert len(rows) == ROWS // jax.process_count()
        return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], super().batch(step))


def train(
    workdir,
    mesh: str,
    steps: int = 6,
    *,
    rows: int = ROWS,
    every: int = 3,
    source: Any = None,
    **settings,
):
    """The parameters after ``steps`` steps on a mesh."""
    held_out = [Rows(rows).batch(77), Rows(rows).batch(78)]
    params = lm.init_params(SHAPE, jax.random.key(0))
    task = loop.Task(LOSS, params, {}, source or Rows(rows), held_out)
    schedule = Schedule(steps=steps, log_every=1, eval_every=3, checkpoint_every=every)
    settings = Settings(mesh=mesh, **settings)
    return loop.train(task, make_optimiser(), schedule, workdir, settings, {"a": 1})


def runs(root: Path, text: str, mesh: str) -> Iterator[tuple[Path, Config]]:
    """(workdir, configuration) of runs that build on each other, small."""
    common = {"data__files": text, "mesh": mesh, "train__batch_size": 8, "train__steps": 12}
    shape = {"model__vocab_size": 320, "model__num_heads": 4, "model__num_kv_heads": 2}
    yield root / "target", small_config("pretrain", **common, **shape)
    target = str(root / "target")
    config = features.get_config()
    config.update({"target": target, "mesh": mesh})
    config.data.files = text
    config.features.rows = 24
    config.train.update({"length": 32, "eval_batches": 1})
    config.examine.update({"prompts": 2, "prompt_tokens": 6})
    yield root / "features", config
    common["target"] = target
    on_policy = {"data__on_policy": 0.5, "data__on_policy_prompt": 8}
    yield root / "draft", small_config("distill", **common, **on_policy)
    stored = common | {"data__files": "", "data__features": str(root / "features")}
    yield root / "medusa", small_config("medusa", examine__prompts=2, **stored)
    if "fsdp" in mesh:  # not for decoding
        return
    config = self_generate.get_config()
    config.update({"target": target, "mesh": mesh})
    config.data.files = text
    config.generation.update({"num_prompts": 24, "prompt_tokens": 8, "new_tokens": 8})
    config.generation.update({"batch_size": 8, "shard_prompts": 16, "temperatures": (0.0,)})
    yield root / "generated", config


def python(script: str, devices: int = 8, **options: Any) -> subprocess.Popen:
    """A process with so many fake devices that runs the script."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    # TensorBoard's writer would import PyTorch, which takes seconds.
    script = 'import sys; sys.modules["torch"] = None\n' + textwrap.dedent(script)
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, env=os.environ | environment, **options)
