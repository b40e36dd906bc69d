"""EAGLE-3 (Li et al. 2025): reads three layers of the target; trained on its own drafts.

    python -m specjax.run --config=configs/eagle3.py --workdir=runs/eagle3 \\
        --config.target=runs/target --config.data.dir=runs/target/data
    ... --config.drafter.draft_vocab=8192   # drafts only the most frequent tokens of the text
    ... --config.drafter.fc_norm=True --config.drafter.norm_output=True   # EAGLE-3.1

The seven steps of a draft are unrolled (training-time test), so a training step costs several times
that of configs/eagle.py. Shapes of drafts as there.

Measured as in configs/eagle.py: tau 2.62 greedy and 1.49 at temperature 1; with one step
(--config.loss.steps=1) 1.78 and 1.41: the first drafted token is accepted more often (0.76 against
0.60 in the bench), and the second hardly ever (0.02 against 0.73).
"""

from ml_collections import ConfigDict

from configs import eagle


def get_config() -> ConfigDict:
    """The configuration."""
    loss = {"steps": 7, "decay": 0.8, "noise": 0.0, "weight": 1.0, "in_vocabulary": True}
    return eagle.network("eagle3", **loss)
