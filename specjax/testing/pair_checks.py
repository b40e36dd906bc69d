"""What the compiled loop must show about one drafter with one rule; one function per check."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import rng
from specjax.testing import laws, loop, plain_cases, verdicts
from specjax.testing.claims import setting_name
from specjax.testing.findings import Finding
from specjax.testing.models import prompts_of
from specjax.testing.runner import BATCH, MASKS, NEW, WIDTH, Outputs, Rows, Runner
from specjax.theory import statistics

# Rows of the output law, in batches of BATCH; a p-value below LEVEL fails.
ROWS = 12_000
LEVEL = 1e-4
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.85})


def all_checks(run: Runner, settings: Sequence[dict] = SETTINGS, rows: int = ROWS) -> list[Finding]:
    """Every check; the output law, at each of the settings, only of an L1 rule."""
    findings = [greedy(run), greedy_among_sampled(run), ends(run), independent_rows(run)]
    if run.rule.lossless_class == "L1":
        findings += [output_law(run, each, rows) for each in settings]
    finished, traces = run.frozen and run.finished, run.retraces
    texts = "tokens and lengths, in every run; every row finished"
    again = f"{traces} traces for other texts, settings, seeds and EOS"
    return [
        *findings,
        paths(run),
        Finding("finished rows are frozen", finished, texts),
        Finding("nothing is compiled again", traces == 0, again),
        Finding("the state is donated", run.donated, "its cache was freed"),
    ]


def _of_rows(name: str, good: np.ndarray, which: str) -> Finding:
    """Passed if all rows bool[R] are good."""
    return Finding(name, bool(good.all()), f"{good.sum()}/{len(good)} {which}")


def greedy(run: Runner) -> Finding:
    """All-greedy rows have the tokens of plain greedy decoding."""
    eos = run.vocab - 1
    good = run.greedy().equal(run.plain_greedy()) & run.greedy(eos).equal(run.plain_greedy(eos))
    which = f"ragged rows, with and without EOS; {(~good).sum()} texts changed"
    return _of_rows("greedy is plain greedy decoding", good, which)


def greedy_among_sampled(run: Runner) -> Finding:
    """A greedy row gives the same tokens in a batch with sampled rows."""
    good = run.greedy().equal(run.mixture())[run.ragged.settings["temperature"] == 0]
    return _of_rows("greedy rows among sampled ones", good, "rows equal to an all-greedy batch")


def ends(run: Runner) -> Finding:
    """EOS and length limits cut the text that is generated without EOS, and change nothing else."""
    eos = 0
    long, cut = run.mixture().tokens, run.mixture(eos)
    begin = np.asarray(run.ragged.lengths)
    limit = begin + np.asarray(run.ragged.new)
    place = np.arange(long.shape[1])
    hit = (long == eos) & (place >= begin[:, None]) & (place < limit[:, None])
    expected = np.where(hit.any(1), np.argmax(hit, 1) + 1, limit)
    kept = place < np.reshape(expected, (-1, 1))
    good = (cut.lengths == expected) & (np.where(kept, long, -1) == cut.tokens).all(1)
    return _of_rows("EOS and limits only cut", good, f"rows, {hit.any(1).mean():.0%} ended early")


def independent_rows(run: Runner) -> Finding:
    """A row gives the same tokens at another place of the batch, among rows with other texts."""
    rows, outputs = run.ragged, run.mixture()
    order = np.random.default_rng(1).permutation(BATCH)
    # Every second row gets another text.
    changed = (np.arange(BATCH) % 2 == 1)[order]
    rows = jax.tree.map(lambda x: x[order], rows)
    tokens = jnp.where(changed[:, None], rows.tokens[::-1], rows.tokens)
    lengths = jnp.where(changed, rows.lengths[::-1], rows.lengths)
    moved = run.run(rows._replace(tokens=tokens, lengths=lengths))
    good = Outputs(outputs.tokens[order], outputs.lengths[order]).equal(moved)[~changed]
    return _of_rows("a row is independent of its batch", good, "rows moved among other texts")


def output_law(run: Runner, settings: dict, count: int = ROWS) -> Finding:
    """Chi-square of more tokens than one round can emit, against the target's exact law.

    Every fourth row is greedy and not counted. The counted rows are tested together, and by the
    ways in which ``masked`` makes nodes invalid. Not proven if no node was drafted.
    """
    steps = min(run.drafter.longest + 2, NEW, int(np.log(count) / np.log(run.vocab)))
    mask, greedy = np.arange(count) % len(MASKS), np.arange(count) // len(MASKS) % 4 == 0
    [prompt] = prompts_of(run.plain, [plain_cases.REPEATED])
    temperature = np.where(greedy, 0.0, settings["temperature"])
    keys, new, drafted = rng.row_keys(1, count), [], 0.0
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        mixed = {"temperature": temperature[part], "min_p": np.asarray(MASKS)[mask[part]]}
        texts = jnp.asarray(np.tile(prompt, (BATCH, 1)), jnp.int32)
        lengths, most = (jnp.full((BATCH,), size, jnp.int32) for size in (WIDTH, steps))
        outputs = run.run(Rows(texts, lengths, most, settings | mixed, keys[part]))
        new.append(outputs.tokens[:, WIDTH : WIDTH + steps])
        drafted += outputs.drafted * BATCH / count
    name, tokens = f"law, {setting_name(settings)}", np.concatenate(new)
    if (tokens >= run.vocab).any() or (tokens < 0).any():
        return Finding(name, False, "rows without a text, because of a wrong verdict")
    law = laws.sequence_law(run.plain, run.params.target, prompt, steps, **settings, **run.more)
    cells = np.asarray(np.ravel_multi_index(tuple(tokens.T), law.shape))
    groups = [~greedy, *(~greedy & (mask == kind) for kind in range(len(MASKS)))]
    found = [np.bincount(cells[group], minlength=law.size) for group in groups]
    values = [statistics.chi_square(each, law)[2] for each in found]
    rows_counted = int((~greedy).sum())
    detail = (
        f"{steps} tokens, {rows_counted} rows, {drafted:.2g} nodes per round, p = {values[0]:.2g} "
        f"(a total variation of {loop.detectable(law, rows_counted):.3f} would fail); all nodes "
        "valid, none, some, every second: " + ", ".join(f"{value:.2g}" for value in values[1:])
    )
    passed = min(values) > LEVEL
    if passed and not drafted and run.drafter.nodes:
        return Finding(name, None, f"no node was drafted, so no rule was tested; {detail}")
    return Finding(name, passed, detail)


def paths(run: Runner) -> Finding:
    """In every run, each verdict's path is a path of the draft and has the emitted tokens."""
    name = "paths are paths of the draft"
    if not run.mistakes.any():
        return Finding(name, True, "and have the emitted tokens, in every run")
    worst = int(np.argmax(run.mistakes))
    return Finding(name, False, f"{run.mistakes.sum()} rows; most often {verdicts.MISTAKES[worst]}")
