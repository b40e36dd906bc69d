"""Shapes of trees: numbering, every form of specification, and every error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.errors import UserError
from specjax.topology import shapes
from specjax.topology.shapes import Topology

pytestmark = pytest.mark.fast


def random_tree(seed, nodes):
    rng = np.random.default_rng(seed)
    return shapes.check([int(rng.integers(-1, node)) for node in range(nodes)])


def test_properties():
    tree = shapes.check([-1, 0, -1, 0, 2, 4])
    assert (tree.nodes, tree.depth, tree.branching) == (6, 3, 2)
    assert tree.depths == (1, 2, 1, 2, 2, 3)
    assert tree.children == ((0, 2), (1, 3), (), (4,), (), (5,), ())
    assert tree.levels == ((0, 2), (1, 3, 4), (5,))
    assert tree.ranks == (0, 0, 1, 1, 0, 0)
    empty = Topology(())
    assert (empty.nodes, empty.depth, empty.branching) == (0, 0, 0)
    assert (empty.levels, empty.children) == ((), ((),))


@pytest.mark.parametrize("seed", range(5))
def test_properties_agree(seed):
    tree = random_tree(seed, 30)
    for node, parent in enumerate(tree.parents):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        assert tree.depths[node] == len(path)
        assert node in tree.levels[len(path) - 1]
        assert tree.children[parent + 1][tree.ranks[node]] == node
    assert sum(map(len, tree.levels)) == sum(map(len, tree.children)) == tree.nodes
    assert tree.branching == max(tree.ranks) + 1 and tree.depth == len(tree.levels)


def test_is_a_static_argument():
    traces = []

    def apply(x, tree):
        traces.append(tree)
        return x + tree.nodes

    jitted = jax.jit(apply, static_argnums=1)
    assert int(jitted(1, shapes.chain(3))) == int(jitted(1, shapes.parse("chain:3"))) == 4
    assert int(jitted(1, shapes.full((2, 2)))) == 7
    assert traces == [shapes.chain(3), shapes.full((2, 2))]


def test_constructors():
    assert shapes.chain(4).parents == (-1, 0, 1, 2)
    assert shapes.chains(2, 3).parents == (-1, -1, 0, 1, 2, 3)
    assert shapes.full((3, 2, 1)).parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)
    assert shapes.full((1,) * 4) == shapes.chain(4)
    assert shapes.full((4, 1, 1)) == shapes.chains(4, 3)
    assert shapes.full(np.array([2, 2])).parents == (-1, -1, 0, 0, 1, 1)  # type: ignore[arg-type]
    assert all(type(parent) is int for parent in shapes.check(np.array([-1, 0])).parents)


def rank_names(tree):
    """The name of every node: the ranks along its path."""
    names = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        names.append((*(names[parent] if parent >= 0 else ()), rank))
    return names


def test_from_ranks():
    tree = shapes.from_ranks([(1,), (0, 1), (0,), (0, 0), (0, 1, 0), (1, 0)])
    assert tree.parents == (-1, -1, 0, 0, 1, 3)
    assert rank_names(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]


@pytest.mark.parametrize("seed", range(5))
def test_from_ranks_inverts_ranks(seed):
    tree = random_tree(seed, 20)
    names = rank_names(tree)
    again = shapes.from_ranks(names)
    # Breadth first, for any order of the names.
    assert again.depths == tuple(sorted(again.depths))
    assert sorted(again.depths) == sorted(tree.depths)
    assert sorted(map(len, again.children)) == sorted(map(len, tree.children))
    named = sorted(names, key=lambda name: (len(name), name))
    for node, parent in enumerate(again.parents):
        assert named[node][:-1] == (named[parent] if parent >= 0 else ())


def test_parse():
    tree = shapes.full((4, 2, 1))
    for spec in (tree, "4x2x1", (4, 2, 1), [4, 2, 1], np.array([4, 2, 1])):
        assert shapes.parse(spec) == tree
    assert shapes.parse("3") == shapes.full((3,))
    assert shapes.parse("chain:5") == shapes.chain(5)
    assert shapes.parse("chains:4x5") == shapes.chains(4, 5)


@pytest.mark.parametrize("as_type", [str, lambda path: path])
def test_json_round_trip(tmp_path, as_type):
    tree, path = random_tree(0, 12), as_type(tmp_path / "tree.json")
    shapes.save(path, tree, expected=2.5, source="here")
    assert shapes.parse(path) == tree
    written = json.loads((tmp_path / "tree.json").read_text())
    assert written == {"parents": list(tree.parents), "expected": 2.5, "source": "here"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shapes.check([]), "the tree is empty"),
        (lambda: shapes.check([-1, 1]), r"parents\[1\] is 1; .* below 1"),
        (lambda: shapes.check([-1, 2, 0]), r"parents\[1\] is 2"),
        (lambda: shapes.check([0]), r"parents\[0\] is 0"),
        (lambda: shapes.check([-1, -2]), r"parents\[1\] is -2; .* >= -1"),
        (lambda: shapes.check([-1, 0.0]), r"parents\[1\] is 0.0"),  # type: ignore[list-item]
        (lambda: shapes.check([-1, False]), r"parents\[1\] is False"),
        (lambda: shapes.check([-1] * 5, vocab_size=4), "5 siblings and the vocabulary 4"),
        (lambda: shapes.chain(0), "gamma is 0"),
        (lambda: shapes.chains(0, 2), "chains is 0"),
        (lambda: shapes.chains(100_000, 100_000), "at most 65536"),
        (lambda: shapes.full(()), "the branching is empty"),
        (lambda: shapes.full((2, 0)), r"branching\[1\] is 0"),
        (lambda: shapes.full((10**6,) * 50), "at most 65536"),
        (lambda: shapes.full((True,)), r"branching\[0\] is True"),
        (lambda: shapes.from_ranks([]), "list of choices is empty"),
        (lambda: shapes.from_ranks([(0,), ()]), r"choice \(\) is empty"),
        (lambda: shapes.from_ranks([(0,), (0,)]), r"choice \(0,\) occurs twice"),
        (
            lambda: shapes.from_ranks([(0,), (1, 0)]),
            r"choice \(1, 0\) .* without its parent \(1,\)",
        ),
        (
            lambda: shapes.from_ranks([(0,), (0, 0), (0, 2)]),
            r"choice \(0, 2\) is there without its sibling \(0, 1\)",
        ),
        (lambda: shapes.from_ranks([(1,)]), r"choice \(1,\) is there without its sibling \(0,\)"),
        (lambda: shapes.from_ranks([(0,), (-1,)]), "a rank of choice 1 is -1"),
        (lambda: shapes.parse(""), "4x2x1"),
        (lambda: shapes.parse("4x"), "the tree is '4x'"),
        (lambda: shapes.parse("4x-2"), "the tree is '4x-2'"),
        (lambda: shapes.parse("4x2.5"), "the tree is '4x2.5'"),
        (lambda: shapes.parse("4x0"), r"branching\[1\] is 0"),
        (lambda: shapes.parse("²"), "the tree is '²'"),
        (lambda: shapes.parse("9" * 5000), "the tree is"),
        (lambda: shapes.parse(":4"), "the tree is ':4'"),
        (lambda: shapes.parse("chain:"), "the tree is 'chain:'"),
        (lambda: shapes.parse("chain:0"), "gamma is 0"),
        (lambda: shapes.parse("chain:4x5"), "the tree is 'chain:4x5'"),
        (lambda: shapes.parse("chains:4"), "the tree is 'chains:4'"),
        (lambda: shapes.parse("chains:4x5x6"), "the tree is 'chains:4x5x6'"),
        (lambda: shapes.parse("bush:4"), "the tree is 'bush:4'"),
        (lambda: shapes.parse(4), "the tree is 4; give"),  # type: ignore[arg-type]
        (lambda: shapes.parse(None), "the tree is None"),  # type: ignore[arg-type]
        (lambda: shapes.parse(()), "the branching is empty"),
        (lambda: shapes.parse((2.5,)), r"branching\[0\] is 2.5"),  # type: ignore[arg-type]
        (lambda: shapes.parse(Topology((3,))), r"parents\[0\] is 3"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[-1, 0]", 'no list "parents"'),
        (b"{}", 'no list "parents"'),
        (b'{"parents": 3}', 'no list "parents"'),
        (b'{"parents": []}', "the tree is empty"),
        (b'{"parents": [-1, "0"]}', r"parents\[1\] is '0'"),
        (b'{"parents": [-1, 0.5]}', r"parents\[1\] is 0.5"),
        (b'{"parents": [-1, true]}', r"parents\[1\] is True"),
        (b'{"parents": [-1, 1]}', r"parents\[1\] is 1"),
    ],
)
def test_file_errors(tmp_path, content, message):
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        shapes.parse(str(path))
    assert str(error.value).startswith(f"tree file {path}: ")


def test_save_errors(tmp_path):
    with pytest.raises(UserError, match="the key parents holds the tree"):
        shapes.save(tmp_path / "tree.json", shapes.chain(2), parents=[-1])
    assert not (tmp_path / "tree.json").exists()
    with pytest.raises(UserError, match="a path that can be written"):
        shapes.save(tmp_path / "nowhere" / "tree.json", shapes.chain(2))
    with pytest.raises(UserError, match="Is a directory"):
        shapes.parse(tmp_path)


def test_file_needs_no_jax():
    """Shapes are read on machines without jax, which only show results."""
    package = str(Path(shapes.__file__).parents[1])
    code = (
        "import sys, types; sys.modules['jax'] = None\n"
        f"package = types.ModuleType('specjax'); package.__path__ = [{package!r}]\n"
        "sys.modules['specjax'] = package\n"
        "from specjax import topology; print(topology.parse('2x1').parents)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "(-1, -1, 0, 1)", done.stderr
