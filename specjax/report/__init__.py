"""Shows results and traces: tables in the terminal and elsewhere, plots, and an HTML report."""

from specjax.report.tables import to_frame

__all__ = ["to_frame"]
