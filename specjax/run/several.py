"""One run in several processes: the flags that connect them, and who prints.

Modes generate and train; the mesh of the configuration has the devices of all processes.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence

from absl import flags

from specjax import sharding
from specjax.config import Config
from specjax.errors import UserError
from specjax.run import interrupts
from specjax.sharding import watch

FLAGS = ("distributed", "coordinator", "processes", "process")
# What an exchange of data says when the other side has ended.
_ENDED = ("Gloo", "Connection closed", "coordination service", "NCCL", "heartbeat")


def define(values: flags.FlagValues) -> None:
    """Adds the flags."""
    found = "connect with the other processes, found by JAX: SLURM, Open MPI, TPU pods"
    number = "the number of this process, from 0"
    flags.DEFINE_bool("distributed", False, found, flag_values=values)
    flags.DEFINE_string("coordinator", "", "host:port of process 0", flag_values=values)
    flags.DEFINE_integer("processes", 0, "how many processes there are", flag_values=values)
    flags.DEFINE_integer("process", -1, number, flag_values=values)


@contextlib.contextmanager
def connected(argv: Sequence[str], config: Config) -> Iterator[None]:
    """Connects the processes that the flags name, and lets only process 0 print.

    Raises UserError for flags that do not fit, processes that cannot be reached or have another
    configuration, and if another process ends.
    """
    values = flags.FlagValues()
    define(values)
    values(_own(argv))
    if not (values.distributed or values.coordinator or values.processes or values.process != -1):
        yield
        return
    _check_mode(config)
    if values.distributed and values.coordinator:
        raise UserError("--distributed finds the coordinator; give one of the two")
    sharding.start_processes(values.coordinator, values.processes, values.process)
    interrupts.install_again()
    quiet = contextlib.nullcontext()
    if not sharding.is_first():
        quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, _ending():
        sharding.check_same("the configuration", json.loads(config.to_json_best_effort()))
        yield


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Tells the others how this process ends."""
    try:
        yield
    except UserError:
        watch.fail(2)
        raise
    except (RuntimeError, ValueError) as error:
        watch.fail(2)
        if not any(word in str(error) for word in _ENDED):
            raise
        raise UserError(
            "another process has ended before its work was done; the same commands resume the run"
        ) from None
    except KeyboardInterrupt as error:
        watch.fail(interrupts.status_of(error))
        raise
    except BaseException:
        watch.fail(1)
        raise
    watch.finish()


def _check_mode(config: Config) -> None:
    if config.get("mode") not in ("generate", "train"):
        raise UserError(
            f"mode {config.get('mode')} runs in one process; leave out --{', --'.join(FLAGS)}"
        )
    if config.get("mode") == "generate" and not config.get("mesh"):
        raise UserError(
            "several processes decode with a mesh of all their devices; give config.mesh, "
            "such as data:-1"
        )


def _is_flag(argument: str) -> bool:
    return argument.lstrip("-").partition("=")[0].removeprefix("no") in FLAGS


def _own(argv: Sequence[str]) -> list[str]:
    """The program's name and the flags of this module with their values."""
    chosen, values = [argv[0]], iter(argv[1:])
    for this in values:
        if this.startswith("-") and _is_flag(this):
            chosen.append(this)
            name = this.lstrip("-")
            if "=" not in name and name.removeprefix("no") != "distributed":
                chosen += [next(values, "")]
    return chosen
