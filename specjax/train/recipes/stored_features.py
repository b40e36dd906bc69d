"""Training material from stored features: the directory that ``config.data.features`` names."""

from __future__ import annotations

from typing import Any

from specjax import files
from specjax.config import Config
from specjax.data import feature_store
from specjax.data.feature_store import HeldOut, Store, Stored
from specjax.errors import UserError


def open_store(config: Config, directory: str | None) -> tuple[Any, ...]:
    """The fields of ``Material``, without taps; ``directory`` is that of the target.

    Raises UserError for the features of another target, rows of another length than
    ``config.train.length``, and too few rows or prompts.
    """
    store = Store(config.data.features)
    where, target = store.directory, store.manifest["target"]
    if directory is None or target["sha256"] != feature_store.target_fingerprint(directory):
        raise UserError(
            f"{where} has the features of {target['name']}, and config.target is another model; "
            f"store those of this target with {feature_store.BUILD}"
        )
    size, length = config.train.batch_size, config.train.length
    if length != store.layout.length:
        raise UserError(
            f"config.train.length is {length}, and the rows of {where} have "
            f"{store.layout.length} tokens; give {store.layout.length}"
        )
    batches = Stored(store, size, config.seed)
    held_out = HeldOut(store, size, config.train.eval_batches)
    digest = files.sha256(where / "manifest.json")[:16]
    return batches, held_out, _prompts(config, store), digest, None, store.counts


def _prompts(config: Config, store: Store) -> list[list[int]]:
    wanted, known = config.examine, store.manifest["prompts"]
    if not wanted.prompts:
        return []
    if wanted.prompts > len(known["ids"]) or wanted.prompt_tokens != known["tokens"]:
        raise UserError(
            f"config.examine asks for {wanted.prompts} prompts of {wanted.prompt_tokens} tokens, "
            f"and {store.directory} has {len(known['ids'])} of {known['tokens']}; ask for these, "
            "or for none (config.examine.prompts=0)"
        )
    return known["ids"][: wanted.prompts]
