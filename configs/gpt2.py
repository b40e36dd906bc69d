"""The classic pair: GPT-2 XL with GPT-2 as its draft model, four draft tokens, temperature 0.

    python -m specjax.run --config=configs/gpt2.py   # reads both models from the Hub

github.com/jaymody/speculative-sampling has this prompt and these settings with NumPy: its README
reports 60.64 s plainly and 27.15 s with the draft model, and a text that begins "so powerful that
they would be able to think like humans." Needs 8 GB of memory in float32, and the extra "hub".
"""

from ml_collections import ConfigDict

from specjax.run.settings import decoding, drafter

PROMPT = "Alan Turing theorized that computers would one day become"


def get_config() -> ConfigDict:
    """The configuration."""
    config = decoding("bench", target="openai-community/gpt2-xl", prompt=PROMPT, max_new_tokens=40)
    config.drafter = drafter("draft_model", model="openai-community/gpt2", gamma=4)
    config.show_trace = True
    return config
