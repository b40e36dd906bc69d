"""Trains a small target on books, with longer and longer texts: up to 16,000 tokens.

    PYTHONPATH=. python experiments/long_context/target.py --texts=FILES --workdir=DIR

Every stage begins with the parameters of the stage before; the last one is ``DIR/books_16384``, a
target for run.py. A killed run goes on where it was. Then the loss on the end of the text, which is
not trained on, is measured by position: a rise would show positions that were not learned.
``DIR/loss.json`` has it, and run.py keeps it. About 20 minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import pretrain
from experiments.common import Stopwatch, record, without_folder
from specjax.data import text_files
from specjax.files import write_json, write_text
from specjax.models import hf
from specjax.train import recipes

# Keys and values have 2 x 256 numbers per token and layer, as in the random target of run.py.
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 2,
    "max_positions": 1 << 15,
}
# Tokens of a text -> rows of a batch, steps, learning rate.
STAGES = {256: (16, 240, 0.02), 2048: (2, 40, 0.01), 8192: (1, 12, 0.005), 16384: (1, 4, 0.003)}
EXAMINED = 4  # texts of the last length whose loss is measured
CHUNK = 256


def train(text: Path, workdir: Path, stages: dict[int, tuple[int, int, float]]) -> Path:
    """Trains the stages that are missing; the workdir of the last one."""
    before = None
    for length, (rows, steps, rate) in stages.items():
        config: Any = pretrain.get_config()
        config.data.files = str(text)
        keys: dict[str, Any] = {f"model.{key}": value for key, value in SHAPE.items()}
        keys |= {"train.length": length, "train.batch_size": rows, "train.steps": steps}
        keys |= {"train.eval_batches": 1, "train.log_every": max(steps // 12, 1)}
        keys |= {"train.checkpoint_every": max(steps // 4, 1), "train.eval_every": steps}
        keys |= {"train.remat": length > 2048, "optimiser.learning_rate": rate}
        keys["optimiser.adam_learning_rate"] = 1.5 * rate
        if before is not None:
            # The tokenizer may have fewer tokens than asked for.
            keys |= {"init": str(before), "tokenizer": str(before), "model.vocab_size": 0}
        config.update_from_flattened_dict(keys)
        before = workdir / f"books_{length}"
        recipes.run(config, before)
    assert before is not None
    return before


def losses(target: Path, text: str, length: int, number: int) -> np.ndarray:
    """f64[length]: the mean loss of the tokens at each position, in nats; 0 at the first."""
    loaded = hf.load(str(target), dtype=jnp.float32)
    assert loaded.tokenizer is not None
    ids = np.asarray(loaded.tokenizer.encode(text).ids, np.int32)
    rows = ids[-number * length :].reshape(number, length)
    model, cache = loaded.lm, loaded.lm.init_cache(number, length)

    @jax.jit
    def fed(params, tokens, following, cache):
        out, block = model.apply(params, tokens, cache)
        log_probs = jax.nn.log_softmax(out.logits)
        taken = jnp.take_along_axis(log_probs, following[..., None], -1)[..., 0]
        advance = jnp.full((number,), tokens.shape[1], jnp.int32)
        return -taken.mean(0), model.commit(cache, block, advance)

    following = np.concatenate([rows[:, 1:], rows[:, :1]], 1)
    parts = []
    for begin in range(0, length, CHUNK):
        piece = slice(begin, begin + CHUNK)
        loss, cache = fed(loaded.params, rows[:, piece], following[:, piece], cache)
        parts.append(np.asarray(loss, np.float64))
    return np.concatenate(parts)[:-1]


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, help="text files, separated by commas")
    parser.add_argument("--workdir", type=Path, required=True, help="of the stages")
    parser.add_argument("--characters", type=int, default=6_000_000, help="of the texts")
    args = parser.parse_args(argv)
    stopwatch = Stopwatch()
    pieces = (piece for path in args.texts.split(",") for piece in text_files.pieces(Path(path)))
    text = "".join(pieces)[: args.characters]
    held_out = 8 * EXAMINED * max(STAGES)  # characters; a token has about three
    args.workdir.mkdir(parents=True, exist_ok=True)
    write_text(args.workdir / "text.txt", text[:-held_out])
    target = train(args.workdir / "text.txt", args.workdir, STAGES)
    each = losses(target, text[-held_out:], max(STAGES), EXAMINED)
    ends = [end for end in (256, 1024, 2048, 4096, 8192) if end < len(each)] + [len(each)]
    table = [float(each[a:b].mean()) for a, b in zip([0, *ends], ends, strict=False)]
    result = {"ends": ends, "loss": table}
    shown = [without_folder(argument) for argument in argv]
    write_json(args.workdir / "loss.json", result | record(__file__, shown, stopwatch))
    print(result)


if __name__ == "__main__":
    main(sys.argv[1:])
