"""A controller that is killed: run an effect of the product, SIGKILL at a change to a file or at an event it tells.

`python -m tests.faults.controller CONFIG` (JSON: `act`, `venv`, `home`, `snapshot`, `python`, `killer`; for some acts
`serve`: port and env of a launch, or `files`: texts to keep).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from ddtree_deploy import overlay, upkeep
from ddtree_deploy.events import Event, Progress
from ddtree_deploy.launch import Options, lifecycle
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.fixtures.world import BRIEF, World, local

SERVE = Options(wait=120, completions=1, drain=20)


def _emit(event: Event) -> None:
    if not isinstance(event, Progress):
        sys.audit("tests.emit", type(event).__name__)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    store = Store.open(Path(config["home"]))
    world = World(Path(), store, Path(), Path(config["venv"]), config["snapshot"])
    host = local(config["venv"], python=config["python"])
    sys.dont_write_bytecode = True
    if config["killer"]:
        text = Path(__file__).with_name("killer.py").read_text()
        names = {"ROLE": "controller", "CONFIG": config["killer"], "WRAPPER": ""}
        exec(compile(text, "killer", "exec"), names)
    if config["act"] == "push":
        world.push(host=host, emit=_emit, options=BRIEF)
    elif config["act"] == "rollback":
        world.rollback(host=host, emit=_emit, seconds=BRIEF.confirm_timeout)
    elif config["act"] == "snapshot":
        print(take(host, store, probe=False, label=config.get("label", ""), emit=_emit).ref.id)
    elif config["act"] == "launch":
        request = Request(engine="standalone", model="tiny", gpus=0, **config["serve"])
        lifecycle.launch(lifecycle.prepare(host, request, _emit), SERVE, _emit)
    elif config["act"] == "restart":
        lifecycle.restart(host, options=SERVE, emit=_emit)
    elif config["act"] == "stop":
        lifecycle.stop(host, emit=_emit)
    elif config["act"] == "overlay":
        contents = {hashlib.sha256(text.encode()).hexdigest(): text.encode() for text in config["files"]}
        overlay.keep(store, [overlay.Overlay("0", "test", (), contents)])
    elif config["act"] == "prune":
        upkeep.prune(store, 1)
    else:
        raise SystemExit(f"unknown act {config['act']}")


if __name__ == "__main__":
    main()
