"""The BibTeX of methods: ``references.bib`` has the entries, sorted by key.

A method's module names its references as ``REFERENCE``: a key of that file, or a tuple of keys. A
module outside specjax may give whole entries instead. ``specjax.cite`` prints those of the methods
that were used. The file is read when the first entry is asked for.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from importlib import resources
from types import ModuleType

from specjax import registry
from specjax.errors import UserError

# The packages whose modules ``cite`` takes: drafters, rules, controllers, shapes of trees, and
# ways to decode ("beams").
_CITED = (
    "specjax.drafters",
    "specjax.accept",
    "specjax.control",
    "specjax.topology",
    "specjax.decode",
)


def of(module: ModuleType) -> dict[str, str]:
    """BibTeX key -> entry, of a method's module; empty for a module without ``REFERENCE``.

    Raises UserError for a key that ``references.bib`` does not have.
    """
    named = getattr(module, "REFERENCE", ())
    entries: dict[str, str] = {}
    for text in (named,) if isinstance(named, str) else named:
        if text.lstrip().startswith("@"):
            entries |= _parsed(text)
        elif text in _stored():
            entries[text] = _stored()[text]
        else:
            hint = registry.nearest(text, _stored())
            raise UserError(
                f"{module.__name__}: REFERENCE has {text!r}, which is no key of references.bib and "
                f"no entry that begins with @{hint}"
            )
    return entries


@functools.cache
def _stored() -> dict[str, str]:
    """BibTeX key -> entry, of ``references.bib``."""
    file = resources.files("specjax").joinpath("references.bib")
    return _parsed(file.read_text(encoding="utf-8"))


def _parsed(text: str) -> dict[str, str]:
    """BibTeX key -> entry; each entry begins a line."""
    entries = [entry.strip() for entry in re.split(r"\n(?=@)", text)]
    return {entry.partition("{")[2].partition(",")[0]: entry for entry in entries}


def cite(*names: str) -> str:
    """The BibTeX entries of the methods that were used: ``cite("medusa", "recursive")``.

    Names are drafters, acceptance rules, controllers, modules of ``specjax.topology`` ("search"
    is Sequoia, "dynamic" the trees of EAGLE-2, ReDrafter and DDTree), "beams", and "my_module:make"
    for a method outside the package. Entries are in the order of the names, each once, with an
    empty line between two; a method without a publication ("none") has none. Raises UserError for
    an unknown name; the message has the nearest names.
    """
    entries: dict[str, str] = {}
    for name in names:
        if registry.is_import(name):
            registry.imported(name)
            entries |= of(sys.modules[name.partition(":")[0]])
            continue
        known = [registry.modules(package) for package in _CITED]
        places = [modules[name] for modules in known if isinstance(name, str) and name in modules]
        if not places:
            every = sorted({each for modules in known for each in modules})
            hint = registry.nearest(str(name), every)
            raise UserError(f"there is no drafter, rule or controller {name!r}{hint}")
        for place in places:
            entries |= of(importlib.import_module(place))
    return "\n\n".join(entries.values())
