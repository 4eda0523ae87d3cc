"""The names that the edited SGLang files import; a build lays everything behind them into one file."""

from __future__ import annotations

from sglang_overlay.runtime.args import add_cli_args, resolve_server_args
from sglang_overlay.runtime.serve import install_capture_mask, prepare_verify, start

__all__ = ["add_cli_args", "install_capture_mask", "prepare_verify", "resolve_server_args", "start"]
