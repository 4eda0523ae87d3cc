"""The page of a run of the oracle: every verdict beside what the loader did."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from dataclasses import dataclass

from oracle_trials.bench import Bench


@dataclass(frozen=True)
class Cell:
    """One verdict beside the truth. `files` maps a path to (predicted loads, really loads, what happened)."""

    tree: str
    dist: str
    files: dict[str, tuple[bool, bool, str]]
    reasons: dict[str, str]

    @property
    def predicted(self) -> bool:
        """Say whether the oracle lets every file load."""
        return all(row[0] for row in self.files.values())

    @property
    def real(self) -> bool:
        """Say whether every file loaded."""
        return all(row[1] for row in self.files.values())

    @property
    def wrong(self) -> list[str]:
        """Name the files on which the two differ."""
        return [path for path, row in self.files.items() if row[0] != row[1]]


def report(cells: list[Cell], text: list[str], bench: Bench) -> str:
    """Return docs/oracle.md."""
    cells = [cell for cell in cells if cell.files]
    wheels = json.loads((bench.root / "wheels.json").read_text())
    too_kind = [c for c in cells if any(c.files[p][0] and not c.files[p][1] for p in c.files)]
    too_strict = [c for c in cells if any(not c.files[p][0] and c.files[p][1] for p in c.files)]
    files = sum(len(c.files) for c in cells)
    wrong = sum(len(c.wrong) for c in cells)
    word = {True: "loads", False: "breaks"}
    rows = []
    for c in cells:
        first = next(iter(c.reasons), None)
        why = f"`{first}`: `{c.reasons[first]}`" if first else ""
        ok = sum(row[1] for row in c.files.values())
        agree = len(c.files) - len(c.wrong)
        rows.append(
            f"| {c.tree} | {c.dist} | {word[c.predicted]} | {word[c.real]} | {ok}/{len(c.files)} | {agree}/{len(c.files)} | {why} |"
        )
    odd = [f"* {c.tree}, {c.dist}, `{p}`: said {word[c.files[p][0]]}, {c.files[p][2]}" for c in cells for p in c.wrong]
    died = sorted({f"* {c.tree}, {c.dist}, `{p}`: {row[2]}" for c in cells for p, row in c.files.items() if row[2].startswith("signal")})
    gcc = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    python = subprocess.run([bench.python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [
        "# The oracle beside the loader",
        "",
        f"Run on {date}: {python}, glibc {platform.libc_ver()[1]}, gcc {gcc}, Linux {platform.machine()}, no GPU.",
        "",
        "What is compared: for every cell the distribution is moved, on paper, into a tree with that torch",
        "(`abi.compose` on facts gathered from each separately), and the closure says for each shared object whether",
        "it loads. Then the tree is composed on disk and each file is loaded: `import torch`, then `dlopen` with",
        "RTLD_NOW, one process a file, and a stub `libcuda.so.1` that exports every `cu*` function in use. The three",
        "trees of the accident are read from disk as they are. A cell loads when all of its files do; files for other",
        "interpreters and executables are left out. A file that dies in a constructor was bound by then;",
        "these are listed. Here the closure is judged by itself; `diff` counts only what the source does not miss as well",
        "(MPI and InfiniBand plugins of `nvidia`, modules that need another one loaded first).",
        "",
        f"**{len(cells)} cells, {files} files: {len(too_kind)} cells where the oracle says that a file loads and it does not,",
        f"{len(too_strict)} cells the other way; {files - wrong} of {files} files agree.**",
        "",
        "| tree | distribution | oracle | dlopen | files that load | agree | the oracle's first reason |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "## Disagreements",
        "",
        *(odd or ["None."]),
        "",
        "## Bound, then died in a constructor",
        "",
        *(died or ["None."]),
        "",
        "## The accident, asked beforehand",
        "",
        "ct129 has torch 2.11.0+cu130, sglang-kernel 0.4.2.post2 and sglang 0.5.11; ct200 has torch 2.9.1+cu128,",
        "sgl-kernel 0.3.21 and sglang 0.5.9. The cells `cu12 tree + smallest set` above are what loads after the push.",
        "`python scripts/oracle_story.py` replays the same through the command line, push included, on venvs of these wheels, and",
        "`tests/abi/test_story.py` with tiny shared objects wherever the tests run.",
        *text,
        "",
        "## Repeat it",
        "",
        "`make oracle` (or `python scripts/oracle.py --root DIR --python python3.12 --report FILE`): 20 GB in DIR,",
        "which is deleted afterwards unless `--keep` is given. It needs gcc, unzip, pip and a Python 3.12. Versions:",
        "",
        *sorted(f"* `{name}`" for name in set(wheels.values())),
        "",
    ]
    return "\n".join(parts)
