"""Fuzz one target with atheris (libFuzzer): `python -m tests.fuzz.run TARGET CORPUS [libFuzzer options]`.

Coverage guides it: the product's modules are instrumented as they are imported.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["ddtree_deploy"]):
        from ddtree_deploy.agent import frames
        from tests.fuzz import targets

    frames.CHUNK = 1 << 12  # a megabyte of buffers for each try would take most of the time
    name, corpus, *options = sys.argv[1:]
    directory = Path(corpus)
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.seeds(name)):
        (directory / f"seed{number}").write_bytes(seed)
    words = directory.with_suffix(".dict")
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in targets.WORDS))
    atheris.Setup([sys.argv[0], f"-dict={words}", f"-artifact_prefix={directory}.", *options, corpus], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
