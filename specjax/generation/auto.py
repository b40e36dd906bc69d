"""The fastest method of a model on this machine: measured before, kept in the user's cache folder.

``tune`` measures, and so does a bench with ``config.keep``; ``drafter="auto"`` is what they kept. A
choice belongs to a device, the weights and their dtype, the kind of sampling (greedy or not), the
number of rows and the draft model that was there. The next larger number of rows that was measured
counts. Where nothing was measured, or nothing was faster, decoding is plain.

The methods of ``candidates`` verify lookups with the rule ``match``: a seeded text is then that of
plain decoding. Where a draft model was chosen for sampled texts, their law is the same and the
texts are not. Lossy methods are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import accept as rules
from specjax import control, drafters, files, registry
from specjax.bench import measuring, profile
from specjax.bench.measuring import Report
from specjax.bench.metrics import WORTH
from specjax.bench.passes import Job, Method
from specjax.checks import number, whole
from specjax.control import costs as costs_lib
from specjax.control.costs import device
from specjax.errors import UserError
from specjax.files import cache_folder, write_json
from specjax.generation.loading import Model, needs_model
from specjax.models import hf, layers, memory
from specjax.types import is_lossless

# As a drafter: what was kept.
AUTO = "auto"

LONGEST = 8  # tokens of a draft, at most; the controller chooses fewer
CONTROL = "goodput"
Keys = Mapping[str, Any]  # of a drafter
# Keys of drafters that name models or tables on disk.
FILES = ("model", "models", "datastore", "tables")
# Files whose change makes another model.
_WEIGHTS = (".safetensors", ".gguf", ".json")


class Tried(NamedTuple):
    """A method that was measured."""

    label: str
    drafter: Mapping[str, Any]  # its keys, "name" among them; "model" is a directory
    accept: str  # the rule; "": the recommended one
    speedup: float  # over plain decoding


class Choice(NamedTuple):
    """What is kept for a kind of sampling and a number of rows."""

    rows: int
    sampled: bool
    draft: str  # the directory of the draft model that was there; "": none
    drafter: dict[str, Any]  # its keys without "model"; those of plain decoding if none is faster
    accept: str
    speedup: float  # 1: plain decoding
    tried: dict[str, float]  # the speed-up of every method that was measured

    @property
    def text(self) -> str:
        """What was chosen, in one line."""
        tried = ", ".join(f"{name} {speed:.2f}x" for name, speed in self.tried.items())
        if self.drafter["name"] == drafters.PLAIN:
            return f"plain decoding (in batches of {self.rows}: {tried})"
        text = f"{self.drafter['name']} (in batches of {self.rows}: {tried})"
        if self.sampled and self.accept != "match":
            text += "; sampled texts have the law of plain decoding, and are other texts"
        return text


def tune(
    model: Model,
    prompts: Any,
    *,
    methods: Mapping[str, Keys] | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int = 1,
    repeats: int = 3,
    report: Report = print,
) -> Choice:
    """Measures drafters on some prompts, and keeps the fastest for ``generate_text``.

    It takes ``repeats`` passes over the prompts for each method and for plain decoding, after the
    compilation; ``report`` says how long it took.

    Args:
        model: of ``load``.
        prompts: as in ``generate_text``, like those that will be decoded; at least ``batch_size``.
        methods: label -> keys of a drafter with "name", and "accept"; None: those of
            ``candidates``. One without "control" gets the controller ``goodput``, with the costs
            that are measured here.
        max_new_tokens, temperature: of the texts.
        batch_size: rows that are decoded together.
        repeats: passes over the prompts; the median counts.
        report: is called with a status message before every part.

    Raises:
        UserError: wrong arguments, a lossy rule, too few prompts, a folder that cannot be written.
        NonFiniteLogits: a model gave NaN or infinite logits.
        OutOfMemory: the memory of the device is full.
    """
    from specjax.generation.texts import encode  # which reads what is kept here

    if not model.target.directory:
        raise UserError("tune keeps its choice for a model's files, and this one has none")
    began = time.perf_counter()
    number("temperature", temperature, ">= 0", lambda x: x >= 0)
    ids = encode(model, prompts)
    if whole("batch_size", batch_size, 1) > len(ids):
        raise UserError(f"batch_size is {batch_size} and there are {len(ids)} prompts; give more")
    job = Job(
        model.lm,
        model.params,
        ids,
        {"temperature": temperature},
        batch_size,
        whole("max_new_tokens", max_new_tokens, 1),
        model.eos_ids,
        repeats=whole("repeats", repeats, 1),
    )
    _check_methods(chosen := candidates(model.draft is not None) if methods is None else methods)
    with tempfile.TemporaryDirectory() as folder:
        with memory.errors():
            tried = _measured(model, job, chosen, Path(folder), report)
        draft = "" if model.draft is None else str(model.draft.directory)
        where = model.target.directory, batch_size, temperature > 0
        choice = keep(*where, tried, draft, dtype=layers.dtype_of(model.params).name)
    report(f"{choice.text}; kept after {time.perf_counter() - began:.0f} seconds")
    return choice


def candidates(draft: bool) -> dict[str, dict[str, Any]]:
    """The methods that ``tune`` measures: lookups, and the draft model if there is one."""
    lookups = ("prompt_lookup", "sam")
    found = {name: {"name": name, "gamma": LONGEST, "accept": "match"} for name in lookups}
    if draft:
        found[drafters.WITH_MODEL] = {"name": drafters.WITH_MODEL, "gamma": LONGEST}
    return found


def _check_methods(methods: Any) -> None:
    """Raises UserError for methods that cannot be kept."""
    if not isinstance(methods, Mapping) or not methods:
        raise UserError('methods has none; give label -> {"name": NAME, ...}, or leave it out')
    for label, keys in methods.items():
        try:
            nested = json.dumps(dict(keys)) and keys.get("drafters")
        except (TypeError, ValueError):
            raise UserError(
                f"method {label} is {keys!r}; it must hold keys of a drafter that are texts and "
                "numbers, so that they can be kept"
            ) from None
        if nested:
            raise UserError(f"method {label} has drafters in it, which are not kept; name others")
        if control.wants_policies(keys.get("control")):
            raise UserError(
                f"the control of method {label} is fitted to prompts that are not measured, and "
                "tune has none; give ltd:profile=FILE, a profile of mode bench"
            )


def _measured(
    model: Model, job: Job, methods: Mapping[str, Keys], folder: Path, report: Report
) -> list[Tried]:
    """Measures the methods; their profiles are written into ``folder``."""
    made = [
        _with_profile(model, job, label, keys, folder / f"{number}.json", report)
        for number, (label, keys) in enumerate(methods.items())
    ]
    own = [method for method, _ in made]
    for method in own:
        if not is_lossless(method.accept.lossless_class, job.settings["temperature"] > 0):
            raise UserError(
                f"method {method.name} has the rule {method.accept.name}, which changes the law of "
                "the texts; take a lossless one"
            )
    measuring.warm([job], own, report)
    found = measuring.measure(job, own, report)
    plain = [one.tokens / one.loop for one in found.plain]
    result = []
    for (method, keys), runs in zip(made, found.methods, strict=True):
        speedups = [one.tokens / one.loop / rate for one, rate in zip(runs, plain, strict=True)]
        result.append(Tried(method.name, keys, method.accept.name, statistics.median(speedups)))
    return result


def _with_profile(
    model: Model, job: Job, label: str, keys: Keys, where: Path, report: Report
) -> tuple[Method, dict[str, Any]]:
    """The method with a controller that knows what rounds cost here, and its keys."""
    own = {key: value for key, value in keys.items() if key != "accept"}
    takes = registry.keys_of(drafters.load(str(own.get("name"))))
    if "control" in takes and own.get("control") is None:
        own["control"] = CONTROL
    temperature = job.settings["temperature"]

    def make(other: Any) -> Method:
        changed = own if other is None else own | {"control": other}
        return model.method(changed, str(keys.get("accept", "")), temperature=temperature)

    text = own.get("control")
    if control.wants_profile(text):
        measured = profile.measure(
            [job._replace(prompts=job.prompts[: job.batch_size], eos_id=())],
            make,
            lambda message: report(f"{label}: {message}"),
            names=(Path(model.target.directory).name, str(own["name"])),
            acceptance=False,
            nodes=profile.by_nodes(text),
        )
        write_json(where, measured.to_json())
        own["control"] = text = control.with_profile(str(text), where)
    method = make(text)._replace(name=label)
    if model.draft is not None and needs_model(str(own["name"])):
        own.setdefault("model", str(model.draft.directory))
    return method, own


# What is kept -----------------------------------------------------------------------------------


def keep(
    target: str | os.PathLike,
    rows: int,
    sampled: bool,
    tried: Sequence[Tried],
    draft: str = "",
    *,
    dtype: str = "float32",
) -> Choice:
    """Keeps the fastest method, and the fastest one without a draft model.

    Args:
        target: the directory or file of the model.
        rows: that were decoded together.
        sampled: whether the temperature was above 0.
        tried: what was measured, at least one; the files of their profiles are copied.
        draft: the draft model that was there, apart from those of the methods.
        dtype: of the parameters, and "int8" where products have such weights.

    Returns:
        The choice with every draft model that was there.

    Raises:
        UserError: a profile that cannot be read, a folder that cannot be written.
    """
    file = file_of(target, dtype)
    models = sorted({"", _resolved(draft), *map(_model, tried)})
    with_model = {name: [each for each in tried if _model(each) in ("", name)] for name in models}
    try:
        if any(mark in str(file) for mark in ",~"):
            raise OSError(0, "a controller's keys cannot name it; set SPECJAX_CACHE")
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = [_choice(file, rows, sampled, *each) for each in with_model.items() if each[1]]
        kept = {(each.rows, each.sampled, each.draft): each for each in (*_read(file), *fresh)}
        write_json(file, [each._asdict() for each in kept.values()])
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    return max(fresh, key=lambda each: (bool(each.draft), each.speedup))


def known(
    target: str | os.PathLike, draft: str, rows: int, sampled: bool, dtype: str = "float32"
) -> Choice | None:
    """What is kept for a model with the draft model of this directory ("": none), or None.

    Of the numbers of rows that were measured the smallest one counts that is not below ``rows``. A
    choice that this version cannot make does not count.
    """
    if not target:
        return None  # it was not read from files
    # It is a directory: it has been read, and may be gone since.
    drafts = {"", str(Path(draft).resolve()) if draft else ""}
    found = [
        each
        for each in _read(file_of(target, dtype))
        if (each.sampled, each.draft in drafts) == (sampled, True) and each.rows >= rows
    ]
    # With the draft model first.
    found.sort(key=lambda each: (not each.draft, each.rows))
    return next((each for each in found if _exists(each)), None)


def _exists(choice: Choice) -> bool:
    """Whether the drafter, its keys, its rule and the file of its profile are still there."""
    keys = dict(choice.drafter)
    with contextlib.suppress(UserError, OSError):  # such as a drafter of another version
        if needs_model(keys["name"]):
            keys["model"] = choice.draft
        drafters.check(**keys)
        control.parse(keys.get("control") or "")
        rules.load(choice.accept or "match")
        return True
    return False


def file_of(target: str | os.PathLike, dtype: str) -> Path:
    """Where the choices for a model on this device are: in $SPECJAX_CACHE or ~/.cache/specjax."""
    path = Path(target)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [(each, each.stat()) for each in files if each.suffix in _WEIGHTS and each.exists()]
    stats = [(each.name, stat.st_size, stat.st_mtime_ns) for each, stat in files]
    text = json.dumps([device(), dtype, str(path.resolve()), stats])
    name = re.sub(r"[^\w.-]", "_", path.name)
    name = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    return cache_folder() / "choices" / name


def _model(each: Tried) -> str:
    """The directory of the draft model of a method; "": none."""
    named = needs_model(str(each.drafter["name"]))
    return _resolved(str(each.drafter.get("model") or "")) if named else ""


def _resolved(path: str) -> str:
    """A draft model's directory: that of its name, of its workdir, or as it is."""
    return str(Path(hf.resolve(path)).resolve()) if path else ""


def _choice(file: Path, rows: int, sampled: bool, draft: str, tried: Sequence[Tried]) -> Choice:
    """The fastest of these methods; its profile is copied beside ``file``."""
    speeds = {each.label: each.speedup for each in tried}
    best = max(tried, key=lambda each: each.speedup)
    if best.speedup < WORTH:
        return Choice(rows, sampled, draft, {"name": drafters.PLAIN}, "", 1.0, speeds)
    keys = {key: _lasting(key, each) for key, each in best.drafter.items()}
    if _model(best):
        del keys["model"]
    if keys.get("control"):
        name, values = control.read(str(keys["control"]))
        if values.get("profile"):
            measured = costs_lib.read(str(values["profile"]))
            sizes = sorted(measured.batches)
            # For fewer rows the costs of the next larger number.
            batches = {
                size: measured.batches[next((n for n in sizes if n >= size), sizes[-1])]
                for size in range(1, rows + 1)
            }
            value = measured._replace(batches=batches).to_json()
            # A method is made anew where its keys change: another profile has another name.
            digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
            values["profile"] = str(file.with_name(f"{file.stem}-{digest}.json"))
            write_json(Path(values["profile"]), value)
            text = ",".join(f"{key}={each}" for key, each in values.items())
            keys["control"] = f"{name}:{text}"
    return Choice(rows, sampled, draft, keys, best.accept, best.speedup, speeds)


def _lasting(key: str, value: Any) -> Any:
    """The value of a drafter's key, with paths that hold in any working directory."""
    if key not in FILES or not isinstance(value, str):
        return value
    names = [each.strip() for each in (value.split(",") if key == "models" else [value])]
    paths = [Path(each).expanduser() for each in names]
    found = zip(names, paths, strict=True)
    return ",".join(str(path.resolve()) if name and path.exists() else name for name, path in found)


def _read(file: Path) -> list[Choice]:
    """The choices in a file; none if it is missing, or of another version."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = [Choice(**each) for each in files.parsed(file.read_text(encoding="utf-8"))]
        if all(isinstance(each.rows, int) and "name" in each.drafter for each in found):
            return found
    return []
