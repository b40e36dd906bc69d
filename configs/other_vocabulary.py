"""A draft model whose tokenizer is not the target's, by each of the methods for such pairs.

    python -m specjax.run --config=configs/other_vocabulary.py:DRAFT_DIR --config.target=DIR \\
        --config.prompts=prompts.txt

"tli" drafts the tokens that both vocabularies have, as a chain and as a tree; "slem" the text of
the draft model. A draft model of bytes or of a few hundred tokens can also take "slrs":
--config.grid.methods.slem.vocabulary=slrs. See --explain=draft_model.
"""

from ml_collections import ConfigDict

from configs import bench, generate


def get_config(draft: str = "") -> ConfigDict:
    """The configuration; ``draft`` is the draft model's directory."""
    config = bench.get_config()
    methods = config.grid.methods = ConfigDict()
    for label, vocabulary in (("tli", "tli"), ("tli_tree", "tli"), ("slem", "slem")):
        methods[label] = generate.drafter("draft_model")
        methods[label].vocabulary = vocabulary
        methods[label].model = draft
    methods.tli.gamma = methods.slem.gamma = 4
    methods.tli_tree.tree = "3x2x1x1"
    methods.tli_tree.siblings = "without_replacement"
    config.grid.temperatures = (0.0, 1.0)
    return config
