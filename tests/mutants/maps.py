"""Mistakes in grammars, penalties, biases and bans, each of which changes the law of the text.

Each entry replaces functions of the engine while it is active (``active``). ``SETTINGS`` are those
with which the law of two rounds shows the mistake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax import logit_maps, outcome, step
from specjax.logit_maps import grammar as grammars

_after, _map = logit_maps._after, logit_maps._map
_finish, _of_round = step._finish, outcome.mapped

TEMPERATURE = 0.7
SETTINGS = {
    "temperature": TEMPERATURE,
    "repetition_penalty": 1.6,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
    "min_new_tokens": 2,
    "end_ids": (2,),
}
# Outputs like "1 1 0 1 0 2": a 0 is followed by 1 or by the end, 2. The first state forces a 1.
TABLE = np.array([[-1, 1, -1], [2, 1, -1], [-1, 1, 3], [0, -1, -1]])
AUTOMATON = grammars.of_table(TABLE, 0, (2,), (2,))
GRAMMAR = {"temperature": TEMPERATURE, "grammar": AUTOMATON}


class MapMutant(NamedTuple):
    """One mistake."""

    name: str
    mistake: str
    changes: tuple[tuple[Any, str, Callable], ...]  # module, name of its function, replacement
    case: str = "chain"  # a name for ``cases.named``
    settings: dict = SETTINGS


@contextlib.contextmanager
def active(mutant: MapMutant) -> Iterator[None]:
    """The mistake is in the engine; programs that were compiled before do not have it."""
    with contextlib.ExitStack() as stack:
        for module, name, function in mutant.changes:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def _read(*args: Any, read: Callable = logit_maps.read) -> logit_maps.Text:
    text = read(*args)
    assert text is not None
    return text


def _pending_ignored(maps, tokens, length, vocab_size):
    return _read(maps, tokens, length - 1, vocab_size)


def _prompt_is_output(maps, tokens, length, vocab_size):
    text = _read(maps, tokens, length, vocab_size)
    every = _read(maps.replace(prompt=jnp.zeros_like(length)), tokens, length, vocab_size)
    return text.replace(count=every.count)


def _prompt_is_new(maps, tokens, length, vocab_size):
    return _read(maps, tokens, length, vocab_size).replace(new=length)


def _prompt_ignored(maps, tokens, length, vocab_size):
    text = _read(maps, tokens, length, vocab_size)
    return text.replace(used=text.count > 0)


def _ancestors_ignored(text, nodes, visible, output, grammar=None):
    return text.replace(new=_after(text, nodes, visible, output, grammar).new)


def _whole_block(text, nodes, visible, output, grammar=None):
    every = jnp.ones_like(visible)
    return _after(text, nodes, every, every, grammar).replace(new=text.new + visible.sum(-1))


def _without_depth(text, nodes, visible, output, grammar=None):
    after = _after(text, nodes, visible, output, grammar)
    return after.replace(new=jnp.broadcast_to(text.new, after.new.shape))


def _present_once(text, nodes, visible, output, grammar=None):
    after = _after(text, nodes, visible, output, grammar)
    return after.replace(count=jnp.maximum(text.count, (after.count > 0).astype(jnp.int32)))


def _after_temperature(maps, logits, text):
    return TEMPERATURE * _map(maps, logits / TEMPERATURE, text)


def _always_divided(maps, logits, text):
    divided = logits / maps.repetition[:, None, None] ** 2
    return _map(maps, jnp.where(text.used & (logits < 0), divided, logits), text)


def _one_too_late(maps, logits, text):
    return _map(maps, logits, text.replace(new=text.new - 1))


def _bonus_unmapped(state, draft, logits):
    result = _of_round(state, draft, logits)
    return result if state.sampling.maps is None else result.at[:, -1].set(logits[:, -1])


def _target_unmapped(state, draft, logits):
    return logits


def _rejected_counted(fixed, params, state, draft, judged, width):
    """Counts that are carried from round to round, and take all tokens of a draft."""
    after, info = _finish(fixed, params, state, draft, judged, width)
    maps, vocab = state.sampling.maps, fixed.target.vocab_size
    node = jnp.arange(draft.tokens.shape[1])
    rejected = draft.valid & ~(judged.verdict.path[..., None] == node).any(1)
    times = (jax.nn.one_hot(draft.tokens, vocab) * rejected[..., None]).sum(1)
    bias = maps.bias - maps.frequency[:, None] * times
    return after.replace(sampling=after.sampling.replace(maps=maps.replace(bias=bias))), info


_walked, _along, _allowed = grammars.walked, grammars.along, grammars.allowed


def _path_not_walked(grammar, state, nodes, visible):
    return jnp.broadcast_to(state, visible.shape[:2])


def _block_walked(grammar, state, nodes, visible):
    return _along(grammar, state, nodes, jnp.ones_like(visible))


def _pending_not_walked(grammar, tokens, length):
    return _walked(grammar, tokens, length - 1)


def _prompt_walked(grammar, lengths):
    return grammar.replace(state=jnp.copy(grammar.start), read=jnp.zeros_like(lengths))


def _round_not_walked(maps, tokens, length):
    return maps.replace(grammar=maps.grammar.replace(read=length))


def _ends_everywhere(grammar, state):
    return _allowed(grammar, state).at[..., 2].set(True)


def _one_behind(grammar, state):
    """The mask of a place is that of the place before it."""
    return _allowed(grammar, jnp.concatenate([state[:, :1], state[:, :-1]], 1))


def _of_read(function: Callable) -> tuple:
    return ((logit_maps, "read", function),)


def _of_paths(function: Callable) -> tuple:
    return ((logit_maps, "_after", function),)


def _of_maps(function: Callable) -> tuple:
    return ((logit_maps, "_map", function),)


def _of_grammar(name: str, mistake: str, function: str, change: Callable, case: str = "chain"):
    return MapMutant(name, mistake, ((grammars, function, change),), case, GRAMMAR)


_TREE = "without_replacement"
_BANNED = {"banned": (0,)}
MUTANTS = (
    MapMutant("pending_ignored", "counts without the pending token", _of_read(_pending_ignored)),
    MapMutant("ancestors_ignored", "counts of the committed text", _of_paths(_ancestors_ignored)),
    MapMutant("whole_block", "counts with later nodes of a chain", _of_paths(_whole_block)),
    MapMutant("siblings_counted", "counts with other branches", _of_paths(_whole_block), _TREE),
    MapMutant(
        "rejected_counted",
        "counts with the rejected tokens of earlier rounds",
        ((step, "_finish", _rejected_counted),),
        settings=SETTINGS | {"logit_bias": {0: 0.1}},
    ),
    MapMutant("prompt_is_output", "presence in the prompt", _of_read(_prompt_is_output)),
    MapMutant("prompt_ignored", "repetition of the output only", _of_read(_prompt_ignored)),
    MapMutant("present_once", "a path counts a token once", _of_paths(_present_once)),
    MapMutant("after_temperature", "penalties after temperature", _of_maps(_after_temperature)),
    MapMutant("always_divided", "negative logits are divided too", _of_maps(_always_divided)),
    MapMutant("prompt_is_new", "min_new_tokens with the prompt", _of_read(_prompt_is_new)),
    MapMutant("one_too_late", "ends wait one token longer", _of_maps(_one_too_late)),
    MapMutant("without_depth", "ends wait for whole rounds", _of_paths(_without_depth)),
    MapMutant(
        "bonus_unmapped",
        "a banned token comes as the bonus token",
        ((outcome, "mapped", _bonus_unmapped),),
        settings=_BANNED,
    ),
    MapMutant(
        "target_unmapped",
        "only the draft has the maps",
        ((outcome, "mapped", _target_unmapped),),
        settings={"presence_penalty": 1.0},
    ),
    _of_grammar(
        "path_not_walked",
        "nodes have the mask of the text",
        "along",
        _path_not_walked,
    ),
    _of_grammar(
        "branches_walked", "the automaton reads other branches", "along", _block_walked, _TREE
    ),
    _of_grammar(
        "pending_not_walked", "the pending token is not read", "walked", _pending_not_walked
    ),
    _of_grammar("prompt_walked", "the automaton reads the prompt", "begun", _prompt_walked),
    _of_grammar("ends_everywhere", "the text ends at any place", "allowed", _ends_everywhere),
    _of_grammar("one_behind", "a node has the mask of the one before", "allowed", _one_behind),
    MapMutant(
        "round_not_walked",
        "the automaton skips the tokens of a round",
        ((logit_maps, "advanced", _round_not_walked),),
        settings=GRAMMAR,
    ),
    MapMutant(
        "bonus_not_masked",
        "the bonus token is not masked",
        ((outcome, "mapped", _bonus_unmapped),),
        settings=GRAMMAR,
    ),
    MapMutant(
        "target_not_masked",
        "only the draft is masked",
        ((outcome, "mapped", _target_unmapped),),
        settings=GRAMMAR,
    ),
)
