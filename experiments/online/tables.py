"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import number, source, table


def tables(results: dict) -> str:
    """One table per temperature: alpha of each topic as it begins and as it ends, and the times."""
    settings, topics = results["settings"], results["topics"]
    size = settings["requests"]
    last = range(size - 2 * settings["window"], size)
    where = f"- {size} requests of each topic, {settings['new']} tokens each; chains of "
    where += f"{settings['gamma']}; AdamW at {settings['rate']:g}; first "
    where += f"{settings['window']} and last {len(last)} requests of a topic"
    texts = [source(results), where]
    for temperature in sorted({row["temperature"] for row in results["rows"]}):
        lines = []
        for row in results["rows"]:
            if row["temperature"] != temperature:
                continue
            line = [row["arm"]]
            for number_, _ in enumerate(topics):
                own = [w for w in row["windows"] if w["first"] // size == number_]
                end = [w["alpha"] for w in own if w["first"] % size in last]
                line.append(f"{own[0]['alpha']:.2f} to {sum(end) / len(end):.2f}")
            request, update = row["seconds_per_request"], row["seconds_per_update"]
            line += [f"{row['tau']:.2f}"]
            line += [number(each and 1e3 * each, ".0f") for each in (request, update)]
            updates = row["seconds_of_updates"]
            lines.append([*line, number(updates and updates / (row["seconds"] + updates), ".0%")])
        heads = ["draft model", *(f"alpha, {topic}" for topic in topics), "tau"]
        heads += ["ms per request", "ms per update", "time of updates"]
        texts += ["", f"**Temperature {temperature:g}**", "", table(heads, lines)]
    return "\n".join(texts)
