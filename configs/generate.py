"""Decode prompts with any drafter and print the text.

    python -m specjax.run --config=configs/generate.py --config.target=DIR --config.prompt="Once upon a time"
    python -m specjax.run --config=configs/generate.py --config.target=DIR --config.prompts=prompts.jsonl \\
        --config.drafter.name=draft_model --config.drafter.model=DRAFT_DIR --config.sampling.temperature=0.8

A single prompt on a terminal is streamed. Seconds on a CPU for a small model, most of them compilation.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "generate"
    config.target = ""  # a Hugging Face style directory, or a trained run's workdir
    config.drafter = drafter("prompt_lookup")
    config.accept = "chain"
    config.sampling = sampling(0.0)
    config.prompt = ""  # one text
    config.prompts = ""  # or a .txt file (a prompt per line), a .jsonl file with a "prompt" key, or "stdlib"
    config.num_prompts = 0  # at most so many of them; 0 = all, of "stdlib" 32
    config.prompt_tokens = 64  # "stdlib": the length of each
    config.data_dir = ""  # "stdlib": where the corpus was built; empty: the data folder of the target's run
    config.max_new_tokens = 128
    config.ignore_eos = False
    config.batch_size = 1
    config.seed = 0
    return config


def drafter(name: str) -> ConfigDict:
    """The keys that drafters share; None leaves a drafter's own default."""
    keys = ConfigDict({"name": name})
    keys.gamma = config_dict.placeholder(int)  # draft tokens per round
    keys.model = config_dict.placeholder(str)  # draft_model: directory of the draft model
    keys.max_ngram = config_dict.placeholder(int)  # prompt_lookup: longest n-gram looked for
    keys.match = config_dict.placeholder(str)  # prompt_lookup: "earliest" or "latest" occurrence
    keys.partial = config_dict.placeholder(bool)  # prompt_lookup: whether less than gamma tokens may be proposed
    return keys


def sampling(temperature: float) -> ConfigDict:
    """Sampling settings."""
    return ConfigDict({"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
