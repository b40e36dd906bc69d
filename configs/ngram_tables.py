"""Tables of n-gram counts, from which the drafter ``ngram_lm`` drafts. Counted, not trained.

    python -m specjax.run --config=configs/ngram_tables.py --workdir=runs/ngrams \\
        --config.target=runs/target --config.data.dir=runs/target/data

Six seconds on two CPU cores: 8.5 MB of text give 2.7 million tokens and 16 MB of tables. Text
written by the target is better than any corpus: --config.from_target=200000 (tokens). Other text:
--config.data.files=book.txt,more.jsonl. Use it with --config.drafter.name=ngram_lm
--config.drafter.tables=runs/ngrams.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "ngram"
    config.seed = 0  # of the text that the target writes
    # A model directory, a name of the Hub, a .gguf file, or a trained run's workdir: its tokenizer
    # is used.
    config.target = ""
    config.data = ConfigDict()
    config.data.dir = ""  # where the embedded corpus is built; empty: <workdir>/data
    config.data.files = ""  # .txt and .jsonl files to use instead of it, separated by commas
    config.successors = 16  # kept of each context
    config.contexts = 100_000  # of two tokens, the most frequent ones
    config.smoothing = 0.1  # added to each token's own count
    # Tokens that the target writes at temperature 1, counted instead of the text; 0: off.
    config.from_target = 0
    config.generation = ConfigDict()  # read only with from_target
    config.generation.batch_size = 16
    config.generation.prompt_tokens = 32  # pieces of the text, for the target to continue
    config.generation.new_tokens = 128
    return config
