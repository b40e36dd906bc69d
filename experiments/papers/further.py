"""Experiments of courses on the same pairs: ``run.py --further`` adds them to its results.

- ``pending``: a draft length for each class of the pending token, chosen from the target's texts,
  beside fixed lengths, the window rule and others.
- ``exits``: a draft token from the first layer whose best token is that of the layer before
  (Schuster et al. 2022, 2207.07061, call this saturation), beside exits at a fixed layer.
- ``rules``: the draft model's chains and trees with rules that differ in the noise that they share:
  speculative sampling, sample-then-match, and coupled drafts, whose text no drafter changes.
- ``slots``: untrained placeholder tokens after the pending token.
- ``sizes``: n-grams and draft models of several sizes; --draft=WIDTH=DIR names them. Those of the
  results have one layer and are trained as ``pairs`` trains drafts, on 1,024 prompts that the
  target continued, for 400 steps (model.hidden_size is WIDTH).
- ``checkpoints``: earlier checkpoints of the target as its draft model; --checkpoint=STEP=DIR names
  them, the last one is the target. Those of the results are four runs of configs/pretrain.py, each
  of 100 steps at a constant rate without warm-up, and each from the one before (config.init).

Costs in predictions are those that the first parts of the pair measured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers import law, parts
from experiments.papers.pairs import DRAFT, NGRAMS, Pair, prepared
from specjax import accept, drafters, theory
from specjax.bench.overlap import classify
from specjax.files import write_json
from specjax.models import hf, lm
from specjax.theory import roofline

WINDOW = "heuristic:4,up=1,window=10,above=0.8,below=0.5"
CONTROLLERS = ("fixed:2", "fixed:4", "heuristic:5", WINDOW, "threshold:0.4")
LONGEST = 8  # draft tokens of a controller
SLOTS = 3
BRANCHES = "4x1x1x1"


class Costs(NamedTuple):
    """The time of a round by its draft tokens, from 0, in plain steps: measured before."""

    times: np.ndarray  # f64[n]

    def of(self, drafted: float) -> float:
        """Interpolated."""
        return float(np.interp(drafted, np.arange(len(self.times)), self.times))


def costs_of(known: Mapping[str, Any], temperature: float) -> Costs:
    """Those of the pair's chains; where they were not measured quietly, one step each."""
    rows = {
        row["gamma"]: row["gamma"] * row["c"] + row["verify"]
        for row in known["chains"]
        if row["temperature"] == temperature and row["category"] is None and row["c"] is not None
    }
    rows = {0: 1.0, **rows}
    most = np.arange(max(*rows, LONGEST) + 1)
    return Costs(np.interp(most, sorted(rows), [rows[n] for n in sorted(rows)]))


# A length for each class of the pending token.


def kept(pair: Pair, kind: str, temperature: float) -> list[np.ndarray]:
    """Per text, at each output token: the probability that a draft of it is accepted.

    min(1, draft / target), whose running products have as means the chances of a whole draft; at
    temperature 0 whether both models agree.
    """
    drafter, result = pair.drafter(kind, 1), []
    texts = pair.texts[temperature]
    places = law.places(pair.target.lm, drafter, pair.params(drafter), texts)
    for (target, draft), output in zip(places, texts.outputs, strict=True):
        if temperature == 0:
            result.append((target.argmax(-1) == draft.argmax(-1)).astype(np.float64))
        else:
            own = (np.take_along_axis(x, np.array(output)[:, None], -1) for x in (target, draft))
            first, second = (x[:, 0] for x in own)
            result.append(np.minimum(second / np.maximum(first, law.SMALLEST), 1))
    return result


def class_of_id(pair: Pair) -> list[str]:
    """The class of every token of the vocabulary, alone."""
    decode = pair.target.text_tokenizer.decode
    return [classify([token], decode)[0] for token in range(pair.target.lm.vocab_size)]


def by_pending(pair: Pair, temperature: float, costs: Costs) -> tuple[list[dict], dict[str, int]]:
    """A row for each class of the token before a draft, and the best length after each class.

    The best length has the highest tokens - rate * time, with the rate of the best fixed length.
    """
    names, texts = class_of_id(pair), pair.texts[temperature]
    reached: dict[str, list[np.ndarray]] = {}
    pairs = zip(kept(pair, DRAFT, temperature), texts.prompts, texts.outputs, strict=True)
    for chances, prompt, output in pairs:
        before = [prompt[-1], *output[:-1]]
        for place, token in enumerate(before[: len(output) - LONGEST + 1]):
            chain = np.cumprod(chances[place : place + LONGEST])
            reached.setdefault(names[token], []).append(chain)
    tokens = {name: _tokens(np.mean(rows, 0)) for name, rows in reached.items()}
    every = _tokens(np.mean(np.concatenate(list(reached.values())), 0))
    times = costs.times[: LONGEST + 1]
    rate = (every / times).max()
    best = {name: int(np.argmax(each - rate * times)) for name, each in tokens.items()}
    rows = [
        {
            "temperature": temperature,
            "class": name,
            "share": len(reached[name]) / sum(map(len, reached.values())),
            "alpha": float(tokens[name][1] - 1),
            "expected_tokens": float(tokens[name][4]),
            "length": best[name],
        }
        for name in sorted(reached)
    ]
    return rows, best


def _tokens(reached: np.ndarray) -> np.ndarray:
    """f64[n + 1]: the tokens of a round with 0 to n draft tokens."""
    return 1 + np.concatenate([[0.0], np.cumsum(reached)])


def controllers(pair: Pair, known: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Controllers beside each other, at temperature 0 and 1, and the classes."""
    classes, result = [], []
    for temperature in (0.0, 1.0):
        costs = costs_of(known, temperature)
        rows, best = by_pending(pair, temperature, costs)
        classes += rows
        file = args.workdir / f"{pair.name}-lengths-{temperature:g}.json"
        # A class without a place in the texts has the length of one.
        write_json(file, [best.get(name, 1) for name in class_of_id(pair)])
        texts = {**{each: each for each in CONTROLLERS}, "pending, by class": f"pending:{file}"}
        for label, row in _bench_controllers(pair, texts, temperature, args).items():
            drafted, tokens = row["verified_per_round"] - 1, row["accepted_per_round"] + 1
            result.append(
                {
                    "controller": label,
                    "temperature": temperature,
                    "acceptance_rate": row["acceptance_rate"],
                    "drafted": drafted,
                    "tau": row["block_efficiency"],
                    "tokens_before_cut": tokens,
                    "operations_measured": (drafted * pair.work + drafted + 1) / tokens,
                    "predicted": tokens / costs.of(drafted),
                    "speedup": row["speedup"],
                    "lossless": row["lossless"]["passed"],
                }
            )
    return {"classes": classes, "controllers": result}


def _bench_controllers(
    pair: Pair, texts: Mapping[str, str], temperature: float, args: argparse.Namespace
) -> dict[str, dict]:
    rule, methods = accept.load("chain"), {}
    for label, text in texts.items():
        own = pair.models[DRAFT] | {"gamma": LONGEST, "control": text}
        # A label has no dots and commas.
        methods[label] = drafters.make(target=pair.target.lm, **own), rule
    rows = parts.bench(
        pair, methods, args, f"control {temperature:g} ", temperatures=(temperature,)
    )
    return {row["method"]: row for row in rows if row["category"] is None}


# The target's layers as a draft.


@functools.partial(jax.jit, static_argnums=0)
def _layers(target: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """f32[L,T,V]: the probabilities after each layer, at temperature 1."""
    taps = lm.forward(target, params, tokens[None]).taps
    inside = target.inside
    logits = [target.unembed(params, inside.last_norm(params, tap))[0] for tap in taps]
    return jax.nn.softmax(jnp.stack(logits), -1)


def exits(pair: Pair) -> list[dict[str, Any]]:
    """Acceptance of a draft token from each layer, and from the first one that is saturated."""
    layers = pair.target.lm.layers
    assert layers is not None and layers > 1
    target = pair.target.lm.with_taps(tuple(range(layers)))
    result: dict[str, dict[str, float]] = {}
    for temperature, field in ((0.0, "alpha_greedy"), (1.0, "alpha")):
        values: dict[str, list[np.ndarray]] = {}
        texts = pair.texts[temperature]
        for prompt, output in zip(texts.prompts, texts.outputs, strict=True):
            tokens = jnp.asarray([*prompt, *output], jnp.int32)
            every = np.asarray(_layers(target, pair.target.params, tokens), np.float64)
            every = every[:, len(prompt) - 1 : -1]
            best = every.argmax(-1)
            same = best[1:] == best[:-1]
            # The layer from 1 that ends the draft; the last one where none is saturated.
            first = np.where(same.any(0), same.argmax(0) + 2, layers)
            last = np.array([(column[::-1] != column[-1]).argmax() for column in best.T])
            last = np.where((best == best[-1]).all(0), 1, layers - last + 1)
            exit_at = {f"layer {n}": np.full(len(first), n) for n in range(1, layers)}
            exit_at |= {"saturated": first, "earliest that is right": last}
            for name, which in exit_at.items():
                chosen = np.take_along_axis(every, which[None, :, None] - 1, 0)[0]
                agreed = chosen.argmax(-1) == best[-1]
                alpha = np.minimum(chosen, every[-1]).sum(-1) if temperature else agreed
                values.setdefault(name, []).append(np.stack([which, alpha]).astype(np.float64))
        for name, found in values.items():
            layer, alpha = np.concatenate(found, 1).mean(1)
            row = result.setdefault(name, {})
            row |= {field: float(alpha), f"{field}_layers": float(layer) / layers}
    return [{"exit": name, **row} for name, row in result.items()]


# Drafts without training, of several sizes, and of an earlier time.


def slots(pair: Pair, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Embeddings of random tokens after the pending one; the first draft token is the target's."""
    drafter = drafters.make("pass", pair.target.lm, heads=SLOTS)
    assert drafter.training is not None and drafter.training.start is not None
    params = drafter.training.start(pair.target.params, jax.random.key(0))
    drafter = drafters.make("pass", pair.target.lm, params=params, heads=SLOTS)
    methods = {"slots": (drafter, accept.load("chain"))}
    rows = parts.bench(pair, methods, args, "slots ", temperatures=(0.0, 1.0))
    names = ("temperature", "acceptance_by_depth", "block_efficiency", "speedup")
    return [{name: row[name] for name in names} for row in rows if row["category"] is None]


def rules(pair: Pair, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The draft model at temperature 1, as a chain and as several chains, by rule."""
    keys = pair.models[DRAFT]
    tree = keys | {"name": "draft_tree", "tree": BRANCHES}
    forms = {
        "chain": (keys | {"gamma": parts.GAMMA}, accept.load("chain")),
        "match": (keys | {"gamma": parts.GAMMA}, accept.load("match")),
        "coupled": (keys | {"gamma": parts.GAMMA, "siblings": "coupled"}, accept.load("coupled")),
        "recursive": (tree | {"siblings": "iid"}, accept.load("recursive")),
        "match on a tree": (tree | {"siblings": "iid"}, accept.load("match")),
        "coupled on a tree": (
            tree | {"siblings": "coupled"},
            accept.load("coupled", streams=int(BRANCHES[0])),
        ),
    }
    methods = {
        label: (drafters.make(target=pair.target.lm, **own), rule)
        for label, (own, rule) in forms.items()
    }
    rows = parts.bench(pair, methods, args, "rules ", temperatures=(1.0,))
    names = ("method", "acceptance_rate", "block_efficiency", "speedup")
    return [
        {name: row[name] for name in names} | {"lossless": row["lossless"]["passed"]}
        for row in rows
        if row["category"] is None
    ]


def others(named: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The keys of draft models in directories, and their operations."""
    loaded = {name: hf.load(directory) for name, directory in named.items()}
    models = {
        name: {"name": "draft_model", "model": each.lm, "params": each.params}
        for name, each in loaded.items()
    }
    return models, {name: roofline.model_of(each.config).flops for name, each in loaded.items()}


def sizes(pair: Pair, args: argparse.Namespace) -> list[dict[str, Any]]:
    """n-grams and draft models of several sizes with ``parts.GAMMA`` tokens."""
    models, work = others({f"width {size}": path for size, path in args.drafts.items()})
    models = {kind: pair.models[kind] for kind in NGRAMS} | models
    target, rows = roofline.model_of(pair.target.config).flops, []
    for kind in models:
        own = pair._replace(models={kind: models[kind]}, work=work.get(kind, 0.0) / target)
        alphas = {row["temperature"]: row["alpha"] for row in parts.alphas(own)}
        methods = {kind: (own.drafter(kind, parts.GAMMA), accept.load("chain"))}
        found = parts.bench(own, methods, args, f"size {kind} ", temperatures=(0.0, 1.0))
        for row in (each for each in found if each["category"] is None):
            each = parts.beside_theory(row, kind, alphas[row["temperature"]], own)
            best = theory.optimal_gamma(each["alpha"], each["c"])
            rows.append(each | {"best_gamma": best[0], "best_improvement": best[1]})
    return rows


def checkpoints(args: argparse.Namespace) -> dict[str, Any]:
    """alpha of earlier checkpoints for the last one, and theorem 3.8 with c = 1."""
    (*earlier, last), rows = args.checkpoints, []
    files = [args.checkpoints[each] for each in (last, earlier[0])]
    pair = prepared("checkpoints", [*files, "", ""], args)
    models, _ = others({each: args.checkpoints[each] for each in earlier})
    for row in parts.alphas(pair._replace(models=models)):
        gain = theory.walltime_improvement(row["alpha"], 1, 1.0)
        names = ("temperature", "alpha")
        rows.append(
            {"steps": int(row["drafter"]), "of": int(last), "gain_of_one": gain}
            | {name: row[name] for name in names}
        )
    return {"rows": rows}


def study(pair: Pair, known: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """All parts for a pair."""
    parts.say(f"{pair.name}: controllers")
    result = controllers(pair, known, args) | {"exits": exits(pair), "slots": slots(pair, args)}
    result["rules"] = rules(pair, args)
    return result | ({"sizes": sizes(pair, args)} if args.drafts else {})


def named(texts: Sequence[str]) -> dict[str, str]:
    """Number -> directory, of NUMBER=DIR."""
    return {number: path for number, _, path in (each.partition("=") for each in texts)}
