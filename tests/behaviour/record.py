"""Records what specjax does: texts, rounds, losses, files, programs, messages.

    python tests/behaviour/record.py --compare            what has changed since recorded.json
    python tests/behaviour/record.py --write              stores what is now the case
    python tests/behaviour/record.py --out=FILE           writes a record to another file
    python tests/behaviour/record.py --compare=FILE       compares with that, floats bit by bit

The record does not say what is right; other tests do. A change of structure must not change the
record: compare before and after. Floats differ between processors: recorded.json has four
digits of them, and to compare all digits one makes the records of two commits on one machine.
--only=texts,losses,... limits the groups.

Groups, an entry per drafter's case, or per command line:

texts     tokens, and per round drafted, accepted, emitted, width: greedy and sampled rows
programs  the lowered text of the decode loop (only for the jax that recorded.json names)
losses    the loss of training, its metrics, the norm of the gradient at each parameter
files     what is written for trained parameters: names, shapes and the configuration
commands  status, message and output of command lines, mostly mistaken ones
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    import conftest  # noqa: F401  the environment, before jax is imported

import cases
import commandline
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from specjax import accept, control, decode, drafters, outcome, registry, run
from specjax.drafters.files import head_files
from specjax.testing import loop
from specjax.types import Batch

STORED = Path(__file__).with_name("recorded.json")
PROMPTS, NEW = ([0, 2, 1, 0, 2, 1], [1, 2, 0]), 14
EXACT = False  # whether floats are recorded with all digits


def digest(*values: Any) -> str:
    """A short hash of texts and arrays."""
    made = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, str):
            made.update(value.encode())
        else:
            array = np.asarray(value)
            made.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return made.hexdigest()


def digits(value: Any) -> str:
    """A number to record."""
    return float(value).hex() if EXACT else f"{float(value):.3e}"


def _pair(name: str) -> tuple[cases.Case, Any, Any]:
    """A case with real decoders, its rule and its first state: two greedy rows, two sampled."""
    encoder = name in cases.ENCODER_NAMES
    case = cases.with_encoder(name) if encoder else cases.real(name)
    rule = accept.load(accept.default_rule(case.drafter))
    prompts = [list(prompt) for prompt in (*PROMPTS, *PROMPTS)]
    if encoder:
        prompts = [[*(token or 1 for token in prompt[:-1]), 0] for prompt in prompts]
    settings = {"temperature": np.array([0.0, 0.0, 1.0, 0.7]), "top_p": np.array([1, 1, 1, 0.9])}
    state = loop.begin(case.target, case.drafter, case.params, prompts, NEW, 3, **settings)
    return case, rule, state


NAMES = (*cases.NAMES, *cases.ENCODER_NAMES)


def texts() -> Iterator[tuple[str, Callable[[], str]]]:
    def record(name: str) -> str:
        case, rule, state = _pair(name)
        own = (case.target, case.drafter, rule, case.params, state)
        after, records = decode.generate(*own, max_steps=NEW)
        return digest(after.tokens, after.length, *jax.tree.leaves(records))

    for name in NAMES:
        yield name, lambda name=name: record(name)


def programs() -> Iterator[tuple[str, Callable[[], str]]]:
    def record(name: str) -> str:
        case, rule, state = _pair(name)
        own = (case.target, case.drafter, rule, case.params, state, outcome.stop_ids(None))
        lowered = decode._generate.lower(*own, max_steps=NEW, verify_widths=None)
        return digest(lowered.as_text())

    for name in NAMES:
        yield name, lambda name=name: record(name)


def losses() -> Iterator[tuple[str, Callable[[], str]]]:
    def record(name: str) -> str:
        case, *_ = _pair(name)
        loss = case.drafter.training.loss
        tokens = np.random.default_rng(0).integers(1, cases.VOCAB, (2, 13))
        tokens[:, 5] = 0
        batch = Batch(jnp.asarray(tokens, jnp.int32), step=jnp.zeros((2,), jnp.int32))
        if name in cases.ENCODER_NAMES:
            batch = batch.replace(output=jnp.full((2,), 5, jnp.int32))
        keys = {"run_steps": 4} if "run_steps" in inspect.signature(loss).parameters else {}

        def of(own: Any) -> Any:
            return loss(own, case.params.target, batch, jax.random.key(5), **keys)

        (value, metrics), grads = jax.jit(jax.value_and_grad(of, has_aux=True))(case.params.draft)
        numbers = [value, *jax.tree.leaves(metrics)]
        numbers += [jnp.linalg.norm(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(grads)]
        return " ".join(digits(number) for number in numbers)

    for name in NAMES:
        training = drafter_of(name).training
        if training is not None and training.loss is not None:
            yield name, lambda name=name: record(name)


def drafter_of(name: str) -> Any:
    return (cases.with_encoder if name in cases.ENCODER_NAMES else cases.real)(name).drafter


def written() -> Iterator[tuple[str, Callable[[], str]]]:
    def record(name: str) -> str:
        case, *_ = _pair(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            facts = dict(case.drafter.training.facts)
            head_files.write(path, case.drafter.name, case.params.draft, facts, None)
            parts = []
            for file in sorted(path.iterdir()):
                parts.append(file.name)
                if file.suffix == ".safetensors":
                    with safe_open(file, "np") as opened:
                        for key in sorted(opened.keys()):
                            array = opened.get_tensor(key)
                            parts += [key, array if EXACT else str((array.shape, array.dtype))]
                else:
                    parts.append(file.read_text())
        return digest(*parts)

    for name in NAMES:
        drafter = drafter_of(name)
        if drafter.training is not None and drafter.name in head_files.kinds():
            yield name, lambda name=name: record(name)


def command_lines(target: str) -> Iterator[tuple[str, list[str]]]:
    """Name -> arguments. Each ends before anything is compiled."""
    base = ["--config=generate", f"--config.target={target}"]
    yield from ((flag, [flag]) for flag in ("--list", "--help", "--nonsense", "--explain=nonsense"))
    yield "", []
    for kind in (drafters, accept, control):
        yield from ((f"--explain={name}", [f"--explain={name}"]) for name in kind.names())
    configs = sorted(path.stem for path in (TESTS.parent / "configs").glob("*.py"))
    for name in configs:
        own = f"--config={name}"
        yield f"{name} --help", [own, "--help"]
        yield f"{name} without a target", [own, "--config.target=missing"]
        yield f"{name} with a wrong key", [own, "--config.nonsense=1"]
        yield f"{name} with a wrong mode", [own, "--config.mode=nonsense"]
    wrong = {int: "-1", float: "-1", bool: "maybe", str: "nonsense"}
    for name in drafters.names():
        own = [*base, f"--config.drafter.name={name}"]
        yield f"{name} alone", [*own, "--config.target="]
        for key, each in registry.keys_of(drafters.load(name)).items():
            if not each.facts.python:
                value = wrong[each.type]
                yield f"{name} {key}={value}", [*own, f"--config.drafter.{key}={value}"]
    for name in accept.names():
        yield f"rule {name}", [*base, f"--config.accept={name}", "--config.target="]
    for key, value in {
        "sampling.temperature": "-1",
        "sampling.top_p": "2",
        "sampling.top_k": "-3",
        "sampling.min_p": "1.5",
        "batch_size": "0",
        "seed": "x",
        "max_new_tokens": "0",
        "prompts": "missing.jsonl",
        "drafter.name": "nonsense",
        "accept": "nonsense",
        "chat": "missing.jinja",
    }.items():
        yield f"{key}={value}", [*base, f"--config.{key}={value}"]


def commands() -> Iterator[tuple[str, Callable[[], str]]]:
    folder = tempfile.TemporaryDirectory()
    target = commandline.save(Path(folder.name) / "target")

    # Wide, so that no path is divided; the width of a path changes blanks only.
    os.environ["COLUMNS"] = "400"

    def record(arguments: list[str]) -> str:
        out, err = io.StringIO(), io.StringIO()
        with tempfile.TemporaryDirectory() as work:
            workdir = [f"--workdir={work}/out"] if any("config=" in a for a in arguments) else []
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    status = run.main(["specjax", *arguments, *workdir])
                except SystemExit as ended:
                    status = ended.code
            exists = (Path(work) / "out").exists()
        texts = [text.getvalue().replace(target, "TARGET") for text in (out, err)]
        texts = [text.replace(str(TESTS.parent), "ROOT") for text in texts]
        texts = [re.sub(r"\d+\.\d+s|/tmp/\S+", "", text) for text in texts]
        message = texts[1].strip().splitlines()
        shown = message[-1][:160] if message else ""
        texts = [" ".join(text.split()) for text in texts]
        return f"{status} {int(exists)} {digest(*texts)} {shown}"

    for name, arguments in command_lines(target):
        yield name or "nothing", lambda arguments=arguments: record(arguments)
    folder.cleanup()


GROUPS = {
    "texts": texts,
    "programs": programs,
    "losses": losses,
    "files": written,
    "commands": commands,
}


def made(groups: list[str]) -> dict[str, dict[str, str]]:
    """The record of these groups."""
    result: dict[str, dict[str, str]] = {}
    for group in groups:
        result[group] = {}
        for name, record in GROUPS[group]():
            try:
                result[group][name] = record()
            except Exception as error:
                result[group][name] = f"{type(error).__name__}: {error}"[:200]
            jax_caches(len(result[group]))
        print(f"{group}: {len(result[group])} entries", file=sys.stderr, flush=True)
    return result


def jax_caches(count: int) -> None:
    """Drops compiled programs from time to time: see conftest.py."""
    if count % 30 == 0:
        jax.clear_caches()


def changes(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """A line for each entry that was changed, added or removed."""
    lines = []
    for group, entries in now.items():
        old = before.get(group, {})
        for name in sorted({*old, *entries}):
            was, is_ = old.get(name), entries.get(name)
            if was == is_ or (group == "losses" and was and is_ and _near(was, is_)):
                continue
            lines.append(f"{group}, {name}: {was or 'nothing'} -> {is_ or 'nothing'}")
    return lines


def _near(was: str, now: str) -> bool:
    """Whether two lists of numbers are equal but for their last digit."""
    try:
        one, other = ([float(x) for x in text.split()] for text in (was, now))
    except ValueError:
        return False
    return len(one) == len(other) and np.allclose(one, other, rtol=2e-3, atol=1e-6)


def main() -> None:
    global EXACT
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--compare", nargs="?", const=STORED, type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(GROUPS))
    args = parser.parse_args()
    EXACT = args.out is not None or args.compare not in (None, STORED)
    now = made(args.only.split(","))
    if args.compare is not None:
        stored = json.loads(args.compare.read_text())
        if stored["jax"] != jax.__version__:
            now.pop("programs", None)
        lines = changes(stored["record"], now)
        print("\n".join(lines) or "nothing has changed")
        sys.exit(bool(lines))
    path = args.out if args.out else STORED
    if not args.out and path.is_file():
        now = json.loads(path.read_text())["record"] | now
    text = json.dumps({"jax": jax.__version__, "record": now}, indent=1)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
