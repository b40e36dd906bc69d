"""What exists: ``--list`` prints one line per method and configuration, ``--explain`` all of one.

Nothing is measured and no backend is started. Texts come from docstrings; keys and their types from
the signature of ``make``, their comments from its "Args" and from the comments of shared keys.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specjax import accept, control, drafters, references, registry
from specjax.errors import UserError
from specjax.run import stand_ins
from specjax.run.dispatch import MODES
from specjax.types import Accept, Drafter

KINDS = {"drafter": drafters, "rule": accept, "controller": control}
# How the drafts of each kind of siblings are described.
_SIBLINGS = {
    "chain": "a chain",
    "deterministic": "a deterministic tree, or a chain",
    "iid": "a tree, siblings drawn independently",
    "independent": "a tree, siblings from several distributions",
    "without_replacement": "a tree, siblings drawn without replacement",
}


class KeyLine(NamedTuple):
    """A key for a page of ``--explain`` or ``--help``."""

    name: str
    kind: str
    default: str  # "" if the key must be given
    comment: str


def configs_dir() -> Path:
    """The folder of the configurations: of the checkout, else the one inside the package."""
    package = Path(__file__).parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "generate.py").is_file() else package / "_packaged" / "configs"


def listing() -> Group:
    """Modes, drafters by family, rules, controllers and configurations, one line each."""
    here = Path(__file__).parent
    parts: list[Group | Text] = [
        _section("modes (config.mode)", {m: _first(here / f"{m}.py") for m in MODES})
    ]
    for family, names in drafters.families().items():
        title = f"drafters, {family}" if family else "drafters"
        parts.append(_section(f"{title} (config.drafter.name)", _lines("drafter", names)))
    rules = _lines("rule", accept.names())
    rules = {name: f"{accept.load(name).lossless_class}  {line}" for name, line in rules.items()}
    parts.append(_section("rules and their lossless class (config.accept)", rules))
    parts.append(_section("controllers (config.drafter.control)", _lines("controller")))
    found = {path.stem: _first(path) for path in sorted(configs_dir().glob("*.py"))}
    parts.append(_section(f"configurations in {configs_dir()} (--config=NAME)", found))
    parts.append(Text("--explain=NAME prints all about a drafter, a rule or a controller", "dim"))
    return Group(*parts)


def explanation(name: str) -> Group:
    """What ``--explain=name`` prints. Raises UserError that proposes the nearest names."""
    if registry.is_import(name):
        return _explain_import(name)
    kinds = [kind for kind, package in KINDS.items() if name in package.names()]
    if not kinds:
        known = [each for package in KINDS.values() for each in package.names()]
        hint = registry.nearest(name, known) or "; --list prints the names"
        raise UserError(f"no drafter, rule or controller is called {name!r}{hint}")
    return Group(*(_explain(kind, name) for kind in kinds))


def key_lines(module: Any) -> list[KeyLine]:
    """The keys of a method's ``make``, with types, defaults and comments."""
    text = inspect.getdoc(module.make) or ""
    comments = _shared_comments(module) | _arguments(text)
    keys = registry.keys_of(module)
    if len(keys) == 1:  # the sentence about the function is about its only key
        comments = dict.fromkeys(keys, " ".join(text.partition("\n\n")[0].split())) | comments
    result = []
    for name, key in keys.items():
        default = "" if key.required else repr(key.default)
        result.append(KeyLine(name, key.annotation, default, comments.get(name, "")))
    return result


def keys_table(lines: list[KeyLine], prefix: str) -> Table:
    """The keys as a table; ``prefix`` is the path before each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=28)
    table.add_column(overflow="fold")
    for line in lines:
        kind = f"{line.kind} = {line.default}" if line.default else f"{line.kind}, required"
        python = prefix.startswith("config.drafter") and line.name in drafters.PYTHON_ONLY
        name = f"{line.name} (Python)" if python else f"{prefix}{line.name}"
        table.add_row(Text(name), Text(kind, "dim"), Text(line.comment))
    return table


def _explain(kind: str, name: str) -> Group:
    package = KINDS[kind]
    module = registry.load(package.__name__, name, kind)
    family = registry.family(package.__name__, name)
    head = f"{name}: {kind}" + (f", {family}" if family else "")
    return _page(head, kind, name, module, str(Path(module.__file__ or "")))


def _explain_import(spec: str) -> Group:
    value = registry.imported(spec)
    made = value if isinstance(value, Accept | Drafter) else None
    is_rule = isinstance(made, Accept) or (
        callable(value) and not _takes_target(value) and made is None
    )
    kind = "rule" if is_rule else "drafter"
    module = registry.load(KINDS[kind].__name__, spec, kind)
    [source] = registry.sources([spec]) or [""]
    return _page(f"{spec}: {kind} outside specjax", kind, spec, module, source)


def _takes_target(make: Any) -> bool:
    """Whether a function has a positional parameter, as ``make(target, ...)`` of a drafter has."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.kind in positional and parameter.default is parameter.empty
        for parameter in inspect.signature(make).parameters.values()
    )


def _page(head: str, kind: str, name: str, module: Any, source: str) -> Group:
    prefix = {"drafter": "config.drafter.", "rule": "config.accept_keys."}.get(kind, "")
    lines = key_lines(module)
    text = inspect.getdoc(module.make) if registry.is_import(name) else None
    text = (text or inspect.cleandoc(module.__doc__ or "")).strip()
    keys = keys_table(lines, prefix) if lines else Text("none")
    facts = [f"{label}: {value}" for label, value in _facts(kind, name).items()]
    return Group(
        Text(head, "bold"),
        Padding(Text(text), (0, 0, 1, 2), expand=False),
        *(Text(fact) for fact in facts),
        Text(f"source: {source}"),
        Text("keys:"),
        Padding(keys, (0, 0, 1, 2), expand=False),
        *map(Text, references.of(module).values()),
    )


def _facts(kind: str, name: str) -> dict[str, str]:
    if kind == "controller":
        return {"use": f"config.drafter.control={name}:VALUE"}
    if kind == "rule":
        rule = accept.load(name)
        drafts = "; ".join(_SIBLINGS[each] for each in rule.siblings if each in _SIBLINGS)
        default = [k for k, v in _by_default().items() if v == name]
        facts = {"lossless class": rule.lossless_class, "drafts that it takes": drafts}
        return facts | ({"default rule for siblings": ", ".join(default)} if default else {})
    drafter = _made(name)
    if drafter is None:
        return {}
    rule = accept.default_rule(drafter)
    size = f"at most {drafter.nodes} tokens" if drafter.nodes else "no token"
    return {
        "drafts, with default keys": f"{_SIBLINGS[drafter.siblings]}; {size}",
        "siblings": drafter.siblings,
        "default rule": rule,
        "lossless class": f"{accept.load(rule).lossless_class} with it",
    }


def _made(name: str) -> Drafter | None:
    """The drafter with its default keys, for a stand-in; None if it needs other values."""
    keys = stand_ins.keys(name)
    if None in keys.values():
        return None
    try:
        return drafters.make(name, stand_ins.target_of(name), **keys)
    except UserError:
        raise
    except Exception:  # the user's function may need a real model
        if not registry.is_import(name):
            raise
        return None


def _by_default() -> dict[str, str]:
    fake = drafters.make("none", stand_ins.target())
    return {each: accept.default_rule(fake._replace(siblings=each)) for each in _SIBLINGS}


def _section(title: str, lines: dict[str, str]) -> Group:
    width = max(map(len, lines), default=0) + 2
    texts = (Text(f"  {name:{width}}{line}") for name, line in lines.items())
    return Group(Text(title, "bold"), *texts, Text())


def _lines(kind: str, names: list[str] | None = None) -> dict[str, str]:
    package = KINDS[kind]
    return {
        name: _first(Path(registry.file(package.__name__, name)))
        for name in (package.names() if names is None else names)
    }


def _first(path: Path) -> str:
    """The first sentence of a file's docstring; the file is not run."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(text.partition("\n\n")[0].split())
    text = re.sub(r"^Mode \w+: ", "", text)
    return re.split(r"(?<!et al)(?<!i[.]i[.]d)[.] (?=[A-Z(])", text)[0].rstrip(".")


@functools.cache
def _shared_comments_of(keys: type) -> dict[str, str]:
    """Field -> the comment above it, for a dataclass of shared keys and those it extends."""
    result: dict[str, str] = {}
    for each in reversed(keys.__mro__[:-1]):
        comment: list[str] = []
        for line in inspect.getsource(each).splitlines():
            stripped = line.strip()
            if stripped.startswith("#"):
                comment.append(stripped.lstrip("# "))
            elif match := re.match(r"(\w+): ", stripped):
                result[match[1]], comment = " ".join(comment), []
            else:
                comment = []
    return result


def _shared_comments(module: Any) -> dict[str, str]:
    return _shared_comments_of(module.SHARED) if hasattr(module, "SHARED") else {}


def _arguments(docstring: str) -> dict[str, str]:
    """Parameter -> its text in the section "Args" of a docstring."""
    result: dict[str, str] = {}
    _, _, section = docstring.partition("Args:\n")
    names: list[str] = []
    for line in section.split("\n"):
        if line and not line.startswith(" "):
            break
        if match := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names = match[1].split(", ")
            result |= dict.fromkeys(names, match[2].strip())
        elif line.strip() and names:
            result |= {name: f"{result[name]} {line.strip()}" for name in names}
    return result
