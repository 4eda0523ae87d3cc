"""Run one tiny operation of each extension on every GPU, each in a process of its own, and compare it with the CPU.

The link closure proves that files load; a missing architecture, a wrong driver or a second CUDA runtime only shows when
a kernel runs. The programs below are run by the environment's interpreter; this module needs the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Env = Mapping[str, str]


PRELUDE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.manual_seed(0)
"""

COUNT = (
    PRELUDE
    + """
rows, reason = [], "torch %s sees no GPU" % torch.__version__
if torch.version.cuda is None:
    reason = "torch %s is built without CUDA" % torch.__version__
else:
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        rows.append({"index": index, "name": torch.cuda.get_device_name(index), "cc": "%d.%d" % (major, minor)})
    if not rows:
        try:
            torch.cuda.init()
        except Exception as error:
            reason += ": %s" % str(error).split(". ")[0].rstrip(".")
print(json.dumps([rows, reason]))
"""
)

MATMUL = (
    PRELUDE
    + """
a, b = torch.randn(256, 256), torch.randn(256, 256)
for kind in (torch.float32, torch.bfloat16):
    got = (a.to("cuda", kind) @ b.to("cuda", kind)).float().cpu()
    torch.cuda.synchronize()
    want = a.to(kind).float() @ b.to(kind).float()
    assert torch.allclose(got, want, rtol=2e-2, atol=1.0), "wrong product in %s" % kind
"""
)

TRITON = (
    PRELUDE
    + '''
# A kernel's source must be in a file: Triton reads it back.
code = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)
"""
with open(os.path.join(os.environ["TRITON_CACHE_DIR"], "ddtree_probe_kernel.py"), "w") as file:
    file.write(code)
sys.path.insert(0, os.environ["TRITON_CACHE_DIR"])
from ddtree_probe_kernel import add
x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
out = torch.empty_like(x)
add[(4,)](x, y, out, 1000, BLOCK=256)
torch.cuda.synchronize()
assert torch.equal(out, x + y), "wrong sum"
'''
)

SGL_KERNEL = (
    PRELUDE
    + """
import sgl_kernel

x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
out = torch.empty(8, 128, device="cuda", dtype=torch.bfloat16)
sgl_kernel.silu_and_mul(x, out)
torch.cuda.synchronize()
want = torch.nn.functional.silu(x[:, :128].float()) * x[:, 128:].float()
assert torch.allclose(out.float(), want, rtol=2e-2, atol=2e-2), "wrong product"
"""
)

#: Operation -> (package that must be in the tree, program).
OPERATIONS = {
    "torch matmul": ("torch", MATMUL),
    "triton add": ("triton", TRITON),
    "sgl_kernel silu_and_mul": ("sgl_kernel", SGL_KERNEL),
}


def probe(root: str, python: str, env: Mapping[str, str] | None = None, timeout: float = 180) -> dict[str, Any]:
    """Return `{"skipped", "gpus", "rows"}` for the tree at `root`, run by `python`; nothing outlives the call.

    A row is `{"gpu", "op", "ok", "seconds", "error", "skipped"}`. `skipped` at the top says why nothing ran at all.
    """
    env = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="ddtree-gpu-probe-") as scratch:
        gpus, reason = _count(root, python, env, scratch, timeout)
        if not gpus:
            return {"skipped": reason, "gpus": [], "rows": []}
        with ThreadPoolExecutor(max_workers=min(8, len(gpus))) as pool:
            done = list(pool.map(lambda gpu: _each(root, python, env, scratch, timeout, gpu["index"]), gpus))
        return {"skipped": None, "gpus": gpus, "rows": [row for rows in done for row in rows]}


def _count(root: str, python: str, env: Env, scratch: str, timeout: float) -> tuple[list[dict[str, Any]], str | None]:
    if not os.path.isdir(os.path.join(root, "torch")):
        return [], "there is no torch in this tree"
    outcome, output = _run(root, python, env, scratch, timeout, COUNT)
    if outcome:
        return [], "torch does not answer: %s" % outcome
    try:
        gpus, reason = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [], "torch does not answer: it printed no list of GPUs"
    return gpus, None if gpus else reason


def _each(root: str, python: str, env: Env, scratch: str, timeout: float, index: int) -> list[dict[str, Any]]:
    visible = [part for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    rows: list[dict[str, Any]] = []
    for name, (package, program) in OPERATIONS.items():
        row = {"gpu": index, "op": name, "ok": True, "seconds": 0.0, "error": "", "skipped": ""}
        rows.append(row)
        if not os.path.isdir(os.path.join(root, package)):
            row["skipped"] = "there is no %s in this tree" % package
            continue
        cache = os.path.join(scratch, "%s-%d" % (package, index))
        os.makedirs(cache, exist_ok=True)
        chosen = dict(env, CUDA_VISIBLE_DEVICES=visible[index] if index < len(visible) else str(index))
        started = time.monotonic()
        row["error"], _output = _run(root, python, chosen, cache, timeout, program)
        row["ok"], row["seconds"] = not row["error"], round(time.monotonic() - started, 2)
    return rows


def _run(root: str, python: str, env: Env, cache: str, timeout: float, program: str) -> tuple[str, str]:
    """Run a program in a group of its own; return (what went wrong or "", output). A signal is a failure."""
    env = dict(env, TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache, PYTHONDONTWRITEBYTECODE="1")
    argv = [python, "-B", "-c", program, root]
    try:
        child = subprocess.Popen(
            argv,
            env=env,
            cwd=cache,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return "%s does not start: %s" % (python, error.strerror), ""
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "no answer in %d s" % timeout, ""
    if child.returncode < 0:
        return "died of %s" % signal.Signals(-child.returncode).name, ""
    if child.returncode:
        lines = [line for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]
        return (lines[-1] if lines else "exit %d" % child.returncode)[:500], ""
    return "", output.decode("utf-8", "replace")
