"""The half that runs on a host: standard library only, Python 3.9 or later, sent over stdin, never written there."""

# `TYPE_CHECKING = False` in these modules: importing typing, for annotations alone, would delay the start of every command.
PROTOCOL = 1
