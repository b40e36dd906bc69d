"""The measurements of experiments/tree_search: acceptance, times, the choice, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax import accept, decode
from specjax.bench import measuring, passes, summaries
from specjax.bench.passes import Job, Method
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.models import hf
from specjax.topology import search, shapes
from specjax.topology.shapes import Topology
from specjax.types import ModelParams, StepInfo

FIRST_CHAIN = 4  # draft tokens of the chain that the choice of a tree starts from
MOST_CHOICES = 4
# The values of a measured row that go into results.json.
KEPT = (
    "block_efficiency",
    "tokens_per_second",
    "autoregressive_tokens_per_second",
    "speedup",
    "predicted_speedup",
    "time_split",
    "rounds",
    "tokens",
    "lossless",
)


def accepted_ranks(info: StepInfo) -> np.ndarray:
    """i64[R]: the accepted child of the pending token, -1 for none, in rows that were not finished.

    For ``search.acceptance_vector``. ``info`` comes from ``decode.stream``, with a draft of one
    level. Of equal siblings the first counts: ``recursive`` never accepts another, because a
    rejected token has no mass left. Raises UserError for more levels.
    """
    if info.draft.longest != 1:
        levels = info.draft.longest
        raise UserError(f"the draft has {levels} levels; count ranks on trees of one level")
    emitted = np.asarray(info.draft.tokens) == np.asarray(info.tokens)[:, :1]
    emitted &= np.asarray(info.draft.valid)
    ranks = np.where(np.asarray(info.accepted) > 0, emitted.argmax(1), -1)
    return ranks[np.asarray(info.emitted) > 0]


class Options(NamedTuple):
    """What the trees are chosen from."""

    width: int  # siblings whose acceptance is measured
    depth: int  # of the deepest tree
    sizes: Sequence[int]  # tokens verified at once; 1 is one of them
    k_ary: Sequence[str]  # trees to compare with


def method(
    job: Job, draft: hf.Loaded, tree: Topology, name: str, siblings: str = "without_replacement"
) -> Method:
    """A drafter of that tree, accepted by ``recursive``."""
    drafter = draft_tree.make(
        job.target, model=draft.lm, params=draft.params, tree=tree, siblings=siblings
    )
    return Method(name, drafter, accept.load("recursive"), ModelParams(job.params, draft.params))


def acceptance(job: Job, draft: hf.Loaded, width: int, siblings: str) -> tuple[np.ndarray, int]:
    """(P f64[width] on the text that the target writes, the number of rounds observed)."""
    one_level, ranks = method(job, draft, shapes.full((width,)), siblings, siblings), []
    for rows, prompts in passes.batches(job):
        state = passes.begin(job, one_level.drafter, one_level.params, rows, prompts)
        for _, info in decode.stream(
            job.target,
            one_level.drafter,
            one_level.accept,
            one_level.params,
            state,
            eos_id=job.eos_id,
        ):
            ranks.append(accepted_ranks(info))
    observed = np.concatenate(ranks)
    return search.acceptance_vector(observed, width), observed.size


def level_time(job: Job, draft: hf.Loaded, tree: Topology) -> float:
    """Seconds to draft one level of that tree."""
    return measuring.time_of_draft(job, method(job, draft, tree, "times")) / tree.depth


class Chosen(NamedTuple):
    """The chosen tree, and how it was found."""

    choice: search.Choice
    level: float  # time to draft one of its levels, in one-token passes
    steps: list[dict]


def choose(
    job: Job, draft: hf.Loaded, p: np.ndarray, verify: dict[int, float], depth: int
) -> Chosen:
    """The best tree for acceptance ``p``; ``verify`` maps tokens to the seconds of a pass.

    The time to draft a level depends on its width, so on the choice: it is measured again for the
    chosen tree, until the choice does not change.
    """
    one, tree, steps = verify[1], shapes.chain(min(FIRST_CHAIN, depth)), []
    relative = {n: seconds / one for n, seconds in verify.items()}
    while True:
        level = level_time(job, draft, tree) / one
        choice = search.best_size(p, relative, level, range(1, depth + 1))
        steps.append(
            {
                "level": level,
                "nodes": choice.nodes,
                "depth": choice.topology.depth,
                "speedup": choice.speedup,
            }
        )
        if choice.topology == tree or len(steps) == MOST_CHOICES:
            return Chosen(choice, level, steps)
        tree = choice.topology


def best_chain(p: np.ndarray, verify: dict[int, float], level: float, depth: int) -> Topology:
    """The chain with the largest predicted speed-up.

    ``verify`` is interpolated linearly between the measured sizes.
    """
    sizes, times = np.array(list(verify)), np.array(list(verify.values())) / verify[1]

    def predicted(gamma: int) -> float:
        cost = np.interp(gamma + 1, sizes, times) + gamma * level
        return search.expected_tokens(shapes.chain(gamma), p) / cost

    return shapes.chain(max(range(1, min(depth, int(sizes[-1]) - 1) + 1), key=predicted))


def measure_trees(
    job: Job, draft: hf.Loaded, trees: dict[str, Topology], p: np.ndarray
) -> list[dict]:
    """Decodes with each tree, interleaved with plain decoding; a row per tree.

    A tree with several names is measured once.
    """
    first_names = {tree: name for name, tree in reversed(trees.items())}
    methods = [method(job, draft, tree, name) for tree, name in first_names.items()]
    measuring.warm([job], methods)
    measured = measuring.measure(job, methods)
    by_name = {row["method"]: row for row in summaries.measured_rows(job, methods, measured)}
    rows = []
    for name, tree in trees.items():
        row = by_name[first_names[tree]]
        known = tree.branching <= len(p)
        rows.append(
            {
                "name": name,
                "nodes": tree.nodes,
                "depth": tree.depth,
                "expected_tokens": search.expected_tokens(tree, p) if known else None,
                # Before the cut at the end of the text: the prediction is for whole rounds.
                "measured_tokens": 1 + row["accepted_per_round"],
                **{key: row[key] for key in KEPT},
            }
        )
    return rows


def study(job: Job, draft: hf.Loaded, options: Options) -> dict:
    """All results, as they go into results.json; "tree" has the parents of the chosen tree."""
    width, depth, sizes, k_ary = options
    vectors = {}
    for siblings in ("without_replacement", "iid"):
        p, rounds = acceptance(job, draft, width, siblings)
        vectors[siblings] = {"acceptance": p.tolist(), "none": 1 - p.sum(), "rounds": rounds}
    p = np.array(vectors["without_replacement"]["acceptance"])
    verify = {n: measuring.time_of_verify(job, None, n) for n in sizes}
    chain_level = level_time(job, draft, shapes.chain(min(FIRST_CHAIN, depth))) / verify[1]
    choice, level, steps = choose(job, draft, p, verify, depth)
    chain = best_chain(p, verify, chain_level, depth)
    trees = {f"chain:{chain.nodes}": chain} | {spec: shapes.parse(spec) for spec in k_ary}
    # The best tree with as many nodes as the largest of these, without regard to times.
    nodes = max(tree.nodes for tree in trees.values())
    trees[f"optimal:{nodes}"] = search.optimal(p, nodes, depth)[0]
    trees["chosen"] = choice.topology
    return {
        "acceptance": vectors,
        "verify_ms": {n: 1e3 * seconds for n, seconds in verify.items()},
        "draft_level": {"chain": chain_level, "chosen": level},
        "choices": steps,
        "tree": list(choice.topology.parents),
        "promise": {"expected_tokens": choice.expected, "speedup": choice.speedup},
        "rows": measure_trees(job, draft, trees, p),
    }
