"""A method that proposes tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import struct

from specjax.bound import key
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.sampling import Sampling
from specjax.types.draft import CHAIN, Draft
from specjax.types.model import LM, Array, LowerLayers, ModelParams, Params
from specjax.types.state import DecodeState


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


class Drafter(NamedTuple):
    """A method that proposes tokens: functions of a round, static facts, optional training part.

    A method is a function ``make(target, **keys) -> Drafter``. ``params`` is always the pair
    ``ModelParams``.

    - ``init_params(key) -> params``: {} for a drafter without parameters.
    - ``init(params, context, target_out, slots) -> state``: after the target has read the prompt.
      ``target_out`` covers every prompt token except the pending one; its ``logits`` are empty.
    - ``propose(params, keys, context, state) -> (Draft, state)``.
    - ``update(params, state, draft, verdict, target_out) -> state``: after the verdict. A row with
      verdict count 0 keeps its state. Without ``features``, ``target_out`` covers no token.
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
    # Whether all nodes of every draft are valid or fed. Otherwise a round may verify the first n
    # (``tree.widths``): with ``features``, ``update`` gets a draft of n nodes and outputs of n + 1
    # tokens.
    whole: bool = False
    # Whether a controller ends its drafts: short drafts in all rows are then common.
    adaptive: bool = False
    # How many draft models its trees are of: from 2 on, nodes with equal paths are scored once
    # (``tree.duplicates``). Not together with ``lower`` or ``Draft.fed``.
    merges: int = 1
    greedy_only: bool = False  # meant for temperature 0 only (its lossless class holds at any)
    features: bool = False  # whether ``update`` reads ``target_out``; a recorded target has none
    # Layers of the target whose hidden states it reads, in ``Output.taps`` and ``Context.taps``;
    # (): those that the given target has.
    taps: tuple[int, ...] = ()
    history: bool = False  # whether drafts depend on earlier rounds too, not on the text alone
    # Whether its state stays valid across rounds of another drafter (verdicts then count 0).
    gaps: bool = True
    # Rounds without drafts, known before they begin. None: the drafter always proposes.
    rest: Rest | None = None
    # (params, context) -> f32[B,S,V]: the probs of a draft token after each prefix tokens[:, :i+1],
    # the same in every round. For the overlap with the target and the check of sampled outputs.
    probs: Callable[..., Array] | None = None
    # (params, final state, prompt lengths) -> its parameters with what these rows added. On the
    # host, between batches, only on request (``warm``): it carries text from one row to others.
    learn: Callable[[ModelParams, DecodeState, Sequence[int]], Params] | None = None
    # (params) -> [L,E]: embeddings of the ids from the vocabulary's size on, which some invalid
    # nodes of its drafts have (see ``Draft.fed``). None: its drafts have no such ids.
    rows: Callable[[ModelParams], Array] | None = None
    # (state after ``propose``) -> what drafting has computed of the target's pass over the pending
    # token and the first nodes; for nodes that are not valid it may be anything finite. The pass
    # goes on from there. Not together with ``rows``. None: there is nothing to go on from.
    lower: Callable[[Any], LowerLayers] | None = None
    # (rows of a batch) -> None. Raises UserError for a number of rows that the drafter is not made
    # for: a controller whose costs were measured with other numbers. On a mesh the rows are those
    # of one device. None: any number.
    check_rows: Callable[[int], None] | None = None
    training: Training | None = None

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
        if self.lower is not None:
            return target.with_lower(self.taps), (params.target, self.lower(state))
        if self.rows is None:
            return target, params.target
        if target.extended is None:
            raise UserError(
                f"{self.name} has its own input embeddings, and {target.name} takes none; take a "
                "decoder of specjax.models"
            )
        return target._replace(apply=target.extended), (params.target, self.rows(params))

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
