"""Replay: the block efficiency of any drafter on recorded conversations, without running the model.

The recorded outputs may come from any source; they are taken to be the greedy outputs of a target.
Tokens, rounds and block efficiency are those of this target's own greedy decoding with any lossless
rule: at temperature 0 all of them accept the same tokens. In the last round the text after the end
of the recording is unknown, so no draft token is judged beyond it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from rich.table import Table
from rich.text import Text

from specjax import decode, rng, sampling, tree
from specjax.accept import check_pair
from specjax.bench import methods, metrics
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Method
from specjax.bound import Bound
from specjax.data import recordings
from specjax.data.recordings import Trace
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.token_bytes import TokenBytes
from specjax.rng import RowKeys
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    LM,
    SIBLINGS,
    Accept,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Records,
    Unreadable,
    Verdict,
)

_WITHOUT_A_MODEL = "replay takes drafters that need no more, such as prompt_lookup and draft_model"


class Position(struct.PyTreeNode):
    """The cache of a recorded target: only a length."""

    length: jax.Array  # i32[B]


@functools.cache  # equal arguments give the same object, so nothing is compiled twice
def recorded(
    vocab_size: int, vocabulary: str | None = None, token_bytes: TokenBytes | None = None
) -> LM:
    """A target that gives a recorded text; the last arguments are those of ``LM``.

    It works with every rule and every drafter. But all that a recording defines about a draft token
    is whether it is the recorded one: see ``fold``.

    Its params are i32[B,S]: one text (prompt and output) per row, -1 beyond its end. The token at a
    position depends on the position alone, so a branch that left the recording is never followed
    by a right token. Logits f32[B,T,V] are one-hot. Beyond the end of the recording they are all 0:
    ``limit`` must stop the row before.
    """

    def apply(params, tokens, cache, layout=None, block=None):
        batch, size = tokens.shape
        fed = 0 if block is None else block.shape[1]
        layout = tree.chain_layout(batch, size, fed) if layout is None else layout
        following = _at(params, cache.length[:, None] + layout.depth[:, fed:] + 1)
        return Output(jax.nn.one_hot(following, vocab_size), jnp.zeros((batch, size, 1))), tokens

    own = {"vocabulary": vocabulary, "token_bytes": token_bytes}
    return LM(_init_cache, apply, _commit, vocab_size, **own, name="recorded")


def _init_cache(batch: int, slots: int) -> Position:
    return Position(jnp.zeros((batch,), jnp.int32))


def _commit(
    cache: Position, block: jax.Array, count: jax.Array, path: jax.Array | None = None
) -> Position:
    return cache.replace(length=cache.length + count)


def _at(record: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[B,T]: the recorded tokens at ``positions`` i32[B,T], -1 beyond the end."""
    return jnp.take_along_axis(record, positions, axis=1, mode="fill", fill_value=-1)


# In a vocabulary of two tokens ------------------------------------------------------------------


OTHER, RECORDED = 0, 1


def _always_recorded(params, tokens, cache, layout=None, block=None):
    logits = jnp.broadcast_to(jax.nn.one_hot(RECORDED, 2), (*tokens.shape, 2))
    return Output(logits, jnp.zeros((*tokens.shape, 1))), tokens


# The recorded token at every position.
TWO_TOKENS = LM(_init_cache, _always_recorded, _commit, vocab_size=2, name="recorded")


def fold(drafter: Drafter, rule: Accept) -> tuple[LM, Drafter, Accept]:
    """Target, drafter and rule of a greedy replay in a vocabulary of two tokens.

    Inside the loop the recorded token of each position is called 1 and any other token 0. So a
    round costs the same at every vocabulary size, while the drafter works on the text itself.
    Rounds and counts are those of ``recorded`` with this drafter and this rule. The text of the
    loop is the token 1 at every position. ``ModelParams.draft`` is {"record": i32[B,S] as for
    ``recorded``, S at least the loop's buffer; "drafter": the drafter's own};
    ``ModelParams.target`` is empty. Draft tokens beyond the end of the recording cannot be judged:
    they are neither drafted nor tested.

    Raises:
        UserError: a drafter that reads what the target computes; a rule that does not take its
            drafts; a lossy rule, which uses target probabilities that are not recorded.
    """
    check_pair(drafter, rule)
    if drafter.features:
        raise UserError(
            f"drafter {drafter.name} reads what the target computes, and a recording has only its "
            f"tokens; {_WITHOUT_A_MODEL}"
        )
    if rule.lossless_class == "L3":
        raise UserError(
            f"the rule {rule.name} is lossy and uses the target's probabilities, which a recording "
            "does not have; replay takes lossless rules (at temperature 0 they all accept exactly "
            "the recorded tokens)"
        )
    folded = drafter._replace(
        init=Bound(_init, drafter),
        propose=Bound(_propose, drafter),
        update=Bound(_update, drafter),
        siblings=CHAIN if drafter.siblings == CHAIN else DETERMINISTIC,
        # A pass over a recording costs nothing.
        whole=True,
        probs=None,
        training=None,
        rare=drafter.rare._replace(learn=None, rest=None),
    )

    def sampled(keys: RowKeys, draft: Draft, probs: jax.Array) -> Verdict:
        return rule.greedy(draft, probs)  # not used: every row is greedy

    return TWO_TOKENS, folded, rule._replace(sampled=sampled, siblings=SIBLINGS)


def _init(drafter: Drafter, params: ModelParams, context: Context, target_out: Output, slots: int):
    own = _own_params(drafter, params)
    return drafter.init(own, _recorded_text(params, context), target_out, slots)


def _propose(drafter: Drafter, params: ModelParams, keys: RowKeys, context: Context, state):
    """The drafter's draft in two tokens.

    Until the verdict the state is (the drafter's draft, its state, the recorded tokens that may be
    accepted). ``_update`` returns the drafter's own state again.
    """
    own = _own_params(drafter, params)
    draft, state = drafter.propose(own, keys, _recorded_text(params, context), state)
    record, length = params.draft["record"], context.length[:, None]
    right = _at(record, length + tree.depths(draft.parents, *draft.tokens.shape))
    shown = draft.replace(
        tokens=jnp.where(draft.tokens == right, RECORDED, OTHER),
        valid=draft.valid & (right >= 0),
        probs=None,
    )
    return shown, (draft, state, _at(record, length + jnp.arange(drafter.longest + 1)))


def _update(drafter: Drafter, params: ModelParams, state, shown: Draft, verdict: Verdict, out):
    draft, state, following = state
    emitted = jnp.arange(drafter.longest + 1) < verdict.count[:, None]
    verdict = verdict.replace(tokens=jnp.where(emitted, following, -1))
    # A finished row has no draft, as in the decode loop.
    draft = draft.replace(valid=draft.valid & (verdict.count > 0)[:, None])
    return drafter.update(_own_params(drafter, params), state, draft, verdict, out)


def _own_params(drafter: Drafter, params: ModelParams) -> ModelParams:
    nothing = Unreadable(
        f"drafter {drafter.name} reads the target's weights, and a recording has only its tokens; "
        f"{_WITHOUT_A_MODEL}"
    )
    return ModelParams(nothing, params.draft["drafter"])


def _recorded_text(params: ModelParams, context: Context) -> Context:
    """The context with the recorded tokens in the place of the loop's."""
    slots = context.tokens.shape[1]
    committed = jnp.arange(slots) < context.length[:, None]
    return context.replace(tokens=jnp.where(committed, params.draft["record"][:, :slots], -1))


# Slots of the smallest buffers. Buffers have few sizes, because a loop is compiled for each.
SHORTEST = 64


def measure_rounds(
    method: Method,
    recording: Sequence[Trace],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 0,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> list[tuple[metrics.Counts, list[int]]]:
    """Replays the conversations with a drafter and its rule at temperature 0.

    The counts of a row depend on its own text alone.

    Args:
        method: ``params.draft`` are the drafter's parameters; ``params.target`` is not used.
        recording: conversations; their ids must be below the vocabulary size of the drafter.
        batch_size: rows of a batch. The last batch of each buffer size is filled up with rows that
            are finished from the start.
        max_new_tokens: cuts every output at this length; 0 = no limit.
        seed: for drafters that draw.
        report: is called with a status message before every batch.

    Returns:
        Of each conversation the counts, and the tokens of every round.

    Raises:
        UserError: as ``fold`` and the drafter; NonFiniteLogits of a draft model.
    """
    system = fold(method.drafter, method.accept)
    results: dict[int, tuple[metrics.Counts, list[int]]] = {}
    totals = [
        len(t.prompt) + min(len(t.output), max_new_tokens or len(t.output)) for t in recording
    ]
    batches = _batches(totals, batch_size)
    for number, (slots, rows) in enumerate(batches):
        report(f"batch {number + 1} of {len(batches)}, {slots} tokens")
        spare = [len(recording)] * (batch_size - len(rows))
        keys = rng.row_keys(seed, [*rows, *spare])
        texts = [(recording[row], totals[row]) for row in rows]
        records = _replay(system, method.params.draft, slots, texts, keys)
        for place, row in enumerate(rows):
            only = np.arange(batch_size) == place
            one = metrics.count(records, only, method.drafter.longest)
            # The target is a recording: how much of it is fed has no meaning.
            emitted = [int(n) for n in records.emitted[:, place] if n]
            results[row] = one._replace(verified=None), emitted
    return [results[row] for row in range(len(recording))]


def recorded_rounds(
    trace: Trace, name: str, gamma: int, max_new_tokens: int = 0
) -> tuple[metrics.Counts, list[int]]:
    """The rounds of a method that was recorded with the text, as ``measure_rounds`` gives them.

    A draft has at most ``gamma`` tokens. The first token of the output belongs to no round. Which
    tokens were drafted and rejected is not recorded, so nothing is tested at any depth.
    """
    lengths, emitted, at = trace.rounds[name], [], 0
    last = min(len(lengths), max_new_tokens - 1) if max_new_tokens else len(lengths)
    while at < last:
        emitted.append(min(lengths[at], gamma + 1, last - at))
        at += emitted[-1]
    none, rounds = np.zeros(gamma, np.int64), len(emitted)
    return metrics.Counts(at, rounds, at - rounds, none, none), emitted


def _batches(totals: Sequence[int], batch_size: int) -> list[tuple[int, list[int]]]:
    """Buffer sizes, and the numbers of the conversations that are replayed together in each.

    ``totals`` are the tokens of the conversations; those of similar length are together.
    """
    # The next power of 2, but no more than the longest text needs.
    slots = [min(max(SHORTEST, 1 << (n - 1).bit_length()), max(totals)) for n in totals]
    batches = []
    for size in sorted(set(slots)):
        rows = sorted((r for r, own in enumerate(slots) if own == size), key=lambda r: totals[r])
        batches += [
            (size, rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)
        ]
    return batches


def _replay(
    system: tuple[LM, Drafter, Accept],
    draft_params: Any,
    slots: int,
    texts: Sequence[tuple[Trace, int]],
    keys: jax.Array,
) -> Records:
    """Replays one batch; the records are on the host.

    Args:
        system: the result of ``fold``.
        draft_params: the drafter's.
        slots: the longest text that the buffers hold.
        texts: each with the tokens of prompt and output at which it stops.
        keys: one per row, spare rows included; these hold one token.
    """
    target, drafter, rule = system
    width, spare = slots + drafter.nodes + 1, len(keys) - len(texts)
    whole = [(text.prompt + text.output)[:width] for text, _ in texts]
    record, _ = decode.pack_prompts([*whole, *[[-1]] * spare], width)
    lengths = jnp.asarray([len(text.prompt) for text, _ in texts] + [1] * spare, jnp.int32)
    limits = jnp.asarray([total for _, total in texts] + [1] * spare, jnp.int32)
    prompt = jnp.where(jnp.arange(slots) < lengths[:, None], RECORDED, -1)
    params = ModelParams({}, {"record": record, "drafter": draft_params})
    how = sampling.make_sampling(len(keys), 0.0)
    state = decode.prefill(
        target, drafter, params, prompt, lengths, keys, max_len=slots, limit=limits, sampling=how
    )
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=slots)
    decode.check(state)
    return jax.device_get(records)


# The objects that settings name -----------------------------------------------------------------


def vocabulary_of(directory: str) -> tuple[int, TokenBytes | None]:
    """A model's vocabulary size, and its tokens if it has a tokenizer, for any architecture."""
    path = hf.resolve(directory, weights=False)
    size = hf.read_config(path).get("vocab_size")
    if type(size) is not int or not 0 < size <= recordings.LARGEST:
        raise UserError(
            f"the config.json of {path} has no vocab_size; "
            "give config.vocab_size instead of config.target"
        )
    tokenizer = hf.load_tokenizer(path, size)
    return size, None if tokenizer is None else hf.token_bytes(path, tokenizer)


def method(
    target: LM, choice: MethodChoice, seed: int, label: str, guessed: bool = False
) -> Method:
    """A drafter made for a recorded target, with its rule.

    ``guessed``: the vocabulary size is the largest recorded id plus one, which an error then names.

    Raises:
        UserError: unknown names and keys, a warm run, and as ``fold``.
    """
    if choice.warm:
        raise UserError(
            f"method {label} has warm=True, and replay measures every conversation by itself; "
            "leave it out"
        )
    try:
        drafter, rule = methods.objects(target, choice, (0.0,))
    except UserError as error:
        if target.token_bytes is None and "the target has no tokenizer" in str(error):
            raise UserError(
                f"method {label} compares the texts of tokens, and the recording has ids alone; "
                "give config.target, a model directory with the tokenizer"
            ) from None
        if guessed and "vocabulary" in str(error):
            raise UserError(
                f"{error}; the vocabulary size was taken from the largest recorded id: "
                "give config.vocab_size"
            ) from None
        raise
    fold(drafter, rule)  # raises for a pair that cannot be replayed
    return Method(label, drafter, rule, ModelParams({}, drafter.init_params(jax.random.key(seed))))


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, one line per method and category."""
    result = Table(box=None, pad_edge=False)
    heads = ("method", "rule", "category", "prompts", "tokens", "rounds", "tau", "alpha")
    for place, head in enumerate(heads):
        result.add_column(head, justify="left" if place < 3 else "right", no_wrap=True)
    for row in rows:
        whole = row["category"] is None
        numbers = [str(row[key]) for key in ("prompts", "tokens", "rounds")]
        rates = row["block_efficiency"], row["acceptance_rate"]
        numbers += ["-" if rate is None else f"{rate:.2f}" for rate in rates]
        # Labels and categories come from the user: Text does not interpret markup in them.
        names = (row["method"], row["accept"], "all" if whole else row["category"])
        result.add_row(*map(Text, names), *numbers, style="bold" if whole else "")
    return result
