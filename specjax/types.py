"""The types of specjax: every array that crosses a module boundary, with its shape.

Shape legend
    B  rows of the batch            T  tokens of one block fed to a model
    V  vocabulary                   N  candidate nodes of a draft (a chain has N = gamma)
    E  hidden width                 M  longest accepted path (a chain has M = N)
    S  slots of a buffer            R  rounds

Invariants (every file may rely on them; tests/test_decode.py and tests/test_step.py check them)
    1. ``cache.length == length - 1``: the newest committed token is *pending*, not yet cached.
       Row 0 of the target's probs belongs to it.
    2. ``LM.apply`` reads the cache and changes nothing. ``LM.commit`` writes the accepted tokens,
       and only these.
    3. Every row advances by its own count.
    4. A draft token is drawn from exactly the distribution stored in ``Draft.probs`` (zeros when
       every row is greedy: rules then compare ids only).
    5. Randomness comes from ``RowKeys``: one key per row, folded with the round (or position) and
       the purpose.
    6. Probabilities and acceptance are float32 (float64 when given float64), independent of the
       model's dtype.
    7. End-of-sequence and length limits cut after the verdict and never change it. A finished row
       is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax import struct

from specjax.rng import RowKeys
from specjax.sampling import Sampling

Array = jax.Array
Params = Any  # a pytree of arrays; for models a plain nested dict


class Cache(Protocol):
    """What a model remembers between blocks: any pytree with these two members."""

    @property
    def length(self) -> Array: ...  # i32[B] tokens committed, per row

    def replace(self, **changes: Any) -> Any: ...


class Output(NamedTuple):
    """The result of one forward pass. The compiler removes the parts that are not used."""

    logits: Array  # f32[B,T,V]
    hidden: Array  # [B,T,E] the vector that the LM head multiplies
    taps: tuple[Array, ...] = ()  # [B,T,E] each: hidden states after the requested layers


class LM(NamedTuple):
    """A language model as pure functions: a target, or the inner model of a drafter.

    ``init_cache(batch, slots)`` gives an empty cache; ``slots`` may be 0. ``apply(params, tokens
    i32[B,T], cache, layout=None, block=None) -> (Output, block)`` scores T tokens after the
    committed text and changes nothing. It returns what the model computed for them (keys and
    values), the *block*: a pytree of arrays [B,T,...]. ``layout`` is a ``tree.Layout`` (None: a
    chain). The argument ``block`` has the tokens of the same block that earlier calls were fed, so
    a drafter can grow a tree level by level (``tree.join``, ``tree.put``). ``commit(cache, block,
    count i32[B], path i32[B,M] | None) -> cache`` appends the tokens at ``path[:count]`` of the
    block (None: 0, 1, 2, ...) to the committed text.

    ``embed(params, tokens[...]) -> [...,E]`` and ``unembed(params, hidden[...,E]) -> f32[...,V]``
    are the first and the last map of the model. Heads that share them, or start as copies of
    them, need both.
    """

    init_cache: Callable[[int, int], Any]
    apply: Callable[..., tuple[Output, Any]]
    commit: Callable[..., Any]
    vocab_size: int
    max_positions: int | None = None  # None: unbounded
    vocabulary: str | None = None  # fingerprint of the tokenizer's vocabulary; None: not available
    name: str = "lm"
    width: int | None = None  # E
    embed: Callable[[Params, Array], Array] | None = None
    unembed: Callable[[Params, Array], Array] | None = None


class Draft(struct.PyTreeNode):
    """N candidate nodes in topological order; siblings in the order in which they were drawn."""

    tokens: Array  # i32[B,N]
    # bool[B,N] False: the node does not exist, nor does any node below it. Its token is not read.
    valid: Array
    # i32[B,N], -1 = child of the pending token; None = the chain 0-1-2-...
    parents: Array | None = None
    # f32[B,N,V] the distribution that each node was actually drawn from, given its prefix and the
    # siblings before it (drawn without replacement: their tokens have probability 0);
    # None = deterministic.
    probs: Array | None = None
    # bool[B] whether the drafter's own logits were finite; None = the drafter computes no logits
    finite: Array | None = None
    # i32[B] the first nodes that are fed even if invalid: ``update`` reads the output; None = 0
    fed: Array | None = None
    # M, the length of the longest possible path; None = N
    depth: int | None = struct.field(pytree_node=False, default=None)

    @property
    def longest(self) -> int:
        """M, static: the largest number of draft tokens that can be accepted."""
        return self.tokens.shape[1] if self.depth is None else self.depth


class Verdict(struct.PyTreeNode):
    """The decision of a rule: the accepted path, then one token of the target."""

    tokens: Array  # i32[B,M+1] padded with -1
    count: Array  # i32[B] tokens emitted, 1..M+1; 0 for a finished row
    path: Array  # i32[B,M] ids of the accepted nodes, padded with -1


class Context(struct.PyTreeNode):
    """What a drafter may read when it proposes: text, sampling settings, the target's cache.

    A drafter made of the target's own layers (early exit, layer skipping) needs no other cache.
    """

    tokens: Array  # i32[B,S] prompt and output; entries beyond ``length`` have no meaning
    length: Array  # i32[B]
    sampling: Sampling
    cache: Any = None  # the target's, without the pending token; None: there is no target
    # [B,E] each: ``Output.taps`` at the token before the pending one (zeros if there is none)
    taps: tuple[Array, ...] = ()

    @property
    def pending(self) -> Array:
        """i32[B] the newest committed token of each row."""
        return jax.vmap(lambda row, n: row[n - 1])(self.tokens, self.length)


class Batch(struct.PyTreeNode):
    """Text to train on. Position t of the T that a model is fed has the label ``tokens[:, t + 1]``.

    Padding and prompts are not labels. Attention stays inside one document.
    """

    tokens: Array  # i32[B,T+1]
    labelled: Array | None = None  # bool[B,T+1] tokens that may be a label; None = all
    segments: Array | None = None  # i32[B,T+1] number of the document; None = one per row


class ModelParams(NamedTuple):
    """Parameters of the pair. A drafter gets both: heads and early exits read the target's."""

    target: Params
    draft: Params = {}  # noqa: RUF012  (an empty pytree; never mutated)


# How the siblings of a draft were made. A rule relies on it.
CHAIN = "chain"  # no siblings: at most one child each, drawn from ``probs`` or deterministic
IID = "iid"  # drawn independently from one distribution
INDEPENDENT = "independent"  # each from its own distribution (several drafters)
WITHOUT_REPLACEMENT = "without_replacement"  # without the siblings before it
DETERMINISTIC = "deterministic"  # a function of the committed text; ``probs`` is None
SIBLINGS = (CHAIN, IID, INDEPENDENT, WITHOUT_REPLACEMENT, DETERMINISTIC)


class Training(NamedTuple):
    """Functions of a drafter with trained parameters: loss, initial parameters, forecasts."""

    # (params, target_params, Batch, key) -> (f32[], metrics). ``params`` are the drafter's own;
    # gradients also reach ``target_params`` where the caller differentiates them (Medusa-2).
    # None: trained by ``specjax.train.objectives``.
    loss: Callable[..., Any] | None = None
    # (target_params, key) -> new parameters to start training with.
    start: Callable[[Params, Array], Params] | None = None
    # (params, Batch, Sampling) -> f32[B,T,M]: for text that the target wrote, the probability that
    # a draft made with tokens[:, t] pending has its token at depth d accepted, given that those
    # before it were: by the chain rule, or of a deterministic tree by any lossless rule. The mean
    # path length is the block efficiency, without decoding.
    foresee: Callable[..., Array] | None = None
    # (params, Batch) -> i32[B,T,K]: at depth d of K, how many tokens the drafter prefers to the
    # text's token (-1: it could not draft there). Measures the accuracies for a tree search.
    ranks: Callable[..., Array] | None = None
    # (key, value) pairs that config.json holds about the parameters, in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()


class Drafter(NamedTuple):
    """A method that proposes tokens: functions of a round, static facts, optional training part.

    A method is a function ``make(target, **keys) -> Drafter``. ``params`` is always the pair
    ``ModelParams``.

    - ``init_params(key) -> params``: {} for a drafter without parameters.
    - ``init(params, context, target_out, slots) -> state``: after the target has read the prompt.
      ``target_out`` covers every prompt token except the pending one; its ``logits`` are empty.
    - ``propose(params, keys, context, state) -> (Draft, state)``.
    - ``update(params, state, draft, verdict, target_out) -> state``: after the verdict. A row with
      verdict count 0 keeps its state.
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
    # Whether all nodes of every draft are valid. Otherwise a round may verify only the first n
    # (``step.widths``): ``update`` then gets a draft of n nodes and outputs of n + 1 tokens.
    whole: bool = False
    greedy_only: bool = False  # meant for temperature 0 only (its lossless class holds at any)
    features: bool = False  # whether it reads ``target_out``; a recorded target has none
    history: bool = False  # whether drafts depend on earlier rounds too, not on the text alone
    # Whether its state stays valid across rounds of another drafter (verdicts then count 0).
    gaps: bool = True
    # (params, context) -> f32[B,S,V]: the probs of a draft token after each prefix tokens[:, :i+1],
    # the same in every round. For the overlap with the target and the check of sampled outputs.
    probs: Callable[..., Array] | None = None
    # (params, final state, prompt lengths) -> its parameters with what these rows added. On the
    # host, between batches, only on request (``warm``): it carries text from one row to others.
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

    ``sampled(keys, draft, target_probs f32[B,N+1,V]) -> Verdict`` decides from probabilities.
    ``greedy(draft, logits f32[B,N+1,V]) -> Verdict`` decides for rows of temperature 0, so that
    greedy decoding computes no softmax (and a lossy rule can see near-ties).
    Drafts of 0 nodes (N = 0) occur. ``specjax.accept.verdict`` has what a rule needs.
    """

    sampled: AcceptFn
    greedy: Callable[[Draft, Array], Verdict]
    name: str
    # L1: output law identical to the target's; L2: identical under greedy decoding only; L3: lossy.
    lossless_class: str
    # The kinds of drafts that the rule takes. For any other its lossless class does not hold.
    siblings: tuple[str, ...] = (CHAIN,)
    # Whether a decision depends on the probs at all nodes, not only along the accepted path.
    whole_tree: bool = False


class DecodeState(struct.PyTreeNode):
    """Everything that a decode loop carries."""

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
    taps: tuple[Array, ...] = ()  # [B,E] each: see ``Context``
    made_for: str = struct.field(pytree_node=False, default="")  # tag of the drafter


class StepInfo(NamedTuple):
    """What happened in one round (returned, never carried)."""

    draft: Draft
    tokens: Array  # i32[B,M+1] emitted, padded with -1
    emitted: Array  # i32[B] tokens committed, after cutting at end-of-sequence and length limit
    accepted: Array  # i32[B] draft tokens that the rule accepted, before cutting
    # i32[B] proposed nodes that could be tested (all nodes before them on their path are valid)
    drafted: Array
    # i32[B] depths at which a draft token was tested: accepted, and one more unless the path ended
    tested: Array
    # i32[B] tokens that the target was fed, with the pending one; 0 for a finished row
    verified: Array


class Records(NamedTuple):
    """The counts of ``StepInfo`` for every round of a compiled loop; zeros for unused rounds."""

    emitted: Array  # i32[R,B]
    accepted: Array  # i32[R,B]
    drafted: Array  # i32[R,B]
    tested: Array  # i32[R,B]
    verified: Array  # i32[R,B]
