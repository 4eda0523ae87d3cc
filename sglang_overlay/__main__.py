"""Run `python -m sglang_overlay`: what `ddtree-deploy overlay` does, on a local directory."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from sglang_overlay import build, install, manifest
from sglang_overlay.contract import check_contract
from sglang_overlay.errors import OverlayError


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sglang_overlay", description=__doc__)
    parser.add_argument("command", choices=["list", "check", "build", "apply", "revert", "diff", "contract", "pin"])
    parser.add_argument("--site", type=Path, help="the directory that holds the `sglang` package")
    parser.add_argument("--version", help="the SGLang version, where the site does not say it")
    parser.add_argument("--stock", type=Path, help="diff: a site with the stock files")
    parser.add_argument("--out", type=Path, help="build: where to write the files")
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except OverlayError as error:
        print(f"error: {error}\n\nhint: {error.mend}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    if options.command == "list":
        for entry in manifest.load().values():
            name = f"overlay {entry.overlay_id[:7]}" if entry.built else entry.route
            print(f"sglang {entry.version}: {name}, {', '.join(f'{k} {v}' for k, v in entry.pins.items())}")
        return 0
    if options.site is None:
        print("error: `--site` is missing\n\nhint: give the directory that holds the `sglang` package", file=sys.stderr)
        return 2
    site, version = options.site, options.version or build.installed_version(options.site)
    match options.command:
        case "check":
            state = build.check(site, version)
            for found in state.files:
                print(f"{found.state:8} {found.path}")
            print(f"sglang {version}: {build.describe(state)}")
            return 0 if not state.foreign else 14
        case "build":
            for file in build.build(site, version):
                if options.out:
                    target = options.out / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.data)
                print(f"{file.sha256}  {file.path}")
        case "apply" | "revert":
            change = (install.apply if options.command == "apply" else install.revert)(site, version)
            for path in change.written:
                print(f"wrote    {path}")
            for path in change.removed:
                print(f"removed  {path}")
            print(f"sglang {version}: {build.describe(build.check(site, version))}")
        case "diff":
            print(build.diff(site, options.stock or site, version), end="")
        case "contract":
            broken = check_contract(site, version)
            print("\n".join(map(str, broken)) or f"sglang {version}: contract holds")
            return 13 if broken else 0
        case "pin":
            _pin(site, version)
    return 0


def _pin(site: Path, version: str) -> None:
    """Record the results of building from a stock site (for maintainers, after a change of ours)."""
    versions = manifest.load()
    files = build.make(manifest.reader(site), version)
    versions[version] = dataclasses.replace(
        versions[version],
        built={file.path: file.sha256 for file in files},
        spans={file.path: file.spans for file in files if file.spans},
    )
    manifest.dump(versions)
    print(f"sglang {version}: pinned overlay {versions[version].overlay_id[:7]}")


if __name__ == "__main__":
    sys.exit(main())
