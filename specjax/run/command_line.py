"""Runs a configuration.

    python -m specjax.run --config=configs/<name>.py [--workdir=DIR] [--config.key=value ...]
    python -m specjax.run --list             modes, drafters, rules and configurations
    python -m specjax.run --explain=medusa   a drafter, a rule or a controller, with its keys
    python -m specjax.run --config=bench --help   the keys of a configuration

``config.mode`` is train, generate, chat, bench, replay or online.
``--methods=suffix,prompt_lookup`` measures several drafters, and ``--methods=free`` all that need
no model, no file and no training. Several processes compute together with --coordinator=host:port
--processes=N --process=I, or with --distributed where JAX finds the others. ``config.prepare`` may
name configurations of ``config.stages`` that run first, in that order, each into
``<workdir>/<its name>``; finished stages are skipped, and those whose result the configuration does
not use. "{workdir}" in a text is replaced by the workdir. A user's mistake gives one line on stderr
and exit status 2, and nothing is written.
"""

from __future__ import annotations

import importlib.util
import io
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from rich.text import Text

from specjax import registry
from specjax.config import Config
from specjax.errors import UserError
from specjax.models import memory
from specjax.report import terminal
from specjax.run import catalog, overrides, process, workdirs
from specjax.run.bench import NotLossless
from specjax.run.dispatch import run


def split(argv: Sequence[str]) -> tuple[str | None, list[str], bool]:
    """The value of --config, the other arguments, and whether one is --help; reads --flagfile.

    The program's name is the first of the others. Raises UserError.
    """
    try:
        argv = flags.FlagValues().read_flags_from_files(list(argv), force_gnu=False)
    except flags.Error as error:
        raise UserError(f"{error}") from None
    config, others = _option(argv, "config")
    rest = [each for each in others if each not in ("--help", "-h", "-help")]
    return config, rest, len(rest) < len(others)


def parse(argv: list[str]) -> tuple[Config, Path]:
    """Command line -> (configuration, workdir). Raises UserError for any mistake in it."""
    config, workdir, _ = _parsed(argv)
    return config, Path(workdir).expanduser()


def _parsed(argv: list[str]) -> tuple[Config, str, flags.FlagValues]:
    """``parse``, and the flags."""
    named, arguments, wants_help = split(argv)
    if not named:
        settings = [each for each in arguments if not each.lstrip("-").startswith("config.")]
        _read_flags(settings, ConfigDict(), [])
        raise UserError(
            "no configuration; give --config=configs/<name>.py (--list shows the configurations, "
            "--help how to begin)"
        )
    name, _, argument = named.partition(":")
    file = find(name)
    config = _load(file, argument)
    settings = overrides.given(arguments)
    if (methods := _option(arguments, "methods")[0]) is not None:
        if catalog.FREE in methods.split(",") and config.get("mode") == "replay":
            raise UserError("--methods=free is for mode bench; name the drafters to replay with")
        overrides.choose_methods(config, catalog.expanded(methods), settings)
    overrides.add_own_keys(config, settings)
    if wants_help:
        terminal.console().print(catalog.keys_page(config, file))
        sys.exit(0)
    overrides.check(config, settings)
    values = _read_flags(arguments, config, settings)
    return config, values.workdir or f"runs/{file.stem}", values


def find(name: str) -> Path:
    """The file of a configuration: a path, or the name of one of the package's.

    Raises UserError if there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    # "quickstart", and "configs/quickstart.py" from any working directory.
    own = catalog.configs_dir() / f"{path.stem}.py"
    if path.parent in (Path("."), Path("configs")) and path.suffix in ("", ".py") and own.is_file():
        return own
    names = [each.stem for each in catalog.configs_dir().glob("*.py")]
    hint = registry.nearest(path.stem, names) or "; --list shows them"
    raise UserError(f"there is no configuration file {path}{hint}")


def _load(file: Path, argument: str) -> Config:
    """The result of ``get_config`` in the file, locked. Raises UserError."""
    # A configuration may import another ("from configs import bench"), from any working directory.
    sys.path.insert(0, str(file.resolve().parent.parent))
    spec = importlib.util.spec_from_file_location("config_config", file)
    if spec is None or spec.loader is None:
        raise UserError(f"configuration {file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass in the file needs its module
    try:
        spec.loader.exec_module(module)
        config = module.get_config(*([argument] if argument else []))
    except UserError:
        raise
    except Exception as error:  # a user's program
        raise UserError(f"configuration {file}: {type(error).__name__}: {error}") from None
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"configuration {file}: get_config returns {config!r:.60}; "
            "it must return an ml_collections.ConfigDict"
        )
    config.lock()
    return config


def _option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The last value of --name (None: not given), and the other arguments. Flags are not parsed."""
    found, rest, values = None, [], iter(arguments)
    for this in values:
        flag, equals, value = this.lstrip("-").partition("=")
        if this.startswith("-") and flag == name:
            found = value if equals else next(values, "")
        else:
            rest.append(this)
    return found, rest


def _read_flags(
    arguments: list[str], config: Config, settings: list[overrides.Override]
) -> flags.FlagValues:
    """Reads the flags and puts the settings into the configuration. Raises UserError."""
    values = flags.FlagValues()  # its own flags: nothing is registered globally
    where = "where results go; default runs/<name of the file>"
    flags.DEFINE_string("workdir", "", where, flag_values=values)
    flags.DEFINE_string("methods", "", "drafters to measure, a,b,c or free", flag_values=values)
    process.define_flags(values)
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
        rest = values(arguments)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        _, found, key = overrides.near(config, config, name).partition("did you mean ")
        hint = f"; did you mean --config.{key.removeprefix('config.')}" if found else ""
        raise UserError(f"Unknown command line flag {name!r}{hint}") from None
    except flags.Error as error:
        message = str(error).partition(": Traceback")[0]
        raise UserError(overrides.type_error(config, settings, message) or message) from None
    except Exception as error:  # ml_collections raises many kinds for overrides
        message = f"{type(error).__name__}: {error}"
        raise UserError(overrides.type_error(config, settings, message) or message) from None
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; settings are given as --config.key=value"
        )
    return values


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    argv = sys.argv if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console without UTF-8 gets "?"
            stream.reconfigure(errors="replace")
    logging.set_verbosity(logging.WARNING)  # JAX logs every accelerator that it does not find
    try:
        if _shows(argv):
            return 0
        config, name, values = _parsed(argv)
        with process.connected(values, config), memory.errors(), workdirs.opened(name) as workdir:
            run(config, workdir, shlex.join(["python", "-m", "specjax.run", *argv[1:]]))
    except UserError as error:
        return terminal.fail(str(error))
    except NotLossless as error:
        return terminal.fail(str(error), 1)
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        return terminal.fail(f"{error}: a path begins with ~ and the name of an unknown user")
    except OSError as error:  # such as a full disk, where nothing else has said what is wrong
        where = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or error
        return terminal.fail(f"{where}{reason}; look after the disk, and run again")
    except KeyboardInterrupt as error:
        return terminal.fail(process.MESSAGE, process.status_of(error))
    return 0


def command() -> NoReturn:
    """The process of ``specjax`` and of ``python -m specjax.run``; ends it within two seconds of
    Ctrl-C or SIGTERM."""
    process.install()
    process.keep_programs()
    status = main()
    # A thread that waits for a disk which does not answer would keep the process.
    waiting = status and any(not each.daemon for each in threading.enumerate()[1:])
    if waiting or status in process.STATUS.values():
        process.leave(status)
    sys.exit(status)


def _shows(argv: Sequence[str]) -> bool:
    """Prints what --list, --explain, or --help without --config asks for; False: none of them."""
    config, arguments, wants_help = split(argv)
    if any(each in ("--list", "-list") for each in arguments):
        page = catalog.listing()
    elif (name := _option(arguments, "explain")[0]) is not None:
        page = catalog.explanation(name)
    elif wants_help and not config:
        page = Text(__doc__ or "")
    else:
        return False
    terminal.console().print(page)
    return True
