"""Deepen a pair to N target layers that compute the same function: realistic step times at no training cost.

    deepen.py TARGET DRAFTER OUT N

The added layers are copies of the last one whose output projections are zero: they cost as much as any layer and add
nothing to the residual stream, so text and acceptance stay as they were. Writes OUT/target and OUT/drafter.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def deepen(target: Path, drafter: Path, out: Path, layers: int) -> None:
    """Write the deepened pair. Raises ValueError when the target already has more layers."""
    config = json.loads((target / "config.json").read_text())
    have = config["num_hidden_layers"]
    if layers < have:
        raise ValueError(f"the target already has more layers: {have}")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        weights.update(load_file(file))
    last = {k.split(".", 3)[3]: v for k, v in weights.items() if k.startswith(f"model.layers.{have - 1}.")}
    for i in range(have, layers):
        for name, value in last.items():
            silent = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            weights[f"model.layers.{i}.{name}"] = torch.zeros_like(value) if silent else value.clone()
    changes = {"target": {"num_hidden_layers": layers}, "drafter": {"num_target_layers": layers}}
    for source, name in ((target, "target"), (drafter, "drafter")):
        (out / name).mkdir(parents=True, exist_ok=True)
        for file in source.glob("*.json"):
            if "index" not in file.name:
                shutil.copy(file, out / name / file.name)
        changed = json.loads((out / name / "config.json").read_text()) | changes[name]
        if "max_window_layers" in changed:
            changed["max_window_layers"] = layers if name == "target" else changed["num_hidden_layers"]
        if name == "target" and changed.get("layer_types"):
            changed["layer_types"] = ["full_attention"] * layers
        (out / name / "config.json").write_text(json.dumps(changed, indent=1) + "\n")
    save_file(weights, str(out / "target/model.safetensors"), metadata={"format": "pt"})
    for file in drafter.glob("*.safetensors"):
        shutil.copy(file, out / "drafter" / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("layers", type=int)
    args = parser.parse_args()
    deepen(args.target, args.drafter, args.out, args.layers)


if __name__ == "__main__":
    main()
