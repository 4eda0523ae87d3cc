"""Our reading of known_hosts against `ssh-keygen -F`, its oracle, and the judgements one by one."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.hosts.known_hosts import (
    Verdict,
    answer,
    end_last_line,
    fingerprint,
    judge,
    lookup_names,
    parse,
    record,
    recorded,
)

KEY, OTHER = (base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + bytes([n]) * 32).decode() for n in (1, 2))
KIND = "ssh-ed25519"
needs_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen: install openssh-client")
hosts = st.sampled_from(["a.example.org", "b.example.org", "[a.example.org]:2222", "10.0.0.1", "[10.0.0.1]:22022"])
patterns = st.sampled_from(
    ["*", "*.example.org", "!a.example.org", "a.example.or?", "[a.*]:2222", "[*]:*", "10.0.0.*", "A.EXAMPLE.ORG", "?"]
)


@needs_keygen
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(hosts, patterns), min_size=1, max_size=4), hosts, st.booleans())
def test_names_match_as_ssh_matches_them(tmp_path: Path, listed: list[str], name: str, hashed: bool) -> None:
    file = tmp_path / "known"
    file.write_text(f"{','.join(listed)} {KIND} {KEY}\n")
    if hashed and not any(set(item) & set("*?!") for item in listed):
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", file], check=False, capture_output=True)
    ours = recorded(parse(file.read_text()), (name,))
    assert bool(ours) == (found.returncode == 0)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("", Verdict.UNKNOWN),
        (f"other {KIND} {KEY}", Verdict.UNKNOWN),
        (f"host {KIND} {KEY}", Verdict.KNOWN),
        (f"host {KIND} {OTHER}\nhost {KIND} {KEY}", Verdict.KNOWN),
        (f"host {KIND} {OTHER}", Verdict.CHANGED),
        (f"host ssh-rsa {OTHER}", Verdict.CHANGED),
        (f"host {KIND} {KEY}\n@revoked * {KIND} {KEY}", Verdict.REVOKED),
        (f"host {KIND} {KEY}\n@revoked * {KIND} {OTHER}", Verdict.KNOWN),
        (f"host {KIND} {KEY}\n@revoked other {KIND} {KEY}", Verdict.KNOWN),
        (f"@cert-authority host {KIND} {KEY}", Verdict.UNKNOWN),
        (f"# host {KIND} {KEY}\nhost {KIND}\n\n@revoked\n|1|x|y {KIND} {KEY}\n|1|zz {KIND} {KEY}", Verdict.UNKNOWN),
    ],
)
def test_judgements(text: str, verdict: Verdict) -> None:
    assert judge(parse(text), ("host",), KIND, KEY).verdict is verdict


def test_a_bare_host_vouches_for_a_port_but_does_not_accuse() -> None:
    names = lookup_names("Host", 2222)
    assert names == ("[host]:2222", "host")
    assert judge(parse(f"host {KIND} {KEY}"), names, KIND, KEY).verdict is Verdict.KNOWN
    assert judge(parse(f"host {KIND} {OTHER}"), names, KIND, KEY).verdict is Verdict.UNKNOWN
    assert judge(parse(f"@revoked host {KIND} {KEY}"), names, KIND, KEY).verdict is Verdict.REVOKED


@pytest.mark.parametrize(
    ("pin", "text", "line"),
    [
        (KEY, "", f"host {KIND} {KEY}\n"),
        (KEY, f"host ssh-rsa {OTHER}", f"host {KIND} {KEY}\n"),
        (KEY, f"host {KIND} {OTHER}", ""),
        (KEY, f"@revoked host {KIND} {KEY}", ""),
        (OTHER, f"host {KIND} {KEY}", f"@revoked host {KIND} {KEY}\n"),
    ],
)
def test_what_ssh_is_answered_about_a_pinned_host(pin: str, text: str, line: str) -> None:
    assert answer(fingerprint(pin), "host", KIND, KEY, parse(text)) == line
    assert answer(fingerprint(pin), "host", "NONE", "NONE", parse(text)) == ""


@needs_keygen
def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text(f"{KIND} {KEY}\n")
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], check=True, capture_output=True, text=True)
    assert fingerprint(KEY) in shown.stdout


@pytest.mark.parametrize(("before", "between"), [(None, ""), ("", ""), ("x y z\n", ""), ("x y z", "\n")])
def test_recording_only_appends(tmp_path: Path, before: str | None, between: str) -> None:
    file = tmp_path / ".ssh/known_hosts"
    if before is not None:
        file.parent.mkdir()
        file.write_text(before)
    record(file, "host", KIND, KEY, hashed=False)
    assert file.read_text() == f"{before or ''}{between}host {KIND} {KEY}\n"
    if before is None:
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_ending_the_last_line_needs_no_file(tmp_path: Path) -> None:
    end_last_line(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
