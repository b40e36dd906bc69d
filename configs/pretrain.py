"""A small Llama (7.7 million parameters) for Python code: the target of the quickstart.

    python -m specjax.run --config=configs/pretrain.py --workdir=runs/target

Two minutes on two CPU cores, including corpus and tokenizer: 154,000 tokens, a fraction of the
corpus. Held-out loss 4.49 nats per token, 2.06 bits per byte (Python 3.11.7; other interpreters
have another library). The same command resumes a killed run. Other text:
--config.data.files=book.txt,more.jsonl.

    python -m specjax.run --config=configs/pretrain.py:large --workdir=runs/large

A better target of 10.2 million parameters: four million tokens in 57 minutes on one core (AMD EPYC,
other work on the other core, jax 0.10.2, 2026-11-25), 1.205 held-out bits per byte. Its weights are
in assets/target. A checkpoint is written every ten minutes. It has few and wide layers. On CPUs
that is a disadvantage for speculation: a pass over five tokens costs 1.5 of a pass over one, and
1.25 with the small model (``costs_ms``, verify and step, two runs each on two cores of an Intel
Xeon, jax 0.10.2, 2026-11-27):

    python -m specjax.run --config=configs/bench.py --config.target=assets/target \\
        --config.prompts=stdlib --config.data_dir=runs/data --config.num_prompts=8 \\
        --config.max_new_tokens=32 --config.drafter.name=jacobi --config.drafter.gamma=4 \\
        --config.repeats=15 --config.report=False
"""

from ml_collections import ConfigDict

from specjax.run.settings import training

SMALL = {
    "family": "llama",
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_layers": 4,
    "num_heads": 6,
    "num_kv_heads": 2,
    "max_positions": 512,
    "tie_embeddings": True,
}
LARGE = {
    "hidden_size": 640,
    "intermediate_size": 1024,
    "num_layers": 3,
    "num_heads": 10,
    "max_positions": 1024,
}
MUON = {"name": "muon", "learning_rate": 0.02, "adam_learning_rate": 0.03}


def get_config(size: str = "small", **values: object) -> ConfigDict:
    """The configuration; ``size`` is small or large, ``values`` replace groups."""
    usual = {
        "model": SMALL,
        "optimiser": MUON,
        "examine": {"prompts": 0},  # without config.target there is no target to draft for
    }
    config = training("pretrain", **usual | values)
    if size == "large":
        config.model.update(LARGE)
        config.train.update({"steps": 2000, "length": 256, "eval_batches": 24})
        config.train.update({"checkpoint_every": 330, "eval_every": 330})
        config.optimiser.update({"adam_learning_rate": 0.01, "weight_decay": 0.1})
    return config
