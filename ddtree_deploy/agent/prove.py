"""The proofs that need the host: whole-set hashes, a compile of every source, and an import of each package."""

import json
import os
import pwd
import queue
import re
import select
import signal
import subprocess
import threading
import time

from ddtree_deploy.agent import compile_child, probe_child, walk
from ddtree_deploy.agent.failure import Failure

TRACEBACK_LINES = 30
_OUTPUT_KEPT = 64 << 10
#: Two of one of these in a process is a crash or a wrong answer in the end (auditwheel adds a hash to bundled ones).
_SINGLE = re.compile(r"(lib(?:cudart|cudnn\w*|nccl))(?:-[0-9a-f]{8})?\.so\b")
_SITE = re.compile(r"/(?:site|dist)-packages/")


def _source(module):
    """Return a module's source, also when the agent was imported from memory."""
    text = module.__loader__.get_source(module.__name__)
    if text is None:
        raise Failure("internal", "the agent has no source of %s" % module.__name__)
    return text


def _cpus():
    return len(os.sched_getaffinity(0))


def _kill(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.kill()
    process.wait()


# --- syntax


def syntax(session, python, root, paths, jobs=None, baseline=frozenset(), write=True):
    """Compile the `.py` files `paths` below `root` by the interpreter `python`, in `jobs` processes.

    Returns `(compiled, errors)`: how many compiled, and `(path, message)` of those that did not, without the paths in
    `baseline`, which do not compile on the source host either. With `write` the bytecode goes into `__pycache__`
    (PEP 552, timestamps), else nothing is written, and bytecode that an import would run in the place of its source is
    an error. So is a source that kills the compiler. Raises Failure when `python` does not run.
    """
    sized = []
    for path in paths:
        try:
            size = os.stat(os.path.join(root, path)).st_size
        except OSError:
            size = 0
        sized.append((size, path))
    sized.sort(reverse=True)
    jobs = max(1, min(jobs or _cpus(), (len(sized) + 63) // 64))
    mode = "write" if write else "check"
    errors, faults, done = [], [], [0]
    lock = threading.Lock()

    def record(path, message):
        with lock:
            done[0] += 1
            if message:
                errors.append((path, message))
        session.progress("compile", done[0], len(sized), "files", path)

    def work(share):
        try:
            while share and not session.aborted():
                share = _compile(session, python, root, mode, share, record)
        except Exception as error:
            faults.append(error)

    # Largest first, dealt in turn: the shares cost about the same.
    workers = [threading.Thread(target=work, args=([path for _size, path in sized[k::jobs]],)) for k in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    if session.aborted():
        raise Failure("interrupted", "the compile of the sources was stopped")
    return done[0] - len(errors), sorted(pair for pair in errors if pair[0] not in baseline)


def _compile(session, python, root, mode, paths, record):
    """Run one compiler over `paths`; returns those that it did not reach, because one of them killed it."""
    try:
        child = subprocess.Popen(
            [python, "-I", "-S", "-W", "ignore", "-X", "utf8", "-c", _source(compile_child), root, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise Failure("incompatible", "the interpreter `%s` does not start: %s" % (python, error.strerror)) from None
    reached = 0
    try:
        try:
            child.stdin.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
            child.stdin.close()
        except BrokenPipeError:
            pass
        tail = b""
        while True:
            ready, _, _ = select.select([child.stdout], [], [], 0.2)
            if session.aborted():
                return []
            if not ready:
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                break
            *records, tail = (tail + data).split(b"\0")
            for message in records:
                record(paths[reached], message.decode("utf-8", "replace"))
                reached += 1
        status = child.wait()
        if reached < len(paths):
            if not reached and status > 0:
                raise Failure(
                    "incompatible", "the interpreter `%s` does not compile: exit status %d" % (python, status)
                )
            cause = _signal_name(-status) if status < 0 else "exit status %d" % status
            record(paths[reached], "the compiler died of %s" % cause)
            reached += 1
        return paths[reached:]
    finally:
        if child.poll() is None:
            _kill(child)
        child.stdout.close()


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


# --- imports


def imports(session, python, root, live_site, venv, modules, user="", env=None, timeout=120.0, jobs=None):
    """Import each of `modules` in a process of its own, as the venv would were `root` its site-packages.

    `env` is added to a minimal environment; as root, `user` is who imports. At most four at a time unless `jobs` says
    otherwise, since an import of torch takes a gigabyte. Returns one dict per module, in order, with
    the fields of `models.ImportProof`. Death by a signal, a time-out (seconds), an exit without a result, an exception,
    and libraries of another tree each make `ok` false. A read-only session leaves no bytecode behind.
    """
    todo = queue.SimpleQueue()
    for index, module in enumerate(modules):
        todo.put((index, module))
    how = _identity(user)
    how["env"] = {**how["env"], **(env or {})}
    flags = ["-S", "-B"] if session.read_only else ["-S"]
    allow_system = _system_site(venv)
    results, faults = {}, []

    def work():
        while not session.aborted() and not faults:
            try:
                index, module = todo.get_nowait()
            except queue.Empty:
                return
            try:
                proof = _import(session, [python, *flags], how, root, live_site, venv, module, timeout)
            except Exception as error:
                faults.append(error)
                return
            loaded = proof.pop("loaded")
            proof["foreign_libraries"] = foreign(loaded, root, live_site, venv, allow_system)
            if proof["foreign_libraries"] and proof["ok"]:
                proof["ok"] = False
                proof["error"] = "it loaded files of another tree, or one library twice"
            results[index] = proof
            session.progress("import", len(results), len(modules), "modules", module)

    workers = [threading.Thread(target=work) for _ in range(max(1, min(jobs or min(_cpus(), 4), len(modules))))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    if session.aborted():
        raise Failure("interrupted", "the import proofs were stopped")
    return [results[index] for index in range(len(modules))]


def _identity(user):
    """Return the Popen arguments for who imports, where, and with which environment."""
    who = pwd.getpwuid(os.geteuid()) if not user else None
    if user:
        try:
            who = pwd.getpwnam(user)
        except KeyError:
            mend = "name the service's user in `ddtree.toml`"
            raise Failure("usage", "the host has no user `%s`" % user, mend) from None
    how = {
        "cwd": "/",
        "env": {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": who.pw_dir,
            "USER": who.pw_name,
            "LOGNAME": who.pw_name,
            "LANG": "C.UTF-8",
        },
    }
    if os.geteuid() == 0 and who.pw_uid != 0:
        how.update(user=who.pw_uid, group=who.pw_gid, extra_groups=os.getgrouplist(who.pw_name, who.pw_gid))
    return how


def _import(session, interpreter, how, root, live_site, venv, module, timeout):
    result_out, result_in = os.pipe()
    argv = [*interpreter, "-c", _source(probe_child), str(result_in), str(os.getpid()), root, live_site, venv, module]
    started = time.monotonic()
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[result_in],
            start_new_session=True,
            **how,
        )
    except OSError as error:
        os.close(result_out)
        why = "the interpreter `%s` does not start: %s" % (interpreter[0], error.strerror)
        raise Failure("incompatible", why) from None
    finally:
        os.close(result_in)
    stderr = child.stderr.fileno()
    outputs = {result_out: b"", stderr: b""}
    try:
        ended = _listen(session, child, outputs, started + timeout)
        if not ended and not session.aborted():
            # faulthandler answers SIGABRT with the stack; what hangs in the kernel does not answer.
            os.kill(child.pid, signal.SIGABRT)
            _listen(session, child, outputs, time.monotonic() + 1.0)
    finally:
        _kill(child)
        os.close(result_out)
        child.stderr.close()
    seconds = time.monotonic() - started
    text = outputs[stderr].decode("utf-8", "replace")
    late = "" if ended else "no answer within %g s" % timeout
    return {"module": module, **_judge(outputs[result_out], text, child.returncode, late, seconds)}


def _listen(session, child, outputs, deadline):
    """Collect what `child` writes until it ended, which is True, or until `deadline` or an abort."""
    listening = set(outputs)
    while time.monotonic() < deadline and not session.aborted():
        ended = _has_ended(child)
        # A process that the import left behind may hold the pipes: their end is not awaited.
        ready = select.select(listening, [], [], 0 if ended else 0.1)[0] if listening else time.sleep(0.02)
        for fd in ready or ():
            data = os.read(fd, 1 << 16)
            if data:
                outputs[fd] = (outputs[fd] + data)[-_OUTPUT_KEPT:]
            else:
                listening.discard(fd)
        if ended and not ready:
            return True
    return False


def _has_ended(child):
    # Not reaped: as long as it is a zombie, its process group can not become someone else's.
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _judge(answer, text, status, late, seconds):
    try:
        result = json.loads(answer)
    except ValueError:
        result = None
    lines = text.splitlines()[-TRACEBACK_LINES:]
    proof = {"ok": False, "seconds": seconds, "error": late, "traceback": "\n".join(lines), "signal": "", "loaded": []}
    if result is not None:
        lines = result.get("traceback", "").splitlines()[-TRACEBACK_LINES:]
        proof.update(
            ok=result["ok"],
            seconds=result["seconds"],
            error=result.get("error", ""),
            traceback="\n".join(lines),
            loaded=result["mapped"] + result["modules"],
        )
    elif late:
        pass
    elif status < 0:
        proof["signal"] = _signal_name(-status)
        proof["error"] = "the import died of %s" % proof["signal"]
    else:
        proof["error"] = "the process ended with status %d before the import was done" % status
    return proof


def _system_site(venv):
    """Tell whether the interpreter of `venv` may use packages outside it (no pyvenv.cfg: it is no venv of its own)."""
    try:
        with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            text = file.read().lower()
    except OSError:
        return True
    return re.search(r"^include-system-site-packages\s*=\s*true\s*$", text, re.MULTILINE) is not None


def foreign(files, root, live_site, venv, allow_system=False):
    """Return which loaded `files` come from another tree than `root`, and which libraries are there twice.

    Another tree is the live site-packages, another generation, or (unless `allow_system`) anybody else's site-packages.
    """
    own = os.path.realpath(root)
    others = [os.path.realpath(live_site), os.path.realpath(os.path.join(venv, ".ddtree", "generations"))]
    found, single = [], {}
    for path in files:
        real = os.path.realpath(path[: -len(" (deleted)")] if path.endswith(" (deleted)") else path)
        match = _SINGLE.match(os.path.basename(real))
        if match:
            single.setdefault(match.group(1), set()).add(real)
        if not _below(real, own) and (
            any(_below(real, other) for other in others) or (not allow_system and _SITE.search(real))
        ):
            found.append(path)
    twice = ["%s twice: %s" % (name, ", ".join(sorted(paths))) for name, paths in single.items() if len(paths) > 1]
    return sorted(twice) + sorted(found)


def _below(path, tree):
    return path == tree or path.startswith(tree + "/")


# --- hashes


def hashes(session, root, entries, index):
    """Compare the tree `root` with `entries` (`[path, kind, mode, size, digest]`), which name all of it.

    `index` maps a path to `(walk.stamp, digest)`: a file whose stamp is still that one is vouched for, any other
    is read. Returns `(hashed, vouched, bad)`: numbers of files, and one line for each difference.
    """
    expected = {entry[0]: entry for entry in entries}
    bad, suspects, vouched, seen = [], [], 0, set()
    for found in walk.walk(root):
        path, kind, mode, size = found[:4]
        seen.add(path)
        wanted = expected.get(path)
        if wanted is None:
            bad.append("%s: not part of the set" % path)
        elif kind != wanted[1]:
            bad.append("%s: %s where %s is expected" % (path, _KINDS.get(kind, kind), _KINDS.get(wanted[1], wanted[1])))
        elif kind == "l":
            vouched += 1
            if found[8] != wanted[4]:
                bad.append("%s: a link to `%s` where one to `%s` is expected" % (path, found[8], wanted[4]))
        elif mode != wanted[2]:
            bad.append("%s: mode %o where %o is expected" % (path, mode, wanted[2]))
        elif size != wanted[3]:
            bad.append("%s: %d bytes where %d are expected" % (path, size, wanted[3]))
        else:
            if index.get(path) == (walk.stamp(found), wanted[4]):
                vouched += 1
            else:
                suspects.append(path)
    bad.extend("%s: missing" % path for path in expected.keys() - seen)
    total = sum(expected[path][3] for path in suspects)
    done = [0]

    def moved(count, path):
        done[0] += count
        session.progress("hash", done[0], total, "bytes", path)

    digests = walk.hash_paths(root, suspects, session.aborted, moved)
    if session.aborted():
        raise Failure("interrupted", "the hash of the tree was stopped")
    for path in suspects:
        digest = digests.get(path)
        if digest is None:
            bad.append("%s: unreadable, or it changes while it is read" % path)
        elif digest != expected[path][4]:
            bad.append("%s: sha256 %s where %s is expected" % (path, digest[:12], expected[path][4][:12]))
    return len(suspects), vouched, sorted(bad)


_KINDS = {"f": "a file", "l": "a link", "?": "something else"}
