"""Stores the target's features of a text once, to train several drafters on them.

    python -m specjax.run --config=configs/features.py --workdir=runs/features \\
        --config.target=runs/target --config.data.generated=runs/generated
    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa \\
        --config.target=runs/target --config.data.features=runs/features

A row has ``config.train.length`` tokens. A token takes (1 + taps) * width * 4, 2 or 1 bytes as
float32, bfloat16 or float8 (float8: 4 more for each of its vectors), and 4 to 9 for its id, label
and document. The sizes are printed before the target runs, and are in summary.json. The same
command resumes a killed run.
"""

from ml_collections import ConfigDict

from configs import pretrain


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "features"
    # A model directory, a name of the Hub, a .gguf file, or a trained run's workdir.
    config.target = ""
    config.seed = 0  # of the packing and the prompts
    # Devices: "" (rows divided among all), or axes with sizes, such as "data:2,fsdp:4,tensor:2":
    # "data" and "fsdp" divide the rows, "fsdp" and "tensor" the target.
    config.mesh = ""
    config.data = pretrain.data()
    config.features = ConfigDict()
    # layers whose outputs are stored beside the last feature, numbered from 0, such as (1, 5, 8)
    config.features.taps = ()
    config.features.dtype = "bfloat16"  # or float32, float8 (one scale per vector)
    config.features.rows = 0  # at most so many rows of the train split; 0: all
    config.features.shard_megabytes = 64  # size of a file; a killed run loses at most one
    config.train = ConfigDict()
    config.train.batch_size = 8  # rows of one pass of the target
    config.train.length = 128  # tokens of a row; training needs the same
    config.train.eval_batches = 12  # held-out rows: so many times batch_size
    config.train.precision = "float32"  # or "bfloat16": of the target's pass
    config.examine = ConfigDict()
    config.examine.prompts = 16  # held-out prompts, for training to measure tokens per round on
    config.examine.prompt_tokens = 32
    return config
