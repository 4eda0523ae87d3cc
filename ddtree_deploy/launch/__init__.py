"""Start the DDTree server on a host, know that it serves, and keep it that way (docs/launch.md)."""
