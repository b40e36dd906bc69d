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
2026-11-21).
"""

from ml_collections import ConfigDict

from specjax.run.settings import drafter, training


def get_config() -> ConfigDict:
    """The configuration."""
    # Any lossless pair. In batches on a CPU, plain decoding is the fastest.
    return training("generate", drafter=drafter("none"))
