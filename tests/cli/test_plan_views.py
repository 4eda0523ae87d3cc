"""A plan as a person reads it: what a line already says is not said again."""

from __future__ import annotations

from ddtree_deploy.models import PackageChange
from ddtree_deploy.render.plan_views import package_row


def test_a_reason_does_not_begin_with_the_row_s_own_name() -> None:
    row = PackageChange("add", "packaging", "", "25.0", 25, 240_000, "packaging 25.0 <- sglang requires packaging")
    assert package_row(row) == ("+", "packaging", "—", "25.0", "25", "234 KiB", "sglang requires packaging")
