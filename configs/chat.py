"""A conversation with a chat model, printed as it is written.

    python -m specjax.run --config=configs/chat.py --config.target=DIR \\
        --config.prompt="Why is the sky blue?"
    python -m specjax.run --config=configs/chat.py --config.target=DIR \\
        --config.prompts=question.jsonl --config.num_prompts=6 --config.sampling.temperature=0.7

The prompt, or every turn of the questions of a file (Spec-Bench and MT-bench as published, and the
other kinds of configs/generate.py), is put into the model's own chat template
(``--config.chat=chatml`` or a .jinja file for another one). Conversations are decoded one after the
other, with any drafter; later turns follow the answers that were printed. After each answer a line
has its tokens, tau and tokens/s; results.json has those of all answers, with the texts.

Nothing is downloaded. Half a minute on two CPU cores for a model of 135 million parameters, most of
it compilation, which is needed once for all conversations of a run.
"""

from ml_collections import ConfigDict

from specjax.run.settings import decoding


def get_config() -> ConfigDict:
    """The configuration."""
    return decoding("chat", chat="own", max_new_tokens=256)
