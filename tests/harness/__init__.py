"""Real hosts for the tests: a loopback sshd, and two machines made of namespaces. Nothing here is a fake.

One sshd on 127.0.0.1 (any user; this machine's own files)::

    from ddtree_deploy.demo.sshd import loopback_sshd
    with loopback_sshd(tmp_path, aliases=("ct1", "ct2")) as sshd:
        Host("ct1", address="ct1", ssh_config=str(sshd.client_config))

Two machines (root only; about a second to start)::

    from tests.harness.lab import lab_missing, two_hosts
    pytestmark = [pytest.mark.ssh, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]

    @pytest.fixture(scope="module")
    def lab():
        with two_hosts() as lab:            # two_hosts("ct129", "ct200", disk_mib=20_000)
            yield lab

    def test_push(lab):
        source, target = lab.hosts          # also lab["ct200"]
        target.run(["python3", "-m", "venv", "/srv/venv"])        # runs on that machine, without ssh
        target.path("/srv/venv/x").read_text()                     # its files, seen from here
        lab.run([sys.executable, "-m", "ddtree_deploy", "push", "ct200", "-y"], env={"DDTREE_HOME": ...})

A machine has a root of its own (overlay over this machine's `/`: python and installed wheels are there, writes are
private), its own /srv (a plain ext4 of `disk_mib`; put venvs there), HOME=/srv/home, /proc, processes, network and
sshd. `lab.share` here is /mnt/lab there: hand wheels over in it (the machines have no way out to the internet).

The commands under test run in the controller's network namespace, which has this machine's files: `lab.run(argv, env=)`
for a process, or `with lab.inside():` to bring the current thread (its children and new threads too) into it, so that
connectors can be used in the test itself. `lab.env` holds DDTREE_SSH_CONFIG; `ssh -F lab.ssh_config ct200` works;
`lab.host("ct200", venv="/srv/venv")` is the `Host` value.

Faults: `target.cut()` pulls the cable (frames vanish), `target.drop()` discards every frame but leaves the link up,
`target.restore()` ends both; `target.reset()` kills the sshd processes that serve connections (the peer sees an end
or a reset at once), `target.stop_sshd()`/`start_sshd()`; `lab.shape(1000)` is 1 Gbit/s each way, `lab.shape(None)`
ends it. Measuring: `target.received_bytes()` counts what came in over the wire, `target.processes()` lists
(pid, argv) there, for "nothing left behind".

Every resource hangs on the machine's first process: when that dies (also when the test process is killed), its
processes, mounts, loop device, network and namespaces go with it.
"""
