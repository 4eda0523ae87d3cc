"""What may stand in `ddtree.toml`, as data, and what is wrong with a value, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.hosts.base import TRANSPORTS

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VIA = re.compile(r"(pct:\d+|(docker|podman):[A-Za-z0-9][A-Za-z0-9_.-]*)")
_PIN = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


@dataclass(frozen=True, slots=True)
class Setting:
    """A scalar setting: its field of Config, its shape, its environment variable, its least value."""

    field: str
    shape: type
    env: str
    least: int = 0


SETTINGS: dict[str, Setting] = {
    "default_target": Setting("default_target", str, "DDTREE_DEFAULT_TARGET"),
    "keep_generations": Setting("keep_generations", int, "DDTREE_KEEP_GENERATIONS", least=2),
    "ssh_config": Setting("ssh_config", str, "DDTREE_SSH_CONFIG"),
    "push.confirm_timeout": Setting("confirm_timeout", int, "DDTREE_CONFIRM_TIMEOUT", least=1),
    "profile.roots": Setting("roots", tuple, "DDTREE_ROOTS"),
    "profile.probe": Setting("probe", tuple, "DDTREE_PROBE"),
}
HOST_KEYS: dict[str, type] = {
    "address": str,
    "transport": str,
    "via": str,
    "venv": str,
    "python": str,
    "service_user": str,
    "service_env": dict,
    "ssh_options": tuple,
    "host_key": str,
}
PROFILE_KEYS: dict[str, type] = {
    "engine": str,
    "model": str,
    "drafter": str,
    "algorithm": str,
    "budget": str,
    "gpus": int,
    "tp": int,
    "dp": int,
    "port": int,
    "listen": str,
    "router": bool,
    "env": dict,
    "flags": tuple,
}
CHOICES = {"engine": ("sglang", "standalone"), "algorithm": ("ddtree", "dflash", "none")}
TABLES = {key.partition(".")[0] for key in SETTINGS if "." in key} | {"hosts", "profiles"}
_TOP_KEYS = TABLES | {key for key in SETTINGS if "." not in key}
_SHAPE_WORDS = {bool: "true or false", str: "a string", int: "a whole number", tuple: "a list of strings", dict: "a table of strings"}


def fault(key: str, value: Any) -> str:
    """Return what is wrong with one setting, or an empty string."""
    table, _, rest = key.partition(".")
    if table == "profiles":
        return _profile_fault(key, _split_host(rest)[1], value)
    if table == "hosts" and rest:
        return _host_fault(key, *_split_host(rest), value)
    setting = SETTINGS.get(key)
    if setting is None:
        if key in TABLES:
            return f"`{key}` must be a table"
        known = [k.partition(".")[2] for k in SETTINGS if k.startswith(f"{table}.")] if rest else _TOP_KEYS
        return f"unknown key `{key}`{near(rest or key, sorted(known))}"
    if not _has_shape(value, setting.shape):
        return f"`{key}` must be {_SHAPE_WORDS[setting.shape]}: {value!r}"
    if setting.shape is int and value < setting.least:
        return f"`{key}` must be at least {setting.least}: {value}"
    return ""


def _split_host(rest: str) -> tuple[str, str]:
    name, _, leaf = rest.rpartition(".")
    return (name, leaf) if name else (leaf, "")


def _host_fault(dotted: str, name: str, key: str, value: Any) -> str:
    if not key:
        return f"`{dotted}` must be a table"
    if not _HOST_NAME.fullmatch(name):
        return f"`{name}` is no name for a host: use letters, digits, `_`, `.` and `-`"
    shape = HOST_KEYS.get(key)
    if shape is None:
        return f"unknown key `{dotted}`{near(key, list(HOST_KEYS))}"
    if not _has_shape(value, shape):
        return f"`{dotted}` must be {_SHAPE_WORDS[shape]}: {value!r}"
    if key == "transport" and value not in TRANSPORTS:
        return f"`{dotted}` must be one of {', '.join(TRANSPORTS)}: {value}"
    if key == "via" and not _VIA.fullmatch(value):
        return f"`{dotted}` must be `pct:NUMBER`, `docker:NAME` or `podman:NAME`: {value}"
    if key == "host_key" and not _PIN.fullmatch(value):
        return f"`{dotted}` must be a fingerprint as `ssh-keygen -l` prints it (SHA256:...): {value}"
    if key == "address" and (value.startswith("-") or not value or set(value) & set(" \t\n")):
        return f"`{dotted}` is no address: {value!r}"
    if key in ("venv", "python") and not value.startswith(("/", "~/")):
        return f"`{dotted}` must be absolute or start with `~/`: {value}"
    if name == "local" and key in ("address", "transport", "via", "ssh_options", "host_key"):
        return f"`{dotted}` has no meaning: `local` is this machine"
    return ""


def _profile_fault(dotted: str, key: str, value: Any) -> str:
    if not key:
        return f"`{dotted}` must be a table"
    shape = PROFILE_KEYS.get(key)
    if shape is None:
        return f"unknown key `{dotted}`{near(key, list(PROFILE_KEYS))}"
    if key == "budget" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not _has_shape(value, shape):
        return f"`{dotted}` must be {_SHAPE_WORDS[shape]}: {value!r}"
    if key in CHOICES and value not in CHOICES[key]:
        return f"`{dotted}` must be one of {', '.join(CHOICES[key])}: {value}"
    if shape is int and value < 0:
        return f"`{dotted}` must be at least 0: {value}"
    return ""


def _has_shape(value: Any, shape: type) -> bool:
    if shape is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    if shape is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, shape) and not (shape is int and isinstance(value, bool))


def from_text(text: str, shape: type) -> Any:
    if shape is tuple:
        return tuple(word for word in re.split(r"[,\s]+", text) if word)
    return int(text) if shape is int and re.fullmatch(r"-?\d+", text) else text


def near(word: str, known: Sequence[str]) -> str:
    import difflib

    found = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f", did you mean {' or '.join(f'`{name}`' for name in found)}?" if found else ""
