"""Try the ABI oracle on real wheels: what it predicts from facts alone, beside what `dlopen` does on the composed tree.

`make oracle` runs this. It downloads about 14 GB of wheels, unpacks each once, and composes trees by hard links. Every
cell asks: the distribution moved into a tree with that torch; does each of its shared objects load after `import
torch`? One process a file (a fork of one that has imported torch), RTLD_NOW, a stub `libcuda.so.1` in LD_LIBRARY_PATH.
See docs/oracle.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from oracle_trials.bench import PARTS, PURE, Bench, command_line, copy_by_hand, hosts, lay, open_bench
from oracle_trials.report import Cell, report

from ddtree_deploy import abi
from ddtree_deploy.abi.closure import importable
from ddtree_deploy.agent import abi_facts

REPO = Path(__file__).resolve().parent.parent
TORCHES = ("2.14.1", "2.11.0", "2.9.1")
KERNELS = ("sgl-kernel==0.3.21", "sglang-kernel==0.4.2.post2", "sglang-kernel==0.4.10")
OTHERS = (
    "sgl-deep-gemm==0.1.0", "torchvision==0.24.1", "torchvision==0.26.0", "torchvision==0.29.1", "torchao==0.17.0",
    "xformers==0.0.35", "torchaudio==2.9.1", "torchaudio==2.11.0", "vllm==0.21.0", "vllm==0.33.0",
)  # fmt: skip


def matrix(bench: Bench, torch: str, dists: Iterable[str]) -> Iterator[Cell]:
    """Predict and try every distribution moved into a clean tree of one torch."""
    base = bench.with_closure(f"torch=={torch}") + [bench.fetch(name) for name in PURE]
    sources = {name: abi.load(bench.dist_facts(name), name) for name in dists}
    root = bench.compose(base)
    target = abi.load(bench.facts(root, abi.wanted(sources.values())), f"torch {torch}")
    for part in ("torch", "triton", "nvidia"):
        paths = [path for path in target.tree.objects if path.startswith(f"{part}/")]
        yield try_cell(bench, f"torch {torch}", f"its {part}", target, paths, root)
    for name, source in sources.items():
        composition = abi.compose(source, target, {dist.key for dist in source.tree.dists})
        added = lay(bench.fetch(name), root)
        paths = [path for path, origin in composition.origin.items() if origin == "source"]
        yield try_cell(bench, f"torch {torch}", name.replace("==", " "), composition.result, paths, root)
        for path in added:
            path.unlink()


def try_cell(bench: Bench, tree: str, dist: str, site: abi.Site, paths: Iterable[str], root: Path) -> Cell:
    """Predict and try one cell; a cell that an interrupted run has tried already is taken from its notes."""
    notes = bench.root / "cells.json"
    done: dict[str, list[dict[str, object]]] = json.loads(notes.read_text()) if notes.exists() else {}
    key = f"{tree}|{dist}"
    if key in done:
        tried, reasons = done[key]
        return Cell(tree, dist, {path: tuple(row) for path, row in tried.items()}, reasons)  # type: ignore[misc,arg-type]
    known = abi.closure(site)
    names = [p for p in paths if importable(p, site.tree.objects[p], "cp312")]
    really = bench.truth(root, names)
    files, reasons = {}, {}
    for path in names:
        # Death in a constructor came after everything was bound: the link held.
        happened = really.get(path, "not tried")
        files[path] = (known.loads(path), happened == "ok" or happened.startswith("signal"), happened)
        missed = (*known.torch, *known.files.get(path, ()))
        if missed:
            reasons[path] = f"{missed[0].item}" + (f" (+{len(missed) - 1})" if len(missed) > 1 else "")
    cell = Cell(tree, dist, files, reasons)
    notes.write_text(json.dumps({**done, key: [files, reasons]}))
    row = f"{tree:<44} {dist:<28} {cell.predicted!s:<6} {cell.real!s:<6} {len(files):>3} files, wrong: {cell.wrong}"
    print(row, flush=True)
    return cell


def story(bench: Bench) -> tuple[list[Cell], list[str]]:
    """Ask before the accident: sglang alone, torch without its kernels, then push the set that is named and load it."""
    old, new, pure = hosts(bench)
    source = abi.load(bench.facts(bench.compose(pure + new)), "ct129")
    root = bench.compose(pure + old)
    target = abi.load(bench.facts(root, abi.wanted([source])), "ct200")
    text = []
    nvidia = [dist.key for dist in source.tree.dists if dist.key.startswith("nvidia-")]
    for title, asked in (("sglang", ["sglang"]), ("torch,triton,nvidia*", ["torch", "triton", *nvidia])):
        verdict = abi.judge(source, target, asked)
        text += ["", f"`diff ct200 --only {title}`", "", "```", *abi.lines(verdict), "```"]
    first = abi.judge(source, target, ["sglang"]).solution
    assert first is not None
    verdict = abi.judge(source, target, first.names)
    text += ["", "The set that it names, judged in turn:", "", "```", *abi.lines(verdict), "```"]
    gone = {(name, version) for name, version, _why in verdict.removed}
    for dist in target.tree.dists:
        for path in dist.owns if (dist.name, dist.version) in gone else ():
            (root / path).unlink(missing_ok=True)
    for directory in new:
        if abi.load({"tree": abi_facts.tree(str(directory))}, "").tree.dists[0].key in verdict.moved:
            lay(directory, root)
    bench.close()
    after = abi.load(bench.facts(root), "ct200")
    groups = {top: [p for p in after.tree.objects if p.startswith(f"{top}/")] for top in ("torch", "sgl_kernel", "lib")}
    cells = [try_cell(bench, "cu12 tree + smallest set", top, after, paths, root) for top, paths in groups.items() if paths]
    return cells, text


def accident(bench: Bench, text: list[str]) -> Iterator[Cell]:
    """Replay the story: parts of a cu130 tree laid over a cu128 tree, by copying over, and after rm -rf.

    What is said of each tree as it stands is added to `text`.
    """
    old, new, pure = hosts(bench)
    for name in ("clean", "merged", "replaced"):
        root = bench.compose(pure + (new if name == "clean" else old))
        if name != "clean":
            for part in PARTS:
                if name == "replaced":
                    shutil.rmtree(root / part)
                copy_by_hand(new, part, root)
        site = abi.load(bench.facts(root), name)
        groups: dict[str, list[str]] = {}
        for path in site.tree.objects:
            top = path.split("/")[0]
            if top in ("torch", "sgl_kernel", "deep_gemm", "lib") or path.startswith("_mscclpp"):
                groups.setdefault({"lib": "mscclpp"}.get(top, top.split(".")[0]), []).append(path)
        for group, paths in sorted(groups.items()):
            yield try_cell(bench, f"{name} tree", group, site, paths, root)
        verdict = abi.inspect(site)
        text += ["", f"`doctor` on the {name} tree:", "", "```"]
        text += [f"{item.check} {item.text}" for item in verdict.blocks] or ["nothing that blocks"]
        text += ["```"]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--report", type=Path, default=REPO / "docs" / "oracle.md")
    options = parser.parse_args()
    bench = open_bench(parser, options)
    for name in (*KERNELS, *OTHERS, *PURE):
        bench.fetch(name)
    for torch in TORCHES:
        bench.with_closure(f"torch=={torch}")
    bench.build_stub()
    cells, text = story(bench)
    cells += accident(bench, text)
    cells += [cell for torch in TORCHES for cell in matrix(bench, torch, (*KERNELS, *OTHERS))]
    options.report.write_text(report(cells, text, bench), encoding="utf-8")
    bench.close()
    shutil.rmtree(bench.tree, ignore_errors=True)
    if not options.keep:
        shutil.rmtree(options.root)
    too_kind = sum(row[0] and not row[1] for cell in cells for row in cell.files.values())
    print(f"{len(cells)} cells, {too_kind} files said to load that do not")
    return 1 if too_kind else 0


if __name__ == "__main__":
    sys.exit(main())
