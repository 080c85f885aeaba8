"""Endpoint errors in the OpenAI API format."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A rejected request, with the HTTP status (OpenAI clients retry after 408, 409, 429, and 500 and above), an error
    code, and the invalid parameter, if any."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 500: "server_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """Return the error for an invalid or unsupported request parameter."""
    return ApiError(400, "invalid_value", message, param)
