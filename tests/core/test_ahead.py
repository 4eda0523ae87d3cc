"""A value that is made on another thread: it comes, or what was raised comes."""

from __future__ import annotations

from threading import Event, get_ident

import pytest

from ddtree_deploy.agent.ahead import ahead


def test_the_value_is_made_elsewhere_and_waited_for() -> None:
    go = Event()

    def make() -> int:
        assert go.wait(20)
        return get_ident()

    value = ahead(make)
    go.set()
    assert value() == value() != get_ident()


def test_what_making_it_raised_is_raised_where_it_is_asked_for() -> None:
    def make() -> int:
        raise KeyError("no")

    value = ahead(make)
    with pytest.raises(KeyError, match="no"):
        value()
