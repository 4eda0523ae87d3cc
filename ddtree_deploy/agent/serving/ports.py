"""Ports: whether one is free, and who has it (proc(5), net/tcp)."""

from __future__ import annotations

import errno
import os
import socket

from ddtree_deploy.agent import procs


def address(listen: str) -> str:
    """Return where a client on this host reaches a server that listens on `listen`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(listen, "[%s]" % listen if ":" in listen else listen)


def is_free(listen: str, port: int) -> bool:
    """Tell whether a server could listen there now (a connection in TIME_WAIT does not count)."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def holder(port: int) -> str:
    """Say who listens on a port: `pid 7: python -m ...`, or an empty string when that can not be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.read().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    wanted = {"socket:[%s]" % inode for inode in inodes}
    for name in os.listdir("/proc") if wanted else ():
        if name.isdigit():
            try:
                for fd in os.listdir("/proc/%s/fd" % name):
                    if os.readlink("/proc/%s/fd/%s" % (name, fd)) in wanted:
                        return "pid %s: %s" % (name, command(int(name)))
            except OSError:
                continue
    return ""


def command(pid: int) -> str:
    """Return a process's command line on one line, shortened and without secrets, or an empty string."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            text = " ".join(procs.redact([os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]))
    except OSError:
        return ""
    return text if len(text) <= 160 else text[:157] + "..."
