"""Checks of a target of one's own: what ``types.LM`` requires, as a readable report.

    report = testing.check_lm(lm, params)
    print(report)
    assert report.passed

Every pass is compared with the same text fed one token at a time. Differences are given as parts
of the largest distance of a logit from the mean of its position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checks, tree
from specjax.errors import UserError
from specjax.testing.findings import Check, Finding, Progress, Report, collect, where
from specjax.types import LM, Params

# The tree of a pass: its leaves are the nodes 3, 5 and 6.
PARENTS = (-1, 0, 0, 1, 2, 4, 2)
# The paths that the rows commit, and how many of their nodes.
PATHS, COUNTS = ((0, 2, 4, 5), (0, 1, 3, 3), (0, 2, 6, 6)), (4, 2, 0)
SIZE, ROWS, MORE = len(PARENTS), len(PATHS), 3
# The paths in a model of chains.
ALONG = ((0, 1, 2, 3),) * ROWS
# The tokens before a pass where there is no window, and how far beyond the smallest one.
TEXT, BEYOND = 6, 3
# The allowed difference, by the narrowest float dtype of parameters and block.
CLOSE = {8: 1e-9, 4: 1e-4, 2: 0.05, 1: 0.3}
# A change of the text must change logits by so many times the allowed difference.
POWER = 10


def check_lm(
    lm: LM,
    params: Params,
    *,
    close: float | None = None,
    seed: int = 0,
    first_failure: bool = False,
    progress: Progress = True,
) -> Report:
    """Checks the functions of a model on random texts of three rows.

    Args:
        lm: a model without an encoder, small enough to run a few passes. One with ``chains_only``
            is checked with chains in the place of trees, and a line says so.
        params: such that the logits depend strongly on the text. Fresh parameters often do not:
            multiply their matrices by 8, as ``testing.tiny`` does.
        close: the allowed difference, as a part of the largest distance of a logit from the mean of
            its position; None: 1e-4 for float32, 0.05 for bfloat16, 1e-9 for float64.
        seed: of the texts.
        first_failure: whether to end at the first check that fails.
        progress: True: finished lines appear on stderr; a function gets each line; False: silence.

    Returns:
        A ``Report`` with the largest difference of each property. If ``apply`` or ``commit`` return
        something of another form, that is the only check.

    Raises:
        UserError: a model with an encoder, or with too few positions.
    """
    if lm.encoder is not None:
        raise UserError(f"{lm.name} reads a source with an encoder; check_lm takes models without")
    checks = _checks(lm, params, close, seed)
    return collect(lm.name, checks, progress=progress, first_failure=first_failure, proves="target")


def _checks(lm: LM, params: Params, close: float | None, seed: int) -> Iterator[Check]:
    passes, form = _Passes(lm, params, close, seed), "what its functions return"
    wrong = _wrong_form(lm, params)
    yield form, Finding, form, not wrong, wrong or "shapes and dtypes are those of types.LM"
    if wrong:
        return
    yield "logits depend on the text", passes.dependence
    for name, pairs in passes.properties().items():
        yield name, passes.compare, name, pairs
    if lm.chains_only:
        name, detail = "trees", "left out: the model takes chains only (chains_only)"
        yield name, Finding, name, True, detail
    yield "new parameters, no new trace", passes.new_params


def _wrong_form(lm: LM, params: Params) -> str | None:
    """What is wrong with the results of ``apply`` and ``commit``, in one line, or None."""
    try:
        tokens, count = jnp.zeros((ROWS, SIZE), jnp.int32), jnp.zeros(ROWS, jnp.int32)
        cache = lm.init_cache(ROWS, 2 * SIZE)
        result = tree.shapes(lm.apply, params, tokens, cache)
        returned = f"apply of {lm.name} returned"
        if not isinstance(result, tuple) or len(result) != 2 or not hasattr(result[0], "logits"):
            return f"{returned} {type(result).__name__}; it must be (Output, block)"
        wide = max((jnp.dtype(x.dtype).itemsize for x in _floats(params)), default=4) == 8
        shape, right = (*tokens.shape, lm.vocab_size), jnp.dtype("f8" if wide else "f4")
        logits = result[0].logits
        if logits.shape != shape or logits.dtype != right:
            return f"{returned} logits {checks.shown(logits)}; they must be {right}{list(shape)}"
        wrong = [x for x in jax.tree.leaves(result[1]) if x.shape[:2] != tokens.shape]
        if wrong:
            return f"{returned} a block with an array {list(wrong[0].shape)}; it must be [B,T,...]"
        after = tree.shapes(lm.commit, cache, result[1], count)
        if jax.tree.map(checks.shown, cache) != jax.tree.map(checks.shown, after):
            return f"commit of {lm.name} changed the structure, a shape or a dtype of the cache"
        if getattr(getattr(cache, "length", None), "shape", None) != (ROWS,):
            return f"the cache of {lm.name} has no length i32[B], the number of committed tokens"
    except Exception as error:
        return where(error)
    return None


def _floats(values: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(values) if jnp.issubdtype(x.dtype, jnp.floating)]


class _Passes:
    """The passes of a model over texts with T = SIZE tokens after N committed ones."""

    def __init__(self, lm: LM, params: Params, close: float | None, seed: int):
        self.lm, self.params, self._close, self._traces = lm, params, close, 0
        # N, the tokens before a block: more than the smallest window has positions.
        size = TEXT if lm.window is None else lm.window + BEYOND
        self.size = size + 2 * SIZE
        if lm.max_positions is not None and self.size > lm.max_positions:
            raise UserError(
                f"{lm.name} has {lm.max_positions} positions; the checks need {self.size}"
            )
        self.committed = ALONG if lm.chains_only else PATHS
        draw = functools.partial(np.random.default_rng(seed).integers, 0, lm.vocab_size)
        texts = [draw((ROWS, count)).astype(np.int32) for count in (size + SIZE, SIZE, MORE)]
        self.text, self.nodes, self.more = texts
        self.past = self.text[:, :size]
        # The committed tokens: N in all rows, and rows of unequal length.
        self.even = np.full(ROWS, size, np.int32)
        self.uneven = np.asarray([size, max(size - 4, 1), 0], np.int32)

    def _fed(self, params, slots: int, tokens, counts):
        """The logits of the first tokens and the cache after ``counts`` of them, as in prefill."""
        self._traces += 1
        out, block = self.lm.apply(params, tokens, self.lm.init_cache(len(tokens), 0))
        return out.logits, self.lm.commit(self.lm.init_cache(len(tokens), slots), block, counts)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def _chain(self, slots: int, params, tokens, counts, chain):
        """The logits of the tokens [B,N], and of a block after ``counts`` of them."""
        first, cache = self._fed(params, slots, tokens, counts)
        return first, self.lm.apply(params, chain, cache)[0].logits

    @functools.partial(jax.jit, static_argnums=0)
    def _steps(self, params, tokens):
        """The logits of tokens [B,L], fed one at a time."""

        def step(cache, token):
            out, block = self.lm.apply(params, token[:, None], cache)
            return self.lm.commit(cache, block, jnp.ones(len(token), jnp.int32)), out.logits[:, 0]

        cache = self.lm.init_cache(len(tokens), self.size)
        return jax.lax.scan(step, cache, tokens.T)[1].swapaxes(0, 1)

    @functools.partial(jax.jit, static_argnums=0)
    def _tree(self, params, tokens, counts, nodes):
        """The logits of a tree, at once, again, and in parts; whether the cache stayed the same."""
        cache = self._fed(params, self.size, tokens, counts)[1]
        leaves = jax.tree.leaves(cache)
        whole = self.lm.apply(params, nodes, cache, self._layout(SIZE))[0].logits
        same = [a is b for a, b in zip(leaves, jax.tree.leaves(cache), strict=True)]
        again = self.lm.apply(params, nodes, cache, self._layout(SIZE))[0].logits
        first, block = self.lm.apply(params, nodes[:, :3], cache, self._layout(3))
        rest = self.lm.apply(params, nodes[:, 3:], cache, self._layout(SIZE - 3, 3), block)[0]
        parts = jnp.concatenate([first.logits, rest.logits], 1)
        return whole, again, parts, jnp.asarray(all(same))

    @functools.partial(jax.jit, static_argnums=0)
    def _commit(self, params, tokens, counts, nodes, more):
        """The logits after a committed path, given as such or as its tokens; the lengths."""
        cache = self._fed(params, self.size, tokens, counts)[1]
        block = self.lm.apply(params, nodes, cache, self._layout(SIZE))[1]
        count, path = jnp.asarray(COUNTS), jnp.asarray(self.committed)
        kept = tree.accepted(block, count, path)[0]
        after = [self.lm.commit(cache, block, count, path), self.lm.commit(cache, kept, count)]
        logits = [self.lm.apply(params, more, each)[0].logits for each in after]
        return *logits, jnp.stack([each.length - cache.length for each in after])

    def _layout(self, new: int, fed: int = 0) -> tree.Layout:
        """The layout of ``new`` nodes after ``fed`` ones."""
        if self.lm.chains_only:
            return tree.chain_layout(ROWS, new, fed)
        parents = jnp.broadcast_to(jnp.asarray(PARENTS[: fed + new]), (ROWS, fed + new))
        return tree.layout(parents, new)

    def _after(self, counts, chain=None, text=None, more: int = 0) -> Any:
        """The logits of the text [B,N,V], and of a block [B,T,V] after ``counts`` of each row.

        The block is by default what follows in the text; ``more`` slots than needed.
        """
        text = self.past if text is None else text
        chain = _part(self.text, counts) if chain is None else chain
        return self._chain(self.size + more, self.params, text, counts, chain)

    @functools.cached_property
    def _truth(self) -> np.ndarray:
        """The logits of the texts, by steps."""
        return np.asarray(self._steps(self.params, self.text))

    @functools.cached_property
    def _usual(self) -> np.ndarray:
        """The logits of a block in rows of unequal length."""
        return np.asarray(self._after(self.uneven)[1])

    @functools.cached_property
    def _trees(self) -> tuple[np.ndarray, ...]:
        return tuple(map(np.asarray, self._tree(self.params, self.past, self.uneven, self.nodes)))

    @functools.cached_property
    def allowed(self) -> float:
        """The largest difference that is allowed."""
        if self._close is not None:
            return self._close
        empty = self.lm.init_cache(ROWS, 0)
        block = tree.shapes(self.lm.apply, self.params, jnp.asarray(self.text), empty)[1]
        sizes = [jnp.dtype(x.dtype).itemsize for x in _floats((self.params, block))]
        return CLOSE[min(sizes, default=4)]

    def _difference(self, got, expected) -> float:
        """The largest difference as a part of the scale of the logits; infinite for NaN."""
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        finite = np.where(np.isfinite(self._truth), self._truth, np.nan).astype(np.float64)
        scale = np.nanmax(np.abs(finite - np.nanmean(finite, -1, keepdims=True)))
        with np.errstate(invalid="ignore"):
            error = np.where(got == expected, 0, np.abs(got - expected))
        return float(np.where(np.isnan(error), np.inf, error).max() / (scale or 1.0))

    def compare(self, name: str, pairs: Callable[[], Iterable[Any]]) -> Finding:
        """The finding of pairs of logits that must be equal; a text among them is a mistake."""
        found = list(pairs())
        worst = max(self._difference(*pair) for pair in found if not isinstance(pair, str))
        wrong = "".join(f"; {each}" for each in found if isinstance(each, str))
        detail = f"the largest difference is {worst:.1e}; {self.allowed:.0e} is allowed{wrong}"
        return Finding(name, worst <= self.allowed and not wrong, detail)

    def dependence(self) -> Finding:
        """Whether the other checks can fail: another token before the last one changes logits."""
        name, other = "logits depend on the text", self.text.copy()
        other[:, -2] = (other[:, -2] + 1) % self.lm.vocab_size
        share = self._difference(self._steps(self.params, other)[:, -1], self._truth[:, -1])
        detail = f"another token before the last one changes them by {share:.1e}"
        if not np.isfinite(share):
            return Finding(name, False, "they are not finite")
        if share > POWER * self.allowed:
            return Finding(name, True, detail)
        more = f"; {POWER * self.allowed:.0e} is needed: give parameters with larger matrices"
        return Finding(name, None, detail + more)

    def properties(self) -> dict[str, Callable[[], Iterable[Any]]]:
        """Name -> what ``compare`` takes."""
        kind = "chain" if self.lm.chains_only else "tree"
        paths = {} if self.lm.chains_only else {"a tree equals the chains of its paths": self.paths}
        return {
            "a block equals steps": self.block,
            "rows of unequal length": lambda: [(self._usual, _part(self._truth, self.uneven))],
            **paths,
            f"a {kind} in two parts": lambda: [(self._trees[2], self._trees[0])],
            "any number of slots": lambda: [(self._after(self.uneven, more=9)[1], self._usual)],
            "any padding": self.padding,
            "any other rows": self.rows,
            "apply changes nothing": self.apply_again,
            "commit follows path and count": self.commit,
        }

    def block(self) -> Iterator[Any]:
        first, then = self._after(self.even)
        yield first, self._truth[:, : self.past.shape[1]]
        yield then, _part(self._truth, self.even)

    def paths(self) -> Iterator[Any]:
        for leaf in (3, 5, 6):
            path = [leaf]
            while PARENTS[path[0]] >= 0:
                path.insert(0, PARENTS[path[0]])
            chain = self.nodes[:, (path + [0] * SIZE)[:SIZE]]
            yield self._trees[0][:, path], self._after(self.uneven, chain)[1][:, : len(path)]

    def padding(self) -> Iterator[Any]:
        unused = np.arange(self.past.shape[1]) >= self.uneven[:, None]
        text = np.where(unused, (self.past + 1) % self.lm.vocab_size, self.past)
        yield self._after(self.uneven, text=text)[1], self._usual

    def rows(self) -> Iterator[Any]:
        chain = _part(self.text, self.uneven)
        for row in range(ROWS):
            one = slice(row, row + 1)
            yield self._after(self.uneven[one], chain[one], self.past[one])[1], self._usual[one]

    def apply_again(self) -> Iterator[Any]:
        first, again, _, same = self._trees
        yield again, first
        yield from () if same else ("it replaced an array of the cache",)

    def commit(self) -> Iterator[Any]:
        chain = np.zeros((ROWS, SIZE), np.int32)
        for row, (path, count) in enumerate(zip(self.committed, COUNTS, strict=True)):
            own = [*self.nodes[row, list(path[:count])], *self.more[row]]
            chain[row, : len(own)] = own
        expected = _part(self._after(self.uneven, chain)[1], np.asarray(COUNTS), MORE)
        *logits, lengths = self._commit(self.params, self.past, self.uneven, self.nodes, self.more)
        yield from ((each, expected) for each in logits)
        if (np.asarray(lengths) != np.asarray(COUNTS)).any():
            yield f"rows grew by {np.asarray(lengths)[0].tolist()}, not by {list(COUNTS)}"

    def new_params(self) -> Finding:
        """Other parameters in a second call: other logits, and no trace."""
        name, old, traces = "new parameters, no new trace", self._after(self.even)[1], self._traces
        new = jax.tree.map(_changed, self.params)
        args = new, self.past, self.even, _part(self.text, self.even)
        share = self._difference(self._chain(self.size, *args)[1], old)
        if self._traces > traces:
            return Finding(name, False, "a second call with other parameters is traced again")
        detail = f"other parameters change the logits by {share:.1e}"
        return Finding(name, share > POWER * self.allowed, detail)


def _part(rows, begin, size: int = SIZE) -> np.ndarray:
    """``size`` entries of each row, from the row's own place on."""
    return np.stack([row[n : n + size] for row, n in zip(np.asarray(rows), begin, strict=True)])


def _changed(array: jax.Array) -> jax.Array:
    """Other numbers; not all by one factor, which a norm would remove."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    wave = jnp.cos(jnp.arange(array.size, dtype=jnp.float32)).reshape(array.shape)
    return (1.25 * array + 0.01 * wave).astype(array.dtype)
