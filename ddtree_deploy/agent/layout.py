"""Where things lie in a venv: generations, the live link, and what each generation remembers of its files."""

from __future__ import annotations

import json
import os
import re

from ddtree_deploy.agent import durable, walk
from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    #: kind, mode, size, digest (a link's: its target), dev, ino, mtime_ns, ctime_ns (None: not known yet).
    Row = tuple[str, int, int, str, int, int, int, int | None]

_quote = json.encoder.encode_basestring_ascii
_GENERATION = re.compile(r"^(?:.*/)?\.ddtree/generations/(\d+)/site-packages/?$")


class Layout:
    """The paths of one venv. `site_relative` is `lib/python3.12/site-packages`."""

    def __init__(self, venv: str, site_relative: str) -> None:
        self.venv = venv
        self.site_relative = site_relative
        self.site = os.path.join(venv, site_relative)
        self.state = os.path.join(venv, ".ddtree")
        self.generations = os.path.join(self.state, "generations")
        self.incoming = os.path.join(self.state, "incoming")
        self.journal = os.path.join(self.state, "journal")
        self.decision = os.path.join(self.state, "decision")
        self.ledger = os.path.join(self.state, "ledger.jsonl")
        self.lock = os.path.join(self.state, "lock")

    def directory(self, number: int) -> str:
        return os.path.join(self.generations, str(number))

    def tree(self, number: int) -> str:
        return os.path.join(self.generations, str(number), "site-packages")

    def link_text(self, number: int) -> str:
        """Return the text of the live link for a generation: relative, so that the venv may be moved or mounted elsewhere."""
        up = "/".join([".."] * self.site_relative.count("/"))
        return "%s/.ddtree/generations/%d/site-packages" % (up, number)

    def live(self) -> int | None:
        """Return the number of the live generation, or None for an ordinary venv."""
        try:
            found = _GENERATION.match(os.readlink(self.site))
        except OSError:
            return None
        return int(found.group(1)) if found else None

    def numbers(self) -> list[int]:
        """Return the numbers of the complete generations, ascending (a partial one is named `N.partial`)."""
        try:
            names = os.listdir(self.generations)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdigit() and self.info(int(name)) is not None)

    def partials(self) -> list[str]:
        try:
            names = os.listdir(self.generations)
        except FileNotFoundError:
            return []
        out = [name for name in names if not name.isdigit()]
        # A numbered directory without its record is one whose making was cut off before the last step.
        out += [name for name in names if name.isdigit() and self.info(int(name)) is None]
        return sorted(os.path.join(self.generations, name) for name in out)

    def info(self, number: int) -> dict[str, Any] | None:
        return durable.read_json(os.path.join(self.directory(number), "generation.json"))

    def write_info(self, number: int, info: dict[str, Any]) -> None:
        durable.write_json(os.path.join(self.directory(number), "generation.json"), info)

    def disown(self, number: int) -> None:
        """Take a generation's record away: without it, it is rubbish that the next push clears."""
        remove(os.path.join(self.directory(number), "generation.json"))

    def next_number(self) -> int:
        try:
            names = os.listdir(self.generations)
        except FileNotFoundError:
            names = []
        used = [int(name.split(".")[0]) for name in names if name.split(".")[0].isdigit()]
        used += [entry["generation"] for entry in self.ledger_entries() if isinstance(entry.get("generation"), int)]
        return max([0, *used]) + 1

    def ledger_entries(self) -> list[dict[str, Any]]:
        """Return the ledger's lines, oldest first; a torn last line is left out."""
        out = []
        try:
            with open(self.ledger, encoding="utf-8", errors="replace") as file:
                for line in file:
                    try:
                        entry = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(entry, dict):
                        out.append(entry)
        except FileNotFoundError:
            pass
        return out

    def previous_of(self, number: int) -> int | None:
        """Return the generation that was live before `number`, if it is still there; else the nearest older one, or None."""
        numbers = self.numbers()
        for entry in reversed(self.ledger_entries()):
            if entry.get("event") == "confirmed" and entry.get("generation") == number:
                previous: int | None = entry.get("previous")
                if previous in numbers:
                    return previous
                break
        older = [n for n in numbers if n < number]
        return older[-1] if older else None


def remove(path: str) -> None:
    """Remove a tree of ours, if it is there."""
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        import shutil  # slow to import, and most sessions remove nothing

        shutil.rmtree(path)


class Index:
    """What a generation's files are: `{path: (kind, mode, size, digest, dev, ino, mtime_ns, ctime_ns)}`.

    The stamp vouches for the digest as long as it equals the file's stat. On disk, the first line holds the seal of the walk
    that the rows would give, so that an untouched tree is known without reading the rows.
    """

    VERSION = 1

    def __init__(self, rows: dict[str, Row] | None = None) -> None:
        self.rows = rows or {}

    @classmethod
    def load(cls, path: str) -> Index | None:
        """Return the index in `path`, or None when there is none that this version reads."""
        try:
            with open(path, "rb") as file:
                if json.loads(file.readline()).get("version") != cls.VERSION:
                    return None
                return cls({row[0]: tuple(row[1:]) for row in json.loads(file.read())})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    @staticmethod
    def seal_of(path: str) -> str:
        """Return the seal in the first line of an index file, or an empty string."""
        try:
            with open(path, "rb") as file:
                seal: str = json.loads(file.readline()).get("seal", "")
                return seal
        except (OSError, ValueError, AttributeError, RecursionError):
            return ""

    @staticmethod
    def text(path: str) -> bytes:
        """Return an index file as it is, empty where there is none: a digest that is not in there is not in the index."""
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            return b""

    def save(self, path: str, seen: Sequence[walk.Entry] | None = None) -> None:
        """Write the index; with `seen`, a walk of these very files, its stamps stand for those of the rows."""
        entries = seen if seen is not None else [
            (key, row[0], row[1], row[2], row[4], row[5], row[6], row[7], row[3] if row[0] == "l" else "", 0)
            for key, row in sorted(self.rows.items())
        ]
        head = json.dumps({"version": self.VERSION, "seal": walk.seal(entries)})
        # JSON by hand: `dumps` takes twice as long, and every push waits for this.
        lines = [
            f'[{_quote(path)},"{kind}",{mode},{size},{_quote(self.rows[path][3])},{dev},{ino},{mtime},{ctime}]'
            for path, kind, mode, size, dev, ino, mtime, ctime, _target, _links in entries
        ]
        durable.write_file(path, ("%s\n[%s]\n" % (head, ",".join(lines))).encode())

    def digest(self, entry: walk.Entry) -> str | None:
        """Return the digest that the index vouches for, given an entry of `walk.walk`, or None."""
        row = self.rows.get(entry[0])
        if row is None or row[0] != "f" or row[4:] != (entry[4], entry[5], entry[6], entry[7]) or row[2] != entry[3]:
            return None
        return row[3]


def site_relative(venv: str) -> str:
    """Return the venv's site-packages relative to it; raise Failure when there is none or more than one."""
    base = os.path.join(venv, "lib")
    try:
        found = sorted(
            "lib/%s/site-packages" % name
            for name in os.listdir(base)
            if re.fullmatch(r"python3\.\d+t?", name) and os.path.lexists(os.path.join(base, name, "site-packages"))
        )
        if not found and os.path.isdir(os.path.join(venv, ".ddtree", "generations", "0", "site-packages")):
            # An adoption by two renames was cut between them (switch.mend_gap).
            found = sorted("lib/%s/site-packages" % name for name in os.listdir(base) if re.fullmatch(r"python3\.\d+t?", name))
    except OSError:
        found = []
    if len(found) != 1:
        raise Failure(
            "incompatible",
            "`%s` has %s site-packages below `lib/python3.*`" % (venv, "no" if not found else "more than one"),
            mend="give the venv with `--venv PATH`",
        )
    return found[0]


def locate(venv: str) -> Layout:
    """Return the Layout of a venv; raise Failure when the directory is not a venv."""
    venv = os.path.abspath(os.path.expanduser(venv))
    if not os.path.isdir(venv):
        mend = "give another with `--venv PATH`; `push --create` makes one"
        raise Failure("usage", "there is no venv `%s` on the host" % venv, mend)
    if not os.path.exists(os.path.join(venv, "pyvenv.cfg")):
        mend = "give the venv's top directory with `--venv PATH`"
        raise Failure("usage", "`%s` is not a venv: it has no pyvenv.cfg" % venv, mend)
    return Layout(venv, site_relative(venv))
