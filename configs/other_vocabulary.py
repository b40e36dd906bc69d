"""A draft model whose tokenizer is not the target's, by each of the methods for such pairs.

    python -m specjax.run --config=configs/other_vocabulary.py:DRAFT_DIR --config.target=DIR \\
        --config.prompts=prompts.txt

"tli" drafts the tokens that both vocabularies have, as a chain and as a tree; "slem" the text of
the draft model. A draft model of bytes or of a few hundred tokens can also take "slrs":
--config.grid.methods.slem.vocabulary=slrs. See --explain=draft_model.
"""

from ml_collections import ConfigDict

from configs import bench
from specjax.run.settings import drafter

TREE = {"tree": "3x2x1x1", "siblings": "without_replacement"}


def get_config(draft: str = "") -> ConfigDict:
    """The configuration; ``draft`` is the draft model's directory."""
    config, model = bench.get_config(), {"model": draft}
    methods = config.grid.methods
    methods.tli = drafter("draft_model", vocabulary="tli", gamma=4, **model)
    methods.tli_tree = drafter("draft_model", vocabulary="tli", **TREE, **model)
    methods.slem = drafter("draft_model", vocabulary="slem", gamma=4, **model)
    config.grid.temperatures = (0.0, 1.0)
    return config
