"""SPIRe's draft model: layers of the target, sparse attention, feedback memory (2504.06419).

    python -m specjax.run --config=configs/spire.py --workdir=runs/spire \\
        --config.target=runs/target --config.data.dir=runs/target/data --config.pruned=0,3
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=prompts.txt --config.drafter.name=spire --config.drafter.model=runs/spire

The draft starts from the layers ``config.pruned`` of the target ("": from config.model, with random
parameters) and imitates the target as in configs/distill.py, with the same keys. The paper states
neither the layers, nor the sizes of its window, nor how its memory treats a token itself: these
defaults are those of specjax. Attention is sparse in training only where a text is longer than
``sinks`` + ``window``. With feedback memory a text is computed one token after the other, in
training too.
"""

from ml_collections import ConfigDict

from configs import distill
from specjax.run.settings import draft_model


def get_config() -> ConfigDict:
    """The configuration."""
    config = distill.get_config(pruned="0", drafter=draft_model("spire"))
    config.train.remat = True  # the activations of every token would take much memory
    return config
