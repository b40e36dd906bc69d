"""What exists: ``--list`` prints one line per method and configuration, ``--explain`` all of one,
and ``--help`` with ``--config`` the keys of a configuration.

Nothing is measured and no backend is started. Texts come from docstrings, keys from declarations.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specjax import accept, control, declare, drafters, references, registry
from specjax.bound import Bound
from specjax.config import Config
from specjax.drafters import objectives
from specjax.errors import UserError
from specjax.run import dispatch, overrides, stand_ins
from specjax.run.settings import Settings
from specjax.train.settings import Training
from specjax.types import Accept, Drafter

FREE = "free"
KINDS = {"drafter": drafters, "rule": accept, "controller": control}
# How the drafts of each kind of siblings are described.
_SIBLINGS = {
    "chain": "a chain",
    "deterministic": "a deterministic tree, or a chain",
    "iid": "a tree, siblings drawn independently",
    "independent": "a tree, siblings from several distributions",
    "without_replacement": "a tree, siblings drawn without replacement",
    "coupled": "a chain or a tree, drawn with the target's noise",
}


def configs_dir() -> Path:
    """The folder of the configurations: of the checkout, else the one inside the package."""
    package = Path(__file__).parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "generate.py").is_file() else package / "_packaged" / "configs"


def listing() -> Group:
    """Modes, drafters by family, rules, controllers and configurations, one line each."""
    modes = {"train": dispatch.train.__doc__} | {
        name: sys.modules[mode.__module__].__doc__ for name, mode in dispatch.DECODING.items()
    }
    sections = {"modes (config.mode)": {name: _sentence(doc or "") for name, doc in modes.items()}}
    for family, names in drafters.families().items():
        title = f"drafters, {family}" if family else "drafters"
        sections[f"{title} (config.drafter.name)"] = _lines("drafter", names)
    rules = _lines("rule", accept.names())
    rules = {name: f"{accept.load(name).lossless_class}  {line}" for name, line in rules.items()}
    sections["rules and their lossless class (config.accept)"] = rules
    sections["controllers (config.drafter.control)"] = _lines("controller", control.names())
    found = {path.stem: _first(path) for path in sorted(configs_dir().glob("*.py"))}
    sections[f"configurations in {configs_dir()} (--config=NAME)"] = found
    hint = Text("--explain=NAME prints all about a drafter, a rule or a controller", "dim")
    return Group(*map(_section, sections.keys(), sections.values()), hint)


def explanation(name: str) -> Group:
    """What ``--explain=name`` prints. Raises UserError that proposes the nearest names."""
    if registry.is_import(name):
        value = registry.imported(name)
        is_rule = isinstance(value, Accept) or (callable(value) and not _takes_target(value))
        return _page("rule" if is_rule else "drafter", name)
    kinds = [kind for kind, package in KINDS.items() if name in package.names()]
    if not kinds:
        known = [each for package in KINDS.values() for each in package.names()]
        hint = registry.nearest(name, known) or "; --list prints the names"
        raise UserError(f"no drafter, rule or controller is called {name!r}{hint}")
    return Group(*(_page(kind, name) for kind in kinds))


def keys_table(keys: Iterable[declare.Key], prefix: str) -> Table:
    """The keys as a table; ``prefix`` is the path before each."""
    table = _table(0, 28, None)
    for key in keys:
        default = ", required" if key.required else f" = {key.default!r}"
        name = f"{key.name} (Python)" if key.facts.python else f"{prefix}{key.name}"
        table.add_row(Text(name), Text(f"{key.annotation}{default}", "dim"), Text(key.facts.help))
    return table


def _table(*widths: int | None) -> Table:
    """A table of texts; its columns fold at these widths (None: what is left; 0: they do not)."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for width in widths:
        table.add_column(overflow="fold", max_width=width or None, no_wrap=width == 0)
    return table


def _takes_target(make: Any) -> bool:
    """Whether a function has a positional parameter, as ``make(target, ...)`` of a drafter has."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(make).parameters.values()
    return any(each.kind in positional and each.default is each.empty for each in parameters)


def _page(kind: str, name: str) -> Group:
    package = KINDS[kind].__name__
    module, text, head = registry.load(package, name, kind), None, f"{name}: {kind}"
    if registry.is_import(name):
        head, text = f"{head} outside specjax", inspect.getdoc(module.make)
        [source] = registry.sources([name]) or [""]
    else:
        head = ", ".join(filter(None, (head, registry.family(package, name))))
        source = registry.file(package, name)
    prefix = {"drafter": "config.drafter.", "rule": "config.accept_keys."}.get(kind, "")
    text = (text or inspect.cleandoc(module.__doc__ or "")).strip()
    keys = registry.keys_of(module).values()
    tables = {"keys:": keys_table(keys, prefix) if keys else Text("none")}
    if kind == "drafter" and (own := loss_keys(name)):
        tables["keys of its training's loss:"] = keys_table(own, "config.loss.")
    facts = _facts(kind, name) | {"source": source}
    parts = [Text(head, "bold"), Padding(Text(text), (0, 0, 1, 2), expand=False)]
    parts += [Text(f"{label}: {value}") for label, value in facts.items()]
    for title, table in tables.items():
        parts += [Text(title), Padding(table, (0, 0, 1, 2), expand=False)]
    return Group(*parts, *map(Text, references.of(module).values()))


def _facts(kind: str, name: str) -> dict[str, str]:
    if kind == "controller":
        return {"use": f"config.drafter.control={name}:VALUE"}
    if kind == "rule":
        rule = accept.load(name)
        drafts = "; ".join(_SIBLINGS[each] for each in rule.siblings if each in _SIBLINGS)
        drafted = drafters.make(drafters.PLAIN, stand_ins.target())._replace(nodes=1)
        rules = {each: accept.default_rule(drafted._replace(siblings=each)) for each in _SIBLINGS}
        default = [each for each, own in rules.items() if own == name]
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


def expanded(methods: str) -> str:
    """``--methods``; "free" in it becomes the drafters without model, file and training."""
    names = [name.strip() for name in methods.split(",")]
    if FREE not in names:
        return methods
    free = [name for name in drafters.names() if name not in names and _is_free(name)]
    return ",".join([*free, *(name for name in names if name != FREE)])


def _is_free(name: str) -> bool:
    if any(key.required for key in registry.keys_of(drafters.load(name)).values()):
        return False
    drafter = _made(name)
    return drafter is not None and drafter.nodes > 0 and drafter.training is None


def loss_keys(name: str) -> list[declare.Key]:
    """The keys of the loss of a drafter's training, with the drafter's values."""
    if declared := getattr(registry.load("specjax.drafters", name, "drafter").make, "loss", None):
        return list(declare.keys_of(declared))
    drafter = _made(name)
    loss = drafter and drafter.training and drafter.training.loss
    if not isinstance(loss, Bound) or not hasattr(loss.func, "keys"):
        return []
    known = declare.of(loss.func).values()
    return [each._replace(default=loss.keywords.get(each.name, each.default)) for each in known]


def _section(title: str, lines: dict[str, str]) -> Group:
    width = max(map(len, lines), default=0) + 2
    texts = (Text(f"  {name:{width}}{line}") for name, line in lines.items())
    return Group(Text(title, "bold"), *texts, Text())


def _lines(kind: str, names: list[str]) -> dict[str, str]:
    return {name: _first(Path(registry.file(KINDS[kind].__name__, name))) for name in names}


def _doc(path: Path) -> str:
    """The docstring of a file, which is not run."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _first(path: Path) -> str:
    """The first sentence of a file's docstring."""
    return _sentence(_doc(path))


def _sentence(doc: str) -> str:
    text = " ".join(doc.partition("\n\n")[0].split())
    text = re.sub(r"^Mode \w+: ", "", text)
    return re.split(r"(?<!et al)(?<!i[.]i[.]d)[.] (?=[A-Z(])", text)[0].rstrip(".")


# --help of a configuration -----------------------------------------------------------------------

# Keys beside those of a drafter.
_OF_METHODS = {
    "name": "the name of a drafter, or of a function of your own: my_module:make",
    "drafters": "escalate: label -> keys of a drafter; asked in alphabetical order of the labels",
    "warm": "bench: learn from config.warm_prompts first. True lets text pass from one prompt to "
    "another",
    "accept": "a rule of its own; empty: the recommended one",
}


def keys_page(config: Config, file: Path) -> Group:
    """All keys of a configuration: path, value and help."""
    table = _table(60, None)
    named = list(_methods(config))
    methods = {path: comments for path, _, comments in named}
    for path, value in overrides.leaves(config):
        group, _, key = path.rpartition(".")
        if group in methods:
            known = methods[group].get(key) or _OF_METHODS.get(key)
            comment = known or _help(config, path.split("."))
            if key not in methods[group] and not comment and not value:
                continue  # a key of another drafter
        elif group.endswith("accept_keys"):
            comment = _of_rules(key)
        else:
            comment = _help(config, path.split("."))
            if group == "loss" and not comment:
                continue  # a key of another drafter's loss
        table.add_row(Text(f"--config.{path}={value}"), Text(comment))
    names = ", ".join(dict.fromkeys(name for _, name, _ in named))
    notes = [Text(f"keys of another drafter: --explain=NAME ({names} here)", "dim")] * bool(names)
    return Group(Text(_doc(file)), Text(), Text(f"keys of {file}:", "bold"), table, *notes)


def _help(config: Config, path: list[str]) -> str:
    """The help of a declared key; "" for another one."""
    if path[0] == "stages" and len(path) > 2:
        return _help(config.stages[path[1]], path[2:])
    if path[0] == "loss" and len(path) > 1:
        return _help_of_loss(config, path[-1])
    keys: type[declare.Keys] | None = Training if config.get("mode") == "train" else Settings
    text = ""
    for part in path:
        found = [key for key in declare.keys_of(keys) if key.name == part] if keys else []
        if not found:
            return ""
        text, keys = found[0].facts.help, found[0].facts.group
    return text


def _help_of_loss(config: Config, name: str) -> str:
    """The help of a key of the loss of the configuration's drafter, or of another loss."""
    from specjax.train import layer_skip, objectives

    drafter = config.get("drafter", {}).get("name")
    keys = (objectives.JointKeys, objectives.DistillKeys, layer_skip.Settings)
    known = [*map(declare.keys_of, keys), loss_keys(drafter) if drafter else []]
    return {each.name: each.facts.help for own in known for each in own}.get(name, "")


def _methods(config: Config, path: str = "") -> Iterator[tuple[str, str, dict[str, str]]]:
    """(path, drafter, key -> comment) of each group that holds a drafter's keys."""
    for key in config:
        value = config[key]
        if not hasattr(value, "items"):
            continue
        name = value.get("name")
        if isinstance(name, str) and (name in drafters.names() or ":" in name):
            try:
                keys = _keys_of(config, name)
            except UserError:
                keys = []
            yield f"{path}{key}", name, {each.name: each.facts.help for each in keys}
        yield from _methods(value, f"{path}{key}.")


def _keys_of(config: Config, name: str) -> Iterable[declare.Key]:
    """The keys of the drafter ``name`` in this configuration."""
    how = objectives.distilled(name) if config.get("objective") == "distill" else None
    if how is not None:
        return declare.keys_of(how.keys)
    return registry.keys_of(drafters.load(name)).values()


def _of_rules(name: str) -> str:
    """The help of a key of the rules that have it."""
    rules = {rule: registry.load(accept.__name__, rule, "rule") for rule in accept.names()}
    keys = {rule: registry.keys_of(module) for rule, module in rules.items()}
    return "; ".join(f"{rule}: {own[name].facts.help}" for rule, own in keys.items() if name in own)
