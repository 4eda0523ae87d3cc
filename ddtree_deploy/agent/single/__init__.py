"""One file onto this host, for `put`: beside its place, checked there, then renamed. Sent only with that command; Python 3.9."""

from ddtree_deploy.agent.single import place

READS = {"put-look": place.look}
WRITES = {"put-open": place.open_file, "put-data": place.data, "put-commit": place.commit}
