"""The last step before a generation counts: what is written down of its files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ddtree_deploy.agent import stage
from ddtree_deploy.agent.layout import Index, locate
from ddtree_deploy.agent.walk import walk
from tests.fixtures.venvs import make_venv, package


def test_a_received_file_that_is_edited_after_its_proof_is_not_vouched_for(tmp_path: Path) -> None:
    found = locate(str(make_venv(tmp_path / "venv", package("alpha", "1.0"))))
    root = Path(found.tree(1))
    root.mkdir(parents=True)
    os.mkdir(found.incoming)
    rows, used = {}, set()
    for name in ("left", "edited"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        (Path(found.incoming) / digest).write_text(name)
        os.link(Path(found.incoming) / digest, root / name)
        rows[name] = ("f", 0o644, len(name), digest, 0, 0, 0, None)
        used.add(digest)
    proved = walk(str(root))
    (root / "edited").write_text("EDITED")
    path = str(tmp_path / "index")
    index = Index(rows)
    index.save(path, stage.consume(found, str(root), index, used, proved))
    assert not os.path.exists(found.incoming)
    loaded = Index.load(path)
    assert loaded is not None
    assert {entry[0]: loaded.digest(entry) for entry in walk(str(root))} == {"left": rows["left"][3], "edited": None}
