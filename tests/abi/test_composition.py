"""What the oracle judges is what a push makes: both compose by the same rules, from their own facts of the same two trees."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy import abi
from ddtree_deploy.composition import Part, replacement
from ddtree_deploy.models import Distribution, FileEntry, Inventory, Manifest, PythonFacts
from ddtree_deploy.origins import import_packages
from ddtree_deploy.plan import make

PYTHON = PythonFacts("3.12.1", "CPython", "cpython-312", ".cpython-312-x86_64-linux-gnu.so", "", False, False, "x86_64", "glibc 2.36")
NAMES = ("torch", "sgl-kernel", "sglang-kernel", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl", "own")
PATHS = (
    "torch/__init__.py", "torch/lib/libc10.so", "sgl_kernel/__init__.py", "sgl_kernel/ops.abi3.so", "own/__init__.py", "own/ops.so",
    "nvidia/cudnn/lib/libcudnn.so.9", "nvidia/nccl/lib/libnccl.so.2", "nvidia/__init__.py", "lib/mscclpp.so", "single.so",
    "single.so/inner.so", "own/ops.so/deep/inner.so",
)  # fmt: skip

# A tree: {path: its owners' names, the first first, or nobody}, over some distributions. No path is a file and a directory.
Made = tuple[tuple[str, ...], dict[str, tuple[str, ...]]]


@st.composite
def trees(draw: st.DrawFn) -> Made:
    names = tuple(draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)))
    owners = st.lists(st.sampled_from(names), unique=True, max_size=2) if names else st.just([])
    files = draw(st.dictionaries(st.sampled_from(PATHS), owners))
    whole = {path: found for path, found in files.items() if not any(other.startswith(f"{path}/") for other in files)}
    return names, {path: tuple(sorted(found, key=names.index)) for path, found in whole.items()}


def manifest_parts(tree: Made) -> tuple[tuple[Distribution, ...], tuple[FileEntry, ...]]:
    """Describe a tree as a snapshot does."""
    names, files = tree
    owned = {name: sorted(path for path, owners in files.items() if owners[:1] == (name,)) for name in names}
    shared = {name: tuple(sorted(path for path, owners in files.items() if name in owners[1:])) for name in names}
    dists = tuple(
        Distribution(name, "1", f"{name}.dist-info", packages=import_packages(owned[name]), shares=shared[name]) for name in names
    )
    entries = (
        FileEntry(path, "f", 0o644, 1, f"{path} {owners}", "stock" if owners else "unowned", names.index(owners[0]) if owners else -1)
        for path, owners in files.items()
    )
    return dists, tuple(sorted(entries))


def facts(tree: Made) -> dict[str, Any]:
    """Describe it as the agent's ABI facts do."""
    names, files = tree
    dists = [{"name": name, "version": "1", "owns": [path for path, owners in files.items() if name in owners]} for name in names]
    return {"tree": {"files": {path: {} for path in files if ".so" in path}, "dists": dists}}


@settings(max_examples=300, deadline=None)
@given(source=trees(), target=trees(), data=st.data())
def test_the_oracle_judges_the_tree_that_the_plan_makes(source: Made, target: Made, data: st.DataObject) -> None:
    whole = data.draw(st.booleans()) or not source[0]
    moved = source[0] if whole else tuple(data.draw(st.lists(st.sampled_from(source[0]), unique=True, min_size=1)))
    dists, files = manifest_parts(source)
    theirs, there = manifest_parts(target)
    plan = make(
        "s", Manifest("a", "/a", PYTHON, dists, files),
        Inventory("b", "/b", "lib", PYTHON, None, "", theirs, there, 1 << 40, 1 << 40), only=() if whole else moved,
    )  # fmt: skip
    judged = abi.compose(abi.load(facts(source), "a"), abi.load(facts(target), "b"), moved, whole)
    assert {entry.path for entry in plan.result.files if ".so" in entry.path} == set(judged.result.tree.objects)
    assert sorted(dist.name for dist in plan.result.distributions) == sorted(dist.name for dist in judged.result.tree.dists)
    for path, origin in judged.origin.items():
        owners = (source if origin == "source" else target)[1][path]
        assert next(e.digest for e in plan.result.files if e.path == path) == f"{path} {owners}"


def test_what_makes_a_distribution_go() -> None:
    coming = [Part("sglang-kernel", "sglang-kernel 2", frozenset({"sgl_kernel"}), frozenset({"lib/m.so"})),
              Part("nvidia-cudnn-cu13", "nvidia-cudnn-cu13 9", frozenset({"nvidia"}), frozenset())]  # fmt: skip
    there = [
        Part("sglang-kernel", "", frozenset(), frozenset()), Part("sgl-kernel", "", frozenset({"sgl_kernel"}), frozenset()),
        Part("other", "", frozenset(), frozenset({"lib/m.so"})), Part("nvidia-cudnn-cu12", "", frozenset(), frozenset()),
        Part("nvidia-nccl-cu12", "", frozenset({"nvidia"}), frozenset()), Part("cudnn-cu12", "", frozenset(), frozenset()),
    ]  # fmt: skip
    rules = replacement(coming, there, [0, 1])
    assert {there[index].key: gone.why for index, gone in rules.gone.items()} == {
        "sglang-kernel": "replaced by sglang-kernel 2",
        "sgl-kernel": "owns `sgl_kernel`, which sglang-kernel 2 brings",
        "other": "owns `lib/m.so`, which sglang-kernel 2 brings",
        "nvidia-cudnn-cu12": "the same library as nvidia-cudnn-cu13 9, for another CUDA",
    }
    assert not rules.stays("sgl_kernel/left.py", -1) and rules.stays("nvidia/left.so", -1) and rules.stays("left.py", -1)
    assert rules.comes("sgl_kernel/patch.py", -1) and not rules.comes("nvidia/stray.so", -1)
