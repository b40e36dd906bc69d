"""The command line.

``main(argv)`` runs a command line in this process; ``run(config, workdir)`` runs a configuration.
``settings`` declares the keys and reads a configuration into one frozen object, ``build`` makes the
models and methods, and each mode has a file: ``train``, ``generate``, ``bench``, ``replay``.

``measure(target, methods, prompts, workdir=...)`` is a bench of objects in Python.
"""

from specjax.run.cells import NotLossless
from specjax.run.command_line import main, parse
from specjax.run.dispatch import run
from specjax.run.python import measure

__all__ = ["NotLossless", "main", "measure", "parse", "run"]
