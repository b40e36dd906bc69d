"""A small Llama (7.7 million parameters) trained on the Python standard library: the target of the quickstart.

    python -m specjax.run --config=configs/pretrain.py --workdir=runs/target

Two minutes on two CPU cores, corpus and tokenizer included: 154,000 tokens, a fraction of the corpus. Held-out loss 4.49
nats a token, 2.06 bits a byte (Python 3.11.7; another interpreter has another library). The same command resumes a killed run.
Other text: --config.data.files=book.txt,more.jsonl.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "pretrain"
    config.seed = 0
    config.tokenizer = ""  # a tokenizer.json, or a directory with one; empty: train one
    config.data = ConfigDict()
    config.data.dir = ""  # where the embedded corpus is built; empty: <workdir>/data
    config.data.files = ""  # .txt and .jsonl files to use instead of it, separated by commas
    config.model = ConfigDict()
    config.model.family = "llama"
    config.model.vocab_size = 2048
    config.model.hidden_size = 384
    config.model.intermediate_size = 1152
    config.model.num_layers = 4
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.max_positions = 512
    config.model.tie_embeddings = True
    config.train = ConfigDict()
    config.train.steps = 150
    config.train.batch_size = 8
    config.train.length = 128
    config.train.log_every = 10
    config.train.eval_every = 100
    config.train.eval_batches = 12
    config.train.checkpoint_every = 100
    config.optimiser = ConfigDict()
    config.optimiser.name = "muon"
    config.optimiser.learning_rate = 0.02
    config.optimiser.adam_learning_rate = 0.03  # embeddings, head, norms
    config.optimiser.warmup = 0.05  # of the steps
    config.optimiser.weight_decay = 0.01
    return config
