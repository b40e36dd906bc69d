"""SpecDec's Spec-Drafter (Xia et al. 2023): drafts a block of tokens for T5 targets in one pass.

    python -m specjax.run --config=configs/spec_drafter.py --workdir=runs/spec_drafter \\
        --config.target=runs/t5 --config.data.dir=runs/t5/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/t5 \\
        --config.prompts=stdlib --config.prompt_tokens=96 \\
        --config.drafter.name=spec_drafter --config.drafter.model=runs/spec_drafter
    ... --config.accept=tolerance --config.accept_keys.top=3 --config.accept_keys.gap=1.0   # lossy

The network learns the outputs of the pairs, or better those that the target wrote for their sources
(--config.data.pairs= --config.data.generated=DIR, of configs/self_generate.py with
--config.data.pairs=docstrings), as the paper's data are distilled. The encoder begins as a copy of
the target's where the sizes agree. The paper trains a beginning of each output per step
(config.loss.places=1), with dropout, which is left out here.
"""

from ml_collections import ConfigDict, config_dict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration: what differs from heads."""
    config = heads.get_config("spec_drafter")
    config.data.pairs = "docstrings"
    drafter = config.drafter = ConfigDict({"name": "spec_drafter"})
    drafter.block = 7  # tokens of a draft; the paper's are 25
    drafter.layers = 2  # of the decoder
    # Sizes; None: the target's.
    drafter.encoder_layers = config_dict.placeholder(int)
    drafter.width = config_dict.placeholder(int)
    drafter.inner = config_dict.placeholder(int)  # of the feed-forward
    drafter.heads = config_dict.placeholder(int)  # attention heads
    drafter.head_dim = config_dict.placeholder(int)
    # The shape of drafts in the forecasts of training; None: a chain of the whole block.
    drafter.gamma = config_dict.placeholder(int)
    drafter.tree = config_dict.placeholder(str)
    config.loss = ConfigDict()
    config.loss.places = 4  # different beginnings of each output
    config.loss.smoothing = 0.1  # of the labels
    config.loss.glancing = 0.5  # answers that are given per wrong token, at the first step
    # Share of this rate that is gone at the end; None: 0.4.
    config.loss.fall = config_dict.placeholder(float)
    config.train.batch_size = 32
    config.train.length = 128
    config.train.eval_batches = 8
    config.examine.prompt_tokens = 96
    config.examine.new_tokens = 32
    return config
