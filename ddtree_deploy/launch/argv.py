"""Build the server's command line from what is wanted and from the flags that the deployed engine knows. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ddtree_deploy.errors import UsageProblem

ENGINES = ("sglang", "standalone")
ALGORITHMS = ("ddtree", "dflash", "none")
BUDGET_FLAG, TABLE_FLAG = "--speculative-ddtree-budget", "--speculative-ddtree-budget-table"
BUDGET_TABLE = re.compile(r"\d+:\d+(,\d+:\d+)*")

#: What we set ourselves, by every spelling that SGLang 0.5.11 and 0.5.23 take.
OWNED: Mapping[str, tuple[str, ...]] = {
    "--model-path": ("--model-path", "--model"),
    "--host": ("--host",),
    "--port": ("--port",),
    "--tp-size": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "--dp-size": ("--dp-size", "--data-parallel-size", "--dp"),
    "--nnodes": ("--nnodes",),
    "--node-rank": ("--node-rank",),
    "--dist-init-addr": ("--dist-init-addr",),
    "--speculative-algorithm": ("--speculative-algorithm",),
    "--speculative-draft-model-path": ("--speculative-draft-model-path", "--speculative-draft-model"),
    BUDGET_FLAG: (BUDGET_FLAG,),
    TABLE_FLAG: (TABLE_FLAG,),
    "--drafter": ("--drafter",),
    "--mode": ("--mode",),
    "--budget": ("--budget",),
    "--tiny": ("--tiny",),
}
_CANONICAL = {spelling: name for name, spellings in OWNED.items() for spelling in spellings}


@dataclass(frozen=True, slots=True)
class Request:
    """What the user wants served. `gpus` is per node; `tp` and `dp` (0: not said) are SGLang's, over all nodes.

    `budget` counts tree nodes without the root: a number, `auto` (the engine's own choice), or a table by batch size
    (`1:63,4:31,16:15`). `nodes` hosts run one server; `rank` is this one's place and `rendezvous` rank 0's HOST:PORT.
    """

    engine: str = "sglang"
    model: str = ""
    drafter: str = ""
    algorithm: str = "ddtree"
    budget: str = "auto"
    gpus: int = 1
    tp: int = 0
    dp: int = 0
    port: int = 30000
    listen: str = "127.0.0.1"
    router: bool = False
    nodes: int = 1
    rank: int = 0
    rendezvous: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """What follows the interpreter: `-m MODULE ARGS`, and the variables that carry what no flag can."""

    tail: tuple[str, ...]
    env: Mapping[str, str]


def build(request: Request, flags: Collection[str] = ()) -> Command:
    """Return the command line. `flags` are those that the deployed SGLang knows: they decide how a budget is told.

    Raises UsageProblem for what does not fit together, and for an extra argument that contradicts what we set.
    """
    check(request)
    tail, env = (_sglang if request.engine == "sglang" else _standalone)(request, frozenset(flags))
    return Command((*tail, *_extra(tail, request.extra)), {**env, **request.env})


def check(request: Request) -> None:
    """Raise UsageProblem unless the request can be meant."""
    if request.engine not in ENGINES:
        raise UsageProblem(f"unknown engine: `{request.engine}`", mend=f"use one of {', '.join(ENGINES)}")
    if request.algorithm not in ALGORITHMS:
        raise UsageProblem(f"unknown algorithm: `{request.algorithm}`", mend=f"use one of {', '.join(ALGORITHMS)}")
    if not request.model:
        raise UsageProblem("no model given", mend="name one with `--model`, or in a profile of ddtree.toml")
    if request.algorithm != "none" and not request.drafter and request.model != "tiny":
        mend = "name one with `--drafter`, or use `--algorithm none`"
        raise UsageProblem(f"`--algorithm {request.algorithm}` needs a drafter", mend=mend)
    if request.budget != "auto" and not re.fullmatch(r"[1-9]\d*", request.budget) and not BUDGET_TABLE.fullmatch(request.budget):
        raise UsageProblem(f"`--budget` must be a number, `auto`, or a table such as `1:63,4:31`: {request.budget}")
    if not 0 < request.port < 65536:
        raise UsageProblem(f"`--port` must lie between 1 and 65535: {request.port}")


def degrees(request: Request) -> tuple[int, int]:
    """Return (tp, dp): `--gpus 8` means tp 8, unless `--tp` or `--dp` say otherwise. Raises UsageProblem when GPUs are left over."""
    total = request.gpus * request.nodes
    dp = request.dp or 1
    inside = "--enable-dp-attention" in request.extra  # there dp divides the tp group instead of multiplying it
    tp = request.tp or (total if inside else total // dp)
    used = tp if inside else tp * dp
    if used != total or tp < 1:
        raise UsageProblem(
            f"tp {tp} x dp {dp} uses {used} of {total} GPUs", mend="make `--gpus` their product, or leave `--tp` and `--dp` away"
        )
    return tp, dp


def _sglang(request: Request, flags: frozenset[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    if request.gpus < 1:
        raise UsageProblem("`--engine sglang` needs a GPU: `--gpus` is 0", mend="use `--engine standalone` on a CPU")
    tp, dp = degrees(request)
    module = "sglang_router.launch_server" if request.router else "sglang.launch_server"
    out = ["-m", module, "--model-path", request.model, "--host", request.listen, "--port", str(request.port)]
    out += ["--tp-size", str(tp)]
    out += ["--dp-size", str(dp)] if dp > 1 or request.router else []
    if request.nodes > 1:
        place = ["--nnodes", str(request.nodes), "--node-rank", str(request.rank), "--dist-init-addr", request.rendezvous]
        out += place
    env: dict[str, str] = {}
    if request.algorithm != "none":
        out += ["--speculative-algorithm", request.algorithm.upper(), "--speculative-draft-model-path", request.drafter]
    if request.algorithm == "ddtree" and request.budget != "auto":
        table = ":" in request.budget
        flag = TABLE_FLAG if table else BUDGET_FLAG
        if flag in flags or not flags:
            out += [flag, request.budget]
        else:
            # A plugin can not add flags: it reads its settings from the environment.
            env["SGLANG_DDTREE_BUDGET_TABLE" if table else "SGLANG_DDTREE_BUDGET"] = request.budget
    return tuple(out), env


def _standalone(request: Request, _flags: frozenset[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    if request.gpus > 1 or request.nodes > 1 or request.tp > 1 or request.dp > 1 or request.router:
        raise UsageProblem("the standalone server runs on a CPU or one GPU", mend="use `--engine sglang` for more")
    if ":" in request.budget:
        raise UsageProblem("the standalone server takes one budget, not a table", mend="give `--budget N`")
    out = ["-m", "ddtree.server"]
    out += ["--tiny"] if request.model == "tiny" else ["--model", request.model]
    out += ["--drafter", request.drafter] if request.drafter and request.algorithm != "none" else []
    out += ["--mode", {"none": "plain"}.get(request.algorithm, request.algorithm)]
    out += ["--budget", request.budget] if request.algorithm == "ddtree" and request.budget != "auto" else []
    out += [] if request.gpus else ["--device", "cpu"]
    return (*out, "--host", request.listen, "--port", str(request.port)), {}


def _extra(ours: tuple[str, ...], extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return `extra` without what says again what we say. Raises UsageProblem where it says something else."""
    said = {_CANONICAL.get(name, name): value for name, value, _words in pairs(ours)}
    kept: list[str] = []
    for name, value, words in pairs(extra):
        canonical = _CANONICAL.get(name)
        if canonical is None or canonical not in said:
            if canonical in ("--tp-size", "--dp-size", "--speculative-algorithm", "--nnodes", "--node-rank"):
                mend = f"say it as an option of launch, not as `{name}`"
                raise UsageProblem(f"`{name}` after `--` contradicts the options before it", mend=mend)
            kept += words
        elif said[canonical] != value:
            wanted = f"`{canonical} {said[canonical]}`" if said[canonical] is not None else f"`{canonical}`"
            raise UsageProblem(f"`{name} {value}` after `--` contradicts {wanted}", mend="change the option of launch instead")
    return tuple(kept)


def pairs(argv: tuple[str, ...]) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """Split a command line into (flag, value or None, its words as they stood), also `--flag=value`.

    A word that belongs to no flag, such as a flag's second value, is returned as a flag without value.
    """
    out: list[tuple[str, str | None, tuple[str, ...]]] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word.startswith("--") and "=" in word:
            name, _, value = word.partition("=")
            out.append((name, value, (word,)))
        elif word.startswith("-") and at < len(argv) and not re.match(r"-{1,2}[A-Za-z]", argv[at]):
            out.append((word, argv[at], (word, argv[at])))
            at += 1
        else:
            out.append((word, None, (word,)))
    return out


def unknown_flags(tail: tuple[str, ...], flags: Collection[str]) -> tuple[str, ...]:
    """Return the flags of a command line that the deployed engine does not know (argparse's abbreviations count as known)."""
    words = [name for name, _value, _words in pairs(tail) if name.startswith("--")]
    return tuple(name for name in words if name not in flags and sum(flag.startswith(name) for flag in flags) != 1)


def alike(tail: tuple[str, ...], request: Request) -> Request:
    """Return `request` with what a recorded command line says, where the request itself leaves it open.

    What launch has no option for goes to `extra`. A value that was hidden as a secret (`***`) is left out.
    """
    standalone = "ddtree.server" in tail
    words = tail[2:] if tail[:1] == ("-m",) else tail
    found: dict[str, str | None] = {}
    extra: list[str] = []
    for name, value, written in pairs(words):
        canonical = _CANONICAL.get(name)
        if canonical or (standalone and name == "--device"):
            found[canonical or name] = value
        elif value != "***":
            extra += written
    algorithm = (found.get("--speculative-algorithm") or found.get("--mode") or "none").lower()
    if standalone and "--mode" not in found:
        algorithm = "ddtree"
    tp, dp = int(found.get("--tp-size") or 1), int(found.get("--dp-size") or 1)
    inside = "--enable-dp-attention" in extra
    return replace(
        request,
        engine="standalone" if standalone else "sglang",
        model=request.model or ("tiny" if "--tiny" in found else found.get("--model-path") or ""),
        drafter=request.drafter or found.get("--speculative-draft-model-path") or found.get("--drafter") or "",
        algorithm="none" if algorithm == "plain" else algorithm if algorithm in ALGORITHMS else "none",
        budget=found.get(TABLE_FLAG) or found.get(BUDGET_FLAG) or found.get("--budget") or request.budget,
        gpus=int(found.get("--device") != "cpu") if standalone else tp if inside else tp * dp,
        tp=0 if standalone or dp == 1 else tp,
        dp=0 if standalone or dp == 1 else dp,
        port=int(found.get("--port") or request.port),
        listen=found.get("--host") or request.listen,
        extra=tuple(extra),
    )
