"""The questions on which experiments/trained_drafters trains and measures a chat model.

    PYTHONPATH=. python experiments/trained_drafters/questions.py --out=questions \\
        --gsm8k=train.jsonl --mbpp=mbpp.jsonl --dialogues=dialogues_001.json \\
        --stories=tinystories.txt --books=books.txt --spec-bench=question.jsonl

Reads public files as they are published (also .xz): GSM8K's training set, MBPP, dialogues of
Schema-Guided Dialogue (or turns as pairs of speaker and text), a text of TinyStories, books (each
begins with "# Title:" and "## Author:"), and the questions of Spec-Bench. Writes files in
Spec-Bench's format: ``gsm8k_train.jsonl``, ``mbpp_train.jsonl`` (tasks from 511 on, which are not
in MBPP's test set), ``sgd.jsonl`` (the first turn of the user), ``stories.jsonl`` (the first
sentences of paragraphs, with a request to go on), and ``bench.jsonl``, the first short question of
each category of Spec-Bench. Of the other tasks no training set is read: their questions are
templates, filled with passages, names and nouns of the books and with dialogues
(``summary.jsonl``, ``passages.jsonl``, ``translation.jsonl``, ``knowledge.jsonl``,
``writing.jsonl``). ``train.jsonl`` has all of them, mixed. No file of training
questions has a question of the bench: Spec-Bench's mathematics is from GSM8K's test set. The
selection is the same in every run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from specjax.files import write_text

REQUESTS = (
    "Continue this story: ",
    "Tell me a story. It starts with: ",
    "Write a short story that begins like this: ",
)
SUMMARIES = ("Summarize: ", "Give a short summary of this text: ", "What is this text about? ")
LANGUAGES = ("German", "French", "Spanish", "Italian", "simple modern English")
TRANSLATIONS = ("Translate English to {language}: ", "How do you say this in {language}? ")
ABOUT_PASSAGES = (
    "Who is {name}?",
    "What does the text say about {name}?",
    "What happens to {name}?",
    "Where is {name}?",
    "Why is the {noun} mentioned?",
)
KNOWLEDGE = (
    "Who wrote {title}?",
    "When did {author} live?",
    "What is {title} about?",
    "What is a {noun}?",
    "Where does the word {noun} come from?",
    "What is a {noun} used for?",
    "Who was {author}?",
    "What is the difference between a {noun} and a {other}?",
    "How many kinds of {noun} are there?",
    "Who invented the {noun}?",
)
WRITING = (
    "Write a short essay about the {noun}.",
    "Explain to a child what a {noun} is and why it matters.",
    "Write an email to {name} about the {noun}. Be polite and brief.",
    "Write a poem about a {noun} and a {other}.",
    "Give five tips for somebody who wants to buy a {noun}.",
    "Pretend to be {author}. Speak like {author}. Why do you care about the {noun}?",
    "Compare a {noun} with a {other}. Use a table.",
    "Write a Python function that counts how often the word {noun} occurs in a file.",
    "Describe the history of the {noun} in a few paragraphs.",
    "You are a guide who shows {name} the {noun}. What do you say?",
    "List all people and places in this text as JSON: {passage}",
    "If every {noun} costs 3 dollars and {name} buys 14, how much change is left of 50 dollars?",
)
# Words after "the" that name no thing.
NO_NOUNS = (
    "same other others first second third last next whole most more very latter former two three "
    "four great little least best only old young good present truth fact which where when that "
    "rest then this such poor long large small high full right left dead black white part kind name"
)
SHORT = 200  # characters of a question of the bench
Question = tuple[int, str, str]  # id, category, text


class Book(NamedTuple):
    """A book in paragraphs."""

    title: str
    author: str
    paragraphs: list[str]

    def passage(self, shuffle: random.Random, least: int) -> str:
        """Paragraphs that follow each other, of at least so many characters."""
        first, text = shuffle.randrange(len(self.paragraphs)), ""
        while len(text) < least:
            text = f"{text} {self.paragraphs[first % len(self.paragraphs)]}".strip()
            first += 1
        return text[: text.find(".", least) + 1] or text[:least]


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


def books(path: str) -> list[Book]:
    """The books of a file that have a title, an author and a few paragraphs."""
    found = []
    for text in re.split(r"^# Title: ", read(path), flags=re.MULTILINE)[1:]:
        title, _, rest = text.partition("\n")
        author = re.search(r"^## Author: (.+)$", rest, re.MULTILINE)
        lines = [line.strip() for line in rest.splitlines() if not line.startswith("#")]
        paragraphs = [line for line in lines if len(line) >= 80]
        if author and len(paragraphs) >= 50:
            found.append(Book(title.strip(), author.group(1).strip(), paragraphs))
    return found


def nouns(shelf: Iterable[Book], most: int) -> list[str]:
    """The most frequent words after "the" that may be nouns."""
    counts: Counter[str] = Counter()
    for book in shelf:
        counts.update(re.findall(r"\bthe ([a-z]{4,12})\b", " ".join(book.paragraphs)))
    kept = (word for word, _ in counts.most_common() if word not in NO_NOUNS.split())
    return [word for word in kept if not re.search(r"(ed|ing|est|ly|s|er)$", word)][:most]


def name_in(text: str, shuffle: random.Random) -> str:
    """A word with a capital letter inside a sentence; a common name if there is none."""
    found = re.findall(r"(?<=[a-z,;] )[A-Z][a-z]{3,}\b", text)
    return shuffle.choice(found or ["Thomas"])


def filled(
    patterns: tuple[str, ...], shelf: list[Book], words: list[str], shuffle: random.Random
) -> str:
    """A pattern of questions with names and nouns of a book."""
    book = shuffle.choice(shelf)
    passage = book.passage(shuffle, 400)
    noun, other = shuffle.sample(words, 2)
    names = {"title": book.title, "author": book.author, "name": name_in(passage, shuffle)}
    pattern = shuffle.choice(patterns)
    return pattern.format(passage=passage, noun=noun, other=other, **names)


def conversation(turns: list) -> str:
    """The turns of a dialogue as a text."""
    pairs = [(t["speaker"], t["utterance"]) if isinstance(t, dict) else t for t in turns]
    names = {"U": "User", "S": "Assistant"}
    return "\n".join(f"{names.get(speaker[:1], speaker)}: {text}" for speaker, text in pairs)


def templates(
    shelf: list[Book], talks: list[str], shuffle: random.Random, limit: int
) -> dict[str, list[Question]]:
    """Questions of the tasks of which no training set is read, by the name of their file."""
    words = nouns(shelf, 800)
    made: dict[str, list[Question]] = {}

    def add(name: str, texts: Iterable[str]) -> None:
        made[name] = [(i, name, text) for i, text in enumerate(texts)]

    def passage(least: int) -> str:
        """Of a book, and one of five times a dialogue."""
        if shuffle.random() < 0.2:
            return shuffle.choice(talks)[: 2 * least]
        return shuffle.choice(shelf).passage(shuffle, least)

    def about_passages() -> str:
        text = "\n".join(passage(shuffle.randint(300, 500)) for _ in range(3))
        names = {"name": name_in(text, shuffle), "noun": shuffle.choice(words)}
        return f"{text}\n{shuffle.choice(ABOUT_PASSAGES).format(**names)}"

    def translation() -> str:
        pattern = shuffle.choice(TRANSLATIONS).format(language=shuffle.choice(LANGUAGES))
        return pattern + shuffle.choice(shelf).passage(shuffle, shuffle.randint(40, 160))

    def summary() -> str:
        return shuffle.choice(SUMMARIES) + passage(shuffle.randint(600, 1600))

    own = shelf, words, shuffle
    add("summary", (summary() for _ in range(limit)))
    add("passages", (about_passages() for _ in range(limit)))
    add("translation", (translation() for _ in range(limit)))
    add("knowledge", (filled(KNOWLEDGE, *own) for _ in range(limit)))
    add("writing", (filled(WRITING, *own) for _ in range(limit)))
    return made


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
    parser.add_argument("--books", help="without them there are no questions of templates")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shuffle = random.Random(0)
    files = {
        "gsm8k_train": mathematics(args.gsm8k, shuffle, 2500),
        "mbpp_train": programs(args.mbpp),
        "sgd": dialogues(args.dialogues, shuffle, 1500),
        "stories": stories(args.stories, shuffle, 1500),
    }
    if args.books:
        paths = args.dialogues.split(",")
        talks = [conversation(row["turns"]) for path in paths for row in records(path)]
        files |= templates(books(args.books), talks, shuffle, 1400)
    mixed = [each[1:] for questions in files.values() for each in questions]
    shuffle.shuffle(mixed)
    numbered = [(i, *each) for i, each in enumerate(mixed)]
    for name, questions in [*files.items(), ("train", numbered)]:
        write(args.out / f"{name}.jsonl", questions)
    write(args.out / "bench.jsonl", benchmark(args.spec_bench))


if __name__ == "__main__":
    main(sys.argv[1:])
