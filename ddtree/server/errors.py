"""What goes wrong in the server: each error knows its HTTP status and its code."""

from __future__ import annotations


class ServerError(Exception):
    """Base of the server's own errors, rendered in the OpenAI error format."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, object]:
        """Return the JSON body of the error response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ModelError(ServerError):
    """The model or drafter cannot be served."""

    code = "model_unsupported"

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.mend = mend


class BadRequest(ServerError):
    """The request asks for something malformed or not supported."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class ContextTooLong(BadRequest):
    """The prompt leaves no room for an answer."""

    code = "context_length_exceeded"


class BodyTooLarge(BadRequest):
    """The request body is over the limit."""

    status = 413
    code = "request_too_large"


class Unauthorized(ServerError):
    """The API key is missing or wrong."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFound(ServerError):
    """The request names a model that is not served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class QueueFull(ServerError):
    """Too many requests wait already."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class ShuttingDown(ServerError):
    """The server drains and takes no new work."""

    status = 503
    kind = "service_unavailable"
    code = "shutting_down"


class EngineFailed(ServerError):
    """The engine raised while it served the request."""

    code = "engine_failed"


class Bug(ServerError):
    """The server itself raised; its log has the traceback."""

    code = "internal_error"
