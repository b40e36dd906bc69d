"""Speed-up against draft length, temperature, batch size and context length, with theory's curve.

    python -m specjax.run --config=configs/sweep.py
    python -m specjax.run --config=configs/sweep.py:assets   # with the shipped models
    python -m specjax.run --config=configs/sweep.py:assets \\
        "--config.grid.models=('draft1', 'draft2')"   # draft sizes

Held-out Python code. Every point of the grid is measured in turns with plain decoding, together
with the costs of the parts of a round, so that runs/sweep/report.html shows the measured points
and the curve that these costs predict. Sixty-four points, each measured three times: some ten
minutes on two CPU cores (an estimate), with trained models. The same command resumes
a killed run.
"""

from ml_collections import ConfigDict

from configs import quickstart
from specjax.run.settings import drafter


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target and a draft; empty: train them."""
    config = quickstart.pair(models)
    config.grid.methods = ConfigDict({"draft_model": config.grid.methods.draft_model})
    config.grid.methods.prompt_lookup = drafter("prompt_lookup")
    config.grid.gammas = (1, 2, 4, 8)
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1, 4)
    config.grid.contexts = (32, 128)
    config.num_prompts = 4
    config.max_new_tokens = 48
    config.show_trace = False
    return config
