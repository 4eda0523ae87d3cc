"""Proofs as the user reads them: a line a level, then each failure with its traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_deploy.errors import IntegrityFailure, ProofFailed
from ddtree_deploy.render import as_json
from ddtree_deploy.render.plan_views import check_lines
from ddtree_deploy.render.words import plural, seconds, some

if TYPE_CHECKING:
    from ddtree_deploy.models import ImportProof, Proofs
    from ddtree_deploy.render.ui import Ui


def level_lines(proofs: Proofs) -> list[str]:
    """Say what each level that ran found."""
    lines = []
    if proofs.hashed is not None:
        vouched = f" ({proofs.vouched} vouched for by inode and times)" if proofs.vouched else ""
        wrong = f"{plural(len(proofs.bad_files), 'file')} wrong" if proofs.bad_files else "all as recorded"
        lines.append(f"files   {proofs.hashed + proofs.vouched} checked{vouched}: {wrong}")
    if proofs.compiled is not None:
        wrong = f"{plural(len(proofs.syntax_errors), 'source')} wrong" if proofs.syntax_errors else "all compile"
        lines.append(f"syntax  {plural(proofs.compiled, 'source')}: {wrong}")
    if proofs.imports is not None:
        failed = sum(not proof.ok and not proof.baseline for proof in proofs.imports)
        known = sum(not proof.ok and proof.baseline for proof in proofs.imports)
        spent = seconds(sum(proof.seconds for proof in proofs.imports))
        wrong = f"{failed} failed" if failed else "all fine but those that failed on the source" if known else "all fine"
        lines.append(f"import  {plural(len(proofs.imports), 'package')} in {spent}: {wrong}")
    return lines + [f"{check.id:<7} {check.text}" for check in proofs.extra if check.level == "ok"]


def import_lines(proof: ImportProof) -> list[str]:
    """Show a failed import with its traceback, indented."""
    death = f" (died of {proof.signal})" if proof.signal and proof.signal not in proof.error else ""
    lines = [f"import {proof.module}: {proof.error or 'failed'}{death}"]
    lines += [f"    {line}" for line in proof.traceback.rstrip().splitlines()]
    lines += [f"    loaded from outside the tree: {library}" for library in proof.foreign_libraries]
    return lines


def failure_lines(proofs: Proofs, verbose: int = 0) -> list[str]:
    """Show each failure; many bad files are cut unless verbose."""
    shown, more = some(proofs.bad_files, 1000 if verbose else 20)
    lines = [f"file {path}" for path in shown]
    lines += [f"… and {more} more (-v)"] if more else []
    for path, text in proofs.syntax_errors:
        lines.append(f"syntax {path}:")
        lines += [f"    {line}" for line in text.rstrip().splitlines()]
    for proof in proofs.imports or ():
        if not proof.ok and not proof.baseline:
            lines += import_lines(proof)
        elif not proof.ok and verbose:
            lines.append(f"import {proof.module}: fails on the source too: {proof.error}")
    return lines + [line for line, _style in check_lines(tuple(check for check in proofs.extra if check.level != "ok"), verbose)]


def show(ui: Ui, host: str, proofs: Proofs) -> None:
    """Print proofs as data."""
    ui.json_line({"type": "proofs", "host": host, "ok": proofs.ok, **as_json.fields(proofs)})
    if ui.quiet:
        return
    ui.data(f"{host}: {proofs.where}")
    for line in level_lines(proofs):
        ui.data(f"  {line}")
    for line in failure_lines(proofs, ui.verbose):
        ui.data(f"  {line}", "red")


def check(host: str, proofs: Proofs) -> None:
    """Raise IntegrityFailure when a file differs, else ProofFailed when another proof failed."""
    if proofs.bad_files:
        count = plural(len(proofs.bad_files), "file")
        raise IntegrityFailure(
            f"`{host}`: {count} not as recorded: {proofs.bad_files[0]}",
            mend=f"see `ddtree-deploy status {host}`; push again, or go back with `ddtree-deploy rollback {host}`",
        )
    if not proofs.ok:
        failed = [f"import of `{proof.module}`" for proof in proofs.imports or () if not (proof.ok or proof.baseline)]
        failed += [f"syntax of {path}" for path, _text in proofs.syntax_errors]
        failed += [f"{item.id}: {item.text}" for item in proofs.extra if item.level == "block"]
        shown, more = some(failed, 3)
        rest = f" and {more} more" if more else ""
        raise ProofFailed(
            f"`{host}`: proof failed: {', '.join(shown)}{rest}",
            mend=f"go back with `ddtree-deploy rollback {host}`, or push a snapshot that works",
        )
