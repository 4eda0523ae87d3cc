"""Load on a server from its own host, so that no port need be reachable. Sent only with `bench`; standard library, Python 3.9."""

from ddtree_deploy.agent.load import client

READS = {"load-run": client.run}
WRITES: dict[str, object] = {}
