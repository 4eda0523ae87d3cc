"""Watch a venv's site-packages in a process of its own: every look must see one whole generation, and never nothing.

`python observer.py SITE STOP_FILE EXPECTED.json RESULT.json`: EXPECTED is a list of `{path: sha256}`; RESULT counts the looks.
"""

import hashlib
import json
import os
import sys


def look(site: str, names: list[str]) -> dict[str, str]:
    """Resolve the live link once, as a process that starts does, and read through that directory."""
    root = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen = {}
        for name in names:
            fd = os.open(name, os.O_RDONLY, dir_fd=root)
            with os.fdopen(fd, "rb") as file:
                seen[name] = hashlib.sha256(file.read()).hexdigest()
        return seen
    finally:
        os.close(root)


def main() -> None:
    site, stop, expected_file, result_file = sys.argv[1:]
    with open(expected_file) as file:
        expected = json.load(file)
    # The same twenty names in every generation, so that a look needs no directory listing.
    names = sorted(set.intersection(*(set(tree) for tree in expected)))[:20]
    wanted = [{name: tree[name] for name in names} for tree in expected]
    counts = [0] * len(wanted)
    wrong: list[str] = []

    def epoch() -> int:
        """Return the number that the test moves while it undoes what it did, which no user would see (odd: it is at it)."""
        try:
            with open(stop + ".epoch") as file:
                return int(file.read() or "1")
        except FileNotFoundError:
            return 0

    while not os.path.exists(stop):
        before = epoch()
        try:
            os.stat(os.path.join(site, names[0]))
            seen = look(site, names)
        except OSError as error:
            if before == epoch() and before % 2 == 0:
                wrong.append(f"missing: {error}")
            continue
        if seen in wanted:
            counts[wanted.index(seen)] += 1
        else:
            wrong.append(f"a mixture: {[n for n in names if seen[n] != wanted[0][n]]}")
    with open(result_file, "w") as file:
        json.dump({"files": len(names), "looks": counts, "wrong": wrong[:5], "wrong_count": len(wrong)}, file)


if __name__ == "__main__":
    main()
