"""The tokenizer and the chat template of a .gguf file.

Two kinds of tokenizers are supported: byte-level BPE ("gpt2"), whose file names the rule that
splits a text into words (``tokenizer.ggml.pre``), and BPE of sentencepiece ("llama"), whose merges
follow from the scores of the tokens. The rules are those of llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax.errors import UserError, on_disk
from specjax.models.config_values import check_supported
from specjax.models.sources.gguf_file import GgufFile

# Types of tokens in ``tokenizer.ggml.token_type``.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # these normalise texts to NFC
# Name -> (splits digits before the rule of GPT-2, or the regular expression in its place).
_BPE: dict[str, tuple[bool, str]] = {
    "gpt-2": (False, ""),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (True, "")),
    "llama-bpe": (False, _LLAMA3),
    **dict.fromkeys(_COMPOSED, (False, _QWEN2)),
}
_NONE = (None, "none", "no_vocab")
_SPACE = "▁"  # stands for a space in sentencepiece


def read(file: GgufFile) -> Tokenizer | None:
    """The tokenizer of a .gguf file; None if it has none.

    Ids that no token has (llama.cpp's converter calls them [PAD151665] and so on) are left out.
    Raises UserError for a kind or a pre-tokenizer that is not supported, by name, and for metadata
    that no tokenizer can have.
    """
    kind = _field(file, "model", None)
    if kind in _NONE:
        return None
    check_supported("the tokenizer", kind, ("gpt2", "llama"), file.path)
    tokens = _field(file, "tokens", [])
    if not tokens or len(set(tokens)) != len(tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.tokens is empty or has a token twice")
    types = _field(file, "token_type", [])
    vocabulary = {
        token: number
        for number, token in enumerate(tokens)
        if not (token == f"[PAD{number}]" and types and types[number] == _UNUSED)
    }
    make = _byte_level if kind == "gpt2" else _sentencepiece
    # The library raises plain Exceptions.
    with on_disk(f"{file.path}: its tokenizer is damaged", "copy it again", Exception):
        tokenizer = make(file, vocabulary)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, each in zip(tokens, types, strict=False) if each == wanted]
        added = [AddedToken(each, special=special, normalized=False) for each in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _add_ends(file, tokenizer, kind)
    return tokenizer


def config(file: GgufFile) -> dict[str, Any]:
    """The tokenizer_config.json of a .gguf file: its chat template, and its special tokens."""
    tokens, result = _field(file, "tokens", []), {}
    for name, key in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        number = _field(file, f"{name}_token_id", None)
        if number is not None and 0 <= number < len(tokens):
            result[f"{key}_token"] = tokens[number]
    if (template := file.fields.get("tokenizer.chat_template")) is not None:
        result["chat_template"] = template
    return result


def _field(file: GgufFile, name: str, default: Any) -> Any:
    return file.fields.get(f"tokenizer.ggml.{name}", default)


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    name = _field(file, "pre", None)
    if name not in _BPE:
        raise UserError(
            f"{file.path}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(_BPE)}"
        )
    digits, regex = _BPE[name]
    merges = [tuple(merge.split(" ")) for merge in _field(file, "merges", [])]
    # Llama 3 takes a word that is a token as it is, without merges.
    whole = name == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    if _field(file, "precompiled_charsmap", None) or _field(file, "remove_extra_whitespaces", 0):
        raise UserError(
            f"{file.path}: a tokenizer that rewrites texts (tokenizer.ggml.precompiled_charsmap, "
            "remove_extra_whitespaces) is not supported"
        )
    scores = _field(file, "scores", [])
    if len(scores) != len(tokens := _field(file, "tokens", [])):
        raise UserError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} numbers and there are "
            f"{len(tokens)} tokens"
        )
    unknown = _field(file, "unknown_token_id", 0)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, scores, _field(file, "token_type", [])),
        unk_token=next((token for token, i in vocabulary.items() if i == unknown), None),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixed = _field(file, "add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    after: list[Any] = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list, types: list) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE: a pair with a higher score is joined first.

    Every split of a token into two tokens is a merge that makes it. Control tokens and bytes are
    never made of parts.
    """
    made = sorted(
        (-scores[number], -cut, token[:cut], token[cut:])
        for token, number in vocabulary.items()
        if not types or types[number] in (_NORMAL, _USER_DEFINED)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    return [(left, right) for *_, left, right in made]


def _add_ends(file: GgufFile, tokenizer: Tokenizer, kind: str) -> None:
    """Lets the tokenizer put the first and the last token around a text, if the file asks."""
    llama3 = _field(file, "pre", None) == "llama-bpe"
    default = {"bos": kind == "llama" or llama3, "eos": False}
    ends = {}
    for name in ("bos", "eos"):
        number = _field(file, f"{name}_token_id", None)
        token = None if number is None else tokenizer.id_to_token(number)
        if token is not None and _field(file, f"add_{name}_token", default[name]):
            ends[name] = (token, number)
    if ends:
        first, last = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=list(ends.values())
        )
