"""The questions on which experiments/trained_drafters trains and measures a chat model.

    PYTHONPATH=. python experiments/trained_drafters/questions.py --out=questions \\
        --gsm8k=train.jsonl --mbpp=mbpp.jsonl --dialogues=dialogues_001.json \\
        --stories=tinystories.txt --spec-bench=question.jsonl

Reads public files as they are published (also .xz): GSM8K's training set, MBPP, dialogues of
Schema-Guided Dialogue, a text of TinyStories, and the questions of Spec-Bench. Writes files in
Spec-Bench's format: ``gsm8k_train.jsonl``, ``mbpp_train.jsonl`` (tasks from 511 on, which are not
in MBPP's test set), ``sgd.jsonl`` (the first turn of the user), ``stories.jsonl`` (the first
sentences of paragraphs, with a request to go on), and ``bench.jsonl``, the first short question of
each category of Spec-Bench. No file of training questions has a question of the bench:
Spec-Bench's mathematics is from GSM8K's test set. The selection is the same in every run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from specjax.files import write_text

REQUESTS = (
    "Continue this story: ",
    "Tell me a story. It starts with: ",
    "Write a short story that begins like this: ",
)
SHORT = 200  # characters of a question of the bench
Question = tuple[int, str, str]  # id, category, text


def read(path: str) -> str:
    """The text of a file, which may be compressed."""
    with lzma.open(path, "rt") if path.endswith(".xz") else open(path) as file:
        return file.read()


def records(path: str) -> list[dict]:
    """The objects of a .json list or of a .jsonl file."""
    text = read(path)
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def mathematics(path: str, shuffle: random.Random, limit: int) -> list[Question]:
    """Problems of GSM8K."""
    rows = list(enumerate(row["question"] for row in records(path)))
    shuffle.shuffle(rows)
    return [(i, "math", text) for i, text in rows[:limit]]


def programs(path: str) -> list[Question]:
    """Tasks of MBPP that are not in its test set (11 to 510) or its prompts (1 to 10)."""
    rows = [(row["task_id"], "code", row["text"]) for row in records(path)]
    return [row for row in rows if row[0] > 510]


def dialogues(paths: str, shuffle: random.Random, limit: int) -> list[Question]:
    """What a user says first."""
    first = [row["turns"][0] for path in paths.split(",") for row in records(path)]
    texts = [turn["utterance"] if isinstance(turn, dict) else turn[1] for turn in first]
    rows = list(enumerate(texts))
    shuffle.shuffle(rows)
    return [(i, "dialogue", text) for i, text in rows[:limit]]


def stories(path: str, shuffle: random.Random, limit: int) -> list[Question]:
    """Requests for a story that begins with a sentence."""
    found = (re.match(r"[^.!?\"]{20,150}\.", line.strip()) for line in read(path).splitlines())
    sentences = sorted({match.group() for match in found if match})
    shuffle.shuffle(sentences)
    asked = [shuffle.choice(REQUESTS) + sentence for sentence in sentences[:limit]]
    return [(i, "story", text) for i, text in enumerate(asked)]


def benchmark(path: str) -> list[Question]:
    """The first short question of each category of Spec-Bench, without its second turn."""
    by_category = {}
    for row in records(path):
        if len(row["turns"][0]) <= SHORT:
            by_category.setdefault(row["category"], row)
    return [(row["question_id"], name, row["turns"][0]) for name, row in by_category.items()]


def write(path: Path, questions: Iterable[Question]) -> None:
    """A file in Spec-Bench's format."""
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": [text]}) + "\n"
        for i, category, text in questions
    ]
    write_text(path, "".join(lines))
    print(f"{path}: {len(lines)} questions")


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("gsm8k", "mbpp", "dialogues", "stories", "spec-bench"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shuffle = random.Random(0)
    write(args.out / "gsm8k_train.jsonl", mathematics(args.gsm8k, shuffle, 2500))
    write(args.out / "mbpp_train.jsonl", programs(args.mbpp))
    write(args.out / "sgd.jsonl", dialogues(args.dialogues, shuffle, 1500))
    write(args.out / "stories.jsonl", stories(args.stories, shuffle, 1500))
    write(args.out / "bench.jsonl", benchmark(args.spec_bench))


if __name__ == "__main__":
    main(sys.argv[1:])
