"""The server's life: launch, logs, stop, restart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.hosts.base import Host
    from ddtree_deploy.launch.argv import Request

PANEL = "Serve"
WHAT, PARALLEL, READY = "What to serve", "GPUs and nodes", "Readiness"

Port = Annotated[int | None, typer.Option("--port", metavar="PORT", help="Which server: its port; the only one if not given.")]
Drain = Annotated[float | None, typer.Option("--drain", metavar="SECS", min=0, help="For answers in progress; 0 kills at once (30).")]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECS", min=1, envvar="DDTREE_WAIT", help="Until it must serve.", rich_help_panel=READY)
]
Completions = Annotated[int, typer.Option("--completions", metavar="N", min=1, help="Answers that prove it.", rich_help_panel=READY)]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "launch", panel=PANEL, acts=True, examples=(
        "launch --gpus 8", "launch ct200 --gpus 8 --model /models/qwen3-8b --drafter /models/qwen3-8b-dflash -n",
        "launch ct200 --like ct129-good", "launch local --engine standalone --model tiny --gpus 0",
        "launch ct200 --profile big -- --mem-fraction-static 0.8",
    ))(launch)  # fmt: skip
    command(app, "logs", panel=PANEL, examples=("logs ct200", "logs ct200 -f", "logs ct200 --since 10m"))(logs)
    command(app, "stop", panel=PANEL, acts=True, examples=("stop ct200", "stop ct200 --port 30000 --drain 0"))(stop)
    command(app, "restart", panel=PANEL, acts=True, examples=("restart ct200", "restart ct200 --port 30000"))(restart)


def target(name: str, venv: str | None, transport: str | None, accept_new_host_key: bool) -> Host:
    """Resolve a host; without a name `default_target`, else the only host that has generations."""
    from ddtree_deploy.config import load, resolve_host
    from ddtree_deploy.errors import DeployError, UsageProblem
    from ddtree_deploy.generations import generations

    config = load()
    if name or config.default_target or venv:
        return flags.host(name or ("" if config.default_target else "local"), venv, transport, accept_new_host_key)
    having = []
    for one, entry in config.hosts.items():
        if entry.venv:
            try:
                if generations(resolve_host(one, config, transport=transport)):
                    having.append(one)
            except DeployError:
                continue
    if len(having) != 1:
        known = f"{len(having)} hosts have generations: {', '.join(having)}" if having else "no host of ddtree.toml has a generation"
        raise UsageProblem(f"no host given, and {known}", mend="name one, or set `default_target`")
    return flags.host(having[0], None, transport, accept_new_host_key)


def launch(
    ui: Ui,
    name: flags.OptionalTarget = "",
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SERVER ARGS]", help="After `--`: verbatim to the server.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=0, help="GPUs of each node; 8 means tp 8.", rich_help_panel=PARALLEL)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR|ID", help="The target model; `tiny` comes along.", rich_help_panel=WHAT)
    ] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", metavar="DIR|ID", help="Its DFlash drafter.", rich_help_panel=WHAT)] = None,
    algorithm: Annotated[
        Literal["ddtree", "dflash", "none"] | None, typer.Option("--algorithm", help="How to speculate (ddtree).", rich_help_panel=WHAT)
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="N|auto|TABLE", help="Tree nodes without the root; or `1:63,4:31` by batch size.", rich_help_panel=WHAT
        ),
    ] = None,
    engine: Annotated[
        Literal["sglang", "standalone"] | None, typer.Option("--engine", help="Which server (sglang).", rich_help_panel=WHAT)
    ] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="PORT", help="Where it listens (30000).", rich_help_panel=WHAT)] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDR", help="On which address (127.0.0.1).", rich_help_panel=WHAT)
    ] = None,
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME", help="`[profiles.NAME]` of ddtree.toml; `default` if it is there.", rich_help_panel=WHAT),
    ] = "",
    like: Annotated[
        str,
        typer.Option(
            "--like",
            metavar="ID|LABEL",
            help="As the server that ran when this snapshot was taken.",
            rich_help_panel=WHAT,
            autocompletion=flags.complete_snapshot,
        ),
    ] = "",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for the server (repeatable).", rich_help_panel=WHAT)
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor parallelism over all nodes.", rich_help_panel=PARALLEL)
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", min=1, help="Replicas.", rich_help_panel=PARALLEL)] = None,
    router: Annotated[bool, typer.Option("--router", help="SGLang's router over the replicas.", rich_help_panel=PARALLEL)] = False,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="A,B", help="One server over several hosts; the first is rank 0.", rich_help_panel=PARALLEL)
    ] = "",
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", metavar="HOST:PORT", help="Where the nodes meet.", rich_help_panel=PARALLEL)
    ] = "",
    wait: Wait = 900.0,
    completions: Completions = 8,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Start it and do not wait.", rich_help_panel=READY)] = False,
    keep: Annotated[
        bool, typer.Option("--keep-failed", help="Leave a server that is not ready in time running.", rich_help_panel=READY)
    ] = False,
    rollback_on_failure: Annotated[
        bool, typer.Option("--rollback-on-failure", help="Not ready: go back a generation, and serve from there.", rich_help_panel=READY)
    ] = False,
    restart_policy: Annotated[
        Literal["on-failure", "no"], typer.Option("--restart", help="When a server that served dies.", rich_help_panel=READY)
    ] = "on-failure",
    drain: Drain = None,
    no_nccl: Annotated[bool, typer.Option("--no-nccl-check", help="Do not try an all-reduce first.", rich_help_panel=flags.SAFETY)] = False,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Start a server on a host, and prove that it serves.

    The host is looked at first; the server then runs there in a session of its own, from the live generation, with JIT caches
    of its own. It is followed until it answers real completions. With `-n` only its command line is shown.
    """
    from ddtree_deploy.config import load
    from ddtree_deploy.errors import ServerNotReady, UsageProblem
    from ddtree_deploy.launch import lifecycle
    from ddtree_deploy.launch import nodes as several
    from ddtree_deploy.launch.fallback import go_back
    from ddtree_deploy.render import launch as views

    words = tuple(extra or ())
    if name.startswith("-"):  # `launch -- --flag`: no host was given, and the first word after `--` is the server's
        name, words = "", (name, *words)
    hosts = [flags.host(one.strip(), None, transport, accept_new_host_key and not dry_run) for one in nodes.split(",")] if nodes else []
    if not hosts:
        hosts = [target(name, venv, transport, accept_new_host_key and not dry_run)]
    said: dict[str, Any] = {
        "gpus": gpus, "model": model, "drafter": drafter, "algorithm": algorithm, "budget": budget, "engine": engine, "port": port,
        "listen": listen, "tp": tp, "dp": dp, "router": router or None, "rendezvous": rendezvous or None,
    }  # fmt: skip
    request, manifest, notes = request_of(load().profiles, profile, like, hosts[0].venv, said, variables(env), words)
    options = lifecycle.Options(wait, completions, 30.0 if drain is None else drain, restart_policy, keep, not no_nccl, detach)
    if len(hosts) > 1 and rollback_on_failure:
        raise UsageProblem("`--rollback-on-failure` knows one host", mend="roll each node back with `ddtree-deploy rollback`")
    try_nccl = options.nccl and not dry_run
    if len(hosts) > 1:
        ranks = several.prepare_all(hosts, request, ui.emit, nccl=try_nccl)
    else:
        ranks = (lifecycle.prepare(hosts[0], request, ui.emit, nccl=try_nccl),)
    for rank in ranks:
        if manifest is not None:
            from ddtree_deploy.launch.profiles import differences

            notes = (*notes, *differences(manifest, rank.facts))
        views.prepared(ui, rank, notes, only=dry_run)
        notes = ()
    if dry_run:
        ui.result(dry_run=True)
        return
    if len(ranks) > 1:
        ready = several.launch_all(ranks, options, ui.emit, lambda server: views.begun(ui, server))
        if ready is None:
            ui.result(detached=True)
        else:
            views.ready(ui, ready)
        return
    if detach:
        server = lifecycle.begin(ranks[0], options, ui.emit)
        views.begun(ui, server)
        views.detached(ui, server)
        return
    try:
        views.ready(ui, lifecycle.launch(ranks[0], options, ui.emit, lambda server: views.begun(ui, server)))
    except ServerNotReady as problem:
        if not rollback_on_failure:
            raise
        raise go_back(hosts[0], str(ranks[0].request.port), problem, options, ui.emit) from problem


def variables(given: list[str] | None) -> dict[str, str]:
    from ddtree_deploy.errors import UsageProblem

    out = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageProblem(f"`--env` wants NAME=VALUE: {text}")
        out[name] = value
    return out


def request_of(
    profiles: Mapping[str, Mapping[str, Any]],
    profile: str,
    like: str,
    venv: str,
    said: Mapping[str, Any],
    env: Mapping[str, str],
    extra: tuple[str, ...],
) -> tuple[Request, Any, tuple[str, ...]]:
    """Put a request together: the command line over the profile, or over the launch that a snapshot captured."""
    from ddtree_deploy.launch.argv import Request
    from ddtree_deploy.launch.profiles import captured, from_capture, from_profile

    given = {key: value for key, value in said.items() if value is not None}
    if like:
        from ddtree_deploy.store import Store

        store = Store.open()
        manifest = store.manifest(store.resolve(like))
        request, notes = from_capture(captured(manifest), manifest, venv)
        if "gpus" in given and not {"tp", "dp"} & set(given):
            given.update(tp=0, dp=0)
        return replace(request, **{**given, "env": {**request.env, **env}, "extra": (*request.extra, *extra)}), manifest, notes
    base = from_profile(profiles, profile)
    merged = {**base, **given, "env": {**base["env"], **env}, "extra": (*base["extra"], *extra)}
    if "gpus" not in merged and merged.get("engine") == "standalone":
        merged["gpus"] = 0
    return Request(**merged), None, ()


def stop(
    ui: Ui,
    name: flags.OptionalTarget = "",
    port: Port = None,
    drain: Drain = None,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Stop a server, once the answers in progress have ended.

    All its processes end; what it held (port, GPU memory) is looked at afterwards.
    """
    from ddtree_deploy.launch import stop as run
    from ddtree_deploy.render import launch as views

    host = target(name, venv, transport, accept_new_host_key)
    views.stopped(ui, run(host, str(port or ""), drain=drain, emit=ui.emit))


def restart(
    ui: Ui,
    name: flags.OptionalTarget = "",
    port: Port = None,
    drain: Drain = None,
    wait: Wait = 900.0,
    completions: Completions = 8,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Stop a server and start it again from what is live now.

    It starts as it was launched.
    """
    from ddtree_deploy.launch import Options
    from ddtree_deploy.launch import restart as run
    from ddtree_deploy.render import launch as views

    host = target(name, venv, transport, accept_new_host_key)
    views.ready(ui, run(host, str(port or ""), options=Options(wait=wait, completions=completions), drain=drain, emit=ui.emit))


def logs(
    ui: Ui,
    name: flags.OptionalTarget = "",
    port: Port = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until it ends.")] = False,
    since: Annotated[str, typer.Option("--since", metavar="10m|TIME", help="From then on: `90s`, `10m`, `2h`, or an ISO time (UTC).")] = "",
    lines: Annotated[int, typer.Option("--lines", metavar="N", min=0, help="Without --since: the last N.")] = 100,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Print what a server wrote.

    Its last lines, those from a time on (--since), or what comes (-f).
    """
    from ddtree_deploy.launch.lifecycle import follow_log

    host = target(name, venv, transport, accept_new_host_key)
    text: list[str] = []

    def write(piece: str) -> None:
        text.append(piece) if ui.json else ui.data(piece.rstrip("\n"))

    follow_log(host, str(port or ""), write, lines=lines, since=moment(since), follow=follow and not ui.json, emit=ui.emit)
    ui.document("logs", {"host": host.name, "text": "".join(text)})


def moment(text: str, now: float | None = None) -> float | None:
    """Read `90s`, `10m`, `2h`, `3d` (ago) or an ISO time (UTC unless it says otherwise) as a Unix time; None for nothing."""
    import time
    from datetime import UTC, datetime

    from ddtree_deploy.errors import UsageProblem

    if not text:
        return None
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return (time.time() if now is None else now) - float(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageProblem(f"`--since` wants `10m` or an ISO time: {text}") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
