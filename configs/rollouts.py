"""Rollouts of several epochs: the answers of the last epoch are the drafts of the next one.

    python -m specjax.run --config=configs/rollouts.py --workdir=runs/epoch0 \\
        --config.target=DIR --config.prompts=prompts.jsonl
    python -m specjax.run --config=configs/rollouts.py:runs/epoch0 --workdir=runs/epoch1 \\
        --config.target=NEW_DIR --config.prompts=prompts.jsonl

Reinforcement learning samples answers to the same prompts again and again, from a target that
changes a little each time. The argument is the workdir of the epoch before: the drafter finds the
end of a prompt in its rollouts and proposes what was answered then. Lossless: every epoch is a
sample of its own target.

The seed of an epoch is that of the epoch before plus one, so answers of different epochs are
independent. With one seed the noise that chose an answer would also judge it as a draft, and the
law would change, except with the rule match: --config.accept=match --config.seed=0 in all epochs
uses the same noise for the same place of an answer. Where the target has hardly changed, it repeats
its answer and accepts nearly all drafts. Each epoch is still a sample of its target, but epochs
depend on each other.

So small a model as stories260K answers differently every time at temperature 1; a target with less
entropy repeats more. What an epoch gains is in its results: tau beside a run without the argument.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from specjax.run.settings import decoding, drafter

ROLLOUTS = "rollouts.jsonl"


def get_config(before: str = "") -> ConfigDict:
    """The configuration; ``before`` is the workdir of the epoch before, "" in the first one."""
    config = decoding("generate", drafter=drafter("suffix"), batch_size=8)
    if before:
        config.drafter.datastore = f"{before.rstrip('/')}/{ROLLOUTS}"
        config.seed = _seed_of(before) + 1
    config.sampling.temperature = 1.0
    config.record = f"{{workdir}}/{ROLLOUTS}"
    return config


def _seed_of(workdir: str) -> int:
    """The seed of an earlier run; 0 if there is none."""
    path = Path(workdir).expanduser() / "config.json"
    return json.loads(path.read_text(encoding="utf-8"))["seed"] if path.is_file() else 0
