"""The standalone server's own sources, for a host whose venv does not hold them: `ddtree/`, and the tiny pair when it is served."""

from __future__ import annotations

import base64
import functools
from pathlib import Path

from ddtree_deploy.agent.serving.start import sources_digest


@functools.cache
def collect(tiny: bool) -> tuple[str, dict[str, str]]:
    """Return (digest, {path: base64}) of the package, the tiny pair's weights included only if wanted."""
    import importlib.util

    spec = importlib.util.find_spec("ddtree")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    sent = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent).as_posix()
        if not path.is_file() or "__pycache__" in path.parts or (not tiny and "/tiny/" in name and path.suffix != ".py"):
            continue
        sent[name] = base64.b64encode(path.read_bytes()).decode()
    return sources_digest(sent), sent
