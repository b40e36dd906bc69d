"""The table of this study in the documentation."""

from __future__ import annotations

import numpy as np

from experiments.tables import number, source, table


def tables(results: dict) -> str:
    """One line per arm: reward and tau of the first and of the last steps, over all seeds."""
    settings, lines = results["settings"], []
    last = max(settings["steps"] // 4, 1)
    for arm in dict.fromkeys(row["arm"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["arm"] == arm]
        rewards, taus = (np.asarray([row[key] for row in rows]) for key in ("reward", "tau"))
        shares = [row["rollout_share"] for row in rows if row["rollout_share"] is not None]
        ends = rewards[:, -last:].mean(1)
        error = float(ends.std(ddof=1)) / len(ends) ** 0.5 if len(ends) > 1 else None
        lines.append(
            (
                arm,
                f"{rewards[:, 0].mean():.3f}",
                f"{ends.mean():.3f} +- {number(error, '.3f')}",
                f"{taus[:, 0].mean():.2f}",
                f"{taus[:, -last:].mean():.2f}",
                number(float(np.mean(shares)) if shares else None, ".0%"),
            )
        )
    heads = ("rollouts", "reward, first step", f"last {last} steps", "tau, first step")
    heads += (f"last {last} steps", "rollouts' share of a step")
    where = f"- {settings['seeds']} seeds; {settings['steps']} steps of 4 beginnings x "
    where += f"{settings['samples']} texts of at most {settings['new']} tokens; Adam, "
    where += f"{settings['rate']:g}; standard errors over seeds"
    return "\n".join([source(results), where, "", table(heads, lines)])
