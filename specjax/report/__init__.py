"""Shows results and traces: tables in the terminal, plots, and an HTML report."""
