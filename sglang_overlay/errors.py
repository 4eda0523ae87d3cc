"""What can go wrong with the overlay: a message, an exit code (as `ddtree-deploy` documents them) and a mend."""

from __future__ import annotations

from typing import ClassVar


class OverlayError(Exception):
    """Stop an overlay operation with one lower-case sentence and what to do about it."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "overlay"
    default_mend: ClassVar[str] = "run `ddtree-deploy overlay check` to see the state of each file"

    def __init__(self, message: str, *, mend: str | None = None, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend or self.default_mend
        self.causes = causes

    def __str__(self) -> str:
        return "\n".join((self.message, *(f"  {cause}" for cause in self.causes)))


class UnknownVersion(OverlayError):
    """No overlay is pinned for this SGLang version."""

    exit_code = 13
    kind = "overlay-version"
    default_mend = "see `ddtree-deploy overlay list` for the supported versions"


class BaseMismatch(OverlayError):
    """The files are not the stock files that the overlay was made for."""

    exit_code = 14
    kind = "overlay-base"
    default_mend = "reinstall the stock wheel, or see what was changed with `ddtree-deploy overlay diff`"


class AnchorMismatch(OverlayError):
    """An anchor does not name exactly the expected places of the stock file."""

    exit_code = 14
    kind = "overlay-anchor"
    default_mend = "the pinned files and the edits disagree: this is a bug in the overlay, report it"


class BuildMismatch(OverlayError):
    """The built files are not the ones that the manifest pins."""

    exit_code = 14
    kind = "overlay-build"
    default_mend = "after a change of ours, pin the new result with `python -m sglang_overlay pin`"


class ContractBroken(OverlayError):
    """SGLang lacks a symbol or a parameter that the overlay calls."""

    exit_code = 13
    kind = "overlay-contract"
    default_mend = "use a supported version: see `ddtree-deploy overlay list`"
