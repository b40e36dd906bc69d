"""Runs the command line: python -m specjax.run --config=configs/<name>.py ..."""

import sys

from specjax.run.command_line import main

if __name__ == "__main__":
    sys.exit(main())
