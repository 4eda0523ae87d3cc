"""How fast a server answers: plain, DFlash and DDTree side by side; and the tree budget that is best on a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.launch import PANEL, PARALLEL, WHAT, request_of, target, variables
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.bench.measure import Arm
    from ddtree_deploy.bench.plan import Load
    from ddtree_deploy.launch.argv import Request

HOW = "Measurement"
FIRST_PORT = 31000

Extra = Annotated[
    list[str] | None, typer.Argument(metavar="[-- SERVER ARGS]", help="After `--`: verbatim to each server.", show_default=False)
]
Requests = Annotated[int, typer.Option("--requests", metavar="N", min=1, help="Answers of a measurement, at least.", rich_help_panel=HOW)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", min=2, help="Tokens of an answer, at most.", rich_help_panel=HOW)]
Concurrency = Annotated[str, typer.Option("--concurrency", metavar="1,4,16", help="Requests at a time.", rich_help_panel=HOW)]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="How often each is measured.", rich_help_panel=HOW)]
Prompts = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="A prompt a line, or .jsonl with `prompt`.", rich_help_panel=HOW)
]
Engine = Annotated[Literal["sglang", "standalone"] | None, typer.Option("--engine", help="Which server (sglang).", rich_help_panel=WHAT)]
Model = Annotated[str | None, typer.Option("--model", metavar="DIR|ID", help="The target model.", rich_help_panel=WHAT)]
Drafter = Annotated[str | None, typer.Option("--drafter", metavar="DIR|ID", help="Its DFlash drafter.", rich_help_panel=WHAT)]
Profile = Annotated[str, typer.Option("--profile", metavar="NAME", help="`[profiles.NAME]` of ddtree.toml.", rich_help_panel=WHAT)]
Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for each server.", rich_help_panel=WHAT)
]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=0, help="GPUs of a server.", rich_help_panel=PARALLEL)]
Tp = Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor parallelism.", rich_help_panel=PARALLEL)]
Wait = Annotated[float, typer.Option("--wait", metavar="SECS", min=1, envvar="DDTREE_WAIT", help="Until a server must serve.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "bench", panel=PANEL, acts=True, examples=(
        "bench ct200", "bench ct200 --profile big --variants plain,dflash,ddtree:31,ddtree:63 --concurrency 1,4,16 --report out",
        "bench local --engine standalone --model tiny --max-tokens 32 -n",
    ))(bench)  # fmt: skip
    command(app, "tune", panel=PANEL, acts=True, examples=(
        "tune ct200 --profile big", "tune ct200 --profile big --budgets 15,31,63,127 --concurrency 1,4,16 --out budgets.txt",
    ))(tune)  # fmt: skip


def bench(
    ui: Ui,
    name: flags.OptionalTarget = "",
    extra: Extra = None,
    variants: Annotated[
        str,
        typer.Option("--variants", metavar="A,B", help="`plain`, `dflash`, `ddtree`, `ddtree:BUDGET`; all three.", rich_help_panel=HOW),
    ] = "",
    concurrency: Concurrency = "1,4",
    rounds: Rounds = 3,
    passes: Annotated[
        int, typer.Option("--passes", metavar="N", min=1, help="In turn: how often all are started.", rich_help_panel=HOW)
    ] = 1,
    requests: Requests = 16,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0, help="0: greedy, texts can be compared.", rich_help_panel=HOW)
    ] = 0.0,
    prompts: Prompts = None,
    together: Annotated[
        bool | None, typer.Option("--together/--in-turn", help="All servers at once; so on a CPU.", rich_help_panel=HOW)
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Write bench.html, .svg and .json there.", rich_help_panel=HOW)
    ] = None,
    engine: Engine = None,
    model: Model = None,
    drafter: Drafter = None,
    profile: Profile = "",
    port: Annotated[
        int | None, typer.Option("--port", metavar="PORT", help="Which server; for new ones the first port (31000).", rich_help_panel=WHAT)
    ] = None,
    env: Env = None,
    gpus: Gpus = None,
    tp: Tp = None,
    wait: Wait = 900.0,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Measure plain decoding, DFlash and DDTree side by side.

    Tokens per second, acceptance and latencies, on the same prompts, in one run. What runs on the host is measured as it is. With a
    model, an engine, a profile or variants, servers of its own are launched, warmed, measured in alternating rounds, and stopped.
    Requests are made on the host itself.
    """
    from ddtree_deploy.bench import measure, plan, stats
    from ddtree_deploy.bench import prompts as texts
    from ddtree_deploy.bench.report import Result
    from ddtree_deploy.config import load as settings
    from ddtree_deploy.launch.lifecycle import Options
    from ddtree_deploy.render import bench as views

    name, words = _apart(name, extra)
    levels = plan.numbers(concurrency)
    asked = plan.Load(texts.read(prompts) if prompts else texts.DEFAULT, requests, max_tokens, temperature)
    own = bool(model or engine or profile or variants)
    named = plan.variants(variants or plan.VARIANTS) if own else ()
    host = target(name, venv, transport, accept_new_host_key and not dry_run)
    said = {"gpus": gpus, "model": model, "drafter": drafter, "engine": engine, "tp": tp, "port": port or FIRST_PORT}
    base = request_of(settings().profiles, profile, "", host.venv, said, variables(env), words)[0] if own else None
    at_once = base is not None and (base.gpus == 0 if together is None else together)
    arms = measure.fresh(host, base, named, at_once, ui.emit) if base else (measure.running(host, str(port or ""), ui.emit),)
    steps = plan.steps(len(arms), levels, rounds, passes=passes, together=at_once, fresh=own)
    if dry_run:
        views.planned(ui, arms, plan.told(steps, asked, [arm.variant.name for arm in arms]))
        return
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    options = Options(wait=wait, completions=3, drain=0, restart="no")
    samples = measure.run(host, arms, steps, asked, options, ui.emit, lambda which, ready: views.serving(ui, which, ready))
    about = _about(arms, base, asked, rounds * passes, at_once)
    alike = () if temperature else stats.agreements(samples, len(asked.prompts))
    result = Result(host.name, stats.cells(samples), alike, about)
    views.measured(ui, result)
    if report is not None:
        views.write(ui, report, result)


def tune(
    ui: Ui,
    name: flags.OptionalTarget = "",
    extra: Extra = None,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="7,15,31", help="Budgets to try; a server each.", rich_help_panel=HOW)
    ] = "7,15,31,63",
    concurrency: Concurrency = "1,2,4,8,16",
    rounds: Rounds = 2,
    requests: Requests = 8,
    max_tokens: MaxTokens = 128,
    prompts: Prompts = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the table there too, as SGLang reads it.", rich_help_panel=HOW)
    ] = None,
    engine: Engine = None,
    model: Model = None,
    drafter: Drafter = None,
    profile: Profile = "",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="Where the servers listen, one after the other.", rich_help_panel=WHAT)
    ] = FIRST_PORT,
    env: Env = None,
    gpus: Gpus = None,
    tp: Tp = None,
    wait: Wait = 900.0,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    dry_run: flags.DryRun = False,
) -> None:
    """Find the tree budget that is best at each batch size.

    It is left on the host for `launch --budget auto`. A server without speculation and one for each budget are launched in turn; what
    a verify pass costs by its tokens is fitted to their rounds, and the budget with the most tokens per second chosen for each number
    of requests at a time.
    """
    from ddtree_deploy.bench import measure, plan
    from ddtree_deploy.bench import prompts as texts
    from ddtree_deploy.bench import tune as model_of
    from ddtree_deploy.config import load as settings
    from ddtree_deploy.launch.lifecycle import Options
    from ddtree_deploy.render import bench as views

    name, words = _apart(name, extra)
    sizes = plan.numbers(budgets, "--budgets")
    host = target(name, venv, transport, accept_new_host_key and not dry_run)
    said = {"gpus": gpus, "model": model, "drafter": drafter, "engine": engine, "tp": tp, "port": port}
    base = request_of(settings().profiles, profile, "", host.venv, said, variables(env), words)[0]
    # The standalone server answers requests in turns, never as a batch: there is one batch size.
    levels = plan.numbers(concurrency) if base.engine == "sglang" else (1,)
    asked = plan.Load(texts.read(prompts) if prompts else texts.DEFAULT, requests, max_tokens, waves=3)
    named = plan.variants(",".join(["plain", *(f"ddtree:{size}" for size in sizes)]))
    arms = measure.fresh(host, base, named, base.gpus == 0, ui.emit)
    steps = plan.steps(len(arms), levels, rounds, together=base.gpus == 0)
    if dry_run:
        views.planned(ui, arms, plan.told(steps, asked, [arm.variant.name for arm in arms]))
        return
    options = Options(wait=wait, completions=3, drain=0, restart="no")
    samples = measure.run(host, arms, steps, asked, options, ui.emit, lambda which, ready: views.serving(ui, which, ready))
    tuned = model_of.fit(samples, {"plain": 0, **{f"ddtree:{size}": size for size in sizes}})
    kept = measure.keep(host, arms[-1], tuned.table, ui.emit)
    if out is not None:
        out.write_text(tuned.table.replace(",", "\n") + "\n", "utf-8")
    views.tuned(ui, host.name, tuned, kept)


def _apart(name: str, extra: list[str] | None) -> tuple[str, tuple[str, ...]]:
    """Return the host and the words after `--`; without a host the first of them was taken for it."""
    words = tuple(extra or ())
    return ("", (name, *words)) if name.startswith("-") else (name, words)


def _about(arms: Sequence[Arm], base: Request | None, asked: Load, rounds: int, together: bool) -> Mapping[str, str]:
    """Say what was measured, for a report that is read without its command line."""
    from datetime import UTC, datetime

    from ddtree_deploy.render.launch import command_line

    out = {"when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    facts: Mapping[str, Any] = next((arm.prepared.facts for arm in arms if arm.prepared), {})
    if base is not None:
        version = f" {facts['sglang']}" if base.engine == "sglang" else ""
        out |= {"engine": base.engine + version, "model": base.model, "drafter": base.drafter or "–"}
        out["GPUs"] = ", ".join(str(gpu["name"]) for gpu in list(facts["gpus"])[: base.gpus]) or "none"
        out["servers"] = "all up at once, measured in alternation" if together else "one after the other"
    for arm in arms:
        started = arm.prepared
        out[arm.variant.name] = command_line(started.argv, started.command.env) if started else f"server {arm.name}, as it ran"
    tokens = f"up to {asked.max_tokens} tokens each, temperature {asked.temperature:g}"
    out["asked"] = f"{len(asked.prompts)} prompts, at least {asked.requests} answers a measurement, {tokens}"
    return {**out, "rounds": str(rounds)}
