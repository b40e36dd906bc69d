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

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import struct

from specjax.bound import key
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.sampling import Sampling

# Language models as pure functions.


Array = jax.Array
Params = Any  # a pytree of arrays; for models a plain nested dict


class Output(NamedTuple):
    """The result of one forward pass. The compiler removes the parts that are not used."""

    logits: Array  # f32[B,T,V]
    hidden: Array  # [B,T,E] the vector that the LM head multiplies
    taps: tuple[Array, ...] = ()  # [B,T,E] each: hidden states after the requested layers


class Sublayers(NamedTuple):
    """A part of a decoder: the layers whose attention and whose feed-forward part are computed.

    A sublayer that is left out passes its input on. Embeddings, last norm and head belong to every
    part.
    """

    attention: tuple[int, ...]  # ascending
    mlp: tuple[int, ...]  # ascending


class LowerLayers(struct.PyTreeNode):
    """What the first layers of a model have computed for the first P tokens of a block."""

    hidden: Array  # [B,P,E] the output of the last of these layers
    block: Any  # arrays [B,P,...]: the block of ``Inside.part`` with these layers
    count: int = struct.field(pytree_node=False)  # how many layers, from 1 to all


class Encoder(NamedTuple):
    """How a model reads a source text before it writes: the encoder of an encoder-decoder model.

    The text of such a model is the source, ``start``, and what it writes: a prompt is a source and
    the start token (and perhaps a beginning of the output), and drafters see the whole text. No
    source contains the start token, so the first one in a text ends its source. Every token of the
    source counts in lengths and in positions: ``cache.length == length - 1``, as for any model.
    """

    start: int
    # (params, tokens i32[B,L], count i32[B], cache) -> (Output, cache): reads the first count[b]
    # tokens, a source, into an empty cache, whose length is then ``count``. ``Output.hidden`` is
    # the encoder's output; logits and taps are empty.
    read: Callable[..., tuple[Output, Any]]
    # The model's ``T5Config``, for drafters that begin with its encoder. None: it is no T5 model.
    config: Any = None


class Inside(NamedTuple):
    """What few drafters ask of a model, mostly about its layers; None: it cannot give it."""

    # The model of these sublayers: it has the parameters and reads the cache of the whole model,
    # taps have the numbers of its layers, and blocks have the layers ``Sublayers.attention`` alone;
    # they are not committed. Equal arguments give the same functions.
    part: Callable[[Sublayers], LM] | None = None
    # (params, tokens i32[B,T], cache) -> for each layer the ``cache.Queries`` of T tokens after the
    # committed text. None: it has no queries.
    queries: Callable[..., tuple[Any, ...]] | None = None
    # (params, output of a layer [...,E]) -> [...,E]: what the LM head would multiply if this layer
    # were the last one. None: the model has no such norm.
    last_norm: Callable[[Params, Array], Array] | None = None
    # (params, hidden [...,E], ids i32[n]) -> f32[...,n]: ``unembed`` of these tokens alone. None:
    # the model computes all logits.
    some_logits: Callable[..., Array] | None = None
    # ``apply`` with more tokens than the vocabulary: its first argument is (params, rows [L,E]),
    # and the ids from ``vocab_size`` on have these rows as embeddings. Equal models have the same
    # function. None: the model takes no embeddings.
    extended: Callable[..., tuple[Output, Any]] | None = None
    # (layer numbers) -> ``apply`` that goes on from what the first layers have computed: its first
    # argument is (params, ``LowerLayers``), and it takes no ``block``. The first layers are
    # computed for the other tokens alone. The taps are those of ``tapping``, or the model's own for
    # no numbers. None: it cannot go on from a layer.
    above: Callable[[tuple[int, ...]], Callable[..., tuple[Output, Any]]] | None = None
    # Its ``TransformerConfig``, for drafters that have further layers of its kind. None: it is no
    # decoder of ``specjax.models``.
    decoder: Any = None


# From an ``apply`` to another one.
ApplyChange = Callable[[Callable[..., Any]], Callable[..., Any]]


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
    layers: int | None = None  # how many layers can be tapped, numbered from 0
    # (layer numbers) -> ``apply`` with these ``Output.taps``; equal numbers give the same function.
    # None: the model has no hidden states to tap.
    tapping: Callable[[tuple[int, ...]], Callable[..., tuple[Output, Any]]] | None = None
    # The smallest sliding window of a layer; None: all layers read the whole text.
    window: int | None = None
    inside: Inside = Inside()
    # Of a model that reads its prompt with an encoder. None: it continues the prompt.
    encoder: Encoder | None = None
    # ``models.token_bytes.TokenBytes``: the bytes of each token, for pairs with two vocabularies.
    # None: not available.
    token_bytes: Any = None
    # Whether ``apply`` takes no ``layout`` but those of chains (``tree.Layout.chain``).
    chains_only: bool = False

    def prompt(self, ids: Sequence[int], most: int | None = None) -> list[int]:
        """The prompt of a text: of an encoder-decoder model the source and its start token.

        ``most``: how many tokens the prompt may have, the first ones of the text; None: any number.
        """
        if self.encoder is None or self.encoder.start in (kept := list(ids[:most])):
            return list(ids[:most])
        # Of a source that is too long, the last token is dropped.
        return [*kept[: None if most is None else most - 1], self.encoder.start]

    def continued(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt that the output continues; with an encoder those after the start
        token, a given beginning of the output."""
        ids = list(prompt)
        if self.encoder is None:
            return ids
        return ids[ids.index(self.encoder.start) + 1 :] if self.encoder.start in ids else []

    def with_taps(self, layers: tuple[int, ...]) -> LM:
        """The model with the output hidden states of ``layers`` in ``Output.taps``.

        Raises UserError if it has none, or not these.
        """
        if self.tapping is None:
            raise UserError(
                f"hidden states of layers {list(layers)} of {self.name} are needed, and it gives "
                "none; take a model with hidden states"
            )
        # ``extended`` has the taps of this model, and not these.
        return self._replace(apply=self.tapping(layers), inside=self.inside._replace(extended=None))

    def with_part(self, sublayers: Sublayers) -> LM:
        """The model of these sublayers (``Inside.part``).

        Raises UserError if it has no parts, or not these.
        """
        if self.inside.part is None:
            raise UserError(
                f"a draft with a part of the layers of {self.name} is asked for, and it does not "
                "give its layers; take a decoder of specjax.models"
            )
        return self.inside.part(sublayers)

    def with_lower(self, layers: tuple[int, ...] = ()) -> LM:
        """The model that goes on from ``LowerLayers`` (``Inside.above``), with these taps.

        Raises UserError if it cannot.
        """
        if self.inside.above is None:
            raise UserError(
                f"a pass that goes on from the first layers of {self.name} is asked for, and it "
                "cannot begin above a layer; take a decoder of specjax.models"
            )
        return self._replace(apply=self.inside.above(layers))

    def changed(self, change: ApplyChange, of_pair: ApplyChange | None = None) -> LM:
        """The model with ``change(apply)`` in the place of each function that is an ``apply``.

        ``of_pair``: the same for those that take a pair with the parameters; None: ``change``. Its
        parts are not changed.
        """
        of_pair = change if of_pair is None else of_pair

        def each(make: Callable | None, change: ApplyChange) -> Callable | None:
            # Equal numbers give the same function.
            return make and functools.cache(lambda layers: change(make(layers)))

        extended, above = self.inside.extended, each(self.inside.above, of_pair)
        return self._replace(
            apply=change(self.apply),
            tapping=each(self.tapping, change),
            inside=self.inside._replace(extended=extended and of_pair(extended), above=above),
        )

    def no_output(self, batch: int) -> Output:
        """The output for no tokens."""
        sizes = self.vocab_size, self.width or 0
        logits, hidden = (jnp.zeros((batch, 0, size)) for size in sizes)
        return Output(logits, hidden)


class ModelParams(NamedTuple):
    """Parameters of the pair. A drafter gets both: heads and early exits read the target's."""

    target: Params
    draft: Params = {}  # noqa: RUF012  (an empty pytree; never mutated)


# What a drafter proposes, and what a rule decides.


# How the siblings of a draft were made. A rule relies on it.
CHAIN = "chain"  # no siblings: at most one child each, drawn from ``probs`` or deterministic
IID = "iid"  # drawn independently from one distribution
INDEPENDENT = "independent"  # each from its own distribution (several drafters)
WITHOUT_REPLACEMENT = "without_replacement"  # without the siblings before it
DETERMINISTIC = "deterministic"  # a function of the committed text; ``probs`` is None
COUPLED = "coupled"  # with the noise that the target draws with at the same positions
SIBLINGS = (CHAIN, IID, INDEPENDENT, WITHOUT_REPLACEMENT, DETERMINISTIC, COUPLED)
UNCOUPLED = SIBLINGS[:-1]  # their tokens tell nothing about the target's noise


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


# L1: output law identical to the target's; L2: identical under greedy decoding only; L3: lossy.
CLASSES = ("L1", "L2", "L3")


def is_lossless(lossless_class: str, sampled: bool) -> bool:
    """Whether a rule of this class leaves the law of greedy, or of sampled, texts unchanged."""
    return lossless_class == "L1" or (lossless_class == "L2" and not sampled)


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
    lossless_class: str  # one of CLASSES
    # The kinds of drafts that the rule takes. For any other its lossless class does not hold.
    siblings: tuple[str, ...] = (CHAIN,)
    # Whether a decision depends on the probs at all nodes, not only along the accepted path.
    whole_tree: bool = False
    # The same rule with a value for each row, f32[B]: ``Sampling.lenience``. None: it takes none.
    of_rows: Callable[[Array], Accept] | None = None
    # Of a lossy rule: the law f[...,V] of the token that a sampled row emits at a place where one
    # draft token is tested; from the target's probs f[...,V] there, those that the token was drawn
    # from (one-hot: it was given), and the depth i32[...] of the place (1: the round's first).
    # None: not known. ``testing.check_accept`` enumerates it.
    law: Callable[[Array, Array, Array], Array] | None = None


# Text to train on.


class Features(struct.PyTreeNode):
    """What a target computed for the T tokens of a text, stored: parts of its ``Output``."""

    hidden: Array  # [B,T,E]
    taps: tuple[Array, ...] = ()  # [B,T,E] each
    # Of the logits, f32[B,T] log-sum-exp and i32[B,T] the most probable token: a loss that reads
    # the logits of few tokens needs no others then. None: not stored.
    total: Array | None = None
    best: Array | None = None


class Batch(struct.PyTreeNode):
    """Text to train on. Position t of the T that a model is fed has the label ``tokens[:, t + 1]``.

    Padding and prompts are not labels. Attention stays inside one document.
    """

    tokens: Array  # i32[B,T+1]
    labelled: Array | None = None  # bool[B,T+1] tokens that may be a label; None = all
    segments: Array | None = None  # i32[B,T+1] number of the document; None = one per row
    # Of the first T tokens; None: a loss that needs them runs the target.
    features: Features | None = None
    # i32[B] the number of the training step, from 0, the same in every row: for a loss that changes
    # during training. None: the loss does not depend on it.
    step: Array | None = None
    # i32[B,T+1] the depth of a draft, from 0, that a label is for: a loss of several depths counts
    # it at this depth only. None: labels are for all depths.
    depths: Array | None = None
    # i32[B] the place of the token with which an encoder-decoder model begins its output: no draft
    # begins before it. None: drafts begin everywhere.
    output: Array | None = None


# What a decode loop carries, and what it returns.


# In the place of True: the log-probabilities of the distribution of which tokens are drawn.
SAMPLED = "sampled"


class DecodeState(struct.PyTreeNode):
    """Everything that a decode loop carries."""

    tokens: Array  # i32[B,S] prompt, then output; -1 beyond ``length``
    length: Array  # i32[B]
    limit: Array  # i32[B] the row stops at this length
    done: Array  # bool[B]
    # i32[B] -1: nothing failed; r >= 0: logits were not finite in round r; -2 - r: the row could go
    # on and got no token in round r. A row that failed is done.
    failed: Array
    cache: Any  # the target's
    draft: Any  # the drafter's state
    keys: Array  # key[B]
    round: Array  # i32[]
    sampling: Sampling
    taps: tuple[Array, ...] = ()  # [B,E] each: see ``Context``
    # f32[B,S] the log-probability of each token of the output; 0 elsewhere. None: not wanted.
    logprobs: Array | None = None
    # Of which distribution: False: the target's own logits, before maps and temperature. True: that
    # of which the tokens are drawn.
    sampled_logprobs: bool = struct.field(pytree_node=False, default=False)
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
    """The counts of ``StepInfo`` for every round of a compiled loop; zeros for unused rounds.

    R is the number of rounds that there is room for.
    """

    emitted: Array  # i32[R,B]
    accepted: Array  # i32[R,B]
    drafted: Array  # i32[R,B]
    tested: Array  # i32[R,B]
    verified: Array  # i32[R,B]


# A method that proposes tokens.


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
    # bool[B] the rows whose draft is not used, because they are finished; None: not known
    done: Array | None = None
    limit: Array | None = None  # i32[B] the greatest ``length`` of the text; None: not known

    @property
    def finished(self) -> Array:
        """bool[B]: ``done``, of no row if it is None."""
        return jnp.zeros(self.length.shape, bool) if self.done is None else self.done

    @property
    def pending(self) -> Array:
        """i32[B] the newest committed token of each row."""
        return jax.vmap(lambda row, n: row[n - 1])(self.tokens, self.length)


class Training(NamedTuple):
    """Functions of a drafter with trained parameters: loss, initial parameters, forecasts."""

    # (params, target_params, Batch, key) -> (f32[], metrics). ``params`` are the drafter's own;
    # gradients also reach ``target_params`` where the caller differentiates them (Medusa-2).
    # None: there is none, or a ``model`` is trained.
    loss: Callable[..., Any] | None = None
    # The language model that the parameters are of, if its drafts follow its own distribution:
    # ``specjax.train.objectives.distill_loss`` trains it.
    model: LM | None = None
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
    # Whether the loss runs layers of the target on the rows: stored features are not enough.
    reads_tokens: bool = False


class Lasting(NamedTuple):
    """How a drafter's state changes over many rounds in which all rows rest.

    The drafter then needs neither ``propose`` nor ``update`` in these rounds.
    """

    # (state, live bool[B]) -> i32[B]: of the next rounds, so many are sure to be rests of the row,
    # as long as the same rows are live (not finished); at least 1 in a row that rests.
    rounds: Callable[[Any, Array], Array]
    # (state, i32[B]) -> state: after so many of these rounds in each row; 0 in a finished row.
    after: Callable[[Any, Array], Any]


class Rest(NamedTuple):
    """Rounds without drafts that are known before they begin.

    Where all rows rest, the decode loop does not call ``Drafter.propose``, and the target reads the
    pending tokens alone: the round costs what plain decoding costs. So it is not for drafters whose
    ``update`` reads the target's output at nodes of drafts (``Draft.fed``).
    """

    # (state) -> bool[B]: the rows whose next draft will be empty.
    rows: Callable[[Any], Array]
    # (params, RowKeys, context, state) -> state: in the place of ``propose`` in such a round.
    idle: Callable[[ModelParams, RowKeys, Context, Any], Any]
    # The same for many rounds at once; None: the state changes in every round.
    lasting: Lasting | None = None


# What a drafter learns from the rows of a batch: (params, final ``DecodeState``, lengths of the
# prompts) -> its parameters with what these rows added. On the host, between batches, only on
# request (``warm``): it carries text from one row to others.
Learn = Callable[[ModelParams, DecodeState, Sequence[int]], Params]
# (params) -> [L,E]: the embeddings of the ids from the vocabulary's size on, which some invalid
# nodes have; see ``Draft.fed``.
InputRows = Callable[[ModelParams], Array]
# (the drafter's state after ``propose``) -> what drafting has computed of the target's pass over
# the pending token and the first nodes. For nodes that are not valid it may be anything finite.
Lower = Callable[[Any], LowerLayers]
# (rows of a batch; on a mesh those of one device) -> None. Raises UserError for a number that the
# drafter is not made for, as for a controller whose costs were measured with other numbers.
CheckRows = Callable[[int], None]


class Rare(NamedTuple):
    """What few drafters have."""

    # None: its drafts have no ids beyond the vocabulary.
    rows: InputRows | None = None
    # Not together with ``rows``. None: there is nothing to go on from.
    lower: Lower | None = None
    # How many draft models its trees are of: from 2 on, nodes with equal paths are scored once
    # (``tree.duplicates``). Not together with ``lower`` or ``Draft.fed``.
    merges: int = 1
    # Rounds without drafts, known before they begin. None: the drafter always proposes.
    rest: Rest | None = None
    learn: Learn | None = None  # None: it learns nothing
    check_rows: CheckRows | None = None  # None: it takes any number
    # The lengths that the longest draft of a round usually has, the largest among them; read where
    # every node of a draft is a level (``tree.widths``). (): not known.
    lengths: tuple[int, ...] = ()
    # The numbers of nodes that the largest tree of a round usually has, the largest among them.
    sizes: tuple[int, ...] = ()
    verdicts: bool = False  # whether its controller chooses by earlier verdicts


# Without leaves, so it can be part of a pytree. The dataclass has a hash, unlike Mapping.
@jax.tree_util.register_static  # pyright: ignore[reportArgumentType]
@dataclasses.dataclass(frozen=True)
class Unreadable(Mapping):
    """Takes the place of weights or a cache that a drafter must not read.

    Every access raises UserError with the message.
    """

    message: str

    def _refuse(self, *_: Any) -> NoReturn:
        raise UserError(self.message)

    __getitem__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        # Python and JAX ask for names with underscores.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def no_params(key: Any) -> Params:
    """``Drafter.init_params`` of a drafter without parameters."""
    return {}


def no_state(params: ModelParams, context: Context, target_out: Output, slots: int) -> Any:
    """``Drafter.init`` of a drafter without a state."""
    return ()


def same_state(
    params: ModelParams, state: Any, draft: Any, verdict: Verdict, target_out: Output
) -> Any:
    """``Drafter.update`` of a drafter whose state a verdict does not change."""
    return state


class Drafter(NamedTuple):
    """A method that proposes tokens: functions of a round, static facts, optional training part.

    A method is a function ``make(target, **keys) -> Drafter``. ``params`` is always the pair
    ``ModelParams``.

    - ``propose(params, keys, context, state) -> (Draft, state)``.
    - ``init_params(key) -> params``. Default: there are none, {}.
    - ``init(params, context, target_out, slots) -> state``: after the target has read the prompt.
      ``target_out`` covers every prompt token except the pending one; its ``logits`` are empty.
      Default: there is no state.
    - ``update(params, state, draft, verdict, target_out) -> state``: after the verdict. A row with
      verdict count 0 keeps its state. Without ``features``, ``target_out`` covers no token.
      Default: the state stays.
    """

    propose: Callable[..., tuple[Draft, Any]]
    nodes: int  # N, static: the number of slots of a draft
    init_params: Callable[..., Any] = no_params
    init: Callable[..., Any] = no_state
    update: Callable[..., Any] = same_state
    name: str = "drafter"
    siblings: str = CHAIN  # one of SIBLINGS
    depth: int | None = None  # longest path of a draft, static; None = nodes
    # Whether a draft costs the same for every text. If not, no speed-up is predicted.
    constant_cost: bool = True
    # Whether all nodes of every draft are valid or fed. Otherwise a round may verify the first n
    # (``tree.widths``): with ``features``, ``update`` gets a draft of n nodes and outputs of n + 1
    # tokens.
    whole: bool = False
    # Whether a controller ends its drafts: short drafts in all rows are then common.
    adaptive: bool = False
    greedy_only: bool = False  # meant for temperature 0 only (its lossless class holds at any)
    features: bool = False  # whether ``update`` reads ``target_out``; a recorded target has none
    # Layers of the target whose hidden states it reads, in ``Output.taps`` and ``Context.taps``;
    # (): those that the given target has.
    taps: tuple[int, ...] = ()
    history: bool = False  # whether drafts depend on earlier rounds too, not on the text alone
    # Whether its state stays valid across rounds of another drafter (verdicts then count 0).
    gaps: bool = True
    # (params, context) -> f32[B,S,V]: the probs of a draft token after each prefix tokens[:, :i+1],
    # the same in every round. For the overlap with the target and the check of sampled outputs.
    probs: Callable[..., Array] | None = None
    training: Training | None = None
    rare: Rare = Rare()

    def compared(self) -> tuple:
        """What makes two drafters equal: all but ``init_params``, which no program contains."""
        return tuple(self._replace(init_params=None))

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Drafter and key(self) == key(other))

    def __ne__(self, other: object) -> bool:
        # A tuple has its own, which would compare ``init_params`` too.
        return not self == other

    def __hash__(self) -> int:
        return hash(self.compared())

    def tapped(self, target: LM) -> LM:
        """``target`` with the taps that the drafter reads. Raises UserError if it has none."""
        return target.with_taps(self.taps) if self.taps else target

    def scoring(self, target: LM, params: ModelParams, state: Any) -> tuple[LM, Any]:
        """``target`` and its parameters as they score a draft.

        It has the taps and the rows, and goes on from what drafting has computed; ``state`` is the
        drafter's after ``propose``.

        Raises UserError if the target cannot give the taps, take the rows or go on from a layer.
        """
        target = self.tapped(target)
        if self.rare.lower is not None:
            return target.with_lower(self.taps), (params.target, self.rare.lower(state))
        if self.rare.rows is None:
            return target, params.target
        if target.inside.extended is None:
            raise UserError(
                f"{self.name} has its own input embeddings, and {target.name} takes none; take a "
                "decoder of specjax.models"
            )
        own = params.target, self.rare.rows(params)
        return target._replace(apply=target.inside.extended), own

    @property
    def tag(self) -> str:
        """Identifies the drafter that a state was prefilled for."""
        shape = f"depth {self.longest}, {self.siblings}"
        taps = f", layers {list(self.taps)}" if self.taps else ""
        return f"{self.name} with {self.nodes} nodes ({shape}{taps})"

    @property
    def longest(self) -> int:
        """M: the largest number of draft tokens that can be accepted in a round."""
        return self.nodes if self.depth is None else self.depth
