"""Keep one server alive: run as `python -I -S supervisor.py DIRECTORY`, in a session or a systemd unit of its own.

It imports nothing of ours, for it outlives the connection that started it: `start.py` lays a copy of this file into the
server's directory. It reads `launch.json` there, holds `lock` as long as it lives, and writes `state.json`. The server's
output goes straight into `server.log` (O_APPEND), so that the server does not depend on its supervisor; rotation copies and
truncates, and `times.jsonl` says where in the log which second begins.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
MARK = "DDTREE_LAUNCH"
TICK = 0.5
GONE_SECONDS = 15.0
CLAIM_SECONDS = 5.0


def read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def members(launch: str, session: int | None = None, python: str = "") -> list[int]:
    """Return the pids of a launch, but not this process: those with its mark in their environment, and those of its session.

    SGLang's workers name themselves (setproctitle), which overwrites what /proc shows of their environment; they are known by
    the session of the server and by its interpreter, so that a session of a reused number is not taken for it (proc(5)). A
    supervisor that died before it told the session: it is the one of whatever still carries the mark.
    """
    needle = ("\0%s=%s\0" % (MARK, launch)).encode()
    found, sessions, others = [], {session}, []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open("/proc/%s/environ" % name, "rb") as file:
                ours = needle in b"\0" + file.read() + b"\0"
            if ours:
                found.append(int(name))
                sessions.add(int(stat(name)[3]))
            elif python and os.readlink("/proc/%s/exe" % name) == python:
                others.append((int(name), int(stat(name)[3])))
        except (OSError, ValueError, IndexError):
            continue
    return sorted([*found, *(pid for pid, one in others if one in sessions)])


def stat(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: state, parent, group, session, ..."""
    with open("/proc/%s/stat" % pid, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def offspring(root: int) -> list[int]:
    """Return every living descendant of a process; what lost its parent is a child of its subreaper (prctl(2))."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = stat(name)
                if fields[0] != "Z":
                    parents[int(name)] = int(fields[1])
            except (OSError, ValueError, IndexError):
                continue
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return sorted(found - {root})


class Supervisor:
    """One server: what is wanted of it, how it is, and the child that it is now."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.log_path = os.path.join(directory, "server.log")
        self.launch: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.untold = False  # a full disk: told again until there is room
        self.child: subprocess.Popen[bytes] | None = None
        self.wakeup = -1
        self.healthy = False
        self.stopping = False  # set by a signal; the main loop does the rest
        self.deadline = 0.0  # of the drain, once it began
        self.lock = threading.RLock()  # the health thread tells, too
        self.began = 0.0
        self.seen_size = -1

    # what others read

    def tell(self, phase: str = "", **fields: Any) -> None:
        with self.lock:
            if phase and phase != self.state["phase"]:
                fields.setdefault("since", time.time())
            self.state.update(fields, **({"phase": phase} if phase else {}))
            temporary = os.path.join(self.directory, ".tmp-state")
            try:
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump(self.state, file)
                os.rename(temporary, os.path.join(self.directory, "state.json"))
                self.untold = False
            except OSError:
                self.untold = True  # it must not end a server that runs

    def heard(self, child: subprocess.Popen[bytes], ok: bool) -> None:
        """Take in an answer of /health, unless the server that gave it is gone or going."""
        with self.lock:
            if child is not self.child or child.returncode is not None or self.stopping:
                return
            if ok and self.state["phase"] != "serving":
                self.healthy = True
                self.tell("serving")
            elif not ok and self.state["phase"] == "serving":
                self.say("the server does not answer /health")
                self.tell("unresponsive")

    def say(self, text: str) -> None:
        line = "ddtree-deploy %s: %s\n" % (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text)
        try:
            fd = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            os.write(fd, line.encode())
            os.close(fd)
        except OSError:
            pass

    # the log

    def keep_log(self) -> None:
        """Note when the log grew; copy and truncate it when it is large."""
        try:
            size = os.stat(self.log_path).st_size
        except OSError:
            return
        times = os.path.join(self.directory, "times.jsonl")
        if size != self.seen_size:
            try:
                with open(times, "a", encoding="utf-8") as file:
                    file.write("[%.3f,%d]\n" % (time.time(), max(0, self.seen_size)))
            except OSError:
                pass
            self.seen_size = size
        if size >= self.launch["log_bytes"]:
            for path in (self.log_path, times):
                self.rotate(path)
            self.seen_size = 0

    def rotate(self, path: str) -> None:
        try:
            for number in range(self.launch["log_files"] - 1, 0, -1):
                older = "%s.%d" % (path, number)
                if os.path.exists(older):
                    os.replace(older, "%s.%d" % (path, number + 1))
            with open(path, "rb") as source, open(path + ".1", "wb") as target:
                while True:
                    data = source.read(1 << 20)
                    if not data:
                        break
                    target.write(data)
            os.truncate(path, 0)
        except OSError as error:
            self.say("the log could not be rotated: %s" % error)

    # the server

    def start(self) -> bool:
        launch = self.launch
        log = -1
        who: dict[str, Any] = {}
        if launch.get("uid") is not None:
            who = {"user": launch["uid"], "group": launch["gid"], "extra_groups": launch["groups"]}
        try:
            log = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            self.child = subprocess.Popen(
                launch["argv"],
                env=launch["env"],
                cwd=launch["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **who,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.say("cannot start the server: %s" % error)
            self.tell("failed", pid=None, last={"error": str(error), "at": time.time()})
            return False
        finally:
            if log >= 0:
                os.close(log)
        self.began = time.monotonic()
        self.healthy = False
        self.say("started pid %d" % self.child.pid)
        self.tell("starting", pid=self.child.pid, session=self.child.pid)
        return True

    def look_at_health(self) -> None:
        """Ask /health from a thread of its own, for as long as this supervisor lives."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            child, ok = self.child, False
            if child is not None and child.returncode is None and not self.stopping:
                try:
                    with opener.open(self.launch["url"] + "/health", timeout=20) as answer:
                        ok = answer.status == 200
                except (OSError, ValueError, urllib.error.URLError):
                    pass
                self.heard(child, ok)
            time.sleep(5.0 if ok else 1.0)

    def reap(self) -> bool:
        """Collect children that ended, also those that the server left behind to us; return whether the server ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.child is not None and self.child.returncode is not None
            if pid == 0:
                return False
            if self.child is not None and pid == self.child.pid:
                self.child.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                return True

    def kill_rest(self) -> tuple[list[int], list[int]]:
        """End whatever the server left: its process group, and everything that carries the launch's mark."""
        if self.child is not None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass
        end = time.monotonic() + GONE_SECONDS
        left = self.left()
        killed = list(left)
        while left and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            time.sleep(0.05)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
            left = self.left()
        if left:
            self.say("these processes do not end: %s" % left)
        return killed, left

    def left(self) -> list[int]:
        return sorted({*members(self.launch["id"]), *offspring(os.getpid())})

    def died(self) -> bool:
        """Note how the server ended, clean up after it, and tell whether to start it again."""
        assert self.child is not None
        code: int = self.child.returncode
        how = "exit status %d" % code if code >= 0 else "signal %d" % -code
        if code < 0:
            try:
                how = signal.Signals(-code).name
            except ValueError:
                pass
        lasted = time.monotonic() - self.began
        killed, left = self.kill_rest()
        entry = {"code": code, "how": how, "at": time.time(), "lasted": lasted, "healthy": self.healthy, "killed": killed, "left": left}
        deaths = [*self.state["deaths"], entry][-20:]
        if self.stopping:
            self.say("stopped: %s" % how)
            self.tell("stopped", pid=None, deaths=deaths)
            return False
        self.say("the server ended: %s after %.0f s" % (how, lasted))
        recent = [one for one in deaths if time.time() - one["at"] < self.launch["window"]]
        again = self.launch["restart"] == "on-failure" and code != 0 and self.healthy and len(recent) <= self.launch["most"]
        if not again:
            self.tell("failed", pid=None, last=entry, deaths=deaths)
            return False
        wait = min(60, 2 ** (len(recent) - 1))
        self.say("restart %d of %d in %d s" % (len(recent), self.launch["most"], wait))
        self.tell("restarting", pid=None, last=entry, deaths=deaths, restarts=self.state["restarts"] + 1)
        end = time.monotonic() + wait
        while time.monotonic() < end and not self.stopping:
            self.sleep()
        return True

    def begin_again(self) -> bool:
        """Start the server anew, unless a stop was asked for meanwhile."""
        if self.stopping:
            self.tell("stopped")
            return False
        return self.start()

    def sleep(self) -> None:
        try:
            if select.select([self.wakeup], [], [], TICK)[0]:
                os.read(self.wakeup, 4096)
        except OSError:
            pass

    def stop(self, _number: int, _frame: object) -> None:
        self.stopping = True

    def drain(self) -> None:
        """Pass the wish to stop on to the server, once; when it has not ended by the deadline, kill its process group."""
        assert self.child is not None
        number: int = signal.SIGTERM
        if not self.deadline:
            seconds = float(read(os.path.join(self.directory, "stop.json")).get("drain", self.launch["drain"]))
            self.deadline = time.monotonic() + seconds
            self.say("asked to stop; draining for at most %g s" % seconds)
            self.tell("stopping")
            if seconds > 0:
                self.child.send_signal(signal.SIGTERM)
                return
            number = signal.SIGKILL
        elif time.monotonic() > self.deadline:
            self.say("not drained in time: killed")
            number = signal.SIGKILL
        if number == signal.SIGKILL:
            self.deadline = float("inf")
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except OSError:
                pass

    def claim(self) -> bool:
        """Take the lock for as long as this process lives. Whoever looks whether there is a supervisor holds it for a moment."""
        lock = os.open(os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = time.monotonic() + CLAIM_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > end:
                    return False
            time.sleep(0.02)

    def run(self) -> int:
        if not self.claim():
            return 0  # another supervisor has this server
        # Only now: before, somebody else may still be writing the orders.
        self.launch = read(os.path.join(self.directory, "launch.json"))
        before = read(os.path.join(self.directory, "state.json"))
        if before.get("launch") == self.launch["id"] and before.get("phase") == "stopped":
            return 0  # stopped before we came
        self.state.update(phase="starting", launch=self.launch["id"], supervisor=os.getpid(), restarts=0, deaths=[])
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.wakeup, other = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        # Under systemd this may be a second try: what the first left must not hold the port or the GPUs.
        self.kill_rest()
        threading.Thread(target=self.look_at_health, daemon=True).start()
        again = self.start()
        while again:
            self.sleep()
            self.keep_log()
            if self.untold:
                self.tell()
            if self.reap():
                again = self.died() and self.begin_again()
            elif self.stopping:
                self.drain()
        self.keep_log()
        return 0


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1]).run())
