"""Import torch from argv[1], then dlopen every path on stdin in a fork of its own; print `[path, outcome]` lines."""

import ctypes
import json
import os
import sys


def main() -> None:
    root = sys.argv[1]
    sys.path.insert(0, root)
    paths = sys.stdin.read().split("\n")
    failure = None
    try:
        import torch  # noqa: F401
    except BaseException as error:  # any failure of the import is the answer for every file
        failure = f"torch: {type(error).__name__}: {error}"
    for path in filter(None, paths):
        if failure:
            print(json.dumps([path, failure]), flush=True)
            continue
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            try:
                ctypes.CDLL(os.path.join(root, path), mode=os.RTLD_NOW)
                answer = "ok"
            except OSError as error:
                answer = f"error: {error}"
            os.write(write, answer.encode()[:2000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read().decode()
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            answer = f"signal {os.WTERMSIG(status)}"
        print(json.dumps([path, answer or f"exit {os.WEXITSTATUS(status)}"]), flush=True)


if __name__ == "__main__":
    main()
