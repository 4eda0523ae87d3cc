"""The ABI oracle: compose the tree that would result, and say before a byte is sent whether it will load there.

Pure: facts in (`agent.abi_facts.collect` on both hosts), verdict out. How it is used:

1. A snapshot keeps `collect(root, python, env)` beside its manifest. `load(facts, "snapshot 3f9a1c2")` reads it.
2. The target's agent runs `collect(root, python, env, sonames=wanted([source]))`, so that libraries only the snapshot
   needs are looked up there too.
3. `judge(source, target, names, allow)` gives a `Verdict`: `checks` (models.Check rows for a plan), `ok`, `removed`
   (what must go from the target with it), `solution` (the smallest set when it blocks). `verdict_to_json` carries all
   of it.
4. Without `--only`: `smallest_set(source, target, roots(source, profile_roots))` says what moves, and why each was added.
5. `inspect(site)` judges one environment as it stands: `verify --level link`, `doctor`.

The rooms, from the ground up: `model` (facts), `closure` (what the loader would do), `cuda` (tables), `compose` (target
minus replaced plus moved), `case` (what the rules look at), `rules_*` (K1-K16), `tags` (a summary for people),
`solver`, `judge`, `report` (JSON and lines).
"""

from ddtree_deploy.abi.closure import Closure, Miss, closure
from ddtree_deploy.abi.compose import Composition, Removal, compose
from ddtree_deploy.abi.judge import Allowance, Verdict, inspect, judge
from ddtree_deploy.abi.model import Site, load, wanted
from ddtree_deploy.abi.report import gpu_checks, lines, verdict_from_json, verdict_to_json
from ddtree_deploy.abi.solver import Solution, Step, roots, smallest_set

__all__ = [
    "Allowance",
    "Closure",
    "Composition",
    "Miss",
    "Removal",
    "Site",
    "Solution",
    "Step",
    "Verdict",
    "closure",
    "compose",
    "gpu_checks",
    "inspect",
    "judge",
    "lines",
    "load",
    "roots",
    "smallest_set",
    "verdict_from_json",
    "verdict_to_json",
    "wanted",
]
