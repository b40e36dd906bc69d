"""A model to generate with: the target, and perhaps a draft model with the same tokens."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from specjax import drafters, registry
from specjax.bench import methods
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Method
from specjax.drafters import pairs
from specjax.drafters.files import probe
from specjax.errors import UserError
from specjax.models import hf, hf_tokenizer
from specjax.models.token_bytes import TokenBytes
from specjax.types import LM, DecodeState, Drafter, Params

# What a method is: the name of a drafter, its name and keys, or a ready-made one.
Choice = str | Mapping[str, Any] | Drafter | None


class Model:
    """A target with its tokenizer, and perhaps a draft model; keeps the methods made for it.

    A method that is used again is the same object, so its programs are not compiled again.
    """

    def __init__(
        self,
        target: hf.Loaded,
        draft: hf.Loaded | None = None,
        *,
        eos_ids: Sequence[int] | None = None,
    ):
        if draft is not None:
            # Whether their vocabularies fit depends on the method that is made of them.
            pairs.check(target.lm, draft.lm)
        self.target, self.draft = target, draft
        # The ids that end a text.
        self.eos_ids = tuple(target.config.eos_token_id if eos_ids is None else eos_ids)
        self._methods: dict[tuple, tuple[Method, Any]] = {}
        self._learnt: dict[Drafter, Params] = {}

    @classmethod
    def from_lm(
        cls, lm: LM, params: Params, tokenizer: Tokenizer | None = None, eos_ids: Sequence[int] = ()
    ) -> Model:
        """A model that is in memory already, such as ``models.adapter`` makes.

        Args:
            lm, params: the model as pure functions, and its parameters.
            tokenizer: of package tokenizers (of transformers: ``backend_tokenizer``). None: prompts
                are token ids, and texts are empty.
            eos_ids: the ids that end a text.

        Raises:
            UserError: a tokenizer of another package, or an id that is no token.
        """
        if not isinstance(tokenizer, Tokenizer | None):
            raise UserError(
                f"the tokenizer is a {type(tokenizer).__name__}; give one of package tokenizers, "
                "which a fast tokenizer of transformers has as backend_tokenizer"
            )
        if wrong := [token for token in eos_ids if not 0 <= token < lm.vocab_size]:
            raise UserError(f"eos_ids has {wrong[0]}, and the tokens are 0..{lm.vocab_size - 1}")
        if tokenizer is not None and lm.vocabulary is None:
            name = hf_tokenizer.fingerprint(tokenizer)
            spelled = TokenBytes(name, tokenizer, None, tuple(eos_ids))
            lm = lm._replace(vocabulary=name, token_bytes=lm.token_bytes or spelled)
        return cls(hf.Loaded(lm, params, None, tokenizer, ""), eos_ids=eos_ids)

    @property
    def lm(self) -> LM:
        """The target as pure functions."""
        return self.target.lm

    @property
    def params(self) -> dict:
        """The target's parameters."""
        return self.target.params

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises UserError if the model has none."""
        return self.target.text_tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens; empty if the model has no tokenizer."""
        return "" if self.target.tokenizer is None else self.target.tokenizer.decode(list(ids))

    def method(
        self,
        drafter: Choice = None,
        accept: str = "",
        *,
        temperature: float = 0.0,
        warm: bool = False,
    ) -> Method:
        """The drafter with its rule and its parameters.

        Args:
            drafter: the name of a drafter, a mapping with "name" and its keys, or a ``Drafter``;
                None: "draft_model" if there is a draft model, else "none" (plain decoding). A
                drafter that needs a model gets the draft model.
            accept: the name of a rule; "": the recommended one for the drafter.
            temperature: of the texts: a few drafters are for temperature 0 only.
            warm: whether it learns from texts (``generate_text``).

        Raises:
            UserError: unknown names and keys, or a rule that does not fit the drafter.
        """
        if isinstance(drafter, Drafter):
            key = (id(drafter), accept, temperature > 0, warm)
        else:
            drafter = self._keys(drafter)
            named = {key: _spelled(value) for key, value in drafter.items()}
            key = (repr(sorted(named.items())), accept, temperature > 0, warm)
        if key not in self._methods:
            # The objects are kept, so that no other one gets their id.
            self._methods[key] = self._build(drafter, accept, temperature, warm), drafter
        return self._methods[key][0]

    def learnt(self, method: Method) -> Params | None:
        """The drafter's parameters after ``learn``; None: it learnt nothing so far."""
        return self._learnt.get(method.drafter)

    def learn(self, method: Method, state: DecodeState, lengths: Sequence[int]) -> Params:
        """The drafter's parameters with the texts of a state beyond these lengths."""
        assert method.drafter.rare.learn is not None
        new = method.drafter.rare.learn(method.params, state, lengths)
        self._learnt[method.drafter] = new
        return new

    def _keys(self, drafter: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """The keys of a drafter, with its name and perhaps the draft model."""
        if drafter is None:
            drafter = drafters.PLAIN if self.draft is None else drafters.WITH_MODEL
        keys = dict(drafter) if isinstance(drafter, Mapping) else {"name": drafter}
        if not isinstance(keys.get("name"), str):
            raise UserError(f"the drafter is {drafter!r}; give a name, or name and keys")
        if needs_model(keys["name"]) and "model" not in keys:
            if self.draft is None:
                raise UserError(
                    f"{keys['name']} needs a draft model; give load(..., draft=...), or the key "
                    "model of the drafter"
                )
            keys |= {"model": self.draft.lm, "params": self.draft.params}
        return keys

    def _build(
        self, drafter: dict[str, Any] | Drafter, accept: str, temperature: float, warm: bool
    ) -> Method:
        lines: list[str] = []
        if not isinstance(drafter, Drafter):
            drafter = probe.replaced(self.target, drafter, lines.append)
        if lines:
            warnings.warn(lines[-1], stacklevel=2)
        choice = MethodChoice(drafter, accept, {}, warm)
        return methods.build(
            self.lm, self.params, choice, label="", seed=0, temperatures=(temperature,)
        )


def needs_model(name: str) -> bool:
    """Whether the drafter's key "model" is a draft model; heads are found by their own files.

    Raises UserError for an unknown name.
    """
    key = registry.keys_of(drafters.load(name)).get("model")
    return key is not None and key.required


def _spelled(value: Any) -> str | int:
    """The same for values of a key that are texts and numbers and equal; else for one object."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return id(value)


def load(
    name: str | os.PathLike, *, draft: str | os.PathLike | None = None, dtype: Any = None
) -> Model:
    """Reads a model to generate with.

    Args:
        name: what ``models.hf.load`` takes: a directory in Hugging Face layout, a name of the Hub,
            a .gguf file, or a trained run's workdir.
        draft: a smaller model that drafts; with other tokens the drafter needs the key
            ``vocabulary``. None: none.
        dtype: of the parameters; None: float32 on CPUs, bfloat16 elsewhere, float16 on GPUs
            without bfloat16.

    Raises:
        UserError: a model that cannot be read, or a draft model of another kind than the target.
    """
    target = hf.load(name, dtype=dtype)
    return Model(target, None if draft is None else hf.load(draft, dtype=dtype))
