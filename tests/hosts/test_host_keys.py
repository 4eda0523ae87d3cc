"""P14: we never talk to an impostor. A real sshd, both transports, and known_hosts compared byte for byte."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd, make_key
from ddtree_deploy.errors import DeployError, HostKeyProblem, UsageProblem
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.connect import connector
from ddtree_deploy.hosts.known_hosts import fingerprint
from tests.hosts.conftest import needs_sshd

pytestmark = [pytest.mark.ssh, needs_sshd]


def public(key: Path) -> str:
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


@dataclass
class Client:
    """A user with a known_hosts of his own, who contacts the sshd by one transport."""

    sshd: LoopbackSshd
    folder: Path
    host: Host
    stranger: str = ""
    notices: tuple[str, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def known(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def name(self) -> str:
        return f"[127.0.0.1]:{self.sshd.port}"

    def knows(self, *lines: str) -> None:
        self.known.write_text("".join(f"{line}\n" for line in lines))

    def config(self, *lines: str) -> None:
        """Put lines before the alias's own, so that they win."""
        text = self.sshd.client_config.read_text().replace(str(self.sshd.known_hosts), str(self.known))
        first, _, rest = text.partition("\n")
        (self.folder / "config").write_text("\n".join([first, *lines, rest]))

    def contact(self, **changes: object) -> DeployError | None:
        """Connect and run `true`; return what went wrong."""
        self.notices = ()
        try:
            channel = connector(replace(self.host, **changes)).start(["true"])  # type: ignore[arg-type]
        except DeployError as problem:
            return problem
        try:
            if channel.wait(30) == 0:
                self.notices = channel.notices()
                return None
            return channel.failure()
        finally:
            channel.close()

    def refused(self, **changes: object) -> HostKeyProblem:
        """Connect, be refused for the key, and find known_hosts as it was."""
        before = self.known.read_bytes()
        problem = self.contact(**changes)
        assert isinstance(problem, HostKeyProblem), problem
        assert problem.exit_code == 11
        assert self.known.read_bytes() == before
        return problem

    def welcomed(self, **changes: object) -> None:
        """Connect without trouble, and find known_hosts as it was."""
        before = self.known.read_bytes()
        assert self.contact(**changes) is None
        assert self.known.read_bytes() == before
        assert self.notices == ()


@pytest.fixture(params=["openssh", "fabric"])
def client(request: pytest.FixtureRequest, sshd: LoopbackSshd, tmp_path: Path) -> Client:
    host = Host("ct1", transport=request.param, address="ct1", ssh_config=str(tmp_path / "config"))
    made = Client(sshd, tmp_path, host, stranger=public(make_key(sshd.host_keys[0].with_name("stranger"))))
    made.keys = {key.name.removeprefix("host_"): public(key) for key in sshd.host_keys}
    made.config()
    made.knows()
    return made


def prints(client: Client) -> set[str]:
    return {fingerprint(key.split()[1]) for key in client.keys.values()}


def test_a_known_key_passes(client: Client) -> None:
    client.knows(f"{client.name} {client.keys['ed25519']}")
    client.welcomed()


def test_an_unknown_key_is_refused_with_its_fingerprint_and_a_mend(client: Client) -> None:
    client.knows("# a comment", f"elsewhere {client.keys['ed25519']}")
    problem = client.refused()
    assert problem.message.startswith("the host key of `ct1` is unknown: ")
    assert problem.message.split()[-1] in prints(client)
    assert "--accept-new-host-key" in problem.mend


def test_accept_new_appends_one_line_and_says_so(client: Client) -> None:
    client.known.write_text("# mine, without a newline at the end")
    assert client.contact(accept_new_host_key=True) is None
    lines = client.known.read_text().splitlines()
    assert lines[0] == "# mine, without a newline at the end"
    assert len(lines) == 2
    name, kind, key = lines[1].split()
    assert (name, f"{kind} {key}") in {(client.name, known) for known in client.keys.values()}
    assert client.notices == (f"recorded the host key of `ct1`: {kind} {fingerprint(key)}",)
    client.welcomed()
    client.welcomed(accept_new_host_key=True)


@pytest.mark.parametrize("accept", [False, True])
def test_a_changed_key_never_passes(client: Client, accept: bool) -> None:
    client.knows(f"elsewhere {client.keys['ed25519']}", f"{client.name} {client.stranger}")
    problem = client.refused(accept_new_host_key=accept)
    assert "is not the recorded one" in problem.message
    assert problem.causes == (f"recorded in {client.known}:2",)
    assert f"ssh-keygen -f {client.known} -R '{client.name}'" in problem.mend
    assert "--accept-new-host-key" not in problem.mend


def test_accept_new_does_not_take_a_second_key_of_another_kind(client: Client, tmp_path: Path) -> None:
    # Only ed25519 is on record, and the server has none of that kind any more: as likely an impostor.
    client.config("HostKeyAlgorithms ecdsa-sha2-nistp256")
    if client.host.transport == "fabric":
        client.knows(f"{client.name} {public(make_key(tmp_path / 'other', 'ecdsa'))}")
    else:
        client.knows(f"{client.name} {client.keys['ed25519']}")
    assert "is not the recorded one" in client.refused(accept_new_host_key=True).message


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_the_recorded_kind_is_asked_for(client: Client, kind: str) -> None:
    client.knows(f"{client.name} {client.keys[kind]}")
    client.welcomed()


def test_a_revoked_key_never_passes(client: Client) -> None:
    everything = [f"{client.name} {key}" for key in client.keys.values()]
    client.knows(*(f"@revoked * {key}" for key in client.keys.values()), *everything)
    assert "is revoked" in client.refused().message
    client.knows(*(f"@revoked * {key}" for key in client.keys.values()))
    assert "is revoked" in client.refused(accept_new_host_key=True).message


def test_an_alias_stands_for_the_host(client: Client) -> None:
    client.config("HostKeyAlias gpu-seven")
    client.knows(f"gpu-seven {client.keys['ed25519']}", f"{client.name} {client.stranger}")
    client.welcomed()
    client.knows(f"{client.name} {client.keys['ed25519']}")
    assert "is unknown" in client.refused().message


def test_hashed_names_are_found(client: Client) -> None:
    client.knows(f"{client.name} {client.keys['ed25519']}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", client.known], check=True, capture_output=True)
    assert client.known.read_text().startswith("|1|")
    client.welcomed()
    client.knows(f"{client.name} {client.stranger}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", client.known], check=True, capture_output=True)
    assert "is not the recorded one" in client.refused(accept_new_host_key=True).message


def test_a_new_key_is_recorded_hashed_where_the_user_wants_that(client: Client) -> None:
    client.config("HashKnownHosts yes")
    assert client.contact(accept_new_host_key=True) is None
    assert client.known.read_text().startswith("|1|")
    found = subprocess.run(["ssh-keygen", "-F", client.name, "-f", client.known], check=False, capture_output=True)
    assert found.returncode == 0
    client.welcomed()


def test_a_port_has_keys_of_its_own(client: Client) -> None:
    client.knows(f"127.0.0.1 {client.keys['ed25519']}")
    client.welcomed()  # as ssh: the bare host vouches for a port without keys
    client.knows(f"127.0.0.1 {client.stranger}")
    assert "is unknown" in client.refused().message


def test_patterns_and_the_global_file(client: Client) -> None:
    shared = client.folder / "global"
    shared.write_text(f"[127.0.0.*]:*,!nobody {client.keys['ed25519']}\n")
    client.config(f"GlobalKnownHostsFile {shared}")
    client.welcomed()
    shared.write_text(f"[127.0.0.*]:*,!{client.name} {client.keys['ed25519']}\n")
    assert "is unknown" in client.refused().message


def test_a_pin_is_enough_and_nothing_is_recorded(client: Client) -> None:
    client.config("HostKeyAlgorithms ssh-ed25519")
    pin = fingerprint(client.keys["ed25519"].split()[1])
    client.welcomed(host_key=pin)
    client.welcomed(host_key=pin, accept_new_host_key=True)


def test_a_pin_is_the_only_key_that_passes(client: Client) -> None:
    client.knows(*(f"{client.name} {key}" for key in client.keys.values()))
    pin = fingerprint(client.stranger.split()[1])
    problem = client.refused(host_key=pin, accept_new_host_key=True)
    assert "does not show the pinned host key" in problem.message
    assert pin in problem.message


@pytest.mark.parametrize(("marker", "word"), [("", "is not the recorded one"), ("@revoked ", "is revoked")])
def test_a_pin_does_not_overrule_the_record(client: Client, marker: str, word: str) -> None:
    pin = fingerprint(client.keys["ed25519"].split()[1])
    client.knows(f"{marker}{client.name} {client.keys['ed25519'] if marker else client.stranger}")
    assert word in client.refused(host_key=pin).message


def test_the_user_s_own_laxness_does_not_reach_us(client: Client) -> None:
    client.config("StrictHostKeyChecking no", "NoHostAuthenticationForLocalhost yes", "UpdateHostKeys yes")
    assert "is unknown" in client.refused().message
    client.knows(f"{client.name} {client.keys['ed25519']}")
    client.welcomed()


@pytest.mark.parametrize("option", ["StrictHostKeyChecking=no", "stricthostkeychecking accept-new", "BatchMode=no"])
def test_ssh_options_may_not_weaken_the_check(client: Client, option: str) -> None:
    assert isinstance(client.contact(ssh_options=(option,)), UsageProblem)


def test_a_new_key_needs_a_place_to_be_recorded(client: Client) -> None:
    client.config("UserKnownHostsFile /dev/null")
    problem = client.contact(accept_new_host_key=True)
    assert isinstance(problem, HostKeyProblem)
    assert "nowhere to be recorded: /dev/null" in problem.message


@pytest.mark.parametrize(
    "way",
    [lambda c: "ProxyJump ct2", lambda c: f"ProxyCommand ssh -F {c.folder}/config -W %h:%p ct2"],
    ids=["jump", "command"],
)
def test_the_host_behind_a_jump_is_checked_too(client: Client, way: Callable[[Client], str]) -> None:
    inner = f"""Host behind
    HostName localhost
    Port {client.sshd.port}
    HostKeyAlias behind
    {way(client)}
    UserKnownHostsFile {client.known}
    GlobalKnownHostsFile /dev/null
    IdentityFile {client.sshd.identity}
    IdentitiesOnly yes
"""
    client.config()
    with (client.folder / "config").open("a") as config:
        config.write(inner)
    jump = f"{client.name} {client.keys['ed25519']}"
    client.knows(jump, f"behind {client.keys['ed25519']}")
    client.welcomed(address="behind")
    client.knows(jump, f"behind {client.stranger}")
    assert "is not the recorded one" in client.refused(address="behind").message
