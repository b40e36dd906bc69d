"""P-EAGLE (2602.01469): EAGLE-3 that drafts all tokens in one pass.

    python -m specjax.run --config=configs/p_eagle.py --workdir=runs/p_eagle \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=eagle3 --config.drafter.model=runs/p_eagle
    ... --config.drafter.tree=best_first --config.drafter.nodes=32 --config.accept=match

The network is that of configs/eagle3.py with ``drafter.parallel``: masks with a learned feature
follow the slots of the text. The published one has four layers and trained embeddings.
Without a shape the draft is a sampled chain of all tokens. Deeper masks are dropped, so a step
costs about three passes over the text, not ``drafter.parallel``. Minutes on two CPU cores for a
small target.
"""

from ml_collections import ConfigDict, config_dict

from specjax.run.settings import trained, training


def get_config() -> ConfigDict:
    """The configuration."""
    return training(
        "heads",
        drafter=trained("eagle3", parallel=8, layers=4, embeddings=True),
        loss={
            "ce": 0.0,
            "teacher": 1.0,
            "divergence": "forward_kl",
            "decay": 1.0,
            "pace": config_dict.placeholder(float),
            "keep": 0.8,
            "floor": 0.2,
        },
        train={"steps": 600},
    )
