"""Text that the target writes, for distillation and for heads (self-distillation).

    python -m specjax.run --config=configs/self_generate.py --workdir=runs/generated \\
        --config.target=runs/target --config.data.dir=runs/target/data
    ... --config.generation.prompts=questions.jsonl --config.generation.chat=own \\
        --config.generation.prompt_tokens=256 --config.generation.new_tokens=256
    ... --config=configs/medusa.py --config.data.generated=runs/generated

Continues the beginnings of lines of the corpus (or answers questions, with a chat template) at each
temperature, with lossless speculative decoding, and stores prompts and outputs as array_record with
a manifest. The same command resumes a killed run. With a trained drafter
(--config.drafter.name=medusa --config.drafter.model=DIR) the text has the same law, and is written
faster where a pass over several tokens costs little.

786,432 tokens of stories260K take 45 seconds on two CPU cores (AMD EPYC, 17,000 tokens/s,
2026-11-21); the quickstart's target writes about two thousand tokens per second.
"""

from ml_collections import ConfigDict

from configs import generate, pretrain


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "generate"
    # A model directory, a name of the Hub, a .gguf file, or a trained run's workdir.
    config.target = ""
    config.seed = 0
    # Devices: "" (one), or axes with sizes, such as "data:4,tensor:2": "data" divides the rows,
    # "tensor" the matrices of the models.
    config.mesh = ""
    config.data = pretrain.data()
    config.generation = ConfigDict()
    config.generation.num_prompts = 1024
    config.generation.prompt_tokens = 32
    # Files of questions, separated by commas, as in mode bench: the target answers their first
    # turns, if they have at most prompt_tokens tokens. Empty: it continues lines of config.data.
    config.generation.prompts = ""
    config.generation.chat = ""  # template of the questions; "own": the target's
    config.generation.new_tokens = 96
    config.generation.temperatures = (0.0, 1.0)
    config.generation.top_k = 0
    config.generation.top_p = 1.0
    config.generation.batch_size = 16
    config.generation.shard_prompts = 256
    # Any lossless pair. In batches on a CPU, plain decoding is the fastest.
    config.drafter = generate.drafter("none")
    config.accept = "chain"
    return config
