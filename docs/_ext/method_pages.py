"""Sections about drafters, rules and controllers, made from their modules."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from source_text import docstring

from specjax import accept, control, declare, drafters, references, registry
from specjax.drafters.files import head_files
from specjax.drafters.shared_keys import HeadKeys
from specjax.report import columns
from specjax.run import catalog, stand_ins
from specjax.types import CHAIN, DETERMINISTIC, Drafter

ROOT = Path(__file__).parents[2]
FAMILIES = ("lookup", "parallel", "draft_models", "heads", "self_speculation", "nested")


def parts() -> dict[str, str]:
    """Name of a part -> its MyST text."""
    parts = {
        f"drafters_{family}": "\n\n".join(map(drafter_section, drafters_of(family)))
        for family in FAMILIES
    }
    parts["rules"] = "\n\n".join(map(rule_section, accept.names()))
    parts["controllers"] = "\n\n".join(map(controller_section, control.names()))
    parts["drafter_none"] = drafter_section("none")
    parts["choosing"] = choosing()
    parts["rules_table"] = rules_table()
    parts["definitions"] = definitions()
    parts["drafters_with_files"] = drafters_with_files()
    parts["released_heads"] = released_heads()
    return parts


def drafters_of(family: str) -> list[str]:
    """The drafters of a folder of specjax/drafters."""
    return [n for n in drafters.names() if f".{family}." in drafters.load(n).__name__]


def default(name: str) -> Drafter:
    """The drafter with its default keys, and stand-ins for what must be given."""
    return drafters.make(name, stand_ins.target_of(name), **stand_ins.keys(name))


def keys(module: ModuleType) -> dict[str, declare.Key]:
    """The keys of a method."""
    return registry.keys_of(module)


def drafter_section(name: str) -> str:
    """A drafter: what it is, its facts, its keys, its source."""
    module = drafters.load(name)
    facts = [
        f"- Drafts: {drafts_of(default(name))}. Default rule: {link(default_rule(default(name)))}.",
        f"- Needs: {needs(name)}.",
        f"- File: `{module.__name__.replace('.', '/')}.py`.",
    ]
    parts = [
        f"(drafter-{name})=\n## `{name}`",
        eval_rst(docstring(module)),
        "\n".join(facts),
        key_table(keys(module).values()),
        key_table(catalog.loss_keys(name), "loss."),
        bibtex(module),
    ]
    return "\n\n".join(part for part in parts if part)


def rule_section(name: str) -> str:
    """A rule: what it is, its class, the drafts that it takes, its keys, its source."""
    module = importlib.import_module(f"specjax.accept.{name}")
    rule = accept.load(name)
    kinds = ", ".join(f"`{kind}`" for kind in rule.siblings)
    parts = [
        f"(rule-{name})=\n## `{name}`",
        eval_rst(docstring(module)),
        f"- Class: {rule.lossless_class}. It takes drafts with siblings {kinds}.\n"
        f"- File: `specjax/accept/{name}.py`.",
        key_table(keys(module).values()),
        bibtex(module),
    ]
    return "\n\n".join(part for part in parts if part)


def controller_section(name: str) -> str:
    """A controller: what it is, and its keys."""
    module = importlib.import_module(f"specjax.control.{name}")
    numbers = ",".join(f"{key}=..." for key in keys(module))
    parts = [
        f"(controller-{name})=\n## `{name}`",
        eval_rst(docstring(module)),
        eval_rst(docstring(module.make)[:1]),
        key_table(keys(module).values()),
        f'As a key of a drafter: `control="{name}:{numbers}"`.',
        bibtex(module),
    ]
    return "\n\n".join(part for part in parts if part)


def needs(name: str) -> str:
    """What a drafter needs besides the text, in words."""
    what = {
        "model": "a draft model (`model`)",
        "models": "draft models (`models`)",
        "datastore": "a datastore (`datastore`, built by `configs/datastore.py`)",
        "tables": "n-gram tables (`tables`, built by `configs/ngram_tables.py`)",
        "drafters": "other drafters (`drafters`)",
        "skip_attention": "layers to skip (`skip_attention`)",
        "skip_mlp": "and (`skip_mlp`), from "
        "`python -m specjax.drafters.self_speculation.skip_search`",
    }
    module = drafters.load(name)
    required = [key for key, facts in keys(module).items() if facts.required]
    texts = [what.get(key, f"`{key}`") for key in required]
    if ".heads." in module.__name__ or issubclass(getattr(module.make, "keys", object), HeadKeys):
        texts.append("trained heads (`model`)")
    return ", ".join(texts) or "nothing"


def drafts_of(drafter: Drafter) -> str:
    """The shape and the siblings of the drafts."""
    if drafter.nodes == 0:
        return "none"
    if drafter.siblings == CHAIN:
        return "a chain"
    return f"a tree, siblings `{drafter.siblings}`"


def default_rule(drafter: Drafter) -> str:
    """The rule that the command line takes for ``config.accept=""``."""
    if rule := getattr(accept, "default_rule", None):
        return rule(drafter)
    return {CHAIN: "chain", DETERMINISTIC: "deterministic"}.get(drafter.siblings, "recursive")


def link(rule: str) -> str:
    return f"[`{rule}`](#rule-{rule})"


def choosing() -> str:
    """A table of all drafters, by tau where it was measured; the others last, by family."""
    orders = {target: measured(target) for target in MEASURED}
    heads = [f"tau, {target}, T = 0 / 1" for target in MEASURED]
    lines = [f"| drafter | needs | drafts | default rule | {' | '.join(heads)} |"]
    lines.append("|---" * (4 + len(heads)) + "|")
    names = [name for family in FAMILIES for name in drafters_of(family)]
    for name in sorted(names, key=lambda name: -orders["stories260K"].get((name, 0), 0.0)):
        drafter = default(name)
        shape = drafts_of(drafter).removeprefix("a ").replace(", siblings", ":")
        cells = [f"[`{name}`](#drafter-{name})", needs(name), shape, link(default_rule(drafter))]
        for order in orders.values():
            taus = [f"{order[name, t]:.2f}" for t in (0, 1) if (name, t) in order]
            cells.append(" / ".join(taus))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Target -> the parts of experiments/*/results.json with its taus.
MEASURED = {
    "stories260K": (
        ("training_free", "stories260K"),
        ("trained_drafters", "stories260K"),
        ("trained_drafters", "stories260K, draft networks"),
        ("trained_drafters", "stories260K, drafts of 7"),
        ("trained_drafters", "stories260K, blocks of 7"),
    ),
    "SmolLM2": (("real_model", ""), ("trained_drafters", "SmolLM2-135M")),
}
# Label of a row -> the drafter, where it is a training or a network of one.
_OTHERS = {"forward_kl": "draft_model", "hass": "eagle", "p_eagle": "eagle3"} | dict.fromkeys(
    ("dflare", "dflash", "dflash2", "domino", "dspark", "jetspec", "xpress"), "block_head"
)


def measured(target: str) -> dict[tuple[str, int], float]:
    """(drafter, temperature) -> tau at batch 1: the best of a drafter's rows."""
    known, best = set(drafters.names()), {}
    for study, part in MEASURED[target]:
        path = ROOT / "experiments" / study / "results.json"
        results = json.loads(path.read_text(encoding="utf-8"))
        for row in results["targets"][part]["rows"] if part else results["rows"]:
            name = re.split(r",| sampled$", row["method"])[0]
            name = _OTHERS.get(name, name)
            if name in known and row["batch_size"] == 1 and row.get("category") is None:
                key = (name, round(row["temperature"]))
                best[key] = max(best.get(key, 0.0), row["block_efficiency"])
    return best


def drafters_with_files() -> str:
    """The drafters whose parameters are stored under names of their own."""
    links = [f"[`{name}`](#drafter-{name})" for name in sorted(head_files.kinds())]
    return f"Drafters with files of their own: {', '.join(links)}."


def released_heads() -> str:
    """The heads and draft models on the Hub that specjax knows, by target."""
    lines = ["| target | drafter | on the Hub |", "|---|---|---|"]
    every = {name: getattr(drafters.load(name), "RELEASED", {}) for name in drafters.names()}
    for target in sorted({target for own in every.values() for target in own}, key=str.lower):
        for name, head in drafters.released(target).items():
            lines.append(f"| {target} | [`{name}`](#drafter-{name}) | `{head}` |")
    return "\n".join(lines)


def definitions() -> str:
    """Every reported number with its meaning, as the report defines it."""
    lines = ["| column | key of results.json | meaning |", "|---|---|---|"]
    for column in columns.COLUMNS:
        lines.append(f"| {column.head} | `{column.key}` | {cell(column.meaning)} |")
    more = ["| value | meaning |", "|---|---|"]
    more += [f"| {term} | {cell(meaning)} |" for term, meaning in columns.DETAILS.items()]
    return "\n".join([*lines, "", "In the details of a row, and in traces:", "", *more])


def cell(text: str) -> str:
    """A text for a table of a MyST page."""
    return text.replace("``", "`").replace("|", r"\|").replace("*", r"\*")


def rules_table() -> str:
    """A table of all rules."""
    lines = ["| rule | class | takes siblings | what it is |", "|---|---|---|---|"]
    for name in accept.names():
        rule = accept.load(name)
        first = docstring(importlib.import_module(f"specjax.accept.{name}"))[0]
        first = re.sub(r" L\d(, lossy)?\.$", "", first.replace("``", "`"))
        kinds = ", ".join(rule.siblings)
        lines.append(f"| {link(name)} | {rule.lossless_class} | {kinds} | {first} |")
    return "\n".join(lines)


def key_table(declared: Iterable[declare.Key], prefix: str = "") -> str:
    """Keys as a MyST table, the shared ones last; "" if there are none."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in declared:
        default = "needed" if key.required else f"`{key.default!r}`"
        cells = [
            f"`{prefix}{key.name}`",
            f"`{key.annotation}`",
            default,
            key.facts.help.replace("``", "`"),
        ]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def bibtex(module: ModuleType) -> str:
    """The BibTeX entries of a method, folded."""
    entries = references.of(module)
    if not entries:
        return ""
    text = "\n\n".join(entries.values())
    return f"BibTeX:\n\n```bibtex\n{text}\n```"


def eval_rst(lines: list[str]) -> str:
    """RST inside of a MyST page."""
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```"
