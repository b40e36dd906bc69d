"""The cost and the effects of importing specjax, and its public names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import specjax

pytestmark = pytest.mark.fast

PROBE = """
import json, sys, time
began = time.perf_counter(); import jax; of_jax = time.perf_counter() - began
config = dict(jax.config.values)
import flax.struct, flax.nnx, numpy
before = set(sys.modules)
began = time.perf_counter(); import specjax; of_specjax = time.perf_counter() - began
new = sorted({m.partition('.')[0] for m in set(sys.modules) - before})
from jax._src import xla_bridge
started = bool(xla_bridge._backends)
print(json.dumps([of_jax, of_specjax, new, started, config == dict(jax.config.values)]))
"""
ALONE = """
import time; import jax
began = time.perf_counter(); import specjax; print(time.perf_counter() - began)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_import_needs_only_jax_flax_and_numpy():
    _, _, new, started, same_config = run(PROBE)
    assert new == ["specjax"]
    assert not started, "importing specjax started a backend"
    assert same_config, "importing specjax changed jax's configuration"


def test_import_is_quick():
    """At most 2 seconds more than jax itself. The best of three: other processes may be running."""
    assert min(run(ALONE) for _ in range(3)) < 2


def test_public_names_exist():
    for name in specjax.__all__:
        assert getattr(specjax, name) is not None
    assert specjax.__version__


def test_dir_shows_the_names_that_are_imported_when_used():
    code = """
import json, sys, specjax
names = dir(specjax)
from jax._src import xla_bridge
late = "specjax.generation" in sys.modules or bool(xla_bridge._backends)
print(json.dumps([sorted(set(specjax.__all__) - set(names)), "__version__" in names, late]))
"""
    assert run(code) == [[], True, False]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'brench'"):
        _ = specjax.brench
