"""Replay the accident on real wheels through the command line, and check what it says at each step.

A host with CUDA 13 (torch 2.11.0+cu130, sglang-kernel 0.4.2.post2, sglang 0.5.11), one with CUDA 12 (torch 2.9.1+cu128,
sgl-kernel 0.3.21, sglang 0.5.9), and one where the first was laid over the second by `cp -r`. Downloads 8 GB, needs 40 GB in
--root, which is deleted afterwards unless --keep is given. See docs/oracle.md; `tests/abi/test_story.py` is the same story
with tiny shared objects.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from oracle_trials.bench import PARTS, Bench, command_line, copy_by_hand, hosts, link_over, open_bench


class Story:
    """Three venvs of hard links, a store of their own, and the commands that are run on them."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.root = bench, bench.root / "story"
        self.env = {**os.environ, "DDTREE_HOME": str(self.root / "home"), "NO_COLOR": "1"}
        self.wrong = 0

    def venv(self, name: str, dists: Iterable[Path]) -> Path:
        """Make a venv of unpacked wheels; return its site-packages."""
        subprocess.run([self.bench.python, "-m", "venv", "--without-pip", str(self.root / name)], check=True)
        site = next((self.root / name).glob("lib/python*/site-packages"))
        for dist in dists:
            link_over(dist, site)
        return site

    def run(self, *argv: str) -> tuple[int, str]:
        """Run one command, show it and what it prints; return its exit code and that."""
        print(f"\n$ ddtree-deploy {shlex.join(argv)}", flush=True)
        command = [sys.executable, "-m", "ddtree_deploy", *argv]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if not re.match(r"local: [a-z]+ \d+ %", line)]
        print("\n".join(lines), flush=True)
        return done.returncode, done.stdout

    def expect(self, what: str, *, holds: bool) -> None:
        """Say whether a claim holds, and remember when it does not."""
        self.wrong += not holds
        print(f"{'as it should be' if holds else 'WRONG'}: {what}", flush=True)


def tell(story: Story) -> None:
    """Ask for sglang alone, for torch without its kernels, push the set that is named, and look at the merged tree."""
    old, new, pure = hosts(story.bench)
    story.venv("ct129", [*pure, *new])
    story.venv("ct200", [*pure, *old])
    merged = story.venv("merged", [*pure, *old])
    for part in PARTS:
        copy_by_hand(new, part, merged)
    target = str(story.root / "ct200")

    # The static libraries were left out when the wheels were unpacked: drift, which is accepted here.
    story.run("snapshot", "-q", "local", "--venv", str(story.root / "ct129"), "--allow-drift")
    _code, shown = story.run("diff", "local", "--venv", target, "--only", "sglang")
    story.expect("sglang alone blocks", holds="block K9" in shown and "sglang 0.5.11 requires torch==2.11.0" in shown)
    hint = re.search(r"go together: ddtree-deploy (push .*)", shown)
    story.expect("the set is named, and one command", holds=hint is not None and "--only 'nvidia*'" in hint.group(1))
    _code, shown = story.run("diff", "local", "--venv", target, "--only", "torch", "--only", "triton", "--only", "nvidia*")
    broken = "would no longer work, and is not moved: sgl-kernel 0.3.21, sglang 0.5.9"
    story.expect("what nobody touches and would break is named", holds=broken in shown)
    code, _shown = story.run("push", "local", "--venv", target, "--only", "sglang", "-y")
    story.expect("the push of sglang alone is refused", holds=code == 13)
    if hint is not None:
        code, shown = story.run(*shlex.split(hint.group(1)), "-y", "--no-verify")  # no driver here: no import can be proved
        story.expect("the push of the set passes", holds=code == 0 and "generation 1 active" in shown)
    code, shown = story.run("doctor", "local", "--venv", str(story.root / "merged"))
    known = "a merged tree, CUDA 13 over CUDA 12: torch 2.11.0+cu130 was laid over torch 2.9.1"
    story.expect("doctor knows the merged tree", holds=code == 1 and known in shown)


def main() -> int:
    parser = command_line(__doc__)
    options = parser.parse_args()
    bench = open_bench(parser, options)
    story = Story(bench)
    shutil.rmtree(story.root, ignore_errors=True)
    story.root.mkdir()
    try:
        tell(story)
    finally:
        shutil.rmtree(story.root if options.keep else options.root)
    return 1 if story.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
