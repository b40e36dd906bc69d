"""Tables of n-gram counts, from which the drafter ``ngram_lm`` drafts. Counted, not trained.

    python -m specjax.run --config=configs/ngram_tables.py --workdir=runs/ngrams \\
        --config.target=runs/target --config.data.dir=runs/target/data

Six seconds on two CPU cores: 8.5 MB of text give 2.7 million tokens and 16 MB of tables. Text
written by the target is better than any corpus: --config.from_target=200000 (tokens). Other text:
--config.data.files=book.txt,more.jsonl. Use it with --config.drafter.name=ngram_lm
--config.drafter.tables=runs/ngrams.
"""

from ml_collections import ConfigDict

from specjax.run.settings import training


def get_config() -> ConfigDict:
    """The configuration."""
    return training("ngram", generation={"new_tokens": 128})
