"""The old name of ``python -m specjax.convert_heads``; it goes with the next version."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    print("specjax.models.convert_heads is now specjax.convert_heads", file=sys.stderr)
    sys.exit(importlib.import_module("specjax.convert_heads").main(sys.argv[1:]))
