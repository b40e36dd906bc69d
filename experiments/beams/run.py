"""Speculative beams beside plain beam search: steps per pass, and the time of both.

    PYTHONPATH=. python experiments/beams/run.py quickstart=runs/quickstart stories=runs/stories \\
        --prompts stories=FILE

Each folder holds ``target`` and ``draft/model``, or ``draft``. The prompts of a pair are the first
lines of a text file, or held-out text of the target's corpus ("stdlib", the default). Every setting
decodes the prompts one by one (batch 1), without end-of-sequence tokens, so each of them takes
``--new`` steps. Plain and speculative search take turns; times are without compilation and with the
prefill, and a ratio is that of medians. ``identical`` counts the prompts whose hypotheses are all
those of plain beam search.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax as sj
from experiments import common
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import PromptSource
from specjax.files import write_json
from specjax.models import hf

BEAMS, GAMMAS, WIDER = (2, 4), (2, 3, 4, 5), (1, 2)
TIMES = frozenset({"plain_ms_per_step", "speedup"})


def pair(folder: Path) -> tuple[hf.Loaded, hf.Loaded]:
    """The target and the draft model of a folder."""
    draft = folder / "draft" / "model"
    return hf.load(folder / "target"), hf.load(draft if draft.is_dir() else folder / "draft")


def prompts_of(target: hf.Loaded, file: str | None, count: int) -> list[list[int]]:
    """Token ids of the prompts: lines of a file, or of the target's corpus."""
    source = PromptSource(names=(file or "stdlib",), num_prompts=count)
    chosen = prompts_lib.read(source, target, lambda _: [], name=source.names[0])
    return [prompt.ids for prompt in chosen.prompts]


class Search:
    """One way to decode the prompts of a pair."""

    def __init__(self, models: tuple[hf.Loaded, hf.Loaded], ids: list[list[int]], new: int, **how):
        self._models, self._ids, self._new, self._how = models, ids, new, how
        self._width = max(map(len, ids))
        self.seconds: list[float] = []

    def run(self) -> list[sj.Beams]:
        """The result for each prompt; the time is kept."""
        target, draft = self._models
        own = target.lm, sj.ModelParams(target.params, draft.params)
        began, found = time.perf_counter(), []
        for ids in self._ids:
            packed = sj.pack_prompts([ids], self._width)
            each = sj.beam_search(*own, *packed, max_new_tokens=self._new, **self._how)
            found.append(jax.block_until_ready(each))
        self.seconds.append(time.perf_counter() - began)
        return found


def same(found: sj.Beams, wanted: sj.Beams) -> bool:
    """Whether the hypotheses and their scores are equal."""
    close = np.allclose(found.scores, wanted.scores, rtol=0, atol=1e-4)
    return found.outputs() == wanted.outputs() and close


def measure(
    models: tuple[hf.Loaded, hf.Loaded], ids: list[list[int]], beams: int, options: Any
) -> list[dict[str, Any]]:
    """The rows of one number of beams."""
    keys = [(gamma, beams * wider) for gamma in GAMMAS for wider in WIDER]
    how: dict[str, Any] = {"beams": beams, "returned": beams}
    plain = Search(models, ids, options.new, **how)
    drafts = {
        key: Search(models, ids, options.new, **how, draft=sj.BeamDraft(models[1].lm, *key))
        for key in keys
    }
    wanted = plain.run()
    found = {key: search.run() for key, search in drafts.items()}  # compiles
    for search in (plain, *drafts.values()):
        search.seconds.clear()
    for _ in range(options.repeats):
        for search in (plain, *drafts.values()):
            search.run()
    base = statistics.median(plain.seconds)
    return [
        {
            "beams": beams,
            "gamma": gamma,
            "draft_beams": drafted,
            "nodes": beams + gamma * drafted,
            "steps": sum(int(each.steps.sum()) for each in found[gamma, drafted]),
            "passes": sum(int(each.passes.sum()) for each in found[gamma, drafted]),
            "identical": sum(
                same(each, other) for each, other in zip(found[gamma, drafted], wanted, strict=True)
            ),
            "prompts": len(ids),
            "plain_ms_per_step": 1e3 * base / len(ids) / options.new,
            "speedup": base / statistics.median(drafts[gamma, drafted].seconds),
        }
        for gamma, drafted in keys
    ]


def main(argv: Sequence[str]) -> None:
    parser = common.options(__file__, __doc__)
    parser.add_argument("pairs", nargs="+", help="NAME=FOLDER of a target and its draft model")
    parser.add_argument("--prompts", nargs="*", default=[], help="NAME=FILE of texts")
    parser.add_argument("--count", type=int, default=8, help="prompts of each pair")
    parser.add_argument("--new", type=int, default=64, help="steps of each text")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each setting")
    options: argparse.Namespace = parser.parse_args(argv)
    files = dict(each.split("=", 1) for each in options.prompts)
    watch, rows, models = common.start(options), [], {}
    for name, folder in (each.split("=", 1) for each in options.pairs):
        both = pair(Path(folder))
        ids = prompts_of(both[0], files.get(name), options.count)
        sizes = [sum(x.size for x in jax.tree.leaves(each.params)) for each in both]
        models[name] = {"target_parameters": sizes[0], "draft_parameters": sizes[1]}
        for beams in BEAMS:
            rows += [{"pair": name, **row} for row in measure(both, ids, beams, options)]
            jax.clear_caches()
    named = [common.without_folder(each) for each in argv]
    about = {"new": options.new, "repeats": options.repeats, "models": models}
    result = {**common.record(__file__, named, watch), **about, "rows": rows}
    write_json(options.out, common.checked(result, watch, TIMES))


if __name__ == "__main__":
    main(sys.argv[1:])
