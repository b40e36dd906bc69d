"""References as data: every method has the BibTeX of its papers, and ``specjax.cite`` prints it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys

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


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]
    return [name for name in names if not name.endswith("__main__")]


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
def test_every_method_has_well_formed_references(method):
    package, _, name = method.partition(":")
    entries = references.of(registry.load(package, name, "method"))
    assert entries
    assert {key: well_formed(key, entry) for key, entry in entries.items()} == dict.fromkeys(
        entries, ""
    )


def test_a_key_has_the_same_entry_in_every_module():
    seen: dict[str, str] = {}
    papers: dict[str, str] = {}
    for name in modules():
        if name.split(".")[1] not in ("drafters", "accept", "control", "topology"):
            continue
        for key, entry in references.of(importlib.import_module(name)).items():
            assert seen.setdefault(key, entry) == entry, key
            eprint = dict(FIELD.findall(entry)).get("eprint", key)
            assert papers.setdefault(eprint, key) == key, f"{eprint} has two keys"
    assert len(seen) > 20


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
