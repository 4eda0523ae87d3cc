#!/usr/bin/python
"""Ansible module `ddtree_push`: `ddtree-deploy push` for one host, run where the snapshots are (`delegate_to: localhost`)."""

from __future__ import annotations

import json
import os
import subprocess

DOCUMENTATION = r"""
module: ddtree_push
short_description: Bring a snapshot of a Python serving environment to a host
description:
  - Runs C(ddtree-deploy push) on the machine that holds the snapshots, so delegate it to C(localhost); nothing is installed on the target.
  - Changed when a new generation was made live; not changed when the host already had it.
  - In check mode it plans (C(push -n)), writes nothing anywhere, and fails when the push would be refused.
  - A failure with C(rc=17) means that the old generation serves; with C(rc=18), that somebody must look at the host.
options:
  target: {description: The host as C(ddtree-deploy) knows it, type: str, required: true}
  snapshot: {description: Identity or label; the newest if not given, type: str}
  venv: {description: The virtual environment there, type: str}
  transport: {description: How to reach it, type: str, choices: [openssh, fabric]}
  only: {description: Only these distributions, type: list, elements: str, default: []}
  also: {description: Besides those, these, type: list, elements: str, default: []}
  verify: {description: Try the imports there, type: bool, default: true}
  create: {description: Make the venv if it is missing, type: bool, default: false}
  base: {description: "With C(create): take over this venv", type: str}
  rollback: {description: Go back when a proof fails after the switch, type: bool, default: true}
  confirm_timeout: {description: Seconds until the host goes back unless confirmed, type: float}
  lock_wait: {description: Seconds to wait for another run there, type: float}
  under_running: {description: Switch although processes run from the venv, type: bool, default: false}
  accept_gap: {description: Accept a moment without packages at the first push where RENAME_EXCHANGE is missing, type: bool, default: false}
  accept_new_host_key: {description: Record an unknown host key, type: bool, default: false}
  allow: {description: "Blocks of the oracle to take on, C(CHECK:WHAT)", type: list, elements: str, default: []}
  reason: {description: Why they are allowed; kept in the host's ledger, type: str}
  executable: {description: The command, type: path, default: ddtree-deploy}
  chdir: {description: Where C(ddtree.toml) lies, type: path}
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
"""

EXAMPLES = r"""
- name: Bring the known-good environment
  ddtree_push: {target: "{{ inventory_hostname }}", snapshot: known-good, venv: /opt/sglang/venv}
  delegate_to: localhost
"""

RETURN = r"""
generation: {description: What is live now, type: int, returned: when pushed}
previous: {description: What was live before, type: int, returned: when pushed}
snapshot: {description: The identity, type: str, returned: success}
verified: {description: Whether the imports were proved, type: bool, returned: when pushed}
packages: {description: "Packages that differ, with C(before) and C(after)", type: list, returned: when planned}
rc: {description: Exit code of the command, type: int, returned: always}
kind: {description: Class of the error, type: str, returned: failure}
restored: {description: "Whether a proof failed and the old generation is known to serve (C(rc=17))", type: bool, returned: failure}
"""

ARGUMENTS = {
    "target": {"type": "str", "required": True},
    "snapshot": {"type": "str"},
    "venv": {"type": "str"},
    "transport": {"type": "str", "choices": ["openssh", "fabric"]},
    "only": {"type": "list", "elements": "str", "default": []},
    "also": {"type": "list", "elements": "str", "default": []},
    "verify": {"type": "bool", "default": True},
    "create": {"type": "bool", "default": False},
    "base": {"type": "str"},
    "rollback": {"type": "bool", "default": True},
    "confirm_timeout": {"type": "float"},
    "lock_wait": {"type": "float"},
    "under_running": {"type": "bool", "default": False},
    "accept_gap": {"type": "bool", "default": False},
    "accept_new_host_key": {"type": "bool", "default": False},
    "allow": {"type": "list", "elements": "str", "default": []},
    "reason": {"type": "str"},
    "executable": {"type": "path", "default": "ddtree-deploy"},
    "chdir": {"type": "path"},
}


def argv(params, check):
    """Return the command line of a push, or of its plan."""
    words = [params["executable"], "push", params["target"], "--json"]
    for name, flag in (
        ("snapshot", "--snapshot"), ("venv", "--venv"), ("transport", "--transport"), ("base", "--base"),
        ("confirm_timeout", "--confirm-timeout"), ("lock_wait", "--lock-wait"), ("reason", "--reason"),
    ):  # fmt: skip
        if params.get(name) is not None:
            words += [flag, str(params[name])]
    for name, flag in (("only", "--only"), ("also", "--with"), ("allow", "--allow")):
        for value in params.get(name) or ():
            words += [flag, value]
    for name, flag in (
        ("create", "--create"), ("under_running", "--yes"), ("accept_gap", "--accept-gap"),
        ("accept_new_host_key", "--accept-new-host-key"),
    ):  # fmt: skip
        if params.get(name):
            words.append(flag)
    words += [flag for name, flag in (("verify", "--no-verify"), ("rollback", "--no-rollback")) if params.get(name) is False]
    return words + (["--dry-run"] if check else [])


def _lines(text):
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def outcome(code, out, err, check):
    """Turn how the command ended into what a module returns; `failed` with the message and the mend when it did not succeed."""
    lines = {line.get("type"): line for line in _lines(out)}
    plan = lines.get("plan", {})
    packages = [row for row in plan.get("packages", ()) if row.get("action") != "keep"]
    result = {"rc": code, "changed": False, "packages": packages, "snapshot": plan.get("snapshot", "")}
    if code or "result" not in lines:
        problem = lines.get("error", {})
        message = problem.get("message") or err.strip().splitlines()[-1:] or ["no answer"]
        result.update(
            failed=True,
            msg=message if isinstance(message, str) else message[0],
            mend=problem.get("mend", ""),
            causes=problem.get("causes", []),
            kind=problem.get("kind", "unknown"),
            log=problem.get("log", ""),
            restored=code == 17,
        )
        return result
    if check:
        blocks = [row["text"] for row in plan.get("checks", ()) if row.get("level") == "block"]
        result["changed"] = bool(plan.get("changed_files"))
        if blocks:
            result.update(failed=True, msg="the push would be refused: " + blocks[0], causes=blocks[1:], kind="incompatible")
        return result
    pushed = lines.get("pushed", {})
    result["changed"] = not pushed.get("already", False)
    result.update({name: pushed.get(name) for name in ("generation", "previous", "snapshot", "verified", "sent_bytes")})
    return result


def difference(packages):
    """Return the packages that differ as the two texts of Ansible's diff mode."""
    sides = {"before": [], "after": []}
    for row in packages:
        for side, lines in sides.items():
            if row.get(side):
                lines.append(f"{row['name']} {row[side]} ({row.get('files', 0)} files differ)\n")
    return {"before_header": "live packages", "after_header": "snapshot", **{side: "".join(lines) for side, lines in sides.items()}}


def push(params, check=False, diff=False):
    """Run the command and return the module's result."""
    try:
        done = subprocess.run(
            argv(params, check), cwd=params.get("chdir") or None, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
    except OSError as error:
        message = f"can not run `{params['executable']}`: {error.strerror}"
        mend = "install ddtree-deploy where the task runs, or set `executable`; the task has to run on the machine with the snapshots"
        return {"failed": True, "changed": False, "rc": 127, "kind": "usage", "msg": message, "mend": mend}
    result = outcome(done.returncode, done.stdout, done.stderr, check)
    if diff and result["changed"]:
        result["diff"] = difference(result["packages"])
    return result


def main():
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    result = push(module.params, module.check_mode, module._diff)
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
