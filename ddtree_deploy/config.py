"""`ddtree.toml`: which hosts there are and how pushes behave; each value knows where it came from.

Precedence: environment (`DDTREE_*`) over the nearest `ddtree.toml` upward from the working directory over
`$XDG_CONFIG_HOME/ddtree-deploy/config.toml` over the default. The command line is above all of them (cli.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_deploy.config_check import HOST_KEYS, SETTINGS, TABLES, fault, from_text, near
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.hosts.base import Host

_MEND = "see `ddtree-deploy config --example` for every key"
PROJECT_FILE = "ddtree.toml"
EXAMPLE = Path(__file__).with_name("config_example.toml")


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One `[hosts.NAME]` table, as written; `origin` is the file that wrote it last."""

    address: str = ""
    transport: str = ""
    via: str = ""
    venv: str = ""
    python: str = ""
    service_user: str = ""
    service_env: Mapping[str, str] = field(default_factory=dict)
    ssh_options: tuple[str, ...] = ()
    host_key: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """The merged configuration. `origins` maps a dotted key (`push.confirm_timeout`) to where its value came from.

    `files` are those that were read, weakest first.
    """

    default_target: str = ""
    keep_generations: int = 3
    ssh_config: str = ""
    confirm_timeout: int = 30
    roots: tuple[str, ...] = ("sglang", "torch", "triton", "sgl_kernel")
    probe: tuple[str, ...] = ()
    hosts: Mapping[str, HostEntry] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (dotted key, value, origin) of every setting, defaults included."""
        for key, setting in SETTINGS.items():
            yield key, getattr(self, setting.field), self.origins.get(key, "default")
        for name, entry in sorted(self.hosts.items()):
            for key in HOST_KEYS:
                dotted = f"hosts.{name}.{key}"
                if dotted in self.origins:
                    yield dotted, getattr(entry, key), self.origins[dotted]
        for name, table in sorted(self.profiles.items()):
            for key, value in sorted(table.items()):
                yield f"profiles.{name}.{key}", value, self.origins[f"profiles.{name}.{key}"]


def load(cwd: Path | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Merge every source. Raises UsageProblem that names every wrong key and value at once."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    files = tuple(config_files(cwd or Path.cwd(), environ))
    for file in files:
        for key, value in _read(file, problems).items():
            values[key], origins[key] = value, str(file)
    for key, setting in SETTINGS.items():
        if text := environ.get(setting.env, ""):
            checked = from_text(text, setting.shape)
            if wrong := fault(key, checked):
                problems.append(f"${setting.env}: {wrong}")
            else:
                values[key], origins[key] = checked, f"${setting.env}"
    if problems:
        if len(problems) == 1:
            raise UsageProblem(problems[0], mend=_MEND)
        raise UsageProblem(f"the configuration has {len(problems)} faults", mend=_MEND, causes=tuple(problems))
    scalars = {setting.field: values[key] for key, setting in SETTINGS.items() if key in values}
    tables: dict[str, dict[str, dict[str, Any]]] = {"hosts": {}, "profiles": {}}
    for key in values:
        table, _, rest = key.partition(".")
        if table in tables:
            name, _, leaf = rest.rpartition(".")
            tables[table].setdefault(name, {})[leaf] = values[key]
    hosts = {
        name: HostEntry(**entry, origin=origins[f"hosts.{name}.{next(reversed(entry))}"])
        for name, entry in tables["hosts"].items()
    }
    return Config(**scalars, hosts=hosts, profiles=tables["profiles"], origins=origins, files=files)


def config_files(cwd: Path, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """List the files that exist, weakest first."""
    base = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config")
    user = base / "ddtree-deploy" / "config.toml"
    project = next((file for d in (cwd, *cwd.parents) if (file := d / PROJECT_FILE).is_file()), None)
    return [file for file in (user, project) if file is not None and file.is_file()]


def _read(file: Path, problems: list[str]) -> dict[str, Any]:
    """Flatten a file to dotted keys, with what is wrong appended to `problems`."""
    import tomllib

    try:
        tree = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as problem:  # not UTF-8, not TOML, a number or a nesting beyond reason
        problems.append(f"{file}: cannot be read: {problem}")
        return {}
    flat: dict[str, Any] = {}
    for key, value in _flatten(tree):
        value = tuple(value) if isinstance(value, list) else value
        if wrong := fault(key, value):
            problems.append(f"{file}: {wrong}")
        else:
            try:
                flat[key] = _absolute(file, str(value)) if key == "ssh_config" else value
            except RuntimeError:  # `~somebody` who is not there
                problems.append(f"{file}: {key}: no such home directory: {value}")
    return flat


def _flatten(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value): settings one or two deep, a host's and a profile's values three deep."""
    for key, value in tree.items():
        if key not in TABLES or not isinstance(value, dict):
            yield key, value
            continue
        for name, inner in value.items():
            if key == "hosts" and inner == {}:
                yield f"hosts.{name}.address", name
            elif key in ("hosts", "profiles") and isinstance(inner, dict):
                yield from ((f"{key}.{name}.{leaf}", leaf_value) for leaf, leaf_value in inner.items())
            else:
                yield f"{key}.{name}", inner


def _absolute(file: Path, value: str) -> str:
    """Read a relative path as relative to the file that says it."""
    return str(file.parent / Path(value).expanduser())


def known_names(config: Config | None = None) -> dict[str, str]:
    """Map every name that commands take as a host to where it is written, from local files alone (also for TAB)."""
    from ddtree_deploy.hosts.ssh_config import aliases

    config = config or load()
    names = {"local": "this machine", **dict.fromkeys(aliases(config.ssh_config), "ssh configuration")}
    names |= {name: entry.origin for name, entry in config.hosts.items()}
    return dict(sorted(names.items()))


def resolve_host(
    name: str,
    config: Config | None = None,
    *,
    venv: str | None = None,
    transport: str | None = None,
    accept_new: bool = False,
) -> Host:
    """Turn a name into a Host: `local`, else `[hosts.NAME]`, else an ssh alias or an address.

    Raises UsageProblem with the nearest known names when it is none of these.
    """
    config = config or load()
    entry = config.hosts.get(name)
    place = venv or (entry.venv if entry else "")
    if name == "local" or (entry and entry.transport == "local"):
        inside = bool(entry and entry.via)  # then `~` and a relative path are not this machine's
        try:
            where = {"transport": "local", "venv": place if inside or not place else str(Path(place).expanduser().absolute())}
        except RuntimeError:
            raise UsageProblem(f"the venv of `{name}` is in a home directory that is not there: {place}") from None
        origin = entry.origin if entry else "this machine"
    else:
        if entry and entry.via and not entry.address:
            mend = f"set `address` under [hosts.{name}] to the machine that has the container, or `transport = \"local\"`"
            raise UsageProblem(f"`{name}` is `{entry.via}`, but behind which machine?", mend=mend)
        if place and not place.startswith(("/", "~/")):
            raise UsageProblem(f"the venv on `{name}` must be absolute or start with `~/`: {place}")
        chosen = transport or (entry.transport if entry else "") or "openssh"
        where = {"transport": chosen, "venv": place, "address": (entry.address if entry else "") or name}
        origin = entry.origin if entry else _origin_of_address(name, config)
    entry = entry or HostEntry()
    return Host(
        name,
        **where,
        via=entry.via,
        python=entry.python,
        service_user=entry.service_user,
        service_env=entry.service_env,
        host_key=entry.host_key,
        ssh_options=entry.ssh_options,
        ssh_config=config.ssh_config,
        accept_new_host_key=accept_new,
        origin=origin,
    )


def _origin_of_address(name: str, config: Config) -> str:
    from ddtree_deploy.hosts.ssh_config import is_address, is_declared

    if is_declared(name, config.ssh_config):
        return "ssh configuration"
    if is_address(name):
        return "address"
    raise UsageProblem(
        f"no host `{name}`{near(name, list(known_names(config)))}",
        mend=f"define `[hosts.{name}]` in ddtree.toml or `Host {name}` in ~/.ssh/config; see `ddtree-deploy hosts`",
    )


def example() -> str:
    """Return the annotated example file, which sets every key to its default or to a typical value."""
    return EXAMPLE.read_text("utf-8")
