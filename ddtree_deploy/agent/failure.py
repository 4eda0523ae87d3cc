"""The one exception whose kind the controller turns into an error class of its own."""


class Failure(Exception):
    """A request failed in a way the controller knows: `kind` is the kind of a DeployError."""

    def __init__(self, kind, message, mend=None, causes=()):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.mend = mend
        self.causes = list(causes)
