"""Facts about CUDA that no file states: which soname belongs to which major, which driver speaks what, which GPU runs
what.

Sources: the CUDA Toolkit release notes of 12.9 and 13.3 (table "CUDA Toolkit and Corresponding Driver Versions", GA rows),
CUDA Compatibility (minor version compatibility: 11.x >= 450, 12.x >= 525, 13.x >= 580, newer drivers run older CUDA), the
Blackwell compatibility guide, and "family-specific architecture features" (CUDA 12.9).
"""

from __future__ import annotations

import re

# libcufft, libcusolver and libcusparse count on their own: libcusolver.so.12 is CUDA 13 and libcusparse.so.12 is both.
COUNTED = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvrtc-builtins|nvJitLink|cupti|nvblas)\.so\.(\d+)")
SONAME_MAJORS = {
    "libcufft.so.11": (12,),
    "libcufft.so.12": (13,),
    "libcusolver.so.11": (12,),
    "libcusolver.so.12": (13,),
    "libcusparse.so.12": (12, 13),
}
RUNTIME = re.compile(r"libcudart(?:-[0-9a-f]+)?\.so\.(\d+)")
# Same path, same soname, built for either: only RECORD or a build stamp tells.
AMBIGUOUS = re.compile(r"lib(?:cudnn\w*|nccl|nvshmem_host|cusparseLt|cusparse|cufile|curand)\.so\.\d+$")
OLD_LAYOUT = re.compile(r"(?:^|/)nvidia/(?!cu\d+/)[^/]+/lib/[^/]+$")

# Minimum Linux driver for any release of a major: the branch that the compatibility guide names, the point release of the
# first toolkit in it (of 11.x the one that the guide names). The driver that came with each toolkit is only a recommendation;
# from 13.4 on none comes with it, so that there is no row to compare with.
MINIMUM_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
MATCHED_DRIVER = {
    (11, 8): (520, 61, 5), (12, 0): (525, 60, 13), (12, 1): (530, 30, 2), (12, 2): (535, 54, 3), (12, 3): (545, 23, 6),
    (12, 4): (550, 54, 14), (12, 5): (555, 42, 2), (12, 6): (560, 28, 3), (12, 8): (570, 26), (12, 9): (575, 51, 3),
    (13, 0): (580, 65, 6), (13, 1): (590, 44, 1), (13, 2): (595, 45, 4), (13, 3): (610, 43, 2),
}  # fmt: skip
# The first toolkit whose nvcc knows the architecture.
FIRST_NVCC = {(8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}
# Only data-centre GPUs may use the forward-compatibility libcuda of the cuda-compat package.
CONSUMER = re.compile(r"GeForce|TITAN|Quadro|RTX", re.IGNORECASE)

ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)$")


def soname_majors(soname: str) -> tuple[int, ...]:
    """Return the CUDA majors that a soname can belong to; empty when it says nothing."""
    match = COUNTED.match(soname)
    return (int(match.group(1)),) if match else SONAME_MAJORS.get(soname, ())


def version(text: str | None) -> tuple[int, ...]:
    """Parse a dotted version into numbers; empty when there is none."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def runs_on(arch: str, cc: tuple[int, int]) -> str:
    """Say how code for `arch` serves a GPU of compute capability `cc`: `cubin`, `ptx`, or empty for not at all.

    A cubin serves its major from its minor upwards, `a` code that very GPU only, `f` code its family from its minor
    upwards; PTX is compiled by the driver for its own or a later capability.
    """
    match = ARCH.match(arch)
    if match is None:
        return ""
    kind, suffix = match.group(1), match.group(4)
    have = (int(match.group(2)), int(match.group(3)))
    if suffix == "a" and have != cc:
        return ""
    if kind == "sm" or suffix == "f":
        return ("cubin" if kind == "sm" else "ptx") if have[0] == cc[0] and have[1] <= cc[1] else ""
    return "ptx" if have <= cc else ""


#: cuFFT keeps most of its images where no tool sees them: cuobjdump lists sm_75 alone for CUDA 13's, which runs on any GPU.
PARTLY_LISTED = ("libcufft.so", "libcufftw.so")


def listed(path: str) -> bool:
    """Tell whether the architectures that a library lists are all that it has."""
    return not path.rpartition("/")[2].startswith(PARTLY_LISTED)


def coverage(archs: tuple[str, ...], cc: tuple[int, int]) -> str:
    """Return `cubin`, `ptx` or empty for a file with these architectures."""
    ways = {runs_on(arch, cc) for arch in archs}
    return "cubin" if "cubin" in ways else "ptx" if "ptx" in ways else ""
