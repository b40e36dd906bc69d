"""Decodes a stream of requests while the drafter learns from the target's corrections (OSD).

    python -m specjax.run --config=configs/online.py --workdir=runs/online \\
        --config.target=runs/target --config.drafter.model=runs/draft --config.prompts=prompts.jsonl

Online speculative decoding (Liu et al. 2023, 2310.07177): after every ``config.online.every``
requests one optimiser step, at a constant learning rate, at the places where the target rejected
the draft. The output law stays the target's. The requests are decoded in the order of the file.
Another drafter: --config.drafter.name=medusa; --config.online.learn=False is the same stream
without updates.
"""

from ml_collections import ConfigDict, config_dict

from specjax.run.settings import decoding, drafter

# Key of the loss of a drafter that learns -> type; None: see ``loss_of`` in
# specjax/train/online.py.
_NUMBERS = (
    *("beta", "temperature", "ce", "teacher", "decay", "feature", "keep", "floor", "pace"),
    *("confidence", "weight"),
)
LOSS = dict.fromkeys(("steps", "places"), int) | dict.fromkeys(_NUMBERS, float)


def get_config() -> ConfigDict:
    """The configuration."""
    return decoding(
        "online",
        drafter=drafter("draft_model", model="runs/draft"),
        loss={"divergence": "forward_kl"}
        | {name: config_dict.placeholder(kind) for name, kind in LOSS.items()},
        optimiser={"learning_rate": 1e-4, "schedule": "constant", "warmup": 0.0},
    )
