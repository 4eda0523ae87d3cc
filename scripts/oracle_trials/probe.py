"""Import torch from argv[1], then dlopen every path of every list on stdin in a fork of its own; print `[path, outcome]`."""

import ctypes
import json
import os
import sys


def main() -> None:
    root = sys.argv[1]
    sys.path.insert(0, root)
    failure = None
    try:
        import torch  # noqa: F401
    except BaseException as error:  # any failure of the import is the answer for every file
        failure = f"torch: {type(error).__name__}: {error}"
    for line in sys.stdin:
        for path in json.loads(line):
            print(json.dumps([path, failure or load(os.path.join(root, path))]), flush=True)


def load(path: str) -> str:
    """Load one file in a fork of this process; return `ok`, the loader's message, a signal, or an exit status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW)
            answer = "ok"
        except OSError as error:
            answer = f"error: {error}"
        os.write(write, answer.encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return answer or f"exit {os.WEXITSTATUS(status)}"


if __name__ == "__main__":
    main()
