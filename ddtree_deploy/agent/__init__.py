"""The half that runs on a host: standard library only, Python 3.9 or later, sent over stdin, never written there."""

PROTOCOL = 1
