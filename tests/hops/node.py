"""A Proxmox node's `pct`, and a `docker`, as scripts: real ones for a real LXC container, or a stand-in without one.

`pct` does what pct(1) does, with the words of its Perl source: `exec` becomes `lxc-attach`, which keeps the pipes;
`push` opens one file, goes into the container's mount namespace, creates the destination and sets its mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PCT = r"""#!/bin/sh
die() { echo "$*" >&2; exit 255; }
[ "$(id -u)" = 0 ] || [ -n "{lax}" ] || die "please run as root"
verb=$1 id=$2; shift 2
[ -e "{state}/$id" ] || die "Configuration file 'nodes/pve/lxc/$id.conf' does not exist"
case $verb in
exec)
    {running} || die "container '$id' not running!"
    [ "$1" = -- ] && shift
    [ $# -gt 0 ] || die "missing command"
    {exec} "$@" ;;
push)
    {running} || die "can only push files to a running CT"
    file=$1 to=$2 perms=; shift 2
    while [ $# -gt 0 ]; do case $1 in --perms) perms=$2; shift 2 ;; *) die "Unknown option: $1" ;; esac; done
    [ -r "$file" ] || die "failed to open $file for reading"
    [ -f "$file" ] || die "copy failed: Is a directory"
    wc -c <"$file" >>"{state}/pushed"
    {into} sh -c ': >"$1" || exit 2; [ -z "$2" ] || chmod "$2" "$1"; cat >"$1"' sh "$to" "$perms" <"$file" ||
        die "failed to create file: $to" ;;
*) die "unknown command '$verb'" ;;
esac
"""
# Puts a terminal between, as a wrapper may: the pipes end at it, and its line discipline has its say.
_TERMINAL = f"""exec {sys.executable} -c 'import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))'"""

_ENGINE = """#!/bin/sh
[ "$1" = exec ] && [ "$2" = -i ] || { echo "unknown shorthand flag" >&2; exit 125; }
name=$3; shift 3
case $name in
box) exec "$@" ;;
off) echo "Error response from daemon: container 0123abcd is not running" >&2; exit 1 ;;
*) echo "Error response from daemon: No such container: $name" >&2; exit 1 ;;
esac
"""


def _install(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def lxc_pct(path: Path, *, terminal: bool = False) -> None:
    """Write a `pct` for the LXC containers of the machine that `path` lies on."""
    attach = "lxc-attach -n \"$id\" --keep-env --"
    words = {
        "state": "/var/lib/lxc", "lax": "", "running": '[ "$(lxc-info -n "$id" -sH)" = RUNNING ]',
        "exec": f"{_TERMINAL} {attach}" if terminal else f"exec {attach}",
        "into": 'nsenter --target "$(lxc-info -n "$id" -pH)" --mount --wd=/ --',
    }  # fmt: skip
    _install(path, _filled(_PCT, words))


def stand_ins(folder: Path, *, terminal: bool = False) -> Path:
    """Write `pct` and `docker` whose containers are this machine: 200 and `box` run, 201 and `off` do not."""
    folder.mkdir()
    for number, state in (("200", "running"), ("201", "stopped")):
        (folder / number).write_text(state)
    words = {
        "state": str(folder), "lax": "yes", "running": f'[ "$(cat {folder}/"$id")" = running ]', "into": "",
        "exec": _TERMINAL if terminal else "exec",
    }  # fmt: skip
    _install(folder / "pct", _filled(_PCT, words))
    for engine in ("docker", "podman"):
        _install(folder / engine, _ENGINE)
    return folder


def _filled(text: str, words: dict[str, str]) -> str:
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    return text
