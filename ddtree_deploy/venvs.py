"""Which environments a host has, and which of them can import what a server needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddtree_deploy import answers
from ddtree_deploy.errors import IntegrityFailure, UsageProblem
from ddtree_deploy.events import Emit, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import Check
from ddtree_deploy.session import Session

IMPORT_SECONDS = 60.0
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_TRIED = answers.fields({"version": answers.text, "error": answers.text}, state=answers.text)
_FOUND = answers.fields(
    environments=answers.each(
        answers.fields(
            path=answers.text, kind=answers.text, python=answers.text, version=answers.text, executable=answers.text, error=answers.text,
            configured=answers.truth, distributions=answers.count, imports=answers.named(_TRIED),
        )
    ),
    skipped=answers.each(answers.text),
    cut=answers.text,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Import:
    """What came of importing `module`: `state` is `ok`, `missing`, `error`, `signal` or `time-out`."""

    module: str
    state: str
    version: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment of a host: `kind` is `venv`, `conda` or `interpreter`; `error` says why its `python` does not run.

    `configured` tells the host's own venv from what the search came upon.
    """

    path: str
    kind: str
    python: str
    version: str
    executable: str
    error: str
    configured: bool
    distributions: int
    imports: tuple[Import, ...]

    @property
    def able(self) -> bool:
        """Whether every module that was asked for can be imported."""
        return bool(self.version) and all(tried.state == "ok" for tried in self.imports)


@dataclass(frozen=True, slots=True)
class Search:
    """What was found; `skipped` are network mounts, `cut` says where a bound ended the search (or is empty)."""

    environments: tuple[Environment, ...]
    skipped: tuple[str, ...]
    cut: str


def modules(text: str) -> tuple[str, ...]:
    """Split `torch,fastapi`. Raises UsageProblem for what is no name of a module."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if not _MODULE.fullmatch(name):
            raise UsageProblem(f"`{name}` is no name of a module", mend="name import packages: `--needs torch,fastapi`")
    return names


def venvs(
    host: Host, *, needs: Sequence[str] = (), roots: Sequence[str] = (), seconds: float = IMPORT_SECONDS, emit: Emit = ignore
) -> Search:
    """List a host's environments, and try to import each of `needs` in each; writes nothing there.

    Looks at the configured venv, below the usual places and below `roots`, four levels deep, at most 20 000 directories.
    """
    with Session(host, writable=False, emit=emit, parts=("search",)) as session:
        emit(Step(host.name, "look for environments"))
        return ask(session, needs, roots, seconds)


def ask(session: Session, needs: Sequence[str], roots: Sequence[str] = (), seconds: float = IMPORT_SECONDS) -> Search:
    """Do the same over an open session that has the part `search`."""
    host = session.host
    what: dict[str, Any] = {"needs": list(needs), "roots": list(roots), "seconds": seconds}
    value = session.ask("venvs", own=[host.venv], pythons=[host.python], **what).value
    if not _FOUND(value):
        raise IntegrityFailure(f"`{host.name}` answered with something else than an answer")
    environments = []
    for row in value["environments"]:
        imports = (Import(name, tried["state"], tried.get("version", ""), tried.get("error", "")) for name, tried in row["imports"].items())
        plain = {field.name: row[field.name] for field in fields(Environment) if field.name != "imports"}
        environments.append(Environment(**plain, imports=tuple(imports)))
    return Search(tuple(environments), tuple(value["skipped"]), value["cut"])


def checks(host: Host, found: Search, needs: Sequence[str]) -> Iterator[Check]:
    """Say for the configured venv, module by module, whether it can be imported, and which environments have all."""
    own = next((env for env in found.environments if env.configured), None)
    able = [env.path for env in found.environments if env.able]
    none = f"no environment there has all; see `ddtree-deploy venvs {host.name}`"
    hint = f"these have all of them: {', '.join(able[:5])}" if able else none
    if own is None:
        level, where = ("ok", f"{len(able)} of {len(found.environments)} environments") if able else ("block", "no environment")
        yield Check("needs", level, f"{where} can import {', '.join(needs)}", tuple(able[:5]), "" if able else hint)
        return
    for tried in own.imports:
        if tried.state == "ok":
            yield Check("needs", "ok", f"{own.path} imports {tried.module} {tried.version}".rstrip())
        else:
            why = "is not there" if tried.state == "missing" else tried.error
            yield Check("needs", "block", f"{own.path} cannot import {tried.module}: {why}", mend=hint)
