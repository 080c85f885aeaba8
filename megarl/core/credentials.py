"""Find credentials in text that megarl would write to the run folder."""

from __future__ import annotations

import re

SECRET_KEY = re.compile(
    r"(?:^|[_.-])(?:api|access|secret)[_-]?key$|(?:^|[_.-])(?:password|passwd|secret)$"
    r"|(?:^|[_.-])(?:access|api|auth|bearer|hf|hub|secret|session)[_-]?token$|^token$|^authorization$",
    re.IGNORECASE,
)
"""Names of options that hold secrets. Names such as stop_token and api_key_env do not match."""

VALUE = r"""["']?[^\s"'$`,;]"""
"""The first character of a secret. It excludes references to variables and commands."""

TOKEN = r"(?<!(?i:eos|bos|pad|unk|max|num|cls|sep)[_-])(?<!(?i:stop|mask)[_-])TOKEN"
"""The word TOKEN, except in the names of special tokens and token counts."""

URL = re.compile(r"(://[^/\s@:]*:)(?!\$)[^/\s@]+@")
"""A URL with a password."""

PATTERNS = (  # Matching is linear if unbounded repetitions from different starts do not overlap.
    URL,
    # Environment variable.
    re.compile(rf"\b[A-Z0-9_]*(?:{TOKEN}|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|SECRET_?KEY)={VALUE}"),
    # An environment variable in YAML, as opposed to an annotated Python variable.
    re.compile(
        rf"\b[A-Z0-9_]*(?:_{TOKEN}|_SECRET|_PASSWORD|_PASSWD|API_?KEY|ACCESS_?KEY|SECRET_?KEY):[ \t]+"
        r"""(?!(?:None|null|true|false|bytes|Final|Optional)\b)["']?[A-Za-z0-9+/_.-]{4}"""
    ),
    # Quoted value in Python, JSON or YAML. A short value, a placeholder and EMPTY, which servers without authorization
    # need, are not secrets.
    re.compile(
        r"(?:(?:api|access|secret)[_-]?key|password|passwd|(?:client|app)[_-]?secret"
        r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|session|wandb)[_-]?token)"
        r"""["']?\]?(?:: ?str)?\s{0,4}[:=]\s{0,4}[bru]?["'](?!(?:empty|none|null|dummy)["'])[^\s"'$`{<%[]{4}""",
        re.IGNORECASE,
    ),
    # Command-line option.
    re.compile(rf"(?<![\w-])--[a-z-]*(?:{TOKEN.lower()}|secret|password|passwd|api-?key|access-?key)(?:=|\s+){VALUE}"),
    # HTTP header.
    re.compile(rf"""\bauthorization["']?\s*[:=]\s*["']?(?:bearer|basic|token)\s+{VALUE}""", re.IGNORECASE),
    re.compile(r"\bBearer\s+[A-Za-z0-9+/._~-]{20}"),
    # Tokens of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, Slack, AWS and Google.
    re.compile(r"\b(?:hf_|gh[oprsu]_)[A-Za-z0-9]{30}|\bgithub_pat_\w{30}|\bglpat-[\w-]{20}|\bsk-[\w-]{20}"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10}|\bAKIA[A-Z0-9]{16}|\bAIza[\w-]{30}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
)


def has_credentials(text: str) -> bool:
    """Return whether a text contains a password or token, such as a URL with a password or `export HF_TOKEN=…`."""
    return any(pattern.search(text) for pattern in PATTERNS)


def is_secret_key(key: str) -> bool:
    """Return whether an option with this name holds a secret."""
    return SECRET_KEY.search(key) is not None


def redacted(text: str) -> str:
    """Mask passwords in URLs. Error messages of libraries may contain such URLs."""
    return URL.sub(r"\1***@", text)
