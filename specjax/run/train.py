"""Mode train: runs a training recipe, or builds text, datastores and tables."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from specjax.config import Config
from specjax.report import terminal


def train(config: Config, workdir: Path) -> None:
    """Runs the recipe ``config.objective`` into ``workdir``; resumes it if it was interrupted."""
    # Imported here because TFDS and Orbax take seconds to import.
    from specjax.train import recipes

    summary = recipes.run(config, workdir)
    lines = [
        f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}"
        for key, value in summary.items()
    ]
    terminal.console().print(Text("\n".join([f"{workdir}", *lines]), "dim"))
