"""The GPU probe without a GPU: a torch that answers as one with two GPUs would, and dies as real ones do."""

from __future__ import annotations

import sys
from pathlib import Path

from ddtree_deploy import abi
from ddtree_deploy.agent import gpu_probe

TORCH = """
import os, signal
__version__ = "2.11.0+cu130"
class version:
    cuda = "13.0"
def manual_seed(seed):
    pass
class cuda:
    def init():
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one.")
    device_count = staticmethod(lambda: 2)
    get_device_capability = staticmethod(lambda index: (12, 0))
    get_device_name = staticmethod(lambda index: "NVIDIA RTX PRO 6000")
def randn(*shape, **options):
    if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
"""


def test_no_torch_and_no_gpu_are_skipped_with_the_reason(tmp_path: Path) -> None:
    assert gpu_probe.probe(str(tmp_path), sys.executable)["skipped"] == "there is no torch in this tree"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCH.replace("lambda: 2", "lambda: 0"))
    answer = gpu_probe.probe(str(tmp_path), sys.executable)
    reason = "torch 2.11.0+cu130 sees no GPU: Found no NVIDIA driver on your system"
    assert answer == {"skipped": reason, "gpus": [], "rows": []}
    (check,) = abi.gpu_checks(answer)
    assert (check.level, check.text) == ("ok", f"skipped: {reason}")
    (tmp_path / "torch/__init__.py").write_text(TORCH.replace('"13.0"', "None").replace("+cu130", "+cpu"))
    assert gpu_probe.probe(str(tmp_path), sys.executable)["skipped"] == "torch 2.11.0+cpu is built without CUDA"


def test_every_gpu_is_tried_and_death_is_a_failure(tmp_path: Path) -> None:
    for name, text in (("torch", TORCH), ("triton", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    answer = gpu_probe.probe(str(tmp_path), sys.executable, {"CUDA_VISIBLE_DEVICES": ""})
    matmul = {row["gpu"]: row for row in answer["rows"] if row["op"] == "torch matmul"}
    assert "no kernel image" in matmul[0]["error"] and matmul[1]["error"] == "died of SIGSEGV"
    assert {row["skipped"] for row in answer["rows"] if row["op"].startswith("sgl_kernel")} == {"there is no sgl_kernel in this tree"}
    checks = abi.gpu_checks(answer)
    assert [check.level for check in checks] == ["block", "block", "ok"]
    assert checks[0].evidence[1] == "GPU 1 (NVIDIA RTX PRO 6000): died of SIGSEGV"


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time\ntime.sleep(60)\n")
    answer = gpu_probe.probe(str(tmp_path), sys.executable, timeout=1)
    assert answer["skipped"] == "torch does not answer: no answer in 1 s"
