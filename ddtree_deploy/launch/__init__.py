"""Start the DDTree server on a host, know that it serves, and keep it that way (docs/launch.md).

The small stable face for other commands: `running(host)`, `stop(host, name)`, `start(host, record)`.
"""

from ddtree_deploy.launch.lifecycle import Options, restart, running, start, stop
from ddtree_deploy.launch.models import Ready, Record, Server, Stopped

__all__ = ["Options", "Ready", "Record", "Server", "Stopped", "restart", "running", "start", "stop"]
