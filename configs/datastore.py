"""A datastore: text in which the drafter ``rest`` looks up what comes next. Built, not trained.

    python -m specjax.run --config=configs/datastore.py --workdir=runs/store --config.target=runs/target \\
        --config.data.dir=runs/target/data

Seven seconds on two CPU cores: 8.5 MB of text are 2.7 million tokens and 22 MB of store.
Other text: --config.data.files=book.txt,more.jsonl (whole files: measure on other text than this). Then
--config.drafter.name=rest --config.drafter.datastore=runs/store, with a rule for trees: --config.accept=deterministic.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "datastore"
    config.target = ""  # a model directory, or a trained run's workdir: its tokenizer is used
    config.data = ConfigDict()
    config.data.dir = ""  # where the embedded corpus is built; empty: <workdir>/data
    config.data.files = ""  # .txt and .jsonl files to use instead of it, separated by commas
    config.reach = 32  # tokens that the order looks at: no longer phrase can be looked up
    return config
