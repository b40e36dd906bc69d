"""The tables of tensor names that are modules of their own, by the kind of heads."""

from __future__ import annotations

from specjax.models import (
    block_layouts,
    falcon_layouts,
    mtp_layouts,
    spec_layouts,
    trunk_layouts,
)

TABLES = {
    "mtp_module": mtp_layouts,
    "mtp": trunk_layouts,
    "block_head": block_layouts,
    "falcon": falcon_layouts,
    "spec_drafter": spec_layouts,
}
# Kind -> the ways in which a directory of it can be written; the first is the default.
LAYOUTS = mtp_layouts.LAYOUTS | block_layouts.LAYOUTS | trunk_layouts.LAYOUTS
