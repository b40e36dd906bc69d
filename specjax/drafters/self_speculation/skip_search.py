"""Searches the sublayers that ``layer_skip`` leaves out, by Bayesian optimisation.

python -m specjax.drafters.self_speculation.skip_search TARGET DIR --texts=texts.jsonl

TARGET is a model, and texts.jsonl a recording of its outputs (``config.record`` of
configs/generate.py). Writes DIR/skips.json, which the keys ``skip_attention`` and ``skip_mlp`` of
``layer_skip`` take.

Draft & Verify (Zhang et al. 2023, 2309.08168, section 3.2) maximise the measured speed. It depends
on the machine and on what else runs there, so here the objective is the predicted speed-up, from
the acceptance on the texts and the share of the weights that the draft reads: the same numbers
everywhere. ``--objective=measured`` decodes the texts' prompts instead, as the authors do.

First each sublayer is left out alone, then growing sets of those that cost the least acceptance for
what they save; the optimisation continues from these. Each set follows from the trials before it
and the seed alone, so a search that was killed continues as if it had not been.

The acceptance is measured by one pass of the target over the texts (once) and one of the draft for
each set. A sublayer is left out by zeros in its last map, so all sets share one compiled program;
the pass takes as long for every set, and the cost of a set is a share of the weights, not a time.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, declare, decode, drafters, files, rng, sampling, theory
from specjax.data import progress, recordings
from specjax.data.recordings import Trace
from specjax.declare import key
from specjax.drafters.self_speculation import _skip_sets
from specjax.drafters.self_speculation._skip_sets import ATTENTION, FILE, MLP, Skips, check
from specjax.errors import Parser, UserError, library, one_line
from specjax.models import hf
from specjax.types import LM, Array, ModelParams, Params, Sublayers

OBJECTIVES = ("predicted", "measured")
# The sizes of growing sets that are tried at most.
GROWING = 24
# The noise of the Gaussian process, as in the authors' code.
NOISE = 1e-2
# The last map of a sublayer: (module, map).
LAST = {"attention": "o", "mlp": "down"}


def _times(value: Any) -> tuple[float, ...]:
    """The numbers of the key ``verify``, or of its text. Raises UserError."""
    try:
        parts = value.split(",") if isinstance(value, str) and value else value
        return tuple(map(float, parts))
    except (TypeError, ValueError):
        raise UserError(f"verify is {value!r}; give times in steps, as in '1,1.1,1.2'") from None


class Settings(declare.Keys):
    """What the result depends on, with the target and the texts."""

    trials: int = key(200, "of the optimisation", least=0)
    seed: int = key(0, "of the search and of decoding", least=0)
    gamma: int = key(8, "the longest draft", least=1)
    temperature: float = key(0.0, "of the texts", least=0)
    texts_used: int = key(8, "conversations of the recording", least=1)
    width: int = key(128, "tokens of each", least=2)
    verify: tuple[float, ...] = key(
        (), "times of passes over 1, 2, ... tokens; (): always 1", parse=_times
    )
    objective: str = key("predicted", "what is maximised", choices=OBJECTIVES)

    def check(self) -> None:
        if self.verify and len(self.verify) <= self.gamma:
            raise UserError(
                f"verify has times for up to {len(self.verify)} tokens, and drafts of "
                f"{self.gamma} are verified with one more; give {self.gamma + 1} times"
            )


class Trial(NamedTuple):
    """One set and its value."""

    skips: Skips
    value: float  # the objective: a speed-up, or tokens per second
    alpha: float
    cost: float
    gamma: int


def search(
    target: hf.Loaded, traces: Sequence[Trace], folder: Path, settings: Settings, report: Callable
) -> dict:
    """Searches, writes ``skips.json`` into ``folder``, and returns its content.

    ``report`` gets the lines about the progress. Raises UserError: numbers out of range, a target
    without layers, a missing library.
    """
    bayesian_package()
    traces = traces[: settings.texts_used]
    evaluate = _evaluation(target, traces, settings)
    facts = {"target": target.directory, **vars(settings)}
    mark = progress.fingerprint(facts, [[*t.prompt, *t.output] for t in traces])
    store = progress.Progress(folder, mark)
    if len(store):
        report(f"continues a search with {len(store)} trials")
    layers, done, began = target.config.num_layers, [], time.monotonic()
    for name, chosen in plan(layers, done, settings.trials, settings.seed):
        if (stored := store.get(name)) is None:
            skips = chosen()
            known = {trial.skips: trial for trial in done}
            trial = known[skips] if skips in known else evaluate(skips)
            store.put(name, [*map(list, skips), *trial[1:]])
        else:
            trial = Trial(Skips(*map(tuple, stored[:2])), *stored[2:])
        done.append(trial)
        if len(done) % 10 == 0:
            report(_line(name, done, layers, settings, time.monotonic() - began))
    best = max(done, key=lambda trial: trial.value)
    result = {
        ATTENTION: list(best.skips.attention),
        MLP: list(best.skips.mlp),
        "gamma": best.gamma,
        "alpha": best.alpha,
        "cost": best.cost,
        settings.objective: best.value,
        "trials": len(done),
        "target": Path(target.directory).name,
        "layers": layers,
        "settings": vars(settings),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / FILE, result)
    store.forget()
    return result


def _evaluation(target: hf.Loaded, traces: Sequence[Trace], settings: Settings) -> Callable:
    """The function that gives the trial of a set."""
    check(target.lm, Skips((), ()))
    rows = texts([t.prompt for t in traces], [t.output for t in traces], settings.width)
    experts = target.config.experts
    parts = shares(target.params, 1.0 if experts is None else experts.chosen / experts.experts)
    rate = acceptance(target.lm, target.params, rows, settings.temperature)

    def evaluate(skips: Skips) -> Trial:
        alpha, cost = rate(skips), parts.cost(skips)
        value, gamma = predicted(alpha, cost, settings.gamma, list(settings.verify) or None)
        if settings.objective == "measured":
            value = _tokens_per_second(target, traces, settings, skips, gamma)
        return Trial(skips, value, alpha, cost, gamma)

    return evaluate


def _tokens_per_second(
    target: hf.Loaded, traces: Sequence[Trace], settings: Settings, skips: Skips, gamma: int
) -> float:
    """The speed of decoding the prompts, one after another, without compilation."""
    own = {"skip_attention": skips.attention, "skip_mlp": skips.mlp}
    drafter = drafters.make("layer_skip", target.lm, gamma=gamma, **own)
    params, rule = ModelParams(target.params), accept.load("chain")
    seconds = tokens = 0.0
    width = max(len(trace.prompt) for trace in traces)
    new = max(len(trace.output) for trace in traces)
    for turn in range(2):  # the first one compiles
        for number_, trace in enumerate(traces):
            packed, lengths = decode.pack_prompts([trace.prompt], width)
            state = decode.prefill(
                target.lm,
                drafter,
                params,
                packed,
                lengths,
                rng.row_keys(settings.seed, [number_]),
                max_len=width + new,
                limit=lengths + len(trace.output),
                sampling=sampling.make_sampling(1, settings.temperature),
            )
            began = time.perf_counter()
            state, _ = decode.generate(target.lm, drafter, rule, params, state, max_steps=new)
            jax.block_until_ready(state.tokens)
            if turn:
                seconds += time.perf_counter() - began
                tokens += int(state.length[0] - lengths[0])
    # Every set is another program.
    jax.clear_caches()
    return tokens / seconds


def _line(name: str, done: Sequence[Trial], layers: int, settings: Settings, seconds: float) -> str:
    best = max(done, key=lambda trial: trial.value)
    unit = "x" if settings.objective == "predicted" else " tokens/s"
    return (
        f"{len(done)} of {count(layers, settings.trials)} trials ({name}), {seconds:.0f} s; "
        f"best {best.value:.3f}{unit}: "
        f"{len(best.skips.attention)} attentions and {len(best.skips.mlp)} feed-forward parts of "
        f"{layers} skipped, alpha {best.alpha:.3f}, cost {best.cost:.3f}, gamma {best.gamma}"
    )


def plan(
    layers: int, done: list[Trial], trials: int, seed: int
) -> Iterator[tuple[str, Callable[[], Skips]]]:
    """(name, function that gives the set) of each trial; ``done`` has the trials before it."""
    yield "nothing", lambda: Skips((), ())
    for index in range(2 * layers):
        yield f"alone {index}", functools.partial(_skips, [index], layers)
    order = _by_harm(done, layers)
    for size in _sizes(layers):
        yield f"growing {size}", functools.partial(_skips, order[:size], layers)
    for trial in range(trials):
        # A fit takes longer with every trial: it is left out where the trial is stored.
        yield f"search {trial}", functools.partial(_suggested, layers, done, seed + trial)


def count(layers: int, trials: int) -> int:
    """How many sets ``plan`` has."""
    return 1 + 2 * layers + len(_sizes(layers)) + trials


def _sizes(layers: int) -> list[int]:
    """The sizes of the growing sets."""
    if layers < 2:
        return []
    return np.unique(np.linspace(2, 2 * layers - 1, GROWING).round().astype(int)).tolist()


def bayesian_package() -> Any:
    """The package of Bayesian optimisation. Raises UserError if it is not installed."""
    return library("bayes_opt", "search", "the search needs bayesian-optimization")


def _skips(chosen: Sequence[int], layers: int) -> Skips:
    """The set of these numbers: attentions are 0 to L - 1, feed-forward parts L to 2 L - 1."""
    attention = sorted(int(i) for i in chosen if i < layers)
    mlp = sorted(int(i) - layers for i in chosen if i >= layers)
    return Skips(tuple(attention), tuple(mlp))


def _by_harm(done: Sequence[Trial], layers: int) -> list[int]:
    """All sublayers, first those that cost little acceptance for the weights that they save."""
    nothing, alone = done[0], done[1 : 1 + 2 * layers]
    harm = [(nothing.alpha - t.alpha) / max(nothing.cost - t.cost, 1e-12) for t in alone]
    return [int(i) for i in np.argsort(harm, kind="stable")]


def _suggested(layers: int, done: Sequence[Trial], seed: int) -> Skips:
    """The next set, from the trials so far and the seed alone.

    A number in [0, 1] for each sublayer, left out above 0.5, as in the authors' search. Several
    points are one set: in the place of a set that was tried, a random neighbour of it is taken.
    """
    package = bayesian_package()
    names = [f"x{i:04d}" for i in range(2 * layers)]
    optimiser = package.BayesianOptimization(
        f=None,
        pbounds=dict.fromkeys(names, (0.0, 1.0)),
        random_state=seed,
        verbose=0,
        allow_duplicate_points=True,
    )
    optimiser.set_gp_params(alpha=NOISE)
    # Of equal sets only the last: their values are equal.
    values = {trial.skips: trial.value for trial in done}
    for skips, value in values.items():
        left = {*skips.attention, *(layers + i for i in skips.mlp)}
        point = {name: float(i in left) for i, name in enumerate(names)}
        optimiser.register(params=point, target=value)
    suggested = optimiser.suggest()
    chosen = {i for i, name in enumerate(names) if suggested[name] > 0.5}
    return _new(chosen, layers, set(values), np.random.default_rng(seed))


def _new(chosen: set[int], layers: int, tried: set[Skips], draw: np.random.Generator) -> Skips:
    """The set, or if it was tried one that differs in few sublayers; it leaves something."""
    every, size = chosen, 1
    while len(every) == 2 * layers or _skips(list(every), layers) in tried:
        # More and more sublayers change, so this ends unless all sets were tried.
        every = chosen ^ set(draw.choice(2 * layers, min(size, 2 * layers), False).tolist())
        size += draw.random() < 0.5
        if size > 4 * layers:
            return _skips(sorted(chosen)[: 2 * layers - 1], layers)
    return _skips(sorted(every), layers)


class Shares(NamedTuple):
    """The share of a decoding step's weights that each sublayer reads; with ``rest`` they sum to 1.

    At batch 1 and for short texts a step takes as long as its weights take to be read.
    """

    attention: np.ndarray  # f64[L]
    mlp: np.ndarray  # f64[L]
    rest: float  # the LM head

    def cost(self, skips: Skips) -> float:
        """c: the time of a draft step over that of a target step."""
        left = self.rest + self.attention.sum() + self.mlp.sum()
        for each, numbers in zip((self.attention, self.mlp), skips, strict=True):
            left -= each[[*numbers]].sum()
        return float(left)


def shares(params: Mapping[str, Any], active: float = 1.0) -> Shares:
    """The shares of a decoder's parameters. ``active``: the share of its experts that a token uses.

    Raises UserError for parameters of another form.
    """
    layers = _layers(params)
    attention = np.array([_size(layer["attention"]) for layer in layers], np.float64)
    mlp = np.array([_used(layer["mlp"], active) for layer in layers], np.float64)
    head = _size(params.get("head", params["embed"]))
    total = attention.sum() + mlp.sum() + head
    return Shares(attention / total, mlp / total, float(head / total))


def _layers(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameters of the layers in order. Raises UserError."""
    try:
        layers = [layer for _, layer in sorted(params["layers"].items(), key=lambda x: int(x[0]))]
        for layer in layers:
            for kind, last in LAST.items():
                layer[kind][last]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            "the target's parameters are not those of a decoder of specjax.models; give such a "
            "target"
        ) from None
    return layers


def _used(mlp: Mapping[str, Any], active: float) -> float:
    """The number of a feed-forward part's parameters that a token uses."""
    routed = sum(_size(mlp[name]) for name in ("gate", "up", "down")) if "router" in mlp else 0
    return _size(mlp) - (1 - active) * routed


def _size(part: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(part))


def without(params: Any, attention: Array, mlp: Array) -> Any:
    """The parameters with zeros in the last map of the sublayers whose entry f[L] is 0, not 1."""
    layers = {}
    for index, layer in params["layers"].items():
        changed = dict(layer)
        for kind, keep in (("attention", attention), ("mlp", mlp)):
            last, own = LAST[kind], keep[int(index)]
            scaled = jax.tree.map(lambda x: x * own.astype(x.dtype), changed[kind][last])  # noqa: B023
            changed[kind] = {**changed[kind], last: scaled}
        layers[index] = changed
    return {**params, "layers": layers}


class Texts(NamedTuple):
    """Rows of text that the target wrote."""

    tokens: np.ndarray  # i32[B,T] prompt and output, padded with 0
    counted: np.ndarray  # bool[B,T] places after which the target wrote a token


def texts(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], width: int) -> Texts:
    """One row per conversation, of its last ``width`` tokens. Raises UserError."""
    tokens = np.zeros((len(prompts), width), np.int32)
    counted = np.zeros(tokens.shape, bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = [*prompt, *output][-width:]
        tokens[row, : len(ids)] = ids
        first = max(len(ids) - len(output) - 1, 0)
        counted[row, first : len(ids) - 1] = True
    if not counted.any():
        raise UserError("the texts have no token that follows another one; give longer texts")
    return Texts(tokens, counted)


def acceptance(
    target: LM, params: Params, rows: Texts, temperature: float
) -> Callable[[Skips], float]:
    """The acceptance rate of a set on texts as a function: alpha of the first draft token.

    At temperature 0 the share of places at which draft and target prefer the same token; otherwise
    the mean overlap of their probabilities (``theory.acceptance_rate``). Later tokens of a draft
    read the draft's own keys and values of the tokens before them, which this leaves out.
    """

    _layers(params)
    assert target.layers is not None
    layers, settings = tuple(range(target.layers)), sampling.make_sampling(1, temperature)

    def read(params: Any, tokens: Array) -> tuple[Any, Any]:
        out, block = target.apply(params, tokens[None], target.init_cache(1, 0))
        return block, sampling.to_probs(out.logits, settings)[0]

    def score(params: Any, row: Any, attention: Array, mlp: Array) -> Array:
        tokens, counted, block, probs = row
        own = without(params, attention, mlp)
        out = _skip_sets.draft(target, Sublayers(layers, layers), own, tokens[None], block)
        draft = sampling.to_probs(out.logits, settings)[0]
        # In greedy rows both are one-hot.
        return jnp.where(counted, jnp.minimum(probs, draft).sum(-1), 0).sum()

    @jax.jit
    def total(params: Any, rows: Any, attention: Array, mlp: Array) -> Array:
        return jax.lax.map(lambda row: score(params, row, attention, mlp), rows).sum()

    tokens, counted = map(jnp.asarray, rows)
    prepare = jax.jit(lambda params, rows: jax.lax.map(functools.partial(read, params), rows))
    known = (tokens, counted, *prepare(params, tokens))

    def rate(skips: Skips) -> float:
        masks = np.ones((2, len(layers)), np.float32)
        for mask, left in zip(masks, skips, strict=True):
            mask[[*left]] = 0
        return min(float(total(params, known, *jnp.asarray(masks))) / int(rows.counted.sum()), 1.0)

    return rate


def predicted(
    alpha: float, cost: float, longest: int, verify: theory.Verify | None = None
) -> tuple[float, int]:
    """(speed-up, gamma): the best number of draft tokens from 1 to ``longest``, also if it loses.

    ``verify`` as in ``theory.walltime_improvement``.
    """
    lengths = range(1, longest + 1)
    values = [theory.walltime_improvement(alpha, n, cost, verify) for n in lengths]
    best = int(np.argmax(values))
    return values[best], lengths[best]


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    try:
        args = vars(_parser().parse_args(argv))
        directory = Path(args.pop("directory")).expanduser()
        if directory.is_file():
            raise UserError(f"{directory} is a file; name a directory for {FILE}")
        target, path = args.pop("target"), args.pop("texts")
        settings = Settings(**args)
        bayesian_package()
        loaded = hf.load(target)
        traces = recordings.read(path, loaded.config.vocab_size).traces
        report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        result = search(loaded, traces, directory, settings, report)
    except UserError as error:
        print(f"specjax: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"wrote {directory / FILE}: {settings.objective} {result[settings.objective]:.3f}")
    return 0


def _parser() -> Parser:
    parser = Parser("python -m specjax.drafters.self_speculation.skip_search", None, __doc__)
    parser.add_argument("target", help="a model directory, a name of the Hub, or a .gguf file")
    parser.add_argument("directory", help=f"where {FILE} is written")
    parser.add_argument("--texts", required=True, help="a recording of the target's outputs")
    for each in declare.keys_of(Settings):
        kind, choices = each.type, each.facts.choices or None
        kind = str if kind is tuple else kind
        name, help = f"--{each.name}", each.facts.help
        parser.add_argument(name, type=kind, default=each.default, choices=choices, help=help)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
