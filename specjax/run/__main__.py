"""Runs the command line: python -m specjax.run --config=configs/<name>.py ..."""

from specjax.run.command_line import command

if __name__ == "__main__":
    command()
