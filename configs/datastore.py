"""A datastore: text in which the drafter ``rest`` looks up continuations. Built, not trained.

    python -m specjax.run --config=configs/datastore.py --workdir=runs/store \\
        --config.target=runs/target --config.data.dir=runs/target/data

Seven seconds on two CPU cores: 8.5 MB of text give 2.7 million tokens and a store of 22 MB.
Other text: --config.data.files=book.txt,more.jsonl (whole files: measure on other text). Use with
--config.drafter.name=rest --config.drafter.datastore=runs/store and a rule for trees, such as
--config.accept=deterministic.
"""

from ml_collections import ConfigDict

from specjax.run.settings import training


def get_config() -> ConfigDict:
    """The configuration."""
    return training("datastore")
