"""Every error Octavo raises on purpose.

    OctavoError                    500 internal_error
    ├── InvalidRequest             400 invalid_request
    │   ├── ContextLengthExceeded  400 context_length_exceeded
    │   └── KVCacheTooSmall        400 kv_cache_too_small
    ├── Overloaded                 503 overloaded
    ├── ConfigError                400 invalid_config         (start-up, flags, sizes)
    ├── ModelRefused               400 model_refused          (a model that cannot work, and why)
    ├── ModelNotFound              404 model_not_found
    ├── RequestCancelled           499 cancelled
    ├── Unauthorized               401 invalid_api_key
    ├── Forbidden                  403 forbidden
    ├── BodyTooLarge               413 body_too_large
    ├── BodyTimeout                408 body_timeout
    ├── UnsupportedMediaType       415 unsupported_media_type
    └── BooksDoNotBalance          500 books_do_not_balance   (the conservation law is broken: a bug)

A message names the field, the value, the limit and the smallest change that would work.
"""

from __future__ import annotations

from typing import Any


def show(value: object) -> str:
    """`value` for a message: its `repr`, cut to a readable length."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = "<a number too long to print>"
    return text if len(text) <= 80 else text[:77] + "..."


class OctavoError(Exception):
    """Base class. `status` is the HTTP status, `code` the machine-readable name, `param` the field at fault."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(OctavoError):
    """One request asks for something impossible; no other request is concerned."""

    status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for one more token in the context."""

    code = "context_length_exceeded"


class KVCacheTooSmall(InvalidRequest):
    """The request could not fit even if it had the whole arena to itself."""

    code = "kv_cache_too_small"


class Overloaded(OctavoError):
    """The queue is full. `retry_after_s` is a hint, in seconds."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ConfigError(OctavoError):
    """An engine option has an impossible value, or options contradict each other."""

    status = 400
    code = "invalid_config"


class ModelRefused(OctavoError):
    """The model is there but cannot be served exactly and safely; the message says why."""

    status = 400
    code = "model_refused"


class ModelNotFound(OctavoError):
    """MODEL names no alias, directory, `.gguf` file or reachable hub id."""

    status = 404
    code = "model_not_found"


class RequestCancelled(OctavoError):
    """The request was aborted before it finished."""

    status = 499
    code = "cancelled"


class Unauthorized(OctavoError):
    """No key was sent, or one that nobody has."""

    status = 401
    code = "invalid_api_key"


class Forbidden(OctavoError):
    """The key is valid, but not for this."""

    status = 403
    code = "forbidden"


class BodyTooLarge(OctavoError):
    """The body of a request is longer than the server reads."""

    status = 413
    code = "body_too_large"


class BodyTimeout(OctavoError):
    """The body of a request did not arrive in time."""

    status = 408
    code = "body_timeout"


class UnsupportedMediaType(OctavoError):
    """The body of a request is not declared to be JSON."""

    status = 415
    code = "unsupported_media_type"


class BooksDoNotBalance(OctavoError):
    """A conservation law of the cache does not hold. Always a bug in Octavo."""

    code = "books_do_not_balance"


def error_body(error: OctavoError) -> dict[str, Any]:
    """`error` as OpenAI's API writes it, and so do ours and `--json`."""
    kind = (
        "invalid_request_error" if error.status < 499 else "server_error"
    )  # 499: ended, by no fault of the request
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
