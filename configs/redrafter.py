"""ReDrafter (Cheng et al. 2024): one small recurrent network, drafting by beam search.

    python -m specjax.run --config=configs/redrafter.py --workdir=runs/redrafter \\
        --config.target=runs/target --config.data.dir=runs/target/data
    ... --config.loss.ce=0 --config.loss.teacher=1   # local distillation, as in the paper
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.accept=deterministic \\
        --config.drafter.name=redrafter --config.drafter.model=runs/redrafter

``config.drafter.heads`` is the number of steps that training predicts (5) and the default length
of the beam search; ``config.drafter.top_k`` is its width (6).

Measured as in configs/eagle.py, with this beam: tau 3.19 greedy and 1.60 at temperature 1.
"""

from ml_collections import ConfigDict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    return heads.get_config("redrafter")
