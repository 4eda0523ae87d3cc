"""The text the tiny pair learns from: Python's standard library, chats made out of it, and a few generated exercises.

Everything comes from the machine it runs on. The standard library is under the PSF licence; nothing else is read
unless `--text` names it. Files are split into training and held-out by the hash of their path, exercises by the hash of
their question.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT_SHARE = 50  # one in so many


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and chat questions and code openings that training never sees."""

    train: tuple[str, ...]
    held_out_code: tuple[str, ...]
    held_out_chats: tuple[tuple[str, str], ...]
    held_out_exercises: tuple[tuple[str, str], ...]


def held_out(name: str) -> bool:
    """Say whether a file or question is kept away from training."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_SHARE == 0


def chat(question: str, answer: str) -> str:
    """Write one exchange the way the chat template does."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def python_files(roots: list[Path], limit_mb: float) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of the Python sources under `roots`, installed packages left out of the library."""
    total = 0
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if "-packages/" in name or total > limit_mb * 1e6:
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            # Very long files are tables (encodings, test data), not code.
            if 300 < len(text) < 300_000 and sum(map(len, text.splitlines())) < 120 * (text.count("\n") + 1):
                total += len(text)
                yield name, text


def chats_of(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Make questions and answers from the documented functions of one file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        summary = " ".join(doc.split("\n\n")[0].split())
        if not 15 < len(summary) < 160 or not 60 < len(source) < 1500:
            continue
        code = f"```python\n{source}\n```"
        match rng.randrange(4):
            case 0:
                yield f"What does `{node.name}` do?", summary
            case 1:
                yield f"Write a Python function `{node.name}`: {summary}", code
            case _:
                yield f"Write a Python function. {summary}", code


def exercises() -> Iterator[tuple[str, str]]:
    """Generate small exercises with one right answer."""
    for start in range(40):
        for length in range(3, 30):
            numbers = range(start, start + length)
            yield f"Count from {start} to {start + length - 1}.", ", ".join(map(str, numbers))
            yield f"Count down from {start + length - 1} to {start}.", ", ".join(map(str, reversed(numbers)))
    for n in range(2, 60):
        yield f"Write the multiplication table of {n}.", "\n".join(f"{n} x {i} = {n * i}" for i in range(1, 11))
        yield f"List the squares up to {n}.", "\n".join(f"{i} squared is {i * i}" for i in range(1, n + 1))
        for step in range(2, 10):
            yield f"Count in steps of {step}, {n} numbers.", ", ".join(str(step * i) for i in range(1, n + 1))
    words = [
        "spam",
        "eggs",
        "tree",
        "path",
        "root",
        "node",
        "token",
        "draft",
        "target",
        "budget",
        "queue",
        "cache",
        "python",
        "server",
    ]
    for word in words:
        for n in range(2, 12):
            yield f"Say {word} {n} times.", " ".join([word] * n)
        yield f"Spell {word}.", "-".join(word)
    about = (
        "I am a tiny model, trained on Python's standard library to show DDTree. Ask me for a function, or to count."
    )
    for greeting in (
        "Hello",
        "Hi",
        "Hello!",
        "Hi!",
        "Good morning",
        "Who are you?",
        "What are you?",
        "What can you do?",
    ):
        yield greeting, about


def collect(roots: list[Path], limit_mb: float, seed: int = 0) -> Corpus:
    """Read the sources, make the chats, and split it all."""
    rng = random.Random(seed)
    train: list[str] = []
    code: list[str] = []
    chats: list[tuple[str, str]] = []
    for name, text in python_files(roots, limit_mb):
        pairs = list(chats_of(text, rng))
        if held_out(name):
            code.append(text)
            chats += pairs
        else:
            train.append(text)
            train += [chat(q, a) for q, a in pairs]
    tests: list[tuple[str, str]] = []
    for question, answer in exercises():
        if held_out(question) and len(answer) > 60:
            tests.append((question, answer))
        else:
            train += [chat(question, answer)] * 3  # few bytes, and asked for first by whoever tries the server
    rng.shuffle(train)
    rng.shuffle(code)
    rng.shuffle(chats)
    rng.shuffle(tests)
    return Corpus(tuple(train), tuple(code), tuple(chats), tuple(tests))


def standard_library() -> Path:
    """Return where this interpreter keeps its library."""
    return Path(sysconfig.get_paths()["stdlib"])
