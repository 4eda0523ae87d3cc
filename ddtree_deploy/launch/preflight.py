"""Judge, before anything starts, whether a launch can work on its host: facts in, checks with mends out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree_deploy.abi.cuda import coverage
from ddtree_deploy.launch.argv import Command, Request, unknown_flags
from ddtree_deploy.launch.models import OVER
from ddtree_deploy.models import Check

Facts = Mapping[str, Any]

#: `--enable-dp-attention` on one node makes SGLang use these, counted from its port (PortArgs of 0.5.11).
DERIVED = range(233, 239)
#: A GPU with less than this share free is in use by somebody.
FREE_SHARE = 0.9
CACHE_BYTES = 4 << 30


def size(count: float) -> str:
    """Say an amount of memory or disk in GiB."""
    return f"{count / (1 << 30):.1f} GiB"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ports(request: Request) -> list[int]:
    """Return the ports that the server will need on this host."""
    needed = [request.port]
    if "--enable-dp-attention" in request.extra and request.nodes == 1:
        needed += [request.port + step for step in DERIVED]
    if request.nodes > 1 and request.rank == 0:
        needed.append(int(request.rendezvous.rpartition(":")[2]))
    return needed


def judge(facts: Facts, request: Request, command: Command) -> tuple[Check, ...]:
    """Return every check that applies; `block` stops the launch, `warn` is told."""
    rows: list[Callable[[Facts, Request, Command], list[Check]]] = [_port, _leftovers, _models, _pair, _cache_disk]
    rows += [_gpus, _memory, _archs, _flags, _algorithm, _router] if request.engine == "sglang" else [_standalone]
    if request.engine == "standalone" and request.gpus:
        rows += [_gpus, _memory]
    return tuple(check for row in rows for check in row(facts, request, command))


def chosen(facts: Facts, request: Request) -> list[Mapping[str, Any]]:
    """Return the GPUs that the server will see: those of CUDA_VISIBLE_DEVICES, else the first `--gpus`."""
    gpus = list(facts["gpus"])
    named = request.env.get("CUDA_VISIBLE_DEVICES", "")
    if named and all(part.strip().isdigit() for part in named.split(",")):
        wanted = [int(part) for part in named.split(",")]
        gpus = [gpu for index in wanted for gpu in gpus if gpu["index"] == index]
    return gpus[: request.gpus]


def _port(facts: Facts, request: Request, _command: Command) -> list[Check]:
    ours = {server["name"]: server for server in facts["servers"] if server and server["phase"] not in OVER}
    out = []
    for port, free, holder in facts["ports"]:
        what = f"port {port}" if port == request.port else f"port {port}, which SGLang derives from {request.port},"
        known = ours.get(str(port))
        if known:
            begun = known["launch"]
            text = f"a server of this venv is there already: {known['phase']}, launched by {begun['who']} at {begun['started']}"
            out.append(Check("port", "block", text, (holder,) if holder else (), "`restart` or `stop` it, or take another `--port`"))
        elif not free:
            mend = "stop that process, or take another `--port`"
            out.append(Check("port", "block", f"{what} is taken", (holder,) if holder else (), mend))
        else:
            out.append(Check("port", "ok", f"{what} is free"))
    return out


def _leftovers(facts: Facts, _request: Request, _command: Command) -> list[Check]:
    out = []
    for orphan in facts["orphans"]:
        pid, holds = orphan["pid"], orphan["devices"]
        text = f"pid {pid} is left of an earlier server" + (", and has GPUs open" if holds else "")
        out.append(Check("orphan", "block" if holds else "warn", text, (orphan["command"],), f"end it on the host: `kill -9 {pid}`"))
    for server in facts["servers"]:
        if server and server["phase"] == "orphaned":
            text = f"the server `{server['name']}` lives without its supervisor, in {server['processes']} process(es)"
            out.append(Check("orphan", "warn", text, (), f"`ddtree-deploy stop HOST --port {server['name']}`"))
    return out


def _models(facts: Facts, request: Request, _command: Command) -> list[Check]:
    out = []
    for what, flag in (("model", "--model"), ("drafter", "--drafter")):
        found = facts[what]
        name = found["name"]
        if not name or name == "tiny" or (what == "drafter" and request.algorithm == "none"):
            continue
        if found["hub"] and found["path"] is None:
            block = bool(found.get("offline"))
            text = f"`{name}` is not in the host's hub cache" + (", and HF_HUB_OFFLINE is set" if block else ": the server will fetch it")
            out.append(Check(what, "block" if block else "warn", text, (), f"copy it there and name its directory with `{flag}`"))
        elif found["path"] is None:
            out.append(Check(what, "block", f"there is no directory `{name}` on the host", (), f"correct `{flag}`, or copy it there"))
        elif found["config"] is None:
            out.append(
                Check(what, "block", f"`{name}` has no readable config.json", (), f"name the checkpoint's own directory with `{flag}`")
            )
        else:
            kinds = ", ".join(found["config"].get("architectures") or ["a model"])
            out.append(Check(what, "ok", f"`{name}`: {kinds}"))
    return out


def _pair(facts: Facts, request: Request, _command: Command) -> list[Check]:
    """Whether target and drafter belong together, by what both configs say."""
    target, drafter = facts["model"]["config"], facts["drafter"]["config"]
    if request.algorithm == "none" or not target or not drafter:
        return []
    wrong = []
    for key, word in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        if key in target and key in drafter and target[key] != drafter[key]:
            wrong.append(f"{word}: model {target[key]}, drafter {drafter[key]}")
    layers = target.get("num_hidden_layers")
    made_for = drafter.get("num_target_layers")
    if layers and made_for and layers != made_for:
        wrong.append(f"layers: the model has {layers}, the drafter was made for {made_for}")
    inner = drafter.get("dflash_config") or {}
    ids = drafter.get("target_layer_ids") or inner.get("target_layer_ids") or []
    if layers and any(not isinstance(one, int) or one >= layers for one in ids):
        wrong.append(f"the drafter reads layers {ids} of a model with {layers}")
    block = drafter.get("block_size") or inner.get("block_size")
    if request.algorithm == "ddtree" and isinstance(block, int) and not 2 <= block <= 32:
        wrong.append(f"block size {block}: DDTREE drafts 2 to 32 tokens")
    if wrong:
        return [
            Check("pair", "block", "model and drafter do not belong together", tuple(wrong), "name the drafter that was trained for it")
        ]
    return [Check("pair", "ok", f"model and drafter fit: block {block or '?'}, target layers {ids or '?'}")]


def _gpus(facts: Facts, request: Request, _command: Command) -> list[Check]:
    visible, using = list(facts["gpus"]), chosen(facts, request)
    if len(using) < request.gpus:
        there = "no GPU is" if not visible else f"{plural(len(visible), 'GPU')} {'is' if len(visible) == 1 else 'are'}"
        mend = f"lower `--gpus` to {len(using)}" if using else "use `--engine standalone --gpus 0`, or look at `nvidia-smi` there"
        return [Check("gpus", "block", f"{there} there, {request.gpus} {'is' if request.gpus == 1 else 'are'} wanted", (), mend)]
    kinds = {(gpu["name"], gpu["cc"]) for gpu in using}
    names = ", ".join(sorted(f"{name} (sm_{cc.replace('.', '')})" for name, cc in kinds))
    if len(kinds) > 1:
        rows = tuple(f"GPU {gpu['index']}: {gpu['name']}, {size(gpu['memory'])}" for gpu in using)
        return [
            Check(
                "gpus",
                "warn",
                "the GPUs are not alike: the slowest and the smallest decide",
                rows,
                "choose equal ones with CUDA_VISIBLE_DEVICES",
            )
        ]
    return [Check("gpus", "ok", f"{request.gpus} x {names}")]


def _memory(facts: Facts, request: Request, _command: Command) -> list[Check]:
    full = [gpu for gpu in chosen(facts, request) if gpu["memory"] and gpu["free"] < FREE_SHARE * gpu["memory"]]
    if not full:
        return []
    rows = tuple(f"GPU {gpu['index']}: {size(gpu['free'])} of {size(gpu['memory'])} free" for gpu in full)
    level = "block" if any(gpu["free"] < 0.1 * gpu["memory"] for gpu in full) else "warn"
    mend = "stop what uses them (`nvidia-smi` there), choose others with CUDA_VISIBLE_DEVICES, or lower `-- --mem-fraction-static`"
    return [Check("memory", level, f"{plural(len(full), 'GPU')} {'is' if len(full) == 1 else 'are'} in use already", rows, mend)]


def _archs(facts: Facts, request: Request, _command: Command) -> list[Check]:
    out = []
    capabilities = {gpu["cc"] for gpu in chosen(facts, request)}
    for cc in sorted(capabilities):
        numbers = tuple(int(part) for part in cc.split("."))
        pair = (numbers[0], numbers[1])
        without = [path for path, archs in facts["archs"].items() if not coverage(tuple(archs), pair)]
        # sgl_kernel ships one library a capability: one that serves is enough.
        kernels = [path for path in facts["archs"] if path.startswith("sgl_kernel/")]
        if kernels and not all(path in without for path in kernels):
            without = [path for path in without if path not in kernels]
        if without:
            mend = f"push builds for compute capability {cc}"
            out.append(Check("arch", "block", f"no code for a GPU of compute capability {cc}", tuple(without), mend))
    return out


def _flags(facts: Facts, _request: Request, command: Command) -> list[Check]:
    if not facts["sglang"] and not facts["flags"]:
        return [
            Check(
                "engine", "block", "there is no SGLang in the live tree", (), "push a snapshot that holds it, or use `--engine standalone`"
            )
        ]
    unknown = unknown_flags(command.tail, facts["flags"])
    if unknown:
        from ddtree_deploy.config_check import near

        rows = tuple(f"{flag}{near(flag, sorted(facts['flags']))}" for flag in unknown)
        return [
            Check(
                "flags",
                "block",
                f"sglang {facts['sglang']} does not know {plural(len(unknown), 'flag')}",
                rows,
                "correct them, or push a version that knows them",
            )
        ]
    return [Check("engine", "ok", f"sglang {facts['sglang'] or '(version unknown)'} knows every flag")]


def _algorithm(facts: Facts, request: Request, _command: Command) -> list[Check]:
    if request.algorithm != "ddtree":
        return []
    if facts["overlay"]:
        return [Check("overlay", "ok", "the DDTree overlay is in the tree")]
    plugin = facts["plugin"]
    if plugin and plugin["registered"]:
        return [Check("overlay", "ok", f"the DDTree plugin registers with sglang {facts['sglang']}")]
    if plugin:
        text = f"the DDTree plugin is in the tree, but does not register: {plugin['detail']}"
        return [Check("overlay", "block", text, tuple(plugin["lines"]), "push the overlay again, or use `--algorithm dflash`")]
    text = f"sglang {facts['sglang']} on the host does not know DDTREE"
    return [Check("overlay", "block", text, (), "push the overlay, or use `--algorithm dflash`")]


def _router(facts: Facts, request: Request, _command: Command) -> list[Check]:
    if not request.router or facts["router"]:
        return []
    return [
        Check(
            "router",
            "block",
            "`sglang-router` is not in the live tree",
            (),
            "push it with `--with sglang-router`, or leave `--router` away",
        )
    ]


def _standalone(facts: Facts, _request: Request, _command: Command) -> list[Check]:
    python = tuple(int(part) for part in facts["python"]["version"].split(".")[:2])
    if python < (3, 11):
        text = f"the standalone server needs Python 3.11, the venv has {facts['python']['version']}"
        return [Check("engine", "block", text, (), "use a venv of a newer Python, or `--engine sglang`")]
    if facts["missing"]:
        mend = "push them: `--with " + " --with ".join(facts["missing"][:4]) + "`"
        text = f"the venv lacks what the standalone server imports: {', '.join(facts['missing'])}"
        return [Check("engine", "block", text, (), mend)]
    return [Check("engine", "ok", "the venv has what the standalone server imports")]


def _cache_disk(facts: Facts, request: Request, _command: Command) -> list[Check]:
    out = []
    options = (facts["mount"] or {}).get("options", [])
    if "noexec" in options:
        text = f"`{facts['venv']}` lies on a noexec mount: compiled kernels will not load"
        out.append(Check("caches", "block", text, (), "remount it, or point TRITON_CACHE_DIR and its like elsewhere with `--env`"))
    if (facts["mount"] or {}).get("fs", "").startswith("nfs"):
        out.append(
            Check(
                "caches",
                "warn",
                "the JIT caches lie on NFS: many ranks that compile at once get in each other's way",
                (),
                "put the venv on a local disk",
            )
        )
    free = facts["disk"].get("free_bytes", facts["disk"].get("free", 0))
    if request.gpus and free < CACHE_BYTES:
        out.append(Check("caches", "warn", f"{size(free)} free for the JIT caches", (), "free some space: compiled kernels take gigabytes"))
    return out
