"""The types of specjax: every array that crosses a boundary, with its shape.

Shape legend
    B  rows of the batch            T  tokens of one block fed to a model
    V  vocabulary                   N  candidate nodes of a draft (a chain has N = gamma)
    E  hidden width                 M  longest accepted path (a chain has M = N)
    S  slots of a buffer            R  rounds

Invariants (every file may rely on them; tests/test_decode.py checks them)
    1. ``cache.length == length - 1``: the newest committed token is *pending*, not yet cached. Row 0 of the target's
       probs belongs to it.
    2. ``LM.apply`` writes T tokens at slots ``length + i`` and does not advance. ``LM.commit`` advances. The mask hides
       everything beyond ``length``, so a rejection costs nothing.
    3. Every row advances by its own count.
    4. A draft token is drawn from exactly the distribution stored in ``Draft.probs`` (zeros when every row is greedy: rules
       then compare ids only).
    5. Randomness comes from ``RowKeys``: one key a row, folded with the round (or position) and the purpose.
    6. Probabilities and acceptance are float32 (float64 when given float64), whatever the model's dtype.
    7. End-of-sequence and length limits cut after the verdict and never change it. A finished row is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax import struct

from specjax.rng import RowKeys
from specjax.sampling import Sampling

Array = jax.Array
Params = Any  # a pytree of arrays, for models a plain nested dict


class Cache(Protocol):
    """What a model remembers between blocks. Anything goes, as long as it is a pytree with these two."""

    @property
    def length(self) -> Array: ...  # i32[B] tokens committed, per row

    def replace(self, **changes: Any) -> Any: ...


class Output(NamedTuple):
    """What one forward pass gives. Parts that nobody reads are removed by the compiler."""

    logits: Array  # f32[B,T,V]
    hidden: Array  # [B,T,E] the vector that the LM head multiplies
    taps: tuple[Array, ...] = ()  # [B,T,E] each: hidden states after the layers asked for


class LM(NamedTuple):
    """A language model as pure functions: a target, or the inner model of a drafter.

    ``init_cache(batch, slots)`` gives an empty cache; ``apply(params, tokens[B,T], cache, parents[B,P] | None)`` scores a
    block (``None`` means a chain, otherwise -1 marks a root). With P > T the block is P long and ``tokens`` are its last T:
    earlier calls have written the others, which lets a drafter grow a tree level by level. ``commit(cache, count[B],
    path[B,M] | None)`` keeps the first ``count`` tokens of the block (``None``), or its root and then the nodes ``path``
    (ids counted after the root).

    ``embed(params, tokens[...]) -> [...,E]`` and ``unembed(params, hidden[...,E]) -> f32[...,V]`` are its first and its last
    map: heads that share them, or begin as copies of them, need both.
    """

    init_cache: Callable[[int, int], Any]
    apply: Callable[..., tuple[Output, Any]]
    commit: Callable[..., Any]
    vocab_size: int
    max_positions: int | None = None  # None: unbounded
    vocabulary: str | None = None  # fingerprint of the tokenizer's map, where one is known
    name: str = "lm"
    width: int | None = None  # E
    embed: Callable[[Params, Array], Array] | None = None
    unembed: Callable[[Params, Array], Array] | None = None


class Draft(struct.PyTreeNode):
    """N candidate nodes in topological order; siblings in the order in which they were drawn."""

    tokens: Array  # i32[B,N]
    valid: Array  # bool[B,N] False: there is no such node, nor any below it (its token is never looked at)
    parents: Array | None = (
        None  # i32[B,N], -1 = child of the pending token; None = the chain 0-1-2-...
    )
    # f32[B,N,V] the distribution that each node was actually drawn from, given its prefix and the siblings before it
    # (drawn without replacement: their tokens have probability 0); None = deterministic.
    probs: Array | None = None
    finite: Array | None = (
        None  # bool[B] whether the drafter's own logits were finite; None = it has none
    )
    depth: int | None = struct.field(
        pytree_node=False, default=None
    )  # M, the longest path there can be; None = N

    @property
    def longest(self) -> int:
        """M, static: how many draft tokens can be accepted at the most."""
        return self.tokens.shape[1] if self.depth is None else self.depth


class Verdict(struct.PyTreeNode):
    """What a rule decided: the accepted path, then one token of the target."""

    tokens: Array  # i32[B,M+1] padded with -1
    count: Array  # i32[B] tokens emitted, 1..M+1; 0 for a finished row
    path: Array  # i32[B,M] ids of the accepted nodes, padded with -1


class Context(struct.PyTreeNode):
    """What a drafter may look at when it proposes: the committed text, and how it is sampled."""

    tokens: Array  # i32[B,S] prompt and output; what lies beyond ``length`` means nothing
    length: Array  # i32[B]
    sampling: Sampling

    @property
    def pending(self) -> Array:
        """i32[B] the newest committed token of each row."""
        return jax.vmap(lambda row, n: row[n - 1])(self.tokens, self.length)


class Batch(struct.PyTreeNode):
    """Text to train on. Position t of the T that a model is fed has the label ``tokens[:, t + 1]``."""

    tokens: Array  # i32[B,T+1]
    labelled: Array | None = (
        None  # bool[B,T+1] tokens that may be a label (padding and prompts may not); None = all
    )
    segments: Array | None = (
        None  # i32[B,T+1] number of the document; attention stays inside it; None = one a row
    )


class ModelParams(NamedTuple):
    """Parameters of the pair. A drafter is handed both: heads and early exits read the target's."""

    target: Params
    draft: Params = {}  # noqa: RUF012  (an empty pytree; never mutated)


# How the siblings of a draft were made. A rule relies on it.
CHAIN = "chain"  # there are none: every node has at most one child, drawn from ``probs`` or deterministic
IID = "iid"  # drawn independently from one distribution
INDEPENDENT = (
    "independent"  # drawn independently, each from its own distribution (several drafters)
)
WITHOUT_REPLACEMENT = (
    "without_replacement"  # each from the parent's probs without the siblings before it
)
DETERMINISTIC = "deterministic"  # a function of the committed text; ``probs`` is None
SIBLINGS = (CHAIN, IID, INDEPENDENT, WITHOUT_REPLACEMENT, DETERMINISTIC)


class Training(NamedTuple):
    """What a drafter with trained parameters adds: its loss, how its parameters start, and forecasts from text."""

    # (params, target_params, Batch, key) -> (f32[], metrics). ``params`` are the drafter's own; gradients also reach
    # ``target_params`` where the caller differentiates them (Medusa-2). None: trained by ``specjax.train.objectives``.
    loss: Callable[..., Any] | None = None
    # (target_params, key) -> new parameters to start training with.
    start: Callable[[Params, Array], Params] | None = None
    # (params, Batch, Sampling) -> f32[B,T,M]: for text that the target wrote, the probability that a draft made with
    # tokens[:, t] pending has its token at depth d accepted, given that those before it were: by the chain rule, or of a
    # deterministic tree by any lossless rule. The mean path length is the block efficiency, without decoding.
    foresee: Callable[..., Array] | None = None
    # (params, Batch) -> i32[B,T,K]: at depth d of K, how many tokens the drafter prefers to the text's token (-1: it could
    # not draft there). Measures the accuracies that a tree is searched with.
    ranks: Callable[..., Array] | None = None
    # What config.json must say about the parameters besides their shapes, as (key, value).
    facts: tuple[tuple[str, Any], ...] = ()


class Drafter(NamedTuple):
    """A method that proposes tokens: the functions of a round, static facts, and an optional training part.

    A method is a function ``make(target, **keys) -> Drafter``. ``params`` is always the pair ``ModelParams``.

    - ``init_params(key) -> params``: {} if there are none.
    - ``init(params, context, target_out, slots) -> state``: after the target has read the prompt. ``target_out`` covers every
      prompt token but the pending one; its ``logits`` are empty.
    - ``propose(params, keys, context, state) -> (Draft, state)``.
    - ``update(params, state, draft, verdict, target_out) -> state``: after the verdict. A row whose verdict counts 0 keeps its
      state.
    """

    init_params: Callable[..., Any]
    init: Callable[..., Any]
    propose: Callable[..., tuple[Draft, Any]]
    update: Callable[..., Any]
    nodes: int  # N, static: the number of slots of a draft
    name: str = "drafter"
    siblings: str = CHAIN  # one of SIBLINGS
    depth: int | None = None  # longest path of a draft, static; None = nodes
    # Whether a draft costs the same for every text. If not, no speed-up is predicted.
    constant_cost: bool = True
    # Whether the method is meant for temperature 0 only (its lossless class holds at any temperature).
    greedy_only: bool = False
    # Whether it reads ``target_out``. A recorded target has none.
    features: bool = False
    # Whether its state stays valid across rounds in which another drafter proposed (its own verdicts then count 0).
    gaps: bool = True
    # (params, context) -> f32[B,S,V]: the probs of a draft token after each prefix tokens[:, :i+1], in whatever round it is
    # drafted. For measurements: the overlap with the target, and the check of sampled outputs.
    probs: Callable[..., Array] | None = None
    # (params, final state, prompt lengths) -> its parameters with what these rows added. Runs on the host, between batches,
    # and only on request (``warm``): it carries text from one row to others.
    learn: Callable[[ModelParams, DecodeState, Sequence[int]], Params] | None = None
    training: Training | None = None

    @property
    def tag(self) -> str:
        """Identifies the drafter that a state was prefilled for."""
        return f"{self.name} with {self.nodes} nodes"

    @property
    def longest(self) -> int:
        """M: the largest number of draft tokens that can be accepted in a round."""
        return self.nodes if self.depth is None else self.depth


AcceptFn = Callable[[RowKeys, Draft, Array], Verdict]


class Accept(NamedTuple):
    """An acceptance rule.

    ``sampled(keys, draft, target_probs f32[B,N+1,V]) -> Verdict`` decides from probabilities; ``greedy(draft, logits
    f32[B,N+1,V]) -> Verdict`` decides for rows of temperature 0, so that greedy decoding computes no softmax (and a lossy rule
    can see near-ties). ``siblings`` are the kinds of drafts that the rule takes: for any other its class would not hold.
    """

    sampled: AcceptFn
    greedy: Callable[[Draft, Array], Verdict]
    name: str
    lossless_class: (
        str  # L1: output law identical; L2: identical under greedy decoding only; L3: lossy
    )
    siblings: tuple[str, ...] = (CHAIN,)
    whole: bool = False  # whether a decision depends on the probs at all nodes, not only along the accepted path


class DecodeState(struct.PyTreeNode):
    """Everything a decode loop carries."""

    tokens: Array  # i32[B,S] prompt, then output; -1 beyond ``length``
    length: Array  # i32[B]
    limit: Array  # i32[B] the row stops at this length
    done: Array  # bool[B]
    failed: Array  # i32[B] the round in which logits were not finite, or -1
    cache: Any  # the target's
    draft: Any  # the drafter's state
    keys: Array  # key[B]
    round: Array  # i32[]
    sampling: Sampling
    made_for: str = struct.field(pytree_node=False, default="")  # which drafter sized its buffers


class StepInfo(NamedTuple):
    """What one round did (returned, never carried)."""

    draft: Draft
    tokens: Array  # i32[B,M+1] emitted, padded with -1
    emitted: Array  # i32[B] tokens committed, after cutting at end-of-sequence and length limit
    accepted: Array  # i32[B] draft tokens the rule accepted, before cutting
    drafted: Array  # i32[B] nodes proposed that could be tested (those with no invalid node before them on their path)
    tested: Array  # i32[B] depths at which a draft token was tested: accepted, and one more unless the path ended there


class Records(NamedTuple):
    """The counts of ``StepInfo`` for every round of a compiled loop; rows of zeros where nothing ran."""

    emitted: Array  # i32[R,B]
    accepted: Array  # i32[R,B]
    drafted: Array  # i32[R,B]
    tested: Array  # i32[R,B]
