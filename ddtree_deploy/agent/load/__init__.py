"""Load on a server from its own host, so no port need be reachable. Sent only with `bench` and `tune`; standard library, Python 3.9."""

from ddtree_deploy.agent.load import client, kept

READS = {"load-run": client.run}
WRITES = {"tune-keep": kept.keep, "bench-forget": kept.forget}
