"""`ddtree.toml`: what is read, what wins, what is refused, and what a name means."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy import config
from ddtree_deploy.config import Config, load, resolve_host
from ddtree_deploy.config_check import HOST_KEYS, SETTINGS, fault
from ddtree_deploy.errors import UsageProblem

PIN = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"


def project(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ddtree.toml").write_text(text)
    return folder


def user(folder: Path, text: str) -> dict[str, str]:
    file = folder / "xdg/ddtree-deploy/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return {"XDG_CONFIG_HOME": str(folder / "xdg"), "HOME": str(folder)}


def refusal(folder: Path, text: str) -> UsageProblem:
    with pytest.raises(UsageProblem) as caught:
        load(project(folder, text), {"HOME": str(folder)})
    assert caught.value.exit_code == 2
    return caught.value


def test_nothing_is_needed(tmp_path: Path) -> None:
    found = load(tmp_path, {"HOME": str(tmp_path)})
    assert found == Config()
    assert (found.keep_generations, found.confirm_timeout) == (3, 30)
    assert found.roots == ("sglang", "torch", "triton", "sgl_kernel")
    assert {origin for _, _, origin in found.rows()} == {"default"}


def test_environment_over_project_over_user_over_default(tmp_path: Path) -> None:
    env = user(tmp_path, "keep_generations = 5\ndefault_target = 'a'\n[push]\nconfirm_timeout = 50\n")
    cwd = project(tmp_path / "work", "keep_generations = 6\ndefault_target = 'b'\n") / "deep/er"
    cwd.mkdir(parents=True)
    found = load(cwd, {**env, "DDTREE_KEEP_GENERATIONS": "7", "DDTREE_PROBE": "mine, ours"})
    rows = {key: (value, origin) for key, value, origin in found.rows()}
    assert rows["keep_generations"] == (7, "$DDTREE_KEEP_GENERATIONS")
    assert rows["default_target"] == ("b", str(tmp_path / "work/ddtree.toml"))
    assert rows["push.confirm_timeout"] == (50, str(tmp_path / "xdg/ddtree-deploy/config.toml"))
    assert rows["profile.roots"][1] == "default"
    assert found.probe == ("mine", "ours")
    assert [file.name for file in found.files] == ["config.toml", "ddtree.toml"]


def test_the_nearest_project_file_is_the_only_one(tmp_path: Path) -> None:
    project(tmp_path, "keep_generations = 9\n")
    inner = project(tmp_path / "inner", "default_target = 'x'\n")
    assert load(inner, {"HOME": str(tmp_path)}).keep_generations == 3


def test_a_host_is_merged_key_by_key(tmp_path: Path) -> None:
    env = user(tmp_path, "[hosts.ct200]\naddress = 'root@10.0.0.2'\nvenv = '/old'\n")
    cwd = project(tmp_path / "work", "[hosts.ct200]\nvenv = '/new'\n[hosts.'a.b']\n")
    found = load(cwd, env)
    assert (found.hosts["ct200"].address, found.hosts["ct200"].venv) == ("root@10.0.0.2", "/new")
    assert found.hosts["ct200"].origin == str(cwd / "ddtree.toml")
    assert found.hosts["a.b"].address == "a.b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keep_generation = 3", "unknown key `keep_generation`, did you mean `keep_generations`?"),
        ("[push]\nconfirm = 3", "unknown key `push.confirm`, did you mean `confirm_timeout`?"),
        ("[pusch]\nconfirm_timeout = 3", "unknown key `pusch`, did you mean `push`?"),
        ("[hosts.a]\nvenf = '/x'", "unknown key `hosts.a.venf`, did you mean `venv`?"),
        ("[hosts.a.b]\nvenv = '/x'", "unknown key `hosts.a.b`"),
        ("hosts = 3", "`hosts` must be a table"),
        ("push = 3", "`push` must be a table"),
        ("[hosts]\na = '10.0.0.1'", "`hosts.a` must be a table"),
        ("[profiles]\na = 1", "`profiles.a` must be a table"),
        ("keep_generations = '3'", "`keep_generations` must be a whole number: '3'"),
        ("keep_generations = true", "`keep_generations` must be a whole number: True"),
        ("keep_generations = 1", "`keep_generations` must be at least 2: 1"),
        ("[profile]\nroots = 'torch'", "`profile.roots` must be a list of strings: 'torch'"),
        ("[profile]\nroots = ['']", "`profile.roots` must be a list of strings: ('',)"),
        ("[hosts.a]\ntransport = 'telnet'", "`hosts.a.transport` must be one of openssh, fabric, local: telnet"),
        ("[hosts.a]\nvia = 'lxc:3'", "`hosts.a.via` must be `pct:NUMBER`, `docker:NAME` or `podman:NAME`: lxc:3"),
        ("[hosts.a]\nvenv = 'venv'", "`hosts.a.venv` must be absolute or start with `~/`: venv"),
        ("[hosts.a]\naddress = '-oProxyCommand=x'", "`hosts.a.address` is no address: '-oProxyCommand=x'"),
        ("[hosts.a]\nhost_key = 'SHA256:abc'", "`hosts.a.host_key` must be a fingerprint"),
        ("[hosts.a]\nservice_env = { A = 1 }", "`hosts.a.service_env` must be a table of strings: {'A': 1}"),
        ("[hosts.'a b']\nvenv = '/x'", "`a b` is no name for a host"),
        ("[hosts.local]\naddress = 'x'", "`hosts.local.address` has no meaning: `local` is this machine"),
        ("a = = 3", "cannot be read: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    problem = refusal(tmp_path, text)
    assert words in problem.message
    assert str(tmp_path / "ddtree.toml") in problem.message
    assert "config --example" in problem.mend


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    problem = refusal(tmp_path, "keep_generations = 0\nnope = 1\n[hosts.a]\nvenf = '/x'\n")
    assert problem.message == "the configuration has 3 faults"
    assert [cause.partition(": ")[0] for cause in problem.causes] == [str(tmp_path / "ddtree.toml")] * 3


def test_a_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"\$DDTREE_KEEP_GENERATIONS: .* whole number: 'many'"):
        load(tmp_path, {"HOME": str(tmp_path), "DDTREE_KEEP_GENERATIONS": "many"})


def test_a_relative_ssh_config_belongs_to_its_file(tmp_path: Path) -> None:
    cwd = project(tmp_path / "work", "ssh_config = 'ssh/config'\n")
    assert load(cwd, {"HOME": str(tmp_path)}).ssh_config == str(cwd / "ssh/config")


def test_profiles_hold_what_launch_knows(tmp_path: Path) -> None:
    text = "[profiles.big]\nmodel = 'Qwen'\ngpus = 8\nbudget = 63\nflags = ['--a', '1']\nenv = { NCCL_DEBUG = 'INFO' }\n"
    big = load(project(tmp_path, text), {"HOME": str(tmp_path)}).profiles["big"]
    assert big == {"model": "Qwen", "gpus": 8, "budget": 63, "flags": ("--a", "1"), "env": {"NCCL_DEBUG": "INFO"}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("modell = 'x'", "unknown key `profiles.big.modell`, did you mean `model`?"),
        ("gpus = 'eight'", "`profiles.big.gpus` must be a whole number"),
        ("gpus = -1", "`profiles.big.gpus` must be at least 0"),
        ("engine = 'vllm'", "`profiles.big.engine` must be one of sglang, standalone"),
        ("flags = '--a'", "`profiles.big.flags` must be a list of strings"),
        ("router = 1", "`profiles.big.router` must be true or false"),
        ("env = { A = 1 }", "`profiles.big.env` must be a table of strings"),
    ],
)
def test_what_does_not_belong_into_a_profile_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        load(project(tmp_path, f"[profiles.big]\n{line}\n"), {"HOME": str(tmp_path)})
    assert words in str(caught.value)


@given(st.text(min_size=1, max_size=30), st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text())))
def test_any_key_and_value_is_judged_without_an_exception(key: str, value: object) -> None:
    for dotted in (key, f"hosts.{key}", f"hosts.{key}.venv", f"push.{key}", f"profiles.{key}"):
        assert isinstance(fault(dotted, value), str)


class TestExample:
    def test_it_loads_and_shows_every_key(self, tmp_path: Path) -> None:
        text = config.example()
        found = load(project(tmp_path, text), {"HOME": str(tmp_path)})
        shown = {key.rpartition(".")[2] for key, _, origin in found.rows() if origin != "default"}
        commented = {line.split()[1] for line in text.splitlines() if line.startswith("# ") and " = " in line}
        assert {key.rpartition(".")[2] for key in SETTINGS} | set(HOST_KEYS) <= shown | commented
        assert all(setting.env in text for setting in SETTINGS.values())

    def test_its_settings_are_the_defaults(self) -> None:
        tree = tomllib.loads(config.example())
        assert tree["keep_generations"] == Config().keep_generations
        assert tree["push"]["confirm_timeout"] == Config().confirm_timeout
        assert tuple(tree["profile"]["roots"]) == Config().roots
        assert tuple(tree["profile"]["probe"]) == Config().probe


class TestResolve:
    @pytest.fixture
    def ssh(self, tmp_path: Path) -> Path:
        (tmp_path / "more").mkdir()
        (tmp_path / "more/gpu.conf").write_text("Host ct129 gpu-*\n  HostName 10.0.0.129\nHost *\n  User x\n")
        file = tmp_path / "ssh_config"
        file.write_text(f'Include "{tmp_path}/more/*.conf"\nHost  jump !never\n  Port 7\nhost=equals\n  Port 8\n')
        return file

    def test_toml_before_alias(self, tmp_path: Path, ssh: Path) -> None:
        text = f"ssh_config = '{ssh}'\n[hosts.ct129]\naddress = 'root@10.1.1.1'\nvenv = '~/venv'\nhost_key = '{PIN}'\n"
        found = load(project(tmp_path, text), {"HOME": str(tmp_path)})
        host = resolve_host("ct129", found, accept_new=True)
        assert (host.address, host.venv, host.host_key, host.transport) == ("root@10.1.1.1", "~/venv", PIN, "openssh")
        assert (host.ssh_config, host.accept_new_host_key) == (str(ssh), True)
        assert host.origin == str(tmp_path / "ddtree.toml")

    @pytest.mark.parametrize("name", ["ct129", "gpu-7", "jump", "equals"])
    def test_an_alias_needs_no_table(self, ssh: Path, name: str) -> None:
        host = resolve_host(name, Config(ssh_config=str(ssh)), venv="/srv/venv", transport="fabric")
        assert (host.address, host.venv, host.transport) == (name, "/srv/venv", "fabric")
        assert host.origin == "ssh configuration"

    @pytest.mark.parametrize("name", ["root@nowhere", "127.0.0.1", "::1", "localhost", "ssh://root@nowhere:2222"])
    def test_an_address_needs_no_alias(self, ssh: Path, name: str) -> None:
        assert resolve_host(name, Config(ssh_config=str(ssh))).origin == "address"

    @pytest.mark.parametrize("name", ["ct130", "never", "-oProxyCommand=touch", "two words", "a/b", ""])
    def test_any_other_name_is_refused(self, ssh: Path, name: str) -> None:
        with pytest.raises(UsageProblem, match="no host") as caught:
            resolve_host(name, Config(ssh_config=str(ssh)))
        if name == "ct130":
            assert "did you mean `ct129`?" in caught.value.message
            assert "[hosts.ct130]" in caught.value.mend

    def test_local_is_always_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert resolve_host("local", Config()).transport == "local"
        assert resolve_host("local", Config(), venv="A", transport="fabric").venv == str(tmp_path / "A")
        found = load(project(tmp_path, "[hosts.local]\nvenv = '/srv/v'\n"), {"HOME": str(tmp_path)})
        assert resolve_host("local", found).venv == "/srv/v"

    def test_another_name_can_mean_this_machine(self, tmp_path: Path) -> None:
        text = "[hosts.here]\ntransport = 'local'\nvenv = '/srv/v'\n"
        found = load(project(tmp_path, text), {"HOME": str(tmp_path)})
        host = resolve_host("here", found, transport="fabric")
        assert (host.transport, host.address, host.venv) == ("local", "", "/srv/v")

    def test_a_relative_venv_elsewhere_is_refused(self, ssh: Path) -> None:
        with pytest.raises(UsageProblem, match="absolute"):
            resolve_host("ct129", Config(ssh_config=str(ssh)), venv="venv")

    def test_known_names_come_with_their_origin(self, tmp_path: Path, ssh: Path) -> None:
        found = load(project(tmp_path, f"ssh_config = '{ssh}'\n[hosts.mine]\n"), {"HOME": str(tmp_path)})
        assert config.known_names(found) == {
            "ct129": "ssh configuration",
            "equals": "ssh configuration",
            "jump": "ssh configuration",
            "local": "this machine",
            "mine": str(tmp_path / "ddtree.toml"),
        }


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"pydantic", "paramiko", "fabric", "tomllib", "socket", "subprocess"}
    code = f"import sys, ddtree_deploy.config; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
