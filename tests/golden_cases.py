"""Models whose parameters follow from the names of their tensors, for comparisons without PyTorch.

``python tests/golden_cases.py`` (with torch, transformers, and the repository in PYTHONPATH) writes
the logits of transformers to tests/models/goldens.json.
"""

from __future__ import annotations

import datetime
import json
import platform
import tempfile
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = Path(__file__).parent / "models" / "goldens.json"
# One configuration of each family, those with windows where a family has them.
NAMES = (
    *("llama-yarn", "gpt2", "mistral-window", "qwen2-window", "qwen3-window", "qwen3_moe"),
    *("qwen3_next-experts", "qwen3_next", "qwen3_5_text", "nemotron_h"),
    *("smollm3-window", "olmo2", "gemma2", "gemma3_text", "phi3-long", "gpt_neox"),
)
VOCAB, TOKENS = 23, 12


def write(directory: Path, config: dict, shapes: dict[str, list[int]]) -> None:
    """A model directory with these tensors; each is drawn with a seed from its name."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in shapes.items():
        values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        tensors[name] = np.float32(0.3 * values + (0.5 if len(shape) == 1 else 0.0))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def tokens(name: str) -> list[int]:
    """The text of a case."""
    seed = zlib.crc32(name.encode())
    return np.random.RandomState(seed).randint(3, VOCAB, TOKENS).tolist()


def make(name: str) -> dict:
    """A case: config.json, the shapes of the tensors, and the logits of transformers."""
    import torch
    import transformers
    from family_cases import reference_model

    with tempfile.TemporaryDirectory() as folder:
        model = reference_model(torch, transformers, name, {"vocab_size": VOCAB})
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        stored = load_file(Path(folder) / "model.safetensors")
        shapes = {key: list(stored[key].shape) for key in sorted(stored)}
        write(Path(folder), config, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            logits = model.eval()(torch.tensor([tokens(name)])).logits[0].double().numpy()
    return {"config": config, "shapes": shapes, "logits": np.round(logits, 5).tolist()}


def main() -> None:
    import torch
    import transformers

    cases = {"transformers": transformers.__version__, "torch": torch.__version__}
    cases |= {"date": str(datetime.date.today()), "machine": platform.machine()}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in cases.items()]
    for name in NAMES:
        case = json.dumps(make(name), separators=(",", ":"))
        lines.append(f"{json.dumps(name)}: {case}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
