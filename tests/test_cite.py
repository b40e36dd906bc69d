"""References as data: every method names entries of one file, and ``specjax.cite`` prints them."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import specjax
from specjax import accept, control, drafters, references, registry
from specjax.errors import UserError

pytestmark = pytest.mark.fast

FIELD = re.compile(r"^  (\w+) = \{(.*?)\},$", re.MULTILINE | re.DOTALL)
METHODS = [
    f"{package.__name__}:{name}"
    for package in (drafters, accept, control)
    for name in package.names()
    if name != "none"
]

TEXT = (Path(specjax.__file__).parent / "references.bib").read_text(encoding="utf-8")
# Key and entry, in the order of the file.
STORED = [
    (key, entry) for entry, key in re.findall(r"^(@\w+\{(\w+),\n.*?\n\})$", TEXT, re.M | re.S)
]
PARTS = ("drafters", "accept", "control", "topology", "decode", "models")


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]
    return [name for name in names if name.split(".")[1] in PARTS]


def well_formed(key: str, entry: str) -> str:
    """ "" if the entry can be cited; otherwise what is wrong with it."""
    fields = dict(FIELD.findall(entry))
    if not re.fullmatch(
        r"@(inproceedings|misc|article)\{[a-z]+\d{4}[a-z0-9]+,\n.*\n\}", entry, re.S
    ):
        return "not an entry"
    if entry.count("{") != entry.count("}") or len(FIELD.findall(entry)) != entry.count(" = {"):
        return "unbalanced braces"
    if not {"title", "author", "year"} <= set(fields):
        return "title, author or year is missing"
    if not {"eprint", "journal", "booktitle", "howpublished"} & set(fields):
        return "no place of publication"
    if "eprint" in fields and not re.fullmatch(r"\d{4}\.\d{4,5}", fields["eprint"]):
        return "the eprint is no arXiv identifier"
    authors = re.split(r"\s+and\s+", fields["author"])
    # An organisation is in braces.
    if not all(re.fullmatch(r"[^,]+, [^,]+|\{[^{}]+\}", author) for author in authors):
        return "an author is not 'family name, first name'"
    family = re.sub(r"\W", "", authors[0].partition(",")[0]).lower()
    return "" if key.startswith(family + fields["year"]) else "the key is not author, year, word"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_references(method):
    package, _, name = method.partition(":")
    assert references.of(registry.load(package, name, "method"))


def test_the_file_has_well_formed_entries_and_nothing_else():
    assert "\n\n".join(entry for _, entry in STORED) + "\n" == TEXT
    wrong = {key: problem for key, entry in STORED if (problem := well_formed(key, entry))}
    assert not wrong


def test_keys_are_unique_and_sorted_and_a_paper_has_one():
    keys = [key for key, _ in STORED]
    assert keys == sorted(set(keys))
    papers: dict[str, str] = {}
    for key, entry in STORED:
        eprint = dict(FIELD.findall(entry)).get("eprint", key)
        assert papers.setdefault(eprint, key) == key, f"{eprint} has two keys"


def test_modules_name_entries_of_the_file_and_all_of_them():
    named: set[str] = set()
    for name in modules():
        keys = getattr(importlib.import_module(name), "REFERENCE", ())
        named |= {keys} if isinstance(keys, str) else set(keys)
    stored = {key for key, _ in STORED}
    assert not named - stored, "no entry of references.bib"
    assert not stored - named, "no module names these"


def own(*named: str) -> ModuleType:
    """A module of a user."""
    module = ModuleType("mine")
    vars(module)["REFERENCE"] = named
    return module


def test_a_module_outside_of_the_package_gives_entries_or_keys():
    entries = ["@misc{mine2026draft,\n  year = {2026},\n}", "@misc{mine2026more,\n}"]
    found = references.of(own("\n".join(entries) + "\n", "cai2024medusa"))
    assert list(found) == ["mine2026draft", "mine2026more", "cai2024medusa"]
    assert [*found.values()] == [*entries, dict(STORED)["cai2024medusa"]]


def test_an_unknown_key_gets_the_nearest_keys():
    message = "mine: REFERENCE has 'cai2024medsua', .* did you mean cai2024medusa"
    with pytest.raises(UserError, match=message):
        references.of(own("cai2024medsua"))


def test_cite_prints_what_was_used_each_entry_once():
    text = specjax.cite("medusa", "typical", "recursive")
    keys = re.findall(r"^@\w+\{(\w+),", text, re.MULTILINE)
    # Medusa's heads and its rule have one paper.
    assert keys == ["cai2024medusa", "miao2024specinfer", "chen2024sequoia", "jeon2024recursive"]
    assert "author = {Cai, Tianle and Li, Yuhong" in text
    assert "\n\n@" in text and not text.endswith("\n")


def test_cite_takes_shapes_of_trees_and_controllers():
    assert "{chen2024sequoia," in specjax.cite("search")
    assert "{ringel2026accelerating," in specjax.cite("dynamic")
    assert specjax.cite("threshold").count("@inproceedings") == 3


def test_what_has_no_publication_adds_nothing():
    assert specjax.cite() == specjax.cite("none") == ""
    assert specjax.cite("none", "chain") == specjax.cite("chain")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("medsua", "there is no drafter, rule or controller 'medsua'; did you mean medusa"),
        ("recursiv", "did you mean recursive"),
        ("", "there is no drafter, rule or controller"),
        (["medusa"], r"there is no drafter, rule or controller \['medusa'\]"),
    ],
)
def test_an_unknown_name_gets_the_nearest_names(name, message):
    with pytest.raises(UserError, match=message):
        specjax.cite(name)


def test_importing_specjax_imports_no_method():
    code = (
        "import sys, specjax; print([m for m in sys.modules if m.startswith('specjax.drafters')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_importing_specjax_does_not_read_the_references():
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import specjax
before = [path for path in opened if path.endswith(".bib")]
specjax.cite("medusa", "typical")
print(before, sum(path.endswith(".bib") for path in opened))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] 1"
