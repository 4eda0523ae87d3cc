"""The ABI oracle: compose the tree that would result, and say before a byte is sent whether it will load there.

Pure: facts in (`agent.abi_facts.collect` on both hosts), verdict out. The rooms, from the ground up: `model` (facts),
`closure` (what the dynamic loader would do), `compose` (target minus replaced plus moved), `rules*` (checks K1-K16),
`tags` (a summary for people), `solver` (the smallest set that must move), `report` (JSON and lines).
"""

from ddtree_deploy.abi.closure import Closure, Miss, closure
from ddtree_deploy.abi.compose import Composition, Removal, compose
from ddtree_deploy.abi.judge import Allowance, Verdict, inspect, judge
from ddtree_deploy.abi.model import Site, load, wanted
from ddtree_deploy.abi.report import lines, verdict_from_json, verdict_to_json
from ddtree_deploy.abi.solver import Step, Solution, smallest_set

__all__ = [
    "Allowance", "Closure", "Composition", "Miss", "Removal", "Site", "Solution", "Step", "Verdict", "closure", "compose",
    "inspect", "judge", "lines", "load", "smallest_set", "verdict_from_json", "verdict_to_json", "wanted",
]  # fmt: skip
