"""Does a method keep its promises? ``check_drafter`` and ``check_accept`` try, and say in a report what they saw.

    report = testing.check_drafter(make(target), target, params)
    print(report)
    assert report.passed

They run the real compiled loop over thousands of ragged rows of a table model, so that one compilation serves every check,
and walk through every outcome in float64 where all randomness is coins and draws (``specjax.testing.exact``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling, step
from specjax.drafters import none
from specjax.errors import UserError
from specjax.testing import cases, exact, laws, loop
from specjax.testing.drafts import check_draft
from specjax.testing.findings import Finding, Report
from specjax.theory import statistics
from specjax.types import LM, Accept, Context, DecodeState, Drafter, ModelParams

ROWS, WIDTH, NEW, STEPS = 12_000, 6, 9, 3
LEVEL = 1e-4
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.85})
EXACT = 1e-12


def masked(drafter: Drafter) -> Drafter:
    """The drafter with nodes withdrawn by the first token of the text: 0 all of them, 1 none, else the eldest of the tree
    with what hangs below it (of a chain all but the first).

    A function of the committed text: a withdrawal like any drafter may make, and one that every rule must stand.
    """

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        first = context.tokens[:, :1]
        node = jnp.arange(drafter.nodes)
        keep = jnp.where(
            first == 0, False, (first == 1) | (node == 0 if draft.parents is None else node > 0)
        )
        return draft.replace(valid=draft.valid & keep), state

    return drafter._replace(propose=propose)


def check_pair(
    drafter: Drafter, rule: Accept, target: LM, params: ModelParams, *, seed: int = 0
) -> list[Finding]:
    """What the compiled loop shows about one drafter with one rule. ``target`` has a small vocabulary (3 to 6 tokens)."""
    accept.check_pair(drafter, rule)
    run = _Runner(_prepare(drafter, target), rule, params, seed)
    findings = [run.greedy(), run.mixed(), run.ends(), run.company()]
    if rule.lossless_class == "L1":
        findings += run.law()
    return [*findings, run.frozen(), run.compiled(), run.donated()]


class _Prepared(NamedTuple):
    """A pair of models that counts how often it is traced."""

    plain: LM
    target: LM
    drafter: Drafter
    traces: list[int]


@functools.lru_cache(maxsize=4)  # the rules of one drafter share what is compiled for it
def _prepare(drafter: Drafter, target: LM) -> _Prepared:
    traces: list[int] = []

    def counted(*args):
        traces.append(1)
        return target.apply(*args)

    return _Prepared(target, target._replace(apply=counted), masked(drafter), traces)


class _Runner:
    """Runs one program on many inputs: always ROWS rows, prompts of at most WIDTH tokens, at most NEW new ones."""

    def __init__(self, prepared: _Prepared, rule: Accept, params: ModelParams, seed: int):
        self.plain, self.target, self.drafter, self.traces = prepared
        self.rule, self.params, self.vocab = rule, params, prepared.plain.vocab_size
        self.first, self.known = 0, {}
        random = np.random.default_rng(seed)
        lengths = random.integers(1, WIDTH + 1, ROWS)
        tokens = random.integers(0, self.vocab, (ROWS, WIDTH))
        self.tokens = jnp.asarray(
            np.where(np.arange(WIDTH) < lengths[:, None], tokens, -1), jnp.int32
        )
        self.lengths = jnp.asarray(lengths, jnp.int32)
        self.new = jnp.asarray(random.integers(0, NEW + 1, ROWS), jnp.int32)
        self.mixture = {
            "temperature": np.where(
                np.arange(ROWS) % 3 == 0, 0.0, np.where(np.arange(ROWS) % 3 == 1, 1.0, 0.6)
            ),
            "top_p": np.where(np.arange(ROWS) % 2 == 0, 1.0, 0.8),
        }
        self.everything: list[tuple[str, bool]] = []

    def begin(self, tokens, lengths, new, settings: dict, ids=None, seed: int = 0) -> DecodeState:
        return decode.prefill(
            self.target,
            self.drafter,
            self.params,
            tokens,
            lengths,
            rng.row_keys(seed, ROWS if ids is None else ids),
            max_len=WIDTH + NEW,
            limit=lengths + new,
            sampling=sampling.make_sampling(ROWS, **settings),
        )

    def run(
        self,
        settings: dict,
        tokens=None,
        lengths=None,
        new=None,
        ids=None,
        eos: int = -5,
        seed: int = 0,
    ):
        """(tokens, lengths) of every row at the end; watches what finished rows do on the way."""
        lengths = self.lengths if lengths is None else lengths
        state = self.begin(
            self.tokens if tokens is None else tokens,
            lengths,
            self.new if new is None else new,
            settings,
            ids,
            seed,
        )
        still, gone = True, True
        done, before = np.asarray(state.done), self._frozen(state)
        for _ in range(NEW + 2):
            if done.all():
                break
            previous = state
            state, _ = decode.generate(
                self.target,
                self.drafter,
                self.rule,
                self.params,
                state,
                max_steps=STEPS,
                eos_id=(eos,),
            )
            gone &= all(x.is_deleted() for x in jax.tree.leaves(previous.cache) if x.ndim > 1)
            now = self._frozen(state)
            still &= all((a[done] == b[done]).all() for a, b in zip(before, now, strict=True))
            done, before = np.asarray(state.done), now
        self.everything += [("finished", bool(done.all())), ("frozen", still), ("donated", gone)]
        decode.check(state)
        return np.asarray(state.tokens), np.asarray(state.length)

    @staticmethod
    def _frozen(state: DecodeState) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(x) for x in (state.tokens, state.length, state.cache.length))

    def again(self, what: str, eos: int = -5):
        """The run of the ragged rows, greedy or in a mixture of settings: once for all checks."""
        if (what, eos) not in self.known:
            settings = {"temperature": 0.0} if what == "greedy" else self.mixture
            self.known[what, eos] = self.run(settings, eos=eos)
            self.first = self.first or len(self.traces)
        return self.known[what, eos]

    def plainly(self, eos: int) -> tuple[np.ndarray, np.ndarray]:
        """The same rows by plain greedy decoding."""
        packed = (
            self.plain,
            none.make(self.plain),
            ModelParams(self.params.target),
            self.tokens,
            self.lengths,
        )
        settings = sampling.make_sampling(ROWS, 0.0)
        state = decode.prefill(
            *packed,
            rng.row_keys(0, ROWS),
            max_len=WIDTH + NEW,
            limit=self.lengths + self.new,
            sampling=settings,
        )
        state = decode.autoregressive(self.plain, self.params, state, max_steps=NEW, eos_id=(eos,))
        return np.asarray(state.tokens), np.asarray(state.length)

    def greedy(self) -> Finding:
        same = []
        for eos in (-5, self.vocab - 1):
            want, got = self.plainly(eos), self.again("greedy", eos)
            same.append(_rows_equal(want, got))
        good = np.logical_and(*same)
        return Finding(
            "greedy is plain greedy decoding",
            bool(good.all()),
            f"{good.sum()}/{ROWS} ragged rows, with and without EOS",
        )

    def mixed(self) -> Finding:
        alone, together = self.again("greedy"), self.again("mixture")
        good = _rows_equal(alone, together)[self.mixture["temperature"] == 0]
        return Finding(
            "greedy rows among sampled ones",
            bool(good.all()),
            f"{good.sum()}/{len(good)} rows as in a greedy batch",
        )

    def ends(self) -> Finding:
        eos = 0
        (long, _), (short, ends) = self.again("mixture"), self.again("mixture", eos)
        begin, limit = np.asarray(self.lengths), np.asarray(self.lengths + self.new)
        place = np.arange(long.shape[1])
        new = (place >= begin[:, None]) & (place < limit[:, None])
        hit = new & (long == eos)
        want = np.where(hit.any(1), np.argmax(hit, 1) + 1, limit)
        kept = place < np.reshape(want, (-1, 1))
        good = (ends == want) & (np.where(kept, long, -1) == short).all(1)
        return Finding(
            "EOS and limits only cut",
            bool(good.all()),
            f"{good.sum()}/{ROWS} rows, {hit.any(1).mean():.0%} ended early",
        )

    def company(self) -> Finding:
        tokens, lengths = self.again("mixture")
        order = np.random.default_rng(1).permutation(ROWS)
        strangers = (
            np.arange(ROWS) % 2 == 1
        )  # every second row is given another text, and moves as well
        other = jnp.where(strangers[order][:, None], self.tokens[order][::-1], self.tokens[order])
        size = jnp.where(strangers[order], self.lengths[order][::-1], self.lengths[order])
        settings = {k: v[order] for k, v in self.mixture.items()}
        moved = self.run(settings, other, size, self.new[order], ids=order.tolist())
        good = _rows_equal((tokens[order], lengths[order]), moved)[~strangers[order]]
        return Finding(
            "a row does not see its batch",
            bool(good.all()),
            f"{good.sum()}/{len(good)} rows moved among strangers",
        )

    def law(self) -> list[Finding]:
        """Chi-square of more tokens than one round can emit, for the three ways to withdraw nodes together and apart, of rows
        among which every fourth is greedy and not counted."""
        steps = min(self.drafter.longest + 2, NEW, int(np.log(ROWS) / np.log(self.vocab)))
        firsts, greedy = np.arange(ROWS) % 3, np.arange(ROWS) // 3 % 4 == 0
        prompts = np.concatenate(
            [firsts[:, None] % self.vocab, np.tile(cases.PROMPT, (ROWS, 1))], 1
        )
        prompts = jnp.asarray(
            np.pad(prompts, ((0, 0), (0, WIDTH - 3)), constant_values=-1), jnp.int32
        )
        findings = []
        for settings in SETTINGS:
            full = jnp.full((ROWS,), 3, jnp.int32)
            mixed = settings | {"temperature": np.where(greedy, 0.0, settings["temperature"])}
            tokens, _ = self.run(mixed, prompts, full, jnp.full((ROWS,), steps, jnp.int32), seed=1)
            new = tokens[:, 3 : 3 + steps]
            law = laws.sequence_law(
                self.plain, self.params.target, [0, *cases.PROMPT], steps, **settings
            )
            cells = np.asarray(np.ravel_multi_index(tuple(new.T), law.shape))
            groups = [~greedy, *(~greedy & (firsts == f) for f in range(3))]
            values = [
                statistics.chi_square(np.bincount(cells[g], minlength=law.size), law)[2]
                for g in groups
            ]
            detail = (
                f"{steps} tokens, {(~greedy).sum()} rows, p = {values[0]:.2g} (a total variation of "
                f"{loop.detectable(law, int((~greedy).sum())):.3f} would show); none valid, all, some: "
                + ", ".join(f"{v:.2g}" for v in values[1:])
            )
            name = ", ".join(f"{k} {v}" for k, v in settings.items())
            findings.append(Finding(f"law, {name}", min(values) > LEVEL, detail))
        return findings

    def frozen(self) -> Finding:
        good = all(ok for name, ok in self.everything if name in ("frozen", "finished"))
        return Finding(
            "finished rows are frozen",
            good,
            "tokens and lengths, in every run; every row came to its end",
        )

    def donated(self) -> Finding:
        return Finding(
            "the state is donated",
            all(ok for name, ok in self.everything if name == "donated"),
            "its cache was freed",
        )

    def compiled(self) -> Finding:
        new = len(self.traces) - self.first
        return Finding(
            "nothing is compiled again",
            new == 0,
            f"{new} traces for other texts, settings, seeds and EOS",
        )


def _rows_equal(a, b) -> np.ndarray:
    size = min(
        a[0].shape[1], b[0].shape[1]
    )  # buffers differ by the drafter's nodes, in which nothing is ever left
    return (a[1] == b[1]) & (a[0][:, :size] == b[0][:, :size]).all(1)


def check_law(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    **settings,
) -> Finding:
    """The exact law of one round, where it can be enumerated: total variation from the target's below 1e-12."""
    name = "exact law of a round"
    with jax.enable_x64(True):
        wide = jax.tree.map(  # ids and counts stay what they are
            lambda x: (
                jnp.asarray(x, jnp.float64)
                if jnp.issubdtype(x.dtype, jnp.floating)
                else jnp.asarray(x)
            ),
            params,
        )
        steps, worst = drafter.longest + 1, 0.0
        try:
            for prompt in prompts:
                found = exact.exact_law(
                    target, drafter, rule, wide, list(prompt), steps, rounds=1, **settings
                )
                truth = laws.sequence_law(target, wide.target, list(prompt), steps, **settings)
                worst = max(worst, statistics.total_variation(found, truth))
        except (exact.NoiseReused, exact.ImpossibleLaw) as error:
            return Finding(name, False, str(error))
        except (exact.NotEnumerable, exact.TooLarge) as error:
            return Finding(name, None, str(error))
    return Finding(
        name,
        worst < EXACT if rule.lossless_class == "L1" else None,
        f"total variation {worst:.1e}, {rule.name}",
    )


def check_drafter(
    drafter: Drafter,
    target: LM,
    params: ModelParams,
    rules: Sequence[Accept] | None = None,
    *,
    prompts: Sequence[Sequence[int]] = (cases.PROMPT,),
) -> Report:
    """Checks a drafter with the given rules (default: every L1 rule that takes its drafts).

    Args:
        drafter: made for ``target``.
        target: a model with a vocabulary of 3 to 6 tokens, such as ``testing.tabular(3)``.
        params: of the pair; floats are widened where the law is enumerated.
        rules: acceptance rules.
        prompts: texts after which the law is enumerated.

    Returns:
        A ``Report``: what it drafts, the exact law of a round, then per rule what ``check_pair`` lists.
    """
    findings = [_drafts(drafter, target, params)]
    if findings[0].passed is False:
        return Report(drafter.name, tuple(findings))
    findings.append(_memory(drafter, target, params))
    if rules is None:
        every = [accept.load(n) for n in accept.names()]
        rules = [r for r in every if r.law == "L1" and drafter.siblings in r.siblings]
    for rule in rules:
        found = [
            check_law(target, drafter, rule, params, prompts),
            *check_pair(drafter, rule, target, params),
        ]
        findings += [f._replace(check=f"{rule.name}: {f.check}") for f in found]
    return Report(drafter.name, tuple(findings))


def _drafts(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """What the drafter proposes, looked at array by array."""
    packed, lengths = decode.pack_prompts([[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]])
    settings = sampling.make_sampling(4, temperature=[1.0, 1.0, 0.5, 0.0])
    state = decode.prefill(
        target, drafter, params, packed, lengths, rng.row_keys(0, 4), max_len=12, sampling=settings
    )  # fmt: skip
    try:
        for turn in range(3):
            keys = rng.RowKeys(state.keys, jnp.asarray(turn), state.length)
            draft, _ = drafter.propose(
                params, keys, Context(state.tokens, state.length, settings), state.draft
            )
            check_draft(
                draft, target.vocab_size, drafter.siblings, greedy=np.asarray(settings.greedy)
            )
    except UserError as error:
        return Finding("drafts are well formed", False, str(error))
    return Finding(
        "drafts are well formed",
        True,
        f"{drafter.siblings}, {drafter.nodes} nodes, {drafter.longest} deep",
    )


def _memory(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Whether the drafter still knows the text after some rounds: its first draft token's law must be ``Drafter.probs``'s.

    A wrong cache costs no exactness, so no other check sees it: only acceptance.
    """
    name = "it remembers the text"
    packed, lengths = decode.pack_prompts([[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]])
    state = decode.prefill(target, drafter, params, packed, lengths, rng.row_keys(3, 4), max_len=24)
    rule, worst = accept.load("match"), 0.0
    for _ in range(5):
        keys = rng.RowKeys(state.keys, state.round, state.length)
        scored = step.propose(target, drafter, params, state, keys)
        if drafter.probs is None or scored.draft.probs is None:
            return Finding(name, None, "it states no law to compare with")
        law = drafter.probs(
            params, Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
        )
        want = jax.vmap(lambda row, n: row[n - 1])(law, state.length)
        off = np.abs(np.asarray(scored.draft.probs[:, 0] - want)).max(-1)
        worst = max(worst, float(off[~np.asarray(state.done)].max(initial=0)))
        state, _ = step.decide(target, drafter, rule, params, state, keys, scored, None)
    return Finding(
        name,
        worst < 1e-4,
        f"the law of its first token is off by at most {worst:.1e} in five rounds",
    )


def check_accept(
    rule: Accept, names: Sequence[str] | None = None, *, loop_case: str | None = None
) -> Report:
    """Checks a rule on one drafter of every kind that it takes (``cases.NAMES``).

    Args:
        rule: its class is taken at its word: an L1 rule must have the target's law, any rule must be greedy decoding at
            temperature 0 with the settings it was made with.
        names: the cases to enumerate; default: all that fit.
        loop_case: the case for the compiled loop; default: the last of them.

    Returns:
        A ``Report``.
    """
    for name in (*(names or ()), *([loop_case] if loop_case else ())):
        if name not in cases.NAMES:
            raise UserError(f"there is no case {name!r}; there is {', '.join(cases.NAMES)}")
    every = [cases.case(name) for name in names or cases.NAMES]
    fit = [case for case in every if case.drafter.siblings in rule.siblings]
    if not fit:
        raise UserError(
            f"rule {rule.name} takes none of the cases {', '.join(names or cases.NAMES)}"
        )
    findings = []
    for case in fit:
        for settings in SETTINGS if rule.lossless_class == "L1" else ():
            found = check_law(
                case.target, case.drafter, rule, case.params, [cases.PROMPT], **settings
            )
            name = ", ".join(f"{k} {v}" for k, v in settings.items())
            findings.append(found._replace(check=f"{case.name}, {name}: {found.check}"))
    if loop_case and loop_case not in [case.name for case in fit]:
        raise UserError(f"rule {rule.name} does not take the case {loop_case}")
    chosen = next((case for case in fit if case.name == loop_case), fit[-1])
    findings += check_pair(chosen.drafter, rule, chosen.target, chosen.params)
    return Report(rule.name, tuple(findings))
