"""Golden acceptance: tokens per round for draft lengths 1 to 8, greedy and at temperature 1.

    python -m specjax.run --config=configs/golden.py --config.target=DIR \\
        --config.prompts=speed_bench:qualitative/test.parquet --config.drafter.name=eagle3 \\
        --config.drafter.model=HEAD_DIR
    python -m specjax.run --config=configs/golden.py:replay --config.traces=FILE.jsonl
    python -m specjax.run --config=configs/controlled.py --config.target=DIR \\
        --config.prompts=prompts.txt --config.drafter.length=1.84,2.45,2.87,3.22,3.44

The first command decodes 4,096 new tokens of each prompt and measures speed too; the second one
replays a recording and needs no target. Both write "curves" into results.json: tau of each draft
length with its 95 % interval over prompts, also for every category, and print each curve as the
key ``length`` of the drafter ``controlled``. With it the third command measures the speed at that
acceptance, for any model. The first one takes as long as sixteen benches of one pass.
"""

from ml_collections import ConfigDict

from configs import bench
from configs import replay as replay_config


def get_config(mode: str = "bench") -> ConfigDict:
    """The configuration; ``mode`` is bench or replay."""
    config = replay_config.get_config() if mode == "replay" else bench.get_config()
    config.grid.gammas = tuple(range(1, 9))
    if mode != "replay":
        config.grid.temperatures = (0.0, 1.0)
        config.max_new_tokens = 4096
        config.repeats = 1
        config.trace_prompts = 0
    return config
