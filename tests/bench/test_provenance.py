"""The target's weights and the commit of specjax in results.json."""

from __future__ import annotations

import hashlib
import subprocess

import jax.numpy as jnp
import pytest

from specjax.bench import provenance

pytestmark = pytest.mark.fast


def git(folder, *arguments):
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *name, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "code" / "specjax"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.commit() is None  # not in a repository
    git(package.parent, "init", "-q")
    assert provenance.commit() is None  # no commit yet
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "one")
    head = git(package.parent, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    (package.parent / "notes.txt").write_text("not the package")
    assert provenance.commit() == {"commit": head, "dirty": False}
    (package / "b.py").write_text("new")
    assert provenance.commit() == {"commit": head, "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert provenance.commit() is None


def test_a_package_inside_another_checkout_has_no_commit(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "specjax"
    package.mkdir(parents=True)
    git(tmp_path, "init", "-q")
    (package / "a.py").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    assert provenance.commit() is None


def test_the_hash_is_that_of_the_weight_file(tmp_path):
    model = tmp_path / "tiny" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    params = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros(4), "scale": jnp.float32(2)}
    facts = provenance.target(params, name="", directory=model)
    assert facts == {
        "name": "tiny",
        "dtype": "bfloat16",
        "parameters": 10,
        "source": "directory",
        "revision": None,
        "dequantised_from": None,
        "weights_sha256": hashlib.sha256(b"weights").hexdigest(),
        "weights_from": "model.safetensors",
    }
    (model / "model.safetensors").unlink()
    index = '{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}'
    (model / "model.safetensors.index.json").write_text(index)
    (model / "a.safetensors").write_bytes(b"1")
    (model / "b.safetensors").write_bytes(b"2")
    facts = provenance.target(params, name="shards", directory=model)
    both = "\n".join(hashlib.sha256(text).hexdigest() for text in (b"1", b"2"))
    assert facts["weights_sha256"] == hashlib.sha256(both.encode()).hexdigest()
    assert (facts["name"], facts["weights_from"]) == ("shards", "a.safetensors, b.safetensors")


def test_without_files_the_hash_is_that_of_the_arrays(tmp_path):
    def digest(**arrays):
        facts = provenance.target(arrays, name="x", directory=tmp_path)
        assert facts["weights_from"] == "arrays"
        return facts["weights_sha256"]

    one = digest(a=jnp.arange(6.0), b=jnp.ones(2, jnp.bfloat16))
    assert one == digest(a=jnp.arange(6.0), b=jnp.ones(2, jnp.bfloat16))
    others = {
        digest(a=jnp.arange(6.0), c=jnp.ones(2, jnp.bfloat16)),
        digest(a=jnp.arange(6.0).reshape(2, 3), b=jnp.ones(2, jnp.bfloat16)),
        digest(a=jnp.arange(6.0), b=jnp.ones(2, jnp.float16)),
        digest(a=jnp.arange(6.0).at[2].set(7), b=jnp.ones(2, jnp.bfloat16)),
    }
    assert len(others | {one}) == 5
    assert provenance.target({}, name="x")["dtype"] is None
