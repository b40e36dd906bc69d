"""Measures drafters on a small target for Python code, with trained models that are shipped.

    python -m specjax.run --config=configs/quickstart.py
    python -m specjax.run --config=configs/quickstart.py:train   # trains its own models first

The target and its draft model are in assets. They decode held-out Python code, plainly, with the
draft model, with lookups, and with a lookup where it finds something and the draft model elsewhere
(escalate); greedy and at temperature 1, one row at a time (``--config.grid.batch_sizes=(1,8)``: in
batches of 8 too). The bench checks that the outputs are lossless, prints a table and one
continuation coloured by the origin of each token, and keeps the fastest of the first two for
--config.drafter.name=auto. Everything is written to runs/quickstart.

With "train", or where assets is not there: builds the corpus (the interpreter's own standard
library), trains the target (configs/pretrain.py) and a draft model that imitates it
(configs/distill.py). A second run reuses the trained models.
"""

import os
import sys
from pathlib import Path

from ml_collections import ConfigDict

from configs import bench, distill, pretrain
from specjax.errors import UserError
from specjax.run.settings import drafter


def assets() -> str:
    """The directory of the shipped models, from the working directory."""
    return os.path.relpath(Path(__file__).resolve().parent.parent / "assets")


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is "train", or empty: the shipped ones, if they are there."""
    if models not in ("", "train"):
        raise UserError(f"configs/quickstart.py:{models} is unknown; it must be train, or left out")
    shipped = assets()
    if not models and not Path(shipped).is_dir():
        print("the shipped models are not here: models are trained first", file=sys.stderr)
    if models or not Path(shipped).is_dir():
        return pair()
    config = _bench(f"{shipped}/draft")
    config.target = f"{shipped}/target"
    config.prompts = f"{shipped}/prompts.jsonl"
    config.max_new_tokens = 64
    config.grid.batch_sizes = (1,)
    methods = config.grid.methods
    methods.draft_model.gamma = 3
    methods.prompt_lookup.gamma = 8
    methods.escalate = drafter("escalate")
    # Asked in the order of the labels.
    methods.escalate.drafters.first = drafter("prompt_lookup", gamma=5)
    own = {"model": f"{shipped}/draft", "gamma": 3}
    methods.escalate.drafters.second = drafter("draft_model", **own)
    config.keep = True
    return config


def pair(models: str = "") -> ConfigDict:
    """A bench of a target and a draft model in a folder; empty: trained by two stages."""
    config = _bench(f"{models or '{workdir}'}/draft")
    config.target = f"{models or '{workdir}'}/target"
    config.prompts = "stdlib"
    config.data_dir = text_of(models) if models else ""
    if not models:
        config.prepare = ("target", "draft")
        config.stages.target = pretrain.get_config()
        config.stages.draft = distill.get_config()
        config.stages.draft.target = config.target
        config.stages.draft.data.dir = text_of(models)
    return config


def text_of(models: str) -> str:
    """Where the corpus for a folder of models is; it is built in the workdir if none is there."""
    if not models:
        return "{workdir}/target/data"
    own = (f"{models}/target/data", f"{models}/data")
    return next((each for each in own if Path(each).is_dir()), "{workdir}/data")


def _bench(draft: str) -> ConfigDict:
    config = bench.get_config()
    config.prepare, config.stages = (), ConfigDict()
    config.num_prompts = 8
    config.max_new_tokens = 24
    config.grid.methods.draft_model = drafter("draft_model", model=draft, gamma=4)
    config.grid.methods.prompt_lookup = drafter("prompt_lookup", gamma=4)
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1, 8)
    config.show_trace = True
    return config
