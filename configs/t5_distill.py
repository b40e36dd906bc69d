"""A small T5 draft that imitates a T5 target (DistillSpec, 2310.08461).

    python -m specjax.run --config=configs/t5_distill.py --workdir=runs/t5_draft \\
        --config.target=runs/t5 --config.data.dir=runs/t5/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/t5 \\
        --config.prompts=stdlib --config.prompt_tokens=96 \\
        --config.drafter.name=draft_model --config.drafter.model=runs/t5_draft

The divergence is that along the outputs: of the pairs (the default), of those that the target wrote
for their sources (--config.data.pairs= --config.data.generated=DIR, of configs/self_generate.py
with --config.data.pairs=docstrings), or of those that the draft writes itself
(--config.data.on_policy=1). --config.pruned=0,2 starts from those layers of the target's decoder
and from its whole encoder.
"""

from ml_collections import ConfigDict

from configs import distill, t5

SHAPE = {
    "vocab_size": 0,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 1,
    "encoder_layers": 1,
    "num_heads": 2,
}


def get_config() -> ConfigDict:
    """The configuration."""
    return distill.get_config(
        data={"pairs": "docstrings"},
        model=t5.SHAPE | SHAPE,
        train=t5.TRAIN,
        examine=t5.EXAMINE,
    )
