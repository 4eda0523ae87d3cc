"""A container of docker or podman: `docker exec -i NAME`, here or behind ssh (`via = "docker:NAME"`, `"podman:NAME"`).

`exec -i` without `-t` has no terminal, so bytes pass as they are (docker-exec(1), podman-exec(1)).
"""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_deploy.hosts.base import Channel, Connector, Host
from ddtree_deploy.hosts.hop import Hint, through


def hints(engine: str) -> tuple[Hint, ...]:
    """Return what `engine` says when it can not run a process, with what to do."""
    return (
        Hint(
            r"no such container|no container with name or id",
            "there is no container `{inside}` on {node}",
            f"see `{engine} ps -a` there; another user's containers are not seen",
        ),
        Hint(
            r"container .* is (not running|paused)|container state improper",
            "container `{inside}` on {node} is not running",
            f"`{engine} start {{inside}}` there",
        ),
        Hint(
            r"permission denied while trying to connect|connect: permission denied",
            f"the user who logs in to {{node}} may not use {engine}",
            f"log in as root, or add the user to the `{engine}` group there",
        ),
        Hint(
            r"cannot connect to the docker daemon|cannot connect to podman",
            f"{engine} does not run on {{node}}",
            f"`systemctl start {engine}` there",
        ),
        Hint(
            rf"\b{engine}: (command )?not found|no such file or directory: '{engine}'",
            f"{{node}} has no `{engine}`",
            "`via` under [hosts.{host}] names the engine: `docker:NAME` or `podman:NAME`",
        ),
        Hint(
            r"""exec: "?sh"?: executable file not found|executable file `sh` not found""",
            "container `{inside}` on {node} has no shell",
            "use an image with `sh` and Python 3.9 or newer",
        ),
    )


class DockerConnector:
    """Start processes inside a container. `start` raises what the connector of its node raises."""

    def __init__(self, host: Host, node: Connector) -> None:
        self.host, self._node = host, node
        self._engine, _, self._name = host.via.partition(":")
        self._hints = hints(self._engine)

    def start(self, argv: Sequence[str]) -> Channel:
        return through(self.host, self._node, [self._engine, "exec", "-i", self._name, *argv], self._hints)
