"""What TAB offers: commands, host names and snapshot labels, from local files alone."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import run


def tab(line: str, **options: Path) -> list[str]:
    words = line.split(" ")
    env = {"_DDTREE_DEPLOY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return run(env=env, **options).out.split()  # type: ignore[arg-type]


def test_tab_offers_commands_hosts_and_labels(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ddtree.toml").write_text('[hosts.ct129]\nvenv = "/v"\n[hosts.ct200]\nvenv = "/v"\n')
    run("snapshot", "local", "--venv", str(source), "--label", "known-good")
    assert tab("ddtree-deploy gen") == ["generations"]
    assert tab("ddtree-deploy push ct", cwd=tmp_path) == ["ct129", "ct200"]
    assert tab("ddtree-deploy diff ct200 --snapshot k", cwd=tmp_path) == ["known-good"]


def test_tab_is_silent_where_the_configuration_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "ddtree.toml").write_text("not toml")
    assert tab("ddtree-deploy status l", cwd=tmp_path) == ["local"]
