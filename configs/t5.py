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

SHAPE = {
    "family": "t5",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 3,
    "encoder_layers": 3,
    "num_heads": 4,
    "head_dim": 32,
    "gated": True,
    "buckets": 32,
    "max_distance": 128,
    "tie_embeddings": False,
}
TRAIN = {"steps": 600, "batch_size": 32, "length": 128, "eval_batches": 8}
# prompt_tokens: the longest source, with the start token.
EXAMINE = {"prompt_tokens": 96, "new_tokens": 32}


def get_config() -> ConfigDict:
    """The configuration."""
    return pretrain.get_config(
        data={"pairs": "docstrings"},
        model=SHAPE,
        train=TRAIN,
        examine=EXAMINE | {"prompts": 0},
    )
