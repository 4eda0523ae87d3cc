"""SGLang with a few real modules, taken from a site, and all others empty: what a script imports and never reaches."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Collection
from pathlib import Path


class Empty(types.ModuleType):
    """A module of which any name can be imported; `member` says what the name is."""

    __path__: list[str] = []  # noqa: RUF012
    member: Callable[[str], object]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.member(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Load the modules `real` from the site; leave the rest of the packages empty."""

    def __init__(self, site: Path, real: Collection[str], packages: Collection[str], member: Callable[[str], object]) -> None:
        self.site, self.real, self.packages, self.member = site, real, packages, member

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name in self.real:
            return importlib.util.spec_from_file_location(name, self.site / (name.replace(".", "/") + ".py"))
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Empty(spec.name)
        module.member = self.member
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


def hollow(site: Path, real: Collection[str], packages: Collection[str], member: Callable[[str], object]) -> None:
    """Import from now on in this way."""
    sys.meta_path.insert(0, Finder(site, real, packages, member))
