"""Say what the overlay was built for. A build replaces these by the real values."""

from __future__ import annotations

from collections.abc import Mapping

SGLANG_VERSION = ""
EDITED_FILES: Mapping[str, str] = {}
READ_FILES: Mapping[str, str] = {}
