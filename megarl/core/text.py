"""Format text for messages, and make text from environments, agents, judges and data files safe to encode and print."""

from __future__ import annotations

from typing import Any


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as "1 image" or "2,000 images"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def encodable(value: Any) -> Any:
    """Return a JSON value with strings that UTF-8 can encode, as tokenizers require. A UTF-16 surrogate pair becomes
    its character, and a lone surrogate becomes U+FFFD."""
    if isinstance(value, str):
        return value if _is_encodable(value) else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """Return a text with control characters escaped. A file name may contain line breaks and escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
