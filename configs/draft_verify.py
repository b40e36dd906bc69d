"""Layer skipping (Draft & Verify, Zhang et al. 2023): the target without some sublayers drafts.

    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.prompts=prompts.txt --config.record=texts.jsonl
    python -m specjax.drafters.self_speculation.skip_search DIR runs/skips --texts=texts.jsonl
    python -m specjax.run --config=configs/draft_verify.py:runs/skips --config.target=DIR \\
        --config.prompts=prompts.txt

The first two commands search for the sublayers, the third measures them. Layers can also be named:
``--config.drafter.skip_attention=3-6,9 --config.drafter.skip_mlp=5``.
"""

from ml_collections import ConfigDict

from configs import bench


def get_config(skips: str = "") -> ConfigDict:
    """The configuration; ``skips`` is the result of a search, a file or its directory."""
    config = bench.get_config()
    config.drafter.name = "layer_skip"
    config.drafter.skip_attention = skips  # layers, or the file of a search
    config.drafter.skip_mlp = skips
    # Ends a draft after an unsure token, as the authors do; 0.5 at temperature 1.
    config.drafter.control = "matchness:0.8"
    return config
