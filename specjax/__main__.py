"""python -m specjax: what to do next."""

import sys

TEXT = """\
specjax: speculative decoding in JAX

  python -m specjax.run --list                  modes, drafters, rules, configurations
  python -m specjax.run --explain=medusa        a drafter, a rule or a controller, with its keys
  python -m specjax.run --config=quickstart     train a small pair, measure it, write a report
  python -m specjax.run --config=generate --config.target=DIR --config.prompt="Once upon a time"
  python -m specjax.run --config=bench --help   the keys of a configuration
  python -m specjax.report DIR                  make the report of a workdir again

After installation, "specjax" is short for "python -m specjax.run"."""


def main(arguments: list[str]) -> int:
    """Prints what to do. Returns 0; 2 if there are arguments, because they do nothing here."""
    if not arguments or set(arguments) <= {"-h", "--help"}:
        print(TEXT)
        return 0
    command = " ".join(arguments)
    print(f"specjax: give arguments to python -m specjax.run: {command}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
