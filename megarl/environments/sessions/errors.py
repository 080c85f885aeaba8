"""Errors of the endpoint, as clients of the OpenAI API read them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is refused.

    status   of HTTP; clients try 408, 409, 429 and those from 500 again
    code     tells programs what is wrong
    param    the part of the request that is wrong, or None
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 500: "server_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a request that is not understood, or asks for what is not given here."""
    return ApiError(400, "invalid_value", message, param)
