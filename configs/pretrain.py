"""A small Llama (7.7 million parameters) for Python code, trained for a short or a long time.

    python -m specjax.run --config=configs/pretrain.py --workdir=runs/target

Two minutes on two CPU cores, including corpus and tokenizer: 154,000 tokens, a fraction of the
corpus. Held-out loss 4.49 nats per token, 2.06 bits per byte (Python 3.11.7; other interpreters
have another library). The same command resumes a killed run. Other text:
--config.data.files=book.txt,more.jsonl.

    python -m specjax.run --config=configs/pretrain.py:long --workdir=runs/long

The same model after four million tokens, the target of the quickstart: assets/README.md has its
curve. 25 minutes on two cores of an AMD EPYC with other work on them (jax 0.10.2, 2026-11-27).

    python -m specjax.run --config=configs/pretrain.py:hybrid --workdir=runs/hybrid

Three of four layers are recurrent (the gated delta rule, as in Qwen3-Next). It decodes as any
other target does, and heads learn on it as on any other (experiments/trained_drafters).
"""

from ml_collections import ConfigDict

from specjax.errors import UserError
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
MUON = {"name": "muon", "learning_rate": 0.02, "adam_learning_rate": 0.03}


def get_config(length: str = "", **values: object) -> ConfigDict:
    """The configuration; ``length`` is "long", "hybrid" or empty, ``values`` replace groups."""
    if length not in ("", "long", "hybrid"):
        raise UserError(
            f"configs/pretrain.py:{length} is unknown; it must be long or hybrid, or left out"
        )
    usual = {
        "model": SMALL | ({"family": "qwen3_next"} if length == "hybrid" else {}),
        "optimiser": MUON,
        "examine": {"prompts": 0},  # without config.target there is no target to draft for
    }
    config = training("pretrain", **usual | values)
    if length == "long":
        config.model.max_positions = 1024
        config.train.update({"steps": 2000, "length": 256, "eval_batches": 24})
        config.train.update({"checkpoint_every": 250, "eval_every": 250})
        config.optimiser.update({"adam_learning_rate": 0.01, "weight_decay": 0.1})
    return config
