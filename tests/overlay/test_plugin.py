"""The registry route, against a registry made here with the names and the habits of SGLang 0.5.12.post1's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_overlay.adapters import v1

ROOT = Path(__file__).parents[2]
# A stand-in for the third-party package, as far as registration goes; the real one needs a GPU build of torch.
PACKAGE = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins/__init__.py": """
import importlib.metadata, logging
def load_plugins():
    for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"):
        try:
            entry.load()()
        except Exception:
            logging.getLogger("sglang").exception("plugin %s", entry.name)
""",
    "sglang/srt/plugins/hook_registry.py": """
from enum import Enum
class HookType(Enum):
    AROUND = "around"
class HookRegistry:
    hooks = []
    @classmethod
    def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
        cls.hooks.append((target, hook, hook_type))
""",
    "sglang/srt/speculative/__init__.py": "",
    "sglang/srt/speculative/spec_registry.py": """
class CustomSpecAlgo:
    def __init__(self, name, factory, *, supports_overlap=False, validate_server_args=None):
        self.name, self.factory, self.validate_server_args = name, factory, validate_server_args
    def is_dflash(self):
        return False
    def create_worker(self, server_args):
        return self.factory(server_args)
""",
    "sglang/srt/speculative/spec_info.py": """
from enum import Enum
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
known = {}
class SpeculativeAlgorithm(Enum):
    DFLASH = 1
    @classmethod
    def from_string(cls, name):
        if name in known:
            return known[name]
        raise ValueError(name)
    @classmethod
    def register(cls, name, *, supports_overlap=False, validate_server_args=None, spec_class=CustomSpecAlgo):
        def decorator(factory):
            known[name] = spec_class(name, factory, validate_server_args=validate_server_args)
            return factory
        return decorator
    def is_frozen_kv_mtp(self):
        return False
""",
}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return a site with the stand-in and our entry point."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ours = tmp_path / "ddtree_deploy-0.dist-info"
    ours.mkdir()
    (ours / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-deploy\nVersion: 0\n")
    (ours / "entry_points.txt").write_text("[sglang.srt.plugins]\nddtree = sglang_overlay.plugin:register\n")
    return tmp_path


def run(host: Path, version: str, code: str) -> subprocess.CompletedProcess[str]:
    (host / f"sglang-{version}.dist-info").mkdir()
    (host / f"sglang-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    env = {**os.environ, "PYTHONPATH": f"{host}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env, timeout=120)


MAIN = "import sys, sglang_overlay.plugin as p; sys.exit(p.main())"


@pytest.mark.parametrize(
    "version, detail",
    [("0.5.12.post1", "the plugin did not load"), ("0.5.23", "the plugin did not load"), ("0.6.0", "is not supported")],
)
def test_a_plugin_error_that_sglang_swallows_is_found_before_the_launch(host: Path, version: str, detail: str) -> None:
    """The stand-in does not hold a contract, and for the last there is no adapter: nothing registers."""
    found = run(host, version, MAIN)
    assert found.returncode == 13
    assert detail in json.loads(found.stdout)["detail"]
    assert not json.loads(found.stdout)["registered"]


@pytest.mark.slow
def test_the_algorithm_registers_and_answers_as_dflash(host: Path) -> None:
    code = """
import copy, pickle
from sglang_overlay.adapters import v1
v1.register()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.plugins.hook_registry import HookRegistry
algorithm = SpeculativeAlgorithm.from_string("DDTREE")
assert algorithm.is_dflash() and not algorithm.is_frozen_kv_mtp() and copy.copy(algorithm).name == "DDTREE"
assert algorithm.validate_server_args is v1.validate_server_args
assert [target for target, _, _ in HookRegistry.hooks] == [v1.VERIFY_INPUT]
print("registered")
"""
    found = run(host, "0.5.12.post1", code)
    assert found.stdout == "registered\n", found.stderr


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = []
    monkeypatch.setattr(v1, "resolve_server_args", resolved.append)
    args = SimpleNamespace(speculative_num_draft_tokens=16)
    v1.validate_server_args(args)
    assert (args.speculative_ddtree_budget, args.speculative_ddtree_topk) == (15, None)
    monkeypatch.setenv("SGLANG_DDTREE_BUDGET_TABLE", "1:63,8:15")
    monkeypatch.setenv("SGLANG_DDTREE_TOPK", "8")
    args = SimpleNamespace(speculative_num_draft_tokens=None)
    v1.validate_server_args(args)
    assert (args.speculative_ddtree_budget, args.speculative_ddtree_topk) == (None, 8)
    assert args.speculative_ddtree_budget_table == "1:63,8:15" and len(resolved) == 2
    monkeypatch.setenv("SGLANG_DDTREE_TOPK", "many")
    with pytest.raises(ValueError, match="`SGLANG_DDTREE_TOPK`: many: not a number"):
        v1.validate_server_args(args)
