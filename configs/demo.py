"""A real chat model with the EAGLE-3 head that is shipped: answers, measured and coloured.

    pip install -e ".[hub]" && python -m specjax.run --config=configs/demo.py
    python -m specjax.run --config=configs/demo.py --config.target=DIR_OR_GGUF   # without the Hub

SmolLM2-135M-Instruct answers eight questions: plainly, with prompt lookup, with the head as a chain
and as a dynamic tree, and with the head as a chain under the controller ``goodput``, which drafts
as much as pays on this machine. The bench checks that the outputs are lossless, prints a table and
one answer coloured by the origin of each token, and keeps the fastest for "auto":

    python -m specjax.run --config=configs/chat.py --config.drafter.name=auto \\
        --config.target=HuggingFaceTB/SmolLM2-135M-Instruct --config.prompt="Why is the sky blue?"

Everything is written to runs/demo.
"""

from pathlib import Path

from ml_collections import ConfigDict

from configs import quickstart
from specjax.errors import UserError
from specjax.run.settings import decoding, drafter


def get_config() -> ConfigDict:
    """The configuration."""
    assets = quickstart.assets()
    if not Path(assets).is_dir():
        raise UserError("configs/demo.py needs the head in assets; run it in a checkout")
    config = decoding("bench", keep=True, max_new_tokens=96, repeats=1, show_trace=True)
    config.target = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.prompts = f"{assets}/questions.jsonl"
    head = {"name": "eagle3", "model": f"{assets}/smollm2-135m-eagle3"}
    config.grid.methods = ConfigDict(
        {
            "prompt_lookup": drafter("prompt_lookup", gamma=3),
            "head_chain": drafter(**head, tree="chain:3"),
            "head_tree": drafter(**head, tree="dynamic"),
            "head_goodput": drafter(**head, tree="chain:3", control="goodput"),
        }
    )
    return config
