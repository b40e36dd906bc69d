"""A small T5 (an encoder-decoder model) that writes the docstring of a Python function.

    python -m specjax.run --config=configs/t5.py --workdir=runs/t5
    python -m specjax.run --config=configs/generate.py --config.target=runs/t5 \\
        --config.prompt="def area(width, height): return width * height"

The pairs are functions of the interpreter's standard library: the code without its docstring is the
source, the first paragraph of the docstring the output. Pairs of your own are lines
{"source": text, "output": text} (--config.data.pairs=pairs.jsonl); conversations give a pair for
each answer (--config.data.dialogues=chats.jsonl: an answer and the three turns before it).

The loss is that of the output and of the token that ends it. Each row has one pair, and
config.train.length is the length of source and output together. To go on from a model:
--config.init=DIR --config.tokenizer=DIR, with its shape in config.model.
"""

from ml_collections import ConfigDict

from configs import pretrain


def get_config() -> ConfigDict:
    """The configuration: what differs from pretraining a decoder."""
    config = pretrain.get_config()
    config.data.pairs = "docstrings"
    config.model = model()
    config.train.steps = 600
    config.train.batch_size = 32
    config.train.length = 128
    config.train.eval_batches = 8
    config.examine.prompt_tokens = 96  # the longest source, with the start token
    config.examine.new_tokens = 32
    return config


def model() -> ConfigDict:
    """The shape of a T5 model."""
    model = ConfigDict()
    model.family = "t5"
    model.vocab_size = 2048
    model.hidden_size = 128
    model.intermediate_size = 384
    model.num_layers = 3  # of the decoder
    model.encoder_layers = 3
    model.num_heads = 4
    model.head_dim = 32
    model.gated = True  # T5 1.1: a gate with the approximation of GELU by tanh; else ReLU
    model.buckets = 32  # of relative positions
    model.max_distance = 128  # from here on all positions are in the last bucket
    # True: the LM head is the embedding, and hidden states are divided (T5 1.0).
    model.tie_embeddings = False
    return model
