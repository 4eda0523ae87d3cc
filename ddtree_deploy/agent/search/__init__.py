"""The environments of this host and what they can import, for `venvs` and `doctor --needs`. Sent only with these; Python 3.9."""

from ddtree_deploy.agent.search import environments

READS = {"venvs": environments.venvs}
WRITES: dict[str, object] = {}
