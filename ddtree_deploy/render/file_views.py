"""What `put` and `venvs` show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_deploy.render import as_json
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import plural, size

if TYPE_CHECKING:
    from ddtree_deploy.put import Put
    from ddtree_deploy.render.ui import Ui
    from ddtree_deploy.venvs import Search


def put(ui: Ui, done: Put, dry_run: bool) -> None:
    """Show where a file went, in one line."""
    ui.result(put=as_json.plain(done), dry_run=dry_run)
    if ui.json:
        return
    what = f"{done.host}:{done.path}"
    if done.already:
        ui.data(f"{what}: already there, sha256 {done.sha256[:12]}, mode {done.mode:04o}")
        return
    verb = ("would replace" if done.replaced else "would be new") if dry_run else "replaced" if done.replaced else "new"
    proof = f", compiled by {done.python}" if done.python else ""
    verified = "" if dry_run else ", verified there"
    ui.data(f"{what}: {verb}, {size(done.size)}, sha256 {done.sha256[:12]}{verified}{proof}, mode {done.mode:04o}")


def venvs(ui: Ui, host: str, found: Search, needs: Sequence[str]) -> None:
    """List environments, a column for each module that was asked for; errors below, in full."""
    ui.document("venvs", {"host": host, "needs": needs, **as_json.fields(found)})
    words = {"ok": "yes", "missing": "no"}
    rows, styles = [], []
    for env in found.environments:
        imports = {tried.module: tried.version or words.get(tried.state, tried.state) for tried in env.imports}
        count = "" if env.kind == "interpreter" else str(env.distributions)
        rows.append((env.path, env.kind, env.version or "broken", count, *(imports.get(name, "") for name in needs)))
        styles.append("green" if needs and env.able else "")
    ui.table(columns("environment", "kind", "python", "#packages", *needs), rows, styles)
    for env in found.environments:
        if env.error:
            ui.data(f"{env.path}: {env.error}")
        for tried in env.imports:
            if tried.error:
                ui.data(f"{env.path}: {tried.module}: {tried.error}")
    for path in found.skipped:
        ui.say(f"{host}: {path} was not searched: a network file system (look there with `--root`)")
    if found.cut:
        ui.say(f"{host}: the search ended early, at {found.cut}; name the place with `--root DIR`")
    if needs:
        able = sum(env.able for env in found.environments)
        ui.say(f"{able} of {plural(len(found.environments), 'environment')} can import {', '.join(needs)}")
