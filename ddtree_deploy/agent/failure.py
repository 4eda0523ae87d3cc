"""The one exception whose kind the controller turns into an error class of its own."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Failure(Exception):
    """A request failed in a way the controller knows: `kind` is the kind of a DeployError."""

    def __init__(self, kind: str, message: str, mend: str | None = None, causes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.mend = mend
        self.causes = list(causes)
