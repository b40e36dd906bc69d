"""Tables of n-gram counts, from which the drafter ``ngram_lm`` drafts. Counted, not trained.

    python -m specjax.run --config=configs/ngram_tables.py --workdir=runs/ngrams --config.target=runs/target \\
        --config.data.dir=runs/target/data

Six seconds on two CPU cores: 8.5 MB of text are 2.7 million tokens and 16 MB of tables.
Better than any corpus is what the target itself writes: --config.from_target=200000 (tokens). Other text:
--config.data.files=book.txt,more.jsonl. Then --config.drafter.name=ngram_lm --config.drafter.tables=runs/ngrams.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "ngram"
    config.seed = 0  # of the text that the target writes
    config.target = ""  # a model directory, or a trained run's workdir: its tokenizer is used
    config.data = ConfigDict()
    config.data.dir = ""  # where the embedded corpus is built; empty: <workdir>/data
    config.data.files = ""  # .txt and .jsonl files to use instead of it, separated by commas
    config.successors = 16  # kept of each context
    config.contexts = 100_000  # of two tokens, the most frequent ones
    config.smoothing = 0.1  # added to each token's own count
    config.from_target = (
        0  # tokens that the target writes at temperature 1, to be counted instead of the text
    )
    config.generation = ConfigDict()  # read only with from_target
    config.generation.batch_size = 16
    config.generation.prompt_tokens = 32  # pieces of the text, for the target to continue
    config.generation.new_tokens = 128
    return config
