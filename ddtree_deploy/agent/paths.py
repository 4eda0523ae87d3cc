"""Paths that came over the wire: parse them against a whitelist, and open them without following anything."""

from __future__ import annotations

import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable

MAX_PATH = 4096
MAX_NAME = 255
# What nearly every path is made of; anything else takes the slow way below.
_PLAIN = re.compile(r"(?!\.{1,2}(?:/|$))[ !#-.0-\[\]-~]{1,255}(?:/(?!\.{1,2}(?:/|$))[ !#-.0-\[\]-~]{1,255})*")


class HostilePath(Exception):
    """A path that would leave its tree, or that no honest snapshot contains."""


def is_plain(text: str) -> bool:
    """Tell quickly that a path is harmless; False means that `parse` has to look."""
    return len(text) <= MAX_PATH and _PLAIN.fullmatch(text) is not None


def parse(text: object) -> str:
    """Return `text` when it is a plain relative path below its root; raise HostilePath otherwise.

    Refused: absolute paths, empty, `.` and `..` components, backslashes, control characters, names over 255 bytes.
    """
    if not isinstance(text, str) or not text:
        raise HostilePath("an empty path")
    if is_plain(text):
        return text
    if len(os.fsencode(text)) > MAX_PATH:
        raise HostilePath("a path of more than %d bytes" % MAX_PATH)
    if "\\" in text or (not text.isprintable() and any(ord(c) < 32 or ord(c) == 127 for c in text)):
        raise HostilePath("a path with a control character or a backslash: %r" % text)
    for name in text.split("/"):
        if name in ("", ".", ".."):
            raise HostilePath("a path that does not stay below its root: %r" % text)
        if len(os.fsencode(name)) > MAX_NAME:
            raise HostilePath("a name of more than %d bytes: %r" % (MAX_NAME, text))
    return text


def parse_link(path: str, target: object) -> str:
    """Return the link target when, resolved from `path`, it stays inside the tree; raise HostilePath otherwise."""
    parse(path)
    if not isinstance(target, str) or not target or target.startswith("/") or "\0" in target or "\n" in target:
        raise HostilePath("a link that leaves its tree: %r -> %r" % (path, target))
    names = [name for name in target.split("/") if name not in ("", ".")]
    up = 0
    while up < len(names) and names[up] == "..":
        up += 1
    # Only leading `..`: after a name that is itself a link, `..` would be resolved from that link's target.
    if ".." in names[up:] or up > path.count("/"):
        raise HostilePath("a link that leaves its tree: %r -> %r" % (path, target))
    return target


def below(prefix_links: Container[str], path: str) -> None:
    """Raise HostilePath when a parent of `path` is itself a link of the same manifest (`prefix_links`: a set)."""
    at = path.find("/")
    while at != -1:
        if path[:at] in prefix_links:
            raise HostilePath("a file behind a link: %r" % path)
        at = path.find("/", at + 1)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree:
    """Open files below `root` component by component, so that no link on the way is ever followed.

    Directory descriptors are kept (the most recent chain), since neighbours come one after another. Raises HostilePath
    when a component is a link or not a directory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.fd = os.open(root, _DIRECTORY)
        self._chain: list[tuple[str, int]] = []

    def close(self) -> None:
        for _name, fd in self._chain:
            os.close(fd)
        self._chain = []
        os.close(self.fd)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def parent(self, path: str, create: bool = False) -> tuple[int, str]:
        """Return `(descriptor of the parent directory, base name)`; with `create`, missing directories are made 0755."""
        names = path.split("/")
        base = names.pop()
        keep = 0
        while keep < len(names) and keep < len(self._chain) and self._chain[keep][0] == names[keep]:
            keep += 1
        while len(self._chain) > keep:
            os.close(self._chain.pop()[1])
        at = self._chain[-1][1] if self._chain else self.fd
        for name in names[keep:]:
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=at)
            except FileNotFoundError:
                if not create:
                    raise
                try:
                    os.mkdir(name, 0o755, dir_fd=at)
                except FileExistsError:
                    pass
                fd = self._directory(name, at, path)
            except OSError:
                fd = self._directory(name, at, path)
            self._chain.append((name, fd))
            at = fd
        return at, base

    @staticmethod
    def _directory(name: str, at: int, path: str) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=at)
        except NotADirectoryError:
            raise HostilePath("a parent of %r is not a directory" % path) from None
        except OSError as error:
            if error.errno == 40:  # ELOOP: the component is a link
                raise HostilePath("a parent of %r is a link" % path) from None
            raise

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644, create_parents: bool = False) -> int:
        """Open a regular file without following a link; raise HostilePath when it is anything else."""
        at, base = self.parent(path, create=create_parents)
        try:
            fd = os.open(base, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=at)
        except OSError as error:
            if error.errno == 40:
                raise HostilePath("%r is a link" % path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise HostilePath("%r is not a regular file" % path)
        return fd

    def stat(self, path: str) -> os.stat_result:
        at, base = self.parent(path)
        return os.stat(base, dir_fd=at, follow_symlinks=False)


def parents(paths: Iterable[str]) -> set[str]:
    """Return the directories that paths lie in, at any depth."""
    out: set[str] = set()
    for path in paths:
        at = path.rpartition("/")[0]
        while at and at not in out:
            out.add(at)
            at = at.rpartition("/")[0]
    return out
