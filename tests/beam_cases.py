"""Beam search in plain Python, and small random models for it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
from internals import decode_beam_rounds as _beam_rounds
from internals import decode_hypotheses as _hypotheses

import specjax as sj
from specjax import testing
from specjax.decode import beams
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.types import ModelParams

VOCAB, NEW, BEAMS, WIDTH = 13, 8, 3, 5
ROWS = ([3, 7, 1, 4, 9], [5], [2, 2, 8], [11, 6])
CONFIG = TransformerConfig(
    **(vars(testing.tiny_config(vocab_size=VOCAB, layers=1, width=16)) | {"tie_embeddings": False})
)
MODEL = lm.from_config(CONFIG)


@functools.cache
def params(seed: int, noise: float = 0.0) -> ModelParams:
    """Random parameters; those of the draft differ by noise."""
    rng = np.random.default_rng(seed)
    leaves, shape = jax.tree.flatten(lm.abstract_params(CONFIG))
    own = [rng.normal(0.5 if x.ndim == 1 else 0.0, 0.5, x.shape) for x in leaves]
    near = [x + noise * rng.normal(0, 0.5, x.shape) for x in own]
    made = ([jnp.asarray(x, jnp.float32) for x in each] for each in (own, near))
    return ModelParams(*(jax.tree.unflatten(shape, each) for each in made))


def searched(own: ModelParams, rows=ROWS, **settings) -> sj.Beams:
    """``beam_search`` with all beams returned."""
    packed, lengths = sj.pack_prompts(rows, WIDTH)
    sizes = {"beams": BEAMS, "max_new_tokens": NEW, "returned": BEAMS}
    found = beams.beam_search(MODEL, own, packed, lengths, **sizes | settings)
    sj.check(found)
    return found


@functools.partial(jax.jit)
def _logits(own, tokens):
    return lm.forward(MODEL, own, tokens).logits


def expected(
    own: ModelParams, prompt, *, length_penalty=1.0, early_stopping=False, eos_id=()
) -> list[tuple[list[int], float]]:
    """The hypotheses of one prompt with their scores, each text read from its beginning."""
    running, ended = [((), 0.0)], []
    for count in range(1, NEW + 1):
        texts = np.zeros((BEAMS, WIDTH + NEW), np.int32)
        for i, (text, _) in enumerate(running):
            texts[i, : len(prompt) + count - 1] = [*prompt, *text]
        logits = np.asarray(_logits(own.target, texts))[:, len(prompt) + count - 2]
        logprobs = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
        found = [
            (score + logprobs[i, token], (*text, token))
            for i, (text, score) in enumerate(running)
            for token in range(VOCAB)
        ]
        found = sorted(found, reverse=True)[: BEAMS * max(2, 1 + len(eos_id))]
        ends = [text[-1] in eos_id or count == NEW for _, text in found]
        for (score, text), over in list(zip(found, ends, strict=True))[:BEAMS]:
            ended += [(score / count**length_penalty, text)] if over else []
        ended = sorted(ended, reverse=True)[:BEAMS]
        on = [(text, score) for (score, text), over in zip(found, ends, strict=True) if not over]
        running = on[:BEAMS]
        if len(ended) == BEAMS and running:
            far = NEW if early_stopping == "never" and length_penalty > 0 else count
            better = running[0][1] / far**length_penalty > ended[-1][0]
            if early_stopping is True or not better:
                break
    return [([int(token) for token in text], score) for score, text in ended]


def wrong(module: types.ModuleType, *changes: tuple[str, str]) -> types.ModuleType:
    """The module with changes of its source, each of which must occur once."""
    source = inspect.getsource(module)
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    changed = importlib.util.module_from_spec(spec)
    exec(compile(source, f"wrong {module.__name__}", "exec"), vars(changed))
    return changed


def with_mistake(monkeypatch, name: str, *changes: tuple[str, str]) -> None:
    """Beam search with a wrong module until the end of the test; ``forget`` its programs then."""
    if name == "hypotheses":
        changed = wrong(_hypotheses, *changes)
        monkeypatch.setattr(beams, "hypotheses", changed)
        monkeypatch.setattr(_beam_rounds, "hypotheses", changed)
    else:
        monkeypatch.setattr(beams, "rounds", wrong(_beam_rounds, *changes))
    forget()


def forget() -> None:
    beams._beam_search.clear_cache()
