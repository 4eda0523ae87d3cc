"""One host feeds another (`push --relay`): the feeder's bytes, the target's rules. Sent only with that flag; Python 3.9."""

from ddtree_deploy.agent.relay import door, feed

READS = {"relay-feed": feed.feed}
WRITES = {"relay-open": door.open_door, "relay-close": door.close_door}
