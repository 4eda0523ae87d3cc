"""What the documents say is what the program has: commands, exit codes, paths."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from ddtree_deploy.cli import build

ROOT = Path(__file__).parents[2]


def commands() -> dict[str, object]:
    """Return every command of the application by its full name."""
    found: dict[str, object] = {}
    left = [("", get_command(build()))]
    while left:
        prefix, command = left.pop()
        inner = getattr(command, "commands", None)
        if inner is None:
            found[prefix.strip()] = command
        else:
            left += [(f"{prefix} {name}", child) for name, child in inner.items()]
    return found


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text("utf-8").partition("## Commands")[2].partition("## What is promised")[0]
    assert len(commands()) > 15
    for name in commands():
        for word in name.split():
            assert re.search(rf"[`|\[, ]{word}\b", table), f"README's table of commands lacks `{name}`"


def test_the_readme_names_no_command_that_is_not_there() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    first_words = {name.split()[0] for name in commands()}
    for word in re.findall(r"ddtree-deploy +([a-z]+)", text):
        assert word in first_words, word


def test_every_help_ends_with_two_examples_or_more() -> None:
    for name, command in commands().items():
        lines = str(getattr(command, "epilog", "")).partition("Examples:\n")[2].splitlines()
        assert sum(f"ddtree-deploy {name.split()[0]}" in line for line in lines) >= 1 and len(lines) >= 2, name


def test_the_page_of_exit_codes_is_what_the_classes_say() -> None:
    argv = [sys.executable, "scripts/exit_codes.py", "--check"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_error_has_a_kind_of_its_own_a_mend_and_a_documented_code() -> None:
    # Of the package as a process of its own loads it: tests may define errors too.
    code = (
        "import runpy, json; ns = runpy.run_path('scripts/exit_codes.py');"
        "print(json.dumps([[c.__name__, c.kind, c.default_mend, c.exit_code] for c in ns['classes']()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    kinds = [kind for _name, kind, _mend, _code in rows]
    assert len(rows) >= 17 and len(set(kinds)) == len(kinds), kinds
    assert all(mend and not mend.endswith(".") for _name, _kind, mend, _code in rows)


PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "docs|scripts|tests|ddtree_deploy|ddtree|sglang_overlay|benchmarks|integrations"


def test_paths_that_the_documents_name_are_there() -> None:
    named = [(page, path) for page in PAGES for path in re.findall(rf"`((?:{ROOMS})/[\w./]*)`", page.read_text("utf-8"))]
    assert named
    for page, path in named:
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_links_lead_to_pages_and_to_headings_that_are_there() -> None:
    def heading(line: str) -> str:
        return re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-")

    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")) if ":" not in link]
    assert links
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        headings = [heading(line) for line in re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)] if anchor else []
        assert not anchor or anchor in headings, f"{page.name} links to {link}"
