"""Controlled acceptance: what the system makes of an acceptance rate, with a real drafter's cost and any model, trained or not.

    python -m specjax.run --config=configs/controlled.py --config.target=DIR --config.prompts=prompts.txt \\
        --config.drafter.drafters.inner.name=draft_model --config.drafter.drafters.inner.model=DRAFT_DIR \\
        --config.drafter.rate=0.8

The inner drafter is run and paid for, and its tokens are replaced so that each is right with the chosen probability; the text
is still plain greedy decoding's. Temperature 0 only. "eff" in the table is measured over predicted speed-up. Seconds for a
small model, most of them compilation; experiments/system_efficiency does it for twelve layers, many rates and lengths.
"""

from ml_collections import ConfigDict

from configs import bench, generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    config.drafter.name = "controlled"
    config.drafter.rate = 0.8
    config.drafter.drafters.inner = generate.drafter("prompt_lookup")
    config.drafter.drafters.inner.gamma = 5
    return config
