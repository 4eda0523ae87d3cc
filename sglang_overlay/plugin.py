"""The entry point that SGLang loads (group `sglang.srt.plugins`), and the check that it worked.

SGLang logs and swallows what a plugin raises, and then knows no algorithm DDTREE. So whoever launches a server runs
`python -m sglang_overlay.plugin` with the server's interpreter first: it loads the plugins as the server will, and says
whether DDTREE is there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_overlay import build, manifest
from sglang_overlay.contract import check_contract
from sglang_overlay.errors import ContractBroken, OverlayError
from sglang_overlay.runtime.args import NAME

logger = logging.getLogger(__name__)
ADAPTERS = {"0.5.12.post1": "sglang_overlay.adapters.v1", "0.5.23": "sglang_overlay.adapters.v2"}


@dataclass(frozen=True, slots=True)
class Registration:
    """Whether the SGLang of this interpreter would accept `--speculative-algorithm DDTREE`, and by which route."""

    version: str
    route: str
    registered: bool
    detail: str


def site_of_sglang() -> Path:
    """Return the directory that holds the `sglang` package of this interpreter, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise OverlayError("sglang is not installed here", mend="run this with the interpreter of the server")
    return Path(next(iter(spec.submodule_search_locations))).parent


def register() -> None:
    """Register DDTREE with this process's SGLang; with edited files, only log what they are.

    Raises UnknownVersion for a version without an adapter, or ContractBroken naming what is missing.
    """
    version, site = importlib.metadata.version("sglang"), site_of_sglang()
    pins = manifest.pinned(version)
    if pins.route == "overlay":
        logger.info("sglang %s: %s", version, build.describe(build.check(site, version)))
        return
    broken = check_contract(site, version)
    if broken:
        raise ContractBroken(f"sglang {version} is not what DDTREE was written for", causes=tuple(map(str, broken)))
    importlib.import_module(ADAPTERS[version]).register()
    logger.info("sglang %s: DDTREE registered", version)


def registration() -> Registration:
    """Load SGLang's plugins as a server does, and say whether DDTREE is known afterwards."""
    version, site = importlib.metadata.version("sglang"), site_of_sglang()
    try:
        pins = manifest.pinned(version)
        if pins.route == "overlay":
            state = build.check(site, version)
            return Registration(version, pins.route, state.is_built, build.describe(state))
        from sglang.srt.plugins import load_plugins
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        load_plugins()
        SpeculativeAlgorithm.from_string(NAME)
    except OverlayError as error:
        return Registration(version, "none", False, str(error))
    except ValueError:
        return Registration(version, pins.route, False, "the plugin did not load: see the log above")
    return Registration(version, pins.route, True, "DDTREE is known")


def main() -> int:
    """Print the registration as one JSON document; return 0 when DDTREE is there, 13 when not."""
    found = registration()
    print(json.dumps(asdict(found)))
    return 0 if found.registered else 13


if __name__ == "__main__":
    sys.exit(main())
