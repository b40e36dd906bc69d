"""Controlled acceptance: a chosen acceptance rate at a real drafter's cost, with any model.

    python -m specjax.run --config=configs/controlled.py --config.target=DIR \\
        --config.prompts=prompts.txt --config.drafter.drafters.inner.name=draft_model \\
        --config.drafter.drafters.inner.model=DRAFT_DIR --config.drafter.rate=0.8

The inner drafter runs at its full cost, and its tokens are replaced so that each is right with
the chosen probability; ``length`` gives the tokens per round in its place (configs/golden.py). The
text is that of plain greedy decoding. Temperature 0 only. "eff" in
the table is measured over predicted speed-up. Takes seconds for a small model, most of them for
compilation; experiments/system_efficiency does it for twelve layers and many rates and lengths.
"""

from ml_collections import ConfigDict

from configs import bench
from specjax.run.settings import drafter


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    config.drafter = drafter("controlled")
    config.drafter.drafters.inner = drafter("prompt_lookup", gamma=5)
    return config
