"""Runs a configuration.

    python -m specjax.run --config=configs/<name>.py [--workdir=DIR] [--config.key=value ...]

``config.mode`` is train, generate, bench or replay. ``config.prepare`` may name configurations of
``config.stages`` that run first, in that order, each into ``<workdir>/<its name>``; finished stages
are skipped. "{workdir}" in a text is replaced by the workdir. A user's mistake gives one line on
stderr and exit status 2, and nothing is written.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from absl import flags, logging
from ml_collections import config_flags

from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run.bench import NotLossless
from specjax.run.dispatch import run


def parse(argv: list[str]) -> tuple[Config, Path]:
    """Command line -> (configuration, workdir). Raises UserError for any mistake in it."""
    values = flags.FlagValues()  # its own flags: nothing is registered globally
    config_flags.DEFINE_config_file(
        "config", None, "configs/<name>.py", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string(
        "workdir", "", "where results go; default runs/<name of the file>", flag_values=values
    )
    if "--help" in argv or "-h" in argv:
        terminal.console().print(__doc__)
        sys.exit(0)
    file = Path(_config_file(argv)).expanduser()
    # A configuration may import another ("from configs import bench"), from any working directory.
    sys.path.insert(0, str(file.resolve().parent.parent))
    try:
        rest = values(argv)
        config = values.config
        if config is not None:
            config.to_dict()  # a file that cannot be loaded raises only when the value is used
    except flags.Error as error:
        raise UserError(str(error).partition(": Traceback")[0]) from None
    except OSError:
        raise UserError(
            f"there is no configuration file {file}; the repository's are in configs/"
        ) from None
    except Exception as error:  # a user's program; ml_collections raises many kinds for overrides
        raise _bad_configuration(file, error) from None
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; settings are given as --config.key=value"
        )
    if config is None:
        raise UserError("no configuration; give --config=configs/<name>.py")
    workdir = values.workdir or Path("runs") / file.name.partition(".py")[0]
    return config, Path(workdir).expanduser()


def _bad_configuration(file: Path, error: Exception) -> UserError:
    text = str(error)
    key = re.fullmatch(r"\W*(\w+)\W*", text.partition("Did you")[0].replace("\\n", "\n"))
    if key and isinstance(error, AttributeError | KeyError):
        hint = re.search(r"Did you mean \W*(\w+)", text)
        meant = f"did you mean {hint[1]}?" if hint else "the configuration file lists the keys"
        return UserError(f"unknown configuration key {key[1]!r}; {meant}")
    return UserError(f"configuration {file}: {type(error).__name__}: {error}")


def _config_file(argv: list[str]) -> str:
    """The configuration file that the command line names."""
    for this, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = this.lstrip("-").partition("=")
        if name == "config":
            return (value or following).partition(":")[0]
    return "?"


def main(argv: list[str]) -> int:
    """Entry point: returns the exit status."""
    logging.set_verbosity(logging.WARNING)  # JAX logs every accelerator that it does not find
    try:
        run(*parse(argv), shlex.join(["python", "-m", "specjax.run", *argv[1:]]))
    except UserError as error:
        return terminal.fail(str(error))
    except NotLossless as error:
        return terminal.fail(str(error), 1)
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        return terminal.fail(f"{error}: a path begins with ~ and the name of an unknown user")
    except KeyboardInterrupt:
        message = "interrupted; the same command resumes training runs and benches"
        return terminal.fail(message, 130)
    return 0
