"""The keys of training, declared once: what ``config.mode="train"`` and mode online read.

Nothing here imports optax or Orbax, so that configurations load fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specjax import declare, sharding
from specjax.data.feature_store import DTYPES
from specjax.declare import free, group, key, share
from specjax.errors import UserError

OPTIMISERS = ("adamw", "muon", "sgd", "lion")


class Schedule(declare.Keys, owner="config.train."):
    """Numbers of steps. The last step is logged, evaluated and saved in any case."""

    steps: int = key(150, "of the run", least=1)
    log_every: int = key(10, "steps from one line of the log to the next", least=1)
    eval_every: int = key(
        0, "0: every 100 steps, or a twentieth of the steps if that is more", least=0
    )
    checkpoint_every: int = key(100, "steps from one checkpoint to the next", least=1)
    examine_every: int = key(100, "config.examine.every", least=1, python=True)

    @property
    def eval_interval(self) -> int:
        """Steps from one evaluation to the next."""
        return self.eval_every or max(100, math.ceil(self.steps / 20))

    def evaluates(self, step: int) -> bool:
        """Whether there is an evaluation after ``step`` (counted from 1)."""
        return step == self.steps or step % self.eval_interval == 0

    def examines(self, step: int) -> bool:
        """Whether the evaluation after ``step`` also measures tokens per round.

        It does at the last step, and where a multiple of ``examine_every`` was reached since the
        evaluation before. This depends on the step alone, so a resumed run does the same.
        """
        every = self.examine_every
        return step == self.steps or step // every > (step - self.eval_interval) // every


class Settings(declare.Keys, owner="config.train."):
    """How a run is computed, and which parameters it returns."""

    # The gradient is computed in these parts; each is divided among the devices.
    accumulate: int = key(1, "parts of a batch, processed one after the other", least=1)
    # The averaged parameters are then evaluated, examined and returned.
    ema: float = key(0.0, "decay of averaged parameters; 0: none", least=0, below=1)
    # With "bfloat16" the loss and ``Task.rewrite`` get parameters cast to it. Parameters, gradients
    # and the state of the optimiser are float32.
    precision: str = key(
        "float32",
        'or "bfloat16": precision of the loss, or of the target\'s pass; parameters stay float32',
        choices=("float32", "bfloat16"),
    )
    keep: str = key("last", 'or "best": the parameters that are written', choices=("last", "best"))
    # The lowest, or the highest of tau, alpha, agreement and accuracy.
    best: str = key("heldout_loss", 'the logged value that defines "best"')
    resume_changed: bool = key(False, "resume although the configuration has changed")
    seed: int = key(0, "config.seed", python=True)
    mesh: str = key("", "config.mesh", python=True)
    devices: tuple[Any, ...] | None = key(None, "of jax.Device; None: all", python=True)

    @property
    def examine_always(self) -> bool:
        """Whether every evaluation measures tokens per round.

        What decides, and what is reported of the best step, must be measured every time.
        """
        return self.keep == "best" or self.best != "heldout_loss"

    @property
    def decides(self) -> tuple[str, bool]:
        """``best``, and whether its largest value is the best one."""
        return self.best, any(n in self.best for n in ("tau", "alpha", "agreement", "accuracy"))


class TrainKeys(Schedule, Settings):
    """config.train: the training loop."""

    batch_size: int = key(8, "rows of a step, or of one pass of the target", least=1)
    length: int = key(
        0,
        "tokens of a row; 0: 512 of dialogues and of generated text, otherwise 128. Without stored "
        "features the target reads a row at once: longer dialogues and texts are windows",
        least=0,
    )
    eval_batches: int = key(12, "batches of the held-out text", least=1)
    remat: bool = key(
        False,
        "recompute layers, or the depths of a draft, in the backward pass: less memory, more time",
    )


class OptimiserKeys(declare.Keys, owner="config.optimiser."):
    """config.optimiser: what turns gradients into updates."""

    name: str = key("adamw", "adamw, muon, sgd or lion", choices=OPTIMISERS)
    learning_rate: float = key(1e-3, "the peak", above=0)
    adam_learning_rate: float | None = key(
        None, "muon: for parameters that are not matrices; None: learning_rate", above=0
    )
    schedule: str = key(
        "cosine",
        '"cosine" and "linear" end at final, "rsqrt" is the inverse square root, or "constant"; '
        "each begins with a linear warm-up",
        choices=("cosine", "linear", "constant", "rsqrt"),
    )
    warmup: float = key(0.05, "share of the steps", least=0, below=1)
    final: float = key(0.1, "final share of the learning rate", least=0)
    weight_decay: float = key(
        0.01, "not of the scales of norms and biases; muon: of matrices in layers alone", least=0
    )
    clip: float = key(1.0, "largest global norm of the gradient, after clip_value; 0: off", least=0)
    clip_value: float = key(0.0, "largest absolute value of a gradient; 0: off", least=0)
    b1: float | None = key(None, "momentum; None: usual for the optimiser", least=0, below=1)
    b2: float | None = key(
        None,
        "average of squares (lion: the momentum that is kept); None: usual for the optimiser",
        least=0,
        below=1,
    )
    eps: float | None = key(None, "guards the division; None: 1e-8", least=0)
    target_rate: float = key(
        1.0, "joint training: factor on the learning rate of the target", least=0
    )
    target_from: int = key(0, "joint training: step at which the target starts to train", least=0)

    def check(self) -> None:
        if self.name == "sgd":
            self.refuse(("b2",), "on sgd, which averages no squares")
        if self.name in ("sgd", "lion"):
            self.refuse(("eps",), f"on {self.name}, which does not divide")
        if self.schedule in ("constant", "rsqrt"):
            self.refuse(("final",), f"on the schedule {self.schedule}, which has no end")


class OnlineKeys(declare.Keys, owner="config.online."):
    """config.online: how a drafter is updated between requests."""

    FREE = ("window", "checkpoint_every")  # keys that change no result

    every: int = key(
        8, "requests from one update to the next; a multiple of the batch size", least=1
    )
    buffer: int = key(
        0, "texts of which an update learns, the last ones; 0: those since the last update", least=0
    )
    positions: str = key(
        "wrong",
        'where it learns: "wrong", the first rejected place of each round, or all "emitted" tokens',
        choices=("wrong", "emitted"),
    )
    accumulate: int = key(1, "parts of the ring, processed one after the other", least=1)
    learn: bool = key(True, "False: no updates, to compare with")
    window: int = key(25, "requests of a window of the results", least=1)
    checkpoint_every: int = key(64, "requests", least=1)

    @property
    def rows(self) -> int:
        """The number of texts of the ring."""
        return self.buffer or self.every

    def check(self) -> None:
        if self.rows < self.every:
            raise UserError(
                f"config.online.buffer is {self.rows}, fewer than the {self.every} requests "
                "between two updates; raise it, or leave it 0"
            )
        if self.rows % self.accumulate:
            raise UserError(
                f"config.online.accumulate is {self.accumulate}, which does not divide the "
                f"{self.rows} texts of the ring; take a divisor"
            )

    def check_stream(self, batch_size: int, requests: int | None = None) -> None:
        """Raises UserError for keys that do not fit the batches or the stream."""
        if self.every % batch_size:
            raise UserError(
                f"config.online.every is {self.every} and config.batch_size is {batch_size}: "
                "parameters change between batches; make every a multiple of the batch size"
            )
        if requests is not None and self.learn and requests < self.every:
            raise UserError(
                f"the stream has {requests} requests and the first update is after "
                f"config.online.every = {self.every}; give more requests, or lower it"
            )


class DataKeys(declare.Keys, owner="config.data."):
    """config.data: the source of text, at most one of ``KINDS``; none: the embedded corpus."""

    KINDS = ("files", "tfds", "dialogues", "pairs", "generated", "features")

    dir: str = key(
        "",
        "folder of datasets, built there if needed; empty: <workdir>/data for the embedded corpus",
    )
    files: str = key("", ".txt and .jsonl files, separated by commas")
    tfds: str = key("", "name or directory of a TFDS dataset")
    text_key: str = key("text", "its feature that holds the text")
    dialogues: str = key(
        "",
        ".jsonl files of conversations, separated by commas; the assistant's turns are the labels",
    )
    template: str = key(
        "", "chat template: chatml, vicuna, llama2, plain, a .jinja file; empty: the target's own"
    )
    pairs: str = key(
        "",
        'encoder-decoder models (configs/t5.py): .jsonl files of {"source", "output"}, separated '
        'by commas, or "docstrings": functions of the embedded corpus',
    )
    long_pairs: str = key(
        "refuse",
        'or "leave_out": pairs of files that are longer than a row',
        choices=("refuse", "leave_out"),
    )
    generated: str = key("", "workdir of configs/self_generate.py: text written by the target")
    features: str = key(
        "",
        "workdirs of configs/features.py, separated by commas: stored text and features of the "
        "target, for heads",
    )
    temperature: float | None = key(None, "of generated text; None: all of it", least=0)
    labels: str = key(
        "output",
        'labels of dialogues and generated text: "output", or "all"',
        choices=("output", "all"),
    )
    packing: str = key(
        "crops",
        'other text: "crops" of one stream, or whole "documents", packed with document masks',
        choices=("crops", "documents"),
    )
    on_policy: float = share(0.0, "distill: share of the rows that the draft continues itself")
    on_policy_prompt: int = key(
        32,
        "tokens of the text before its continuation; of pairs it is always the source",
        needs="on_policy",
    )


class ModelKeys(declare.Keys, owner="config.model."):
    """config.model: the shape of a new model."""

    family: str = key("llama", "a family of decoders, or t5")
    vocab_size: int = key(2048, "0: the target's", least=0)
    hidden_size: int = key(384, "width of the residual stream", least=1)
    intermediate_size: int = key(1152, "width of the feed-forward", least=1)
    num_layers: int = key(4, "of the decoder", least=1)
    encoder_layers: int = key(3, "t5", least=1)
    num_heads: int = key(6, "attention heads", least=1)
    num_kv_heads: int = key(2, "heads of keys and values", least=1)
    head_dim: int = key(32, "t5: width of an attention head", least=1)
    max_positions: int = key(512, "longest text", least=1)
    gated: bool = key(True, "T5 1.1: a gate with the approximation of GELU by tanh; False: ReLU")
    buckets: int = key(32, "t5: of relative positions", least=1)
    max_distance: int = key(128, "t5: from here on all positions are in the last bucket", least=1)
    tie_embeddings: bool = key(
        True, "the LM head is the embedding; t5: then hidden states are divided (T5 1.0)"
    )


# The keys of an encoder-decoder model.
T5_KEYS = [key.name for key in declare.keys_of(ModelKeys)]
T5_KEYS = [name for name in T5_KEYS if name not in ("num_kv_heads", "max_positions")]


class ExamineKeys(declare.Keys, owner="config.examine."):
    """config.examine: tokens per round (tau), forecast from the target's text, and decoded."""

    every: int = key(
        100, "steps, at least, from one measurement to the next; and after the last", least=1
    )
    prompts: int = key(16, "held-out prompts; 0: off", least=0)
    prompt_tokens: int = key(32, "of each", least=1)
    new_tokens: int = key(64, "that are decoded", least=1)
    temperatures: tuple[float, ...] = key((0.0, 1.0), "each is measured", least=0)
    gamma: int = key(4, "draft models: tokens per round; other drafters have keys for it", least=1)

    def check(self) -> None:
        if self.prompts and not self.temperatures:
            raise UserError(
                "config.examine.temperatures is empty; "
                "give one or more, or set config.examine.prompts=0"
            )


class FeaturesKeys(declare.Keys, owner="config.features."):
    """config.features: what is stored of the target."""

    taps: tuple[int, ...] = key(
        (),
        "layers whose outputs are stored beside the last feature, numbered from 0, as (1, 5, 8)",
        once=True,
    )
    text: int = key(
        2048,
        "tokens that the target reads at once, in rows of train.length; longer texts are windows "
        "with half as many tokens of context",
        least=1,
    )
    dtype: str = key("bfloat16", "or float32, float8 (one scale per vector)", choices=tuple(DTYPES))
    rows: int = key(0, "at most so many rows of the train split; 0: all", least=0)
    shard_megabytes: int = key(64, "size of a file; a killed run loses at most one", least=1)


class GenerationKeys(declare.Keys, owner="config.generation."):
    """config.generation: what the target writes."""

    num_prompts: int = key(1024, "that it continues", least=2)
    prompt_tokens: int = key(32, "of each", least=1)
    prompts: str = key(
        "",
        "files of questions, separated by commas, as in mode bench: the target answers their first "
        "turns, if they have at most prompt_tokens tokens. Empty: it continues lines of "
        "config.data",
    )
    chat: str = key("", 'template of the questions; "own": the target\'s', needs="prompts")
    skip: int = key(
        0,
        "so many questions are left out first: those of earlier runs",
        least=0,
        needs="prompts",
    )
    new_tokens: int = key(96, "of each continuation", least=1)
    temperatures: tuple[float, ...] = key(
        (0.0, 1.0), "of the continuations, by turns", least=0, once=True
    )
    top_k: int = key(0, "how many of the most probable tokens are kept; 0: all")
    top_p: float = key(1.0, "the most probable tokens with this much probability; 1: all")
    batch_size: int = key(16, "rows that are decoded together", least=1)
    shard_prompts: int = key(256, "prompts of a file", least=1)


class WeightKeys(declare.Keys, owner="config.drafter."):
    """config.drafter: what the objective pretrain adds to the keys of a drafter."""

    weight: str | None = key(
        None,
        "pretrain: of the mean over the heads' losses: a value, and later ones from a share of the "
        'steps on, as "3,1@0.5"; None: the number of heads',
    )


class Training(declare.Keys, owner="config."):
    """The keys of all objectives; ``KEYS`` says which of them an objective has."""

    mode: str = key("train", "what is done", choices=("train",))
    objective: str = key(
        help="what is made: pretrain, distill, heads, generate, features, datastore or ngram"
    )
    seed: int = key(0, "of parameters, packing, prompts and written text", least=0, most=2**32 - 1)
    mesh: str = key(
        "",
        'devices: "" (rows divided among all; generate: one), or axes with sizes, such as '
        '"data:2,fsdp:4,tensor:2": "data" and "fsdp" divide the rows, "fsdp" and "tensor" the '
        "parameters and optimiser state",
    )
    target: str = key(
        "",
        "a model directory, a name of the Hub, a .gguf file, or a trained run's workdir; pretrain: "
        "train a draft for this target, with its vocabulary",
    )
    tokenizer: str = key("", "a tokenizer.json, or a model that has one; empty: train one")
    init: str = key("", "a model directory, or heads, to start from; empty: random parameters")
    pruned: str = key("", "layers of the target to start from, instead of config.model")
    boosted: str = key(
        "",
        "directories of draft models, separated by commas: the loss leaves out the labels to which "
        "one of them gives the highest probability (configs/boost.py)",
    )
    joint: bool = key(False, "trains the target too, and writes <workdir>/target as well")
    data: DataKeys = group(DataKeys)
    model: Mapping[str, Any] = free("the shape of a new model", ModelKeys)
    drafter: Mapping[str, Any] = free(
        "the drafter that is trained, or that writes; pretrain: heads that are trained with the "
        "target; distill: a draft model of another kind than a plain decoder",
        WeightKeys,
    )
    accept: str = key("chain", "the rule of the drafter that writes")
    loss: Mapping[str, Any] = free("the keys of the loss")
    train: TrainKeys = group(TrainKeys)
    optimiser: OptimiserKeys = group(OptimiserKeys)
    examine: ExamineKeys = group(ExamineKeys)
    features: FeaturesKeys = group(FeaturesKeys)
    generation: GenerationKeys = group(GenerationKeys)
    # Datastores and tables for lookup drafters.
    reach: int = key(32, "length of sorted phrases: longer ones cannot be looked up", least=1)
    successors: int = key(16, "kept of each context", least=1)
    contexts: int = key(100_000, "of two tokens, the most frequent ones", least=1)
    smoothing: float = key(0.1, "added to each token's own count", above=0)
    from_target: int = key(
        0,
        "tokens that the target writes at temperature 1, counted instead of the text; 0: off",
        least=0,
    )

    def check(self) -> None:
        if self.mesh:
            sharding.parse(self.mesh)


_ALL = ("mode", "objective", "target")
_TRAINED = (*_ALL, "seed", "mesh", "init", "data", "loss", "train", "optimiser", "examine")
# Objective -> its keys; of a group with a dot, only those that are named.
KEYS = {
    "pretrain": (*_TRAINED, "tokenizer", "model", "drafter"),
    "distill": (*_TRAINED, "model", "pruned", "boosted", "drafter"),
    "heads": (*_TRAINED, "drafter", "joint"),
    "generate": (*_ALL, "seed", "mesh", "data", "generation", "drafter", "accept"),
    "features": (
        *(*_ALL, "seed", "mesh", "data", "features", "examine.prompts", "examine.prompt_tokens"),
        *("train.batch_size", "train.length", "train.eval_batches", "train.precision"),
    ),
    "datastore": (*_ALL, "data.dir", "data.files", "reach"),
    "ngram": (
        *(*_ALL, "seed", "data.dir", "data.files", "successors", "contexts", "smoothing"),
        "from_target",
        *("generation.batch_size", "generation.prompt_tokens", "generation.new_tokens"),
    ),
}
