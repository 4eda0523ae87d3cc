"""Write docs/exit-codes.md from the error classes (`--check`: only tell whether it is fresh)."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import ddtree_deploy
from ddtree_deploy.errors import DeployError

PAGE = Path(__file__).parent.parent / "docs" / "exit-codes.md"
HEAD = """# Exit codes

Made from the error classes by `scripts/exit_codes.py`; a test keeps it fresh. A code that is not listed means failure.
With `--json` the last line of a failed command is an object with `"type": "error"`, `code`, `kind`, `message`,
`causes`, `mend` and `log`; `kind` is finer than the code.

| code | when |
|---|---|
| 0 | done, or already up to date; `doctor`: no row fails (warnings are no failure) |
| 1 | a bug (the log's path is printed); `doctor`: a row fails |
| 3 | `diff --exit-code`: something would change |
| 130, 143 | stopped by SIGINT, by SIGTERM; the message names the step, the host's journal is consistent |
| 141 | who read our output went away (`\\| head`); nothing is printed |

A script must tell 17 from 18: after 17 the old generation serves, after 18 somebody must look at the host.

| code | kind | what it means | what to do, unless the error itself says better |
|---|---|---|---|
"""


def classes() -> list[type[DeployError]]:
    """Return every error class, by code."""
    for module in pkgutil.walk_packages(ddtree_deploy.__path__, "ddtree_deploy."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, left = [], [DeployError]
    while left:
        found.append(left.pop())
        left += found[-1].__subclasses__()
    return sorted(set(found), key=lambda cls: (cls.exit_code, cls.kind))


def page() -> str:
    """Return the page's text."""
    rows = []
    for cls in classes():
        what = (cls.__doc__ or "").strip().splitlines()[0] if cls is not DeployError else "A bug in ddtree-deploy."
        rows.append(f"| {cls.exit_code} | `{cls.kind}` | {what} | {cls.default_mend} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        fresh = PAGE.exists() and PAGE.read_text("utf-8") == page()
        print(f"{PAGE.name}: {'fresh' if fresh else 'stale: run python scripts/exit_codes.py'}")
        return 0 if fresh else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
