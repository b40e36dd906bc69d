"""Prompts from the test split of the embedded corpus: the prompt set "stdlib"."""

from __future__ import annotations

from pathlib import Path

from specjax.data import corpora, pairs, token_streams
from specjax.errors import UserError
from specjax.models import hf
from specjax.prompt import of_text


def held_out(
    target: hf.Loaded, count: int, tokens: int, data_dir: str = "", seed: int = 0
) -> list[list[int]]:
    """``count`` prompts of ``tokens`` token ids: starts of lines of the corpus.

    Of a target with an encoder: functions without their docstring, of at most ``tokens`` token ids
    with the start token. The corpus is in ``data_dir``, or in the data folder beside the target.
    Raises UserError if there is none, or too little text for such prompts.
    """
    assert target.tokenizer is not None
    beside = Path(target.directory).parent / "data"
    if not data_dir and not beside.is_dir():
        raise UserError(
            "config.prompts=stdlib: there is no corpus beside the target; "
            "give config.data_dir, a directory to build it in"
        )
    model, tokenizer = target.lm, target.tokenizer
    head = len(token_streams.opening(tokenizer))
    if tokens <= head:
        raise UserError(
            f"config.prompts=stdlib: a prompt of {tokens} tokens has no text, because the "
            f"tokenizer puts {head} before every text; ask for more tokens"
        )
    texts = corpora.load_texts(data_dir or str(beside), "test")
    if model.encoder is None:
        own = tokenizer, count, tokens - head, seed
        return token_streams.held_out_prompts([text for _, text in texts], *own)
    ids = pairs.held_out_sources(pairs.docstrings(texts), tokenizer, count, tokens - 1, seed)
    return [of_text(model, each, f"prompt {number}") for number, each in enumerate(ids)]
