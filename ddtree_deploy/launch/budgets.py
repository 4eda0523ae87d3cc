"""Budget tables that `tune` left on a host, and which of them belongs to a launch. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddtree_deploy.launch.argv import BUDGET_TABLE, TABLE_FLAG, Request, degrees
from ddtree_deploy.models import Check


def key(facts: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return what a table holds for: another model, drafter, engine, number or kind of GPUs needs one of its own."""
    tp, dp = degrees(request) if request.gpus else (0, 0)
    gpus = [str(gpu["name"]) for gpu in list(facts["gpus"])[: request.gpus]]
    return {"engine": request.engine, "model": request.model, "drafter": request.drafter, "tp": tp, "dp": dp, "gpus": gpus}


def apply(facts: Mapping[str, Any], request: Request) -> tuple[Request, tuple[Check, ...]]:
    """Return the request with the host's table where its budget is left open (`auto`), and what to say of it."""
    if request.budget != "auto" or request.algorithm != "ddtree":
        return request, ()
    wanted = key(facts, request)
    known = [one for one in facts.get("budgets") or [] if isinstance(one, Mapping)]
    found = [one for one in known if all(one.get(name) == value for name, value in wanted.items())]
    text = str(found[-1].get("table")) if found else ""
    if not BUDGET_TABLE.fullmatch(text):
        return request, ()
    # One entry is a plain number, which every engine takes; a table only the edited SGLang and the first plugin.
    budget = text.partition(":")[2] if "," not in text else text
    several = TABLE_FLAG in facts["flags"] or str(facts["sglang"]).startswith("0.5.12")
    if ":" in budget and not several:
        said = f"the tuned table `{text}` is not used: this engine takes one budget"
        return request, (Check("budget", "warn", said, (), "give one of its budgets with `--budget N`"),)
    measured = re.sub(r"[^\w :.-]", "", str(found[-1].get("measured")))
    return replace(request, budget=budget), (Check("budget", "ok", f"budget {budget}, tuned here at {measured}"),)
