"""Time a push side by side with scp -r, rsync -a, rsync -a --checksum and tar | ssh tar, between two namespaces with a real sshd.

Run as root on a quiet machine: `python benchmarks/transfer.py --venv SRC [--rounds 3] [--mbit 1000] [--out FILE]`. SRC is a venv of
real CUDA wheels; `--make SRC` installs one first (3 GB or more). Each first copy gets a fresh file system; rounds are interleaved;
medians and ratios are printed as Markdown. CPU seconds are those of all processes of a run, in both machines.
The target's disk is a fresh ext4, or a tmpfs with --ram.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.costs import DDTREE, Account, Cost, timed
from tests.harness.lab import Lab, lab_missing, two_hosts

WHEELS = ("torch==2.14.1", "numpy", "transformers==5.6.0", "tokenizers", "safetensors", "sglang==0.5.11")
FIVE = ("spec_info.py", "dflash_info.py", "dflash_worker.py", "ddtree_utils.py", "server_args.py")


class Bench:
    """The source, the link, and every way to bring the one over the other."""

    def __init__(self, account: Account, source: Path, mbit: int | None, cipher: str, ram: bool, home: Path) -> None:
        self.account = account
        self.site = next((source / "lib").glob("python3.*")) / "site-packages"
        self.venv = source
        self.mbit = mbit
        self.cipher = cipher
        self.ram = ram
        self.env = {"DDTREE_HOME": str(home), "DDTREE_YES": "1"}

    @contextmanager
    def lab(self) -> Iterator[Lab]:
        """Make a fresh target with an empty venv behind the shaped link."""
        with two_hosts("ct200", ram=self.ram) as lab:
            target = lab["ct200"]
            target.run([sys.executable, "-m", "venv", "--without-pip", "/srv/venv"])
            target.run(["mkdir", "-p", "/srv/copy"])
            lab.shape(self.mbit)
            if self.cipher:
                lab.ssh_config.write_text(f"Ciphers {self.cipher}\n{lab.ssh_config.read_text()}")
            yield lab

    def warm(self, name: str) -> None:
        """Bring what a way will read into the page cache, and only that: rsync and scp read the source, a push the store."""
        store = Path(self.env["DDTREE_HOME"]) / "store"
        packed = store / "packed"
        tree = self.site if name != "ddtree-deploy push" else packed if packed.is_dir() else store
        subprocess.run(["sh", "-c", f"find {tree} -type f -print0 | xargs -0 cat > /dev/null"], check=True)

    def ssh(self, lab: Lab) -> str:
        return f"ssh -F {lab.ssh_config} -o ControlMaster=no"

    def push(self, _lab: Lab) -> list[str]:
        return [*DDTREE, "push", "ct200", "--venv", "/srv/venv", "-y", "--json"]

    def first(self) -> dict[str, Callable[[Lab], list[str] | str]]:
        """Return the ways of a first copy by name."""
        return {
            "scp -r": lambda lab: f"scp -O -q -r -F {lab.ssh_config} {self.site} ct200:/srv/copy/",
            "rsync -a": lambda lab: f"rsync -a -e '{self.ssh(lab)}' {self.site}/ ct200:/srv/copy/",
            "tar | ssh tar": lambda lab: f"tar -C {self.site} -cf - . | {self.ssh(lab)} ct200 'tar -C /srv/copy -xf -'",
            "ddtree-deploy push": self.push,
        }

    def run_first(self, only: set[str]) -> dict[str, Cost]:
        """Copy once by each way, each onto a machine of its own."""
        out = {}
        for name, command in self.first().items():
            if only and name not in only:
                continue
            with self.lab() as lab:
                self.warm(name)
                out[name] = timed(self.account, lab, command(lab), self.env)
                print(f"   first: {name}: {out[name]}", file=sys.stderr)
        return out

    def run_again(self) -> dict[str, Cost]:
        """Nothing changed, then five files changed, for each way, on one machine that has the tree by every way."""
        out = {}
        sources = self.site / "sglang/srt/speculative"
        with self.lab() as lab:
            lab.shape(None)
            timed(self.account, lab, self.first()["rsync -a"](lab), self.env)
            timed(self.account, lab, self.push(lab), self.env)
            time.sleep(12)  # the host separates generations in the background, and stamps settle
            lab.shape(self.mbit)
            out["nothing: rsync -a"] = timed(self.account, lab, self.first()["rsync -a"](lab))
            out["nothing: rsync -a --checksum"] = timed(
                self.account, lab, str(self.first()["rsync -a"](lab)).replace("rsync -a", "rsync -a --checksum")
            )
            out["nothing: ddtree-deploy push"] = timed(self.account, lab, self.push(lab), self.env)
            files = [sources / name for name in FIVE[:4]] + [self.site / "sglang/srt" / FIVE[4]]
            originals = {path: path.read_bytes() if path.exists() else None for path in files}
            try:
                for path in files:
                    path.write_bytes((originals[path] or b"") + f"\n# changed at {time.time()}\n".encode())
                snapshot(self.venv, self.env)
                scp = " && ".join(
                    f"scp -O -q -F {lab.ssh_config} -o ControlMaster=no {p} ct200:/srv/copy/{p.relative_to(self.site)}" for p in files
                )
                check = " ".join(f"/srv/copy/{path.relative_to(self.site)}" for path in files)
                out["five: chained scp and py_compile"] = timed(
                    self.account, lab, f"{scp} && {self.ssh(lab)} ct200 {sys.executable} -m py_compile {check}"
                )
                out["five: chained scp"] = timed(self.account, lab, scp)
                for path in files:
                    path.write_bytes(path.read_bytes() + b"# again\n")
                snapshot(self.venv, self.env)
                out["five: rsync -a"] = timed(self.account, lab, self.first()["rsync -a"](lab))
                out["five: ddtree-deploy push"] = timed(self.account, lab, self.push(lab), self.env)
            finally:
                for path, data in originals.items():
                    if data is None:
                        path.unlink(missing_ok=True)
                    else:
                        path.write_bytes(data)
        for name, cost in out.items():
            print(f"   {name}: {cost}", file=sys.stderr)
        return out


def snapshot(venv: Path, env: dict[str, str]) -> None:
    """Take a snapshot of a venv of this machine."""
    subprocess.run(
        [*DDTREE, "snapshot", "local", "--venv", str(venv), "-q", "--no-probe"],
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def table(rounds: list[dict[str, Cost]], base: str) -> list[str]:
    """Return Markdown rows: median wall, ratio to `base` in the same round (median), CPU, memory."""
    lines = [
        "| way | wall s | without import probes | without any proof | to " + base + " | CPU s | controller MiB | agent MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        costs = [r[name] for r in rounds]
        bare = [c.wall - c.proofs - c.syntax for c in costs]
        ratio = statistics.median(b / r[base].wall for b, r in zip(bare, rounds, strict=True))
        mid = statistics.median
        lines.append(
            f"| {name} | {mid(c.wall for c in costs):.2f} | {mid(c.wall - c.proofs for c in costs):.2f} | {mid(bare):.2f} | {ratio:.2f} "
            f"| {mid(c.cpu for c in costs):.1f} | {mid(c.controller_mib for c in costs):.0f} | {mid(c.agent_mib for c in costs):.0f} |"
        )
    return lines


def report(bench: Bench, arguments: argparse.Namespace) -> str:
    """Take the snapshot, run the cases, and return their tables."""
    snapshot(arguments.venv, bench.env)
    if arguments.compress:
        subprocess.run([*DDTREE, "cache", "compress"], env={**os.environ, **bench.env}, check=True)
    lines: list[str] = []
    if "first" in arguments.cases:
        rounds = [bench.run_first(set(filter(None, arguments.only.split(",")))) for _ in range(arguments.rounds)]
        base = "rsync -a" if "rsync -a" in rounds[0] else next(iter(rounds[0]))
        lines += ["", f"First copy, {arguments.mbit or 'unshaped'}", "", *table(rounds, base)]
    if "again" in arguments.cases:
        rounds = [bench.run_again() for _ in range(arguments.rounds)]
        for case, base in (("nothing", "nothing: rsync -a"), ("five", "five: chained scp")):
            part = [{k: v for k, v in r.items() if k.startswith(case)} for r in rounds]
            lines += ["", f"{case}, {arguments.mbit or 'unshaped'}", "", *table(part, base)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--make", action="store_true", help="install the wheels into --venv first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=None)
    parser.add_argument("--cipher", default="", help="for every way: aes128-gcm@openssh.com, say (ssh's own first choice is chacha20)")
    parser.add_argument("--ram", action="store_true", help="the target's disk is a tmpfs: measures everything but the disk")
    parser.add_argument("--compress", action="store_true", help="store objects compressed too")
    parser.add_argument("--cases", default="first,again")
    parser.add_argument("--only", default="", help="comma-separated ways of the first copy")
    parser.add_argument("--home", type=Path, help="keep the store here, and use the one that is here")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if lab_missing():
        raise SystemExit(lab_missing())
    if arguments.make:
        subprocess.run([sys.executable, "-m", "venv", str(arguments.venv)], check=True)
        subprocess.run([str(arguments.venv / "bin/pip"), "install", "-q", *WHEELS[:1]], check=True)
        subprocess.run([str(arguments.venv / "bin/pip"), "install", "-q", "--no-deps", *WHEELS[1:]], check=True)
    home = arguments.home or Path(tempfile.mkdtemp(prefix="ddtree-bench-", dir="/var/tmp"))
    try:
        with Account() as account:
            text = report(Bench(account, arguments.venv, arguments.mbit, arguments.cipher, arguments.ram, home), arguments)
        print(text)
        if arguments.out:
            arguments.out.write_text(text)
    finally:
        if not arguments.home:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
