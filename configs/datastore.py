"""A datastore: text in which the drafter ``rest`` looks up continuations. Built, not trained.

    python -m specjax.run --config=configs/datastore.py --workdir=runs/store \\
        --config.target=runs/target --config.data.dir=runs/target/data

Seven seconds on two CPU cores: 8.5 MB of text give 2.7 million tokens and a store of 22 MB.
Other text: --config.data.files=book.txt,more.jsonl (whole files: measure on other text). Use with
--config.drafter.name=rest --config.drafter.datastore=runs/store and a rule for trees, such as
--config.accept=deterministic.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "datastore"
    # A model directory, a name of the Hub, a .gguf file, or a trained run's workdir: its tokenizer
    # is used.
    config.target = ""
    config.data = ConfigDict()
    config.data.dir = ""  # where the embedded corpus is built; empty: <workdir>/data
    config.data.files = ""  # .txt and .jsonl files to use instead of it, separated by commas
    config.reach = 32  # length of sorted phrases: longer ones cannot be looked up
    return config
