"""Do something on a thread of its own while this one waits, or does something else. Both ends use it."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def ahead(make: Callable[[], T]) -> Callable[[], T]:
    """Start `make` now; the function that is returned waits for its value, and raises what it raised."""
    made: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # whoever asks for the value must hear of it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def value() -> T:
        while thread.is_alive():
            thread.join(0.5)  # not for good: a signal may have gone to another thread, and only the main one acts on it
        if errors:
            raise errors[0]
        return made[0]

    return value
