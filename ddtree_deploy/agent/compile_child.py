"""Compile the sources named on stdin; runs by `-c` under the target's interpreter, so it imports nothing of ours.

argv: root, mode. stdin: paths below root, each ended by a NUL. stdout: one record for each path in order, ended by a
NUL: empty when it compiled, else why not. So a death tells by the number of records which source killed the compiler.

Modes: `write` puts a timestamp pyc into `__pycache__` (PEP 552) as the import system would; `check` writes nothing and
also compares the code with the pyc that an import would take instead of the source.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types


def explain(error: Exception) -> str:
    """Return one line for what the compiler raised."""
    if isinstance(error, SyntaxError):
        where = "line %d: " % error.lineno if error.lineno else ""
        return where + str(error.msg)
    return "%s: %s" % (type(error).__name__, error)


def _read(path: str) -> tuple[bytes, os.stat_result]:
    # O_NONBLOCK: a FIFO in the place of a source must not hang the proof.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        # The stat comes first: a file that is changed while it is read must not look unchanged to the import system.
        info = os.fstat(fd)
        return file.read(), info


def _stamp(info: os.stat_result) -> bytes:
    return b"".join((value & 0xFFFFFFFF).to_bytes(4, "little") for value in (int(info.st_mtime), info.st_size))


def shape(code: types.CodeType) -> tuple[object, ...]:
    """Return what of a code object comes from its source: names, constants, nesting.

    Not the instructions: two patch releases of one Python compile a few sources in a thousand differently.
    """
    constants = tuple(shape(item) if isinstance(item, type(code)) else (type(item), item) for item in code.co_consts)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_firstlineno)
    return code.co_name, counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def stale(path: str, code: types.CodeType, source: bytes, info: os.stat_result) -> bool:
    """Tell whether an import of `path` would run a pyc whose code is not `code`."""
    try:
        data, _ = _read(importlib.util.cache_from_source(path))
    except OSError:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if len(data) < 16 or data[:4] != importlib.util.MAGIC_NUMBER or flags > 3:
        return False
    if flags == 0:
        taken = data[8:16] == _stamp(info)
    else:  # hash-based; an unchecked one is always taken
        taken = not flags & 2 or data[8:16] == importlib.util.source_hash(source)
    if not taken:
        return False
    try:
        return shape(marshal.loads(data[16:])) != shape(code)
    except (EOFError, ValueError, TypeError):
        return True


def write_pyc(path: str, code: types.CodeType, info: os.stat_result) -> None:
    """Put the timestamp pyc of `path` where an import looks for it, by a rename."""
    cached = importlib.util.cache_from_source(path)
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    temporary = "%s.%d" % (cached, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, info.st_mode & 0o666 | 0o200)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(importlib.util.MAGIC_NUMBER + bytes(4) + _stamp(info) + marshal.dumps(code))
        os.replace(temporary, cached)
    except BaseException:
        os.unlink(temporary)
        raise


def compile_one(path: str, write: bool) -> str:
    """Return an empty string when `path` compiles, else why it does not."""
    try:
        source, info = _read(path)
        code = compile(source, path, "exec", dont_inherit=True)
    except (RecursionError, MemoryError) as error:
        return "the compiler gave up: %s" % (error or type(error).__name__)
    except Exception as error:
        return explain(error)
    if not write:
        if stale(path, code, source, info):
            return "stale bytecode: an import runs `%s`, which was not made from this source" % (
                os.path.basename(importlib.util.cache_from_source(path))
            )
        return ""
    try:
        write_pyc(path, code, info)
    except (OSError, ValueError):
        pass  # no permission, read-only, or a link in the way: the source is good, and an import will compile it
    return ""


def main() -> None:
    root, mode = sys.argv[1:3]
    os.nice(10)
    sys.dont_write_bytecode = True
    records = os.fdopen(os.dup(1), "wb", buffering=0)
    paths = [os.fsdecode(path) for path in sys.stdin.buffer.read().split(b"\0")[:-1]]
    for path in paths:
        message = compile_one(os.path.join(root, path), mode == "write")
        records.write(message.replace("\0", "\\0").encode("utf-8", "backslashreplace") + b"\0")


if __name__ == "__main__":
    main()
