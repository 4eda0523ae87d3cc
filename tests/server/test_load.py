"""A pair that does not belong together, or a target that trees would break, is refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.server import tiny
from ddtree.server.drafter import ContextCache, Drafter, load_drafter
from ddtree.server.drafter_config import DrafterConfig
from ddtree.server.engine import Mode, Request, run
from ddtree.server.errors import ModelError
from ddtree.server.load import choose_device, choose_dtype, load_engine, mask_token
from ddtree.server.target import check_supported, locate
from scripts.deepen import deepen
from tests.server.conftest import Variant

Change = Callable[[dict[str, Any]], None]


def changed(pair: tuple[Path, Path], out: Path, change: Change) -> Path:
    """Return a copy of the drafter with another config."""
    shutil.copytree(pair[1], out)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.pop("hidden_size"), "not a drafter config: lacks `hidden_size`"),
        (lambda c: c.update(layer_types=["sliding_attention"]), "sliding-window layers are not supported"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 1]), "reads a target layer twice"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 3]), "reads layer 3 of a target with 3 layers"),
        (lambda c: c.update(num_target_layers=4), "made for 4 target layers, the model has 3"),
        (lambda c: c.update(num_hidden_layers=2), "weights do not fit its config: `layers.1."),
        (lambda c: c.update(intermediate_size=32), "weights do not fit its config"),
        (lambda c: c.update(vocab_size=999), "vocabularies differ: target 320, drafter 999"),
        (lambda c: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope type is not supported"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: Change, reason: str
) -> None:
    drafter = changed(pair, tmp_path / "drafter", change)
    with pytest.raises(ModelError, match=reason):
        load_engine(str(pair[0]), str(drafter), device="cpu")


def test_configs_are_read_in_the_spelling_of_transformers_4_and_5(pair: tuple[Path, Path]) -> None:
    old = json.loads((pair[1] / "config.json").read_text())
    new = {**old, "rope_parameters": {"rope_type": "default", "rope_theta": old["rope_theta"]}}
    new.pop("rope_theta")
    assert DrafterConfig.parse(old) == DrafterConfig.parse(new)
    del old["dflash_config"]["target_layer_ids"]
    assert DrafterConfig.parse(old | {"num_target_layers": 36, "num_hidden_layers": 5}).target_layer_ids == (
        *(1, 9, 17, 25, 33),
    )


def test_weights_may_carry_the_prefix_of_a_wrapped_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = changed(pair, tmp_path / "drafter", lambda c: None)
    save_file({f"model.{k}": v for k, v in load_file(out / "model.safetensors").items()}, out / "model.safetensors")
    theirs = load_drafter(out, torch.float32, torch.device("cpu")).state_dict()
    ours = load_drafter(pair[1], torch.float32, torch.device("cpu")).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gemma3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "mistral", "sliding_window": 4096}, "uses a sliding window"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent cache"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent layers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, "multimodal"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, "change with the length"),
        ({"model_type": "bloom"}, "ALiBi"),
    ],
)
def test_targets_that_trees_would_break_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_supported(config)


def test_plain_decoders_are_taken() -> None:
    check_supported({"model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": False})
    check_supported({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})


def test_places_devices_and_types_that_are_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nope"), "./nope", "a/b/c"):
        with pytest.raises(ModelError, match="no such directory"):
            locate(name)
    with pytest.raises(ModelError, match="unknown device"):
        choose_device("abacus")
    with pytest.raises(ModelError, match="unknown type"):
        choose_dtype("int8", torch.device("cpu"))
    with pytest.raises(ModelError, match="cannot read the drafter's config"):
        load_drafter(tmp_path, torch.float32, torch.device("cpu"))
    assert choose_dtype("auto", torch.device("cpu")) is torch.float32


def test_the_mask_token_may_come_from_the_tokenizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = changed(pair, tmp_path / "drafter", lambda c: c["dflash_config"].pop("mask_token_id"))
    engine = load_engine(str(pair[0]), str(out), device="cpu")
    assert engine.mask_token == 3 and engine.drafter is not None
    with pytest.raises(ModelError, match="no mask token"):
        mask_token(engine.drafter, _NoMask())


class _NoMask:
    mask_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def test_the_drafters_context_cache_grows_without_changing(variant: Variant) -> None:
    engine = variant(Mode.DFLASH)
    drafter = engine.drafter
    assert isinstance(drafter, Drafter)
    features = torch.randn(700, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        once, bit_by_bit = ContextCache(drafter), ContextCache(drafter)
        once.append(features)
        for piece in features.split(61):
            bit_by_bit.append(piece)
        block = engine.target.embedding(engine.block(50, 16))
        torch.testing.assert_close(once.draft(block), bit_by_bit.draft(block), atol=1e-4, rtol=1e-4)


def test_a_deepened_pair_writes_the_same_text(pair: tuple[Path, Path], tmp_path: Path, variant: Variant) -> None:
    deepen(*pair, tmp_path, 7)
    engine = load_engine(str(tmp_path / "target"), str(tmp_path / "drafter"), budget=24, device="cpu")
    assert engine.target.layers == 7
    request = Request(tuple(range(60, 90)), 30, ignore_eos=True)
    deep, shallow = run(engine, request), run(variant(Mode.DDTREE), request)
    assert deep.tokens == shallow.tokens and deep.stats == shallow.stats
    with pytest.raises(ValueError, match="more layers"):
        deepen(tmp_path / "target", tmp_path / "drafter", tmp_path / "again", 3)


def test_the_tiny_pair_is_complete_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(f.stat().st_size for directory in tiny.paths() for f in directory.iterdir()) <= 16 << 20
    prompts = tiny.held_out_prompts()
    assert set(prompts) == {"code", "chat", "exercise"} and all(len(texts) >= 10 for texts in prompts.values())
    monkeypatch.setattr(tiny, "__file__", str(tmp_path / "__init__.py"))
    assert tiny.paths(with_drafter=False).target == tmp_path / "target"
    with pytest.raises(ModelError, match="no trained drafter") as caught:
        tiny.paths()
    assert "--mode plain" in caught.value.mend
