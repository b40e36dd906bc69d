"""--list, --explain, and --help with a configuration: they say what exists, and start nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commandline import BENCH, ROOT

from specjax import accept, control, declare, drafters, registry, run
from specjax.run import catalog, command_line, dispatch, settings
from specjax.train import settings as training


def call(capsys, *args):
    status = run.main(["specjax", *args])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_list_has_everything_once(capsys):
    status, out, err = call(capsys, "--list")
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    configs = {path.stem for path in (ROOT / "configs").glob("*.py")}
    expected = [*dispatch.MODES, *drafters.names(), *accept.names(), *control.names(), *configs]
    assert sorted(names) == sorted(expected)
    assert "drafters, lookup" in out and "chain          L1  Speculative sampling" in out
    assert "k_seq          L1  K-SEQ: k i.i.d. candidates per position" in out


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_everything_is_explained(capsys, kind):
    """Each key with its type, and each key of the command line with a comment."""
    package = catalog.KINDS[kind]
    for name in package.names():
        status, out, err = call(capsys, f"--explain={name}")
        assert (status, err) == (0, "") and f"{name}: {kind}" in out and f"/{name}.py" in out
        module = catalog.registry.load(package.__name__, name, kind)
        keys = catalog.registry.keys_of(module).values()
        assert all(key.facts.help for key in keys), name
        assert all(key.name in out for key in keys)


def test_what_an_explanation_says(capsys):
    _, out, _ = call(capsys, "--explain=medusa")
    assert "medusa: drafter, heads" in out and "Cai et al. 2024" in out
    assert "config.drafter.layers" in out and "int = 0" in out and "residual blocks" in out
    assert "siblings: chain" in out and "default rule: chain" in out
    _, out, _ = call(capsys, "--explain", "draft_tree")
    assert "default rule: recursive" in out and "required" in out
    _, out, _ = call(capsys, "--explain=typical")
    assert "lossless class: L3" in out and "config.accept_keys.epsilon" in out


@pytest.mark.parametrize(
    "name, message",
    [
        ("medsa", "no drafter, rule or controller is called 'medsa'; did you mean medusa?"),
        ("zzzzzz", "'zzzzzz'; --list prints the names"),
        ("no_such_module:make", "there is no module no_such_module"),
    ],
)
def test_an_unknown_name_is_one_line(capsys, name, message):
    status, out, err = call(capsys, f"--explain={name}")
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_keys_of_a_trained_drafter_keep_their_types():
    """A key that a configuration leaves out is given on the command line, and has its type."""
    for file, key, value in (
        ("early_exit", "exit_layer", 2),
        ("pard", "mask_id", 5),
        ("mtp_pretrain", "gamma", 2),
        ("mtp_pretrain", "weight", "0.3"),
        ("eagle3", "norm_output", True),
        ("self_generate", "model", "runs/draft"),
    ):
        given = f"--config.drafter.{key}={value}"
        config, _ = command_line.parse(["specjax", f"--config=configs/{file}.py", given])
        assert config.drafter[key] == value and type(config.drafter[key]) is type(value)


def test_the_list_starts_no_backend():
    code = (
        "import sys; from specjax import run; run.main(['specjax', '--list'])\n"
        "from jax._src import xla_bridge; sys.exit(bool(xla_bridge._backends))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0


def test_help_lists_the_keys_of_a_configuration(capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(["specjax", BENCH, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert not stop.value.code
    assert "--config.repeats=3" in out and "config.drafter.max_ngram=None longest n-gram" in out
    assert "--config.again=False measure again although the same bench is finished" in out
    assert "--config.target= a Hugging Face style directory, a name of the Hub, a .gguf file" in out
    assert "output_weight" not in out  # a key of another drafter
    status, out, err = call(capsys, "--help")
    assert (status, err) == (0, "") and "--explain=medusa" in out
    assert f"config.mode`` is {', '.join(dispatch.MODES[:-1])} or {dispatch.MODES[-1]}." in out


def test_a_rule_names_the_siblings_whose_default_it_is(capsys):
    for rule, siblings in {"chain": "chain", "deterministic": "deterministic", "match": ""}.items():
        _, out, _ = call(capsys, f"--explain={rule}")
        line = f"default rule for siblings: {siblings}\n"
        assert (line in out) == bool(siblings), out
        assert siblings or "default rule for siblings" not in out


def test_every_key_has_help():
    """Of every group of a configuration, also of those that a method chooses."""
    for keys in (settings.Settings, training.Training):
        for each in declare.keys_of(keys):
            inner = declare.keys_of(each.facts.group) if each.facts.group else ()
            assert each.facts.help or inner, each.name
            assert all(key.facts.help for key in inner), each.name


def test_released_heads():
    """Each has the name of a repository, and belongs to a drafter that reads files."""
    found = drafters.released("Qwen3-8B")
    assert found == {
        "block_head": "z-lab/Qwen3-8B-DFlash-b16",
        "eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3",
        "pard": "amd/PARD-Qwen3-0.6B",
    }
    assert drafters.released("no such target") == {}
    for name in drafters.names():
        module = drafters.load(name)
        for target, head in getattr(module, "RELEASED", {}).items():
            assert "/" not in target and len(head.split("/")) == 2, (name, target)
            assert "model" in registry.keys_of(module), name
