"""Error types that distinguish user mistakes from failures, each with the exit code of the command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from megarl.core.text import printable


class OneStop(Exception):
    """An error whose message may embed another program's message. A doubled period after an embedded sentence becomes a
    single one."""

    def __init__(self, message: object = "") -> None:
        super().__init__(re.sub(r"(?<=[^.\s])\.\.(?=\s+[A-Z])", ".", message) if isinstance(message, str) else message)


class UserError(OneStop, ValueError):
    """An error that the user can fix in the recipe, in the data, or on the machine; the message explains how. Every
    other exception, including other ValueErrors, is a failure and is reported with its process, log and stack."""

    exit_code = 2


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors that caused it, along the chain that a traceback shows."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


ERROR, INDENT = "megarl: error: ", "    "
"""Prefix of an error line, and of the lines with code or a stack trace that may follow it."""


def prefix_lines(prefix: str, message: str) -> str:
    """Prefix each line of an error message, except indented lines of code or of a stack trace."""
    return "\n".join(line if line.startswith(INDENT) else f"{prefix}{line}" for line in message.splitlines())


def print_error(message: object) -> None:
    """Print an error to stderr. Control characters are escaped, because the message may contain untrusted text."""
    lines = map(printable, (str(message) or repr(message)).splitlines())
    print(prefix_lines(ERROR, "\n".join(lines)), file=sys.stderr, flush=True)


def install_extra(extra: str) -> str:
    """Return a remedy that installs an extra, such as `run`. The package named megarl on PyPI belongs to another
    project."""
    return f"run pip install '.[{extra}]' in a checkout of megarl, or pip install 'FILE.whl[{extra}]' with its wheel"


EXTRAS = {
    "run": (
        *("megatron", "torch", "ray", "aiohttp", "transformers", "jinja2", "safetensors", "tokenizers", "pyarrow"),
        *("rich", "bm25s", "httpx", "regex"),
    ),
    "gpu": ("vllm", "pynvml", "transformer_engine", "fla"),
    "rewards": ("math_verify", "latex2sympy2_extended", "antlr4", "sympy", "reasoning_gym"),
    "trackers": ("tensorboard", "wandb", "mlflow", "trackio"),
    "images": ("diffusers", "PIL"),
    "ocr": ("onnxruntime", "rapidocr_onnxruntime"),
    "gguf": ("gguf", "accelerate"),
}
"""Extra -> the modules that its packages contain."""


def extra_of(module: str) -> str | None:
    """Return the extra that contains a module, or None."""
    return next((extra for extra, modules in EXTRAS.items() if module.partition(".")[0] in modules), None)


def missing_module(error: ModuleNotFoundError) -> str | None:
    """Return an error line if an extra contains the missing module, else None."""
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra is None:
        return None
    return f"this command requires the package {module}, which is not installed. Fix: {install_extra(extra)}"


class TooLittleSpace(UserError):
    """A disk has less free space than a command needs."""


class RunFailure(OneStop, RuntimeError):
    """A failure not caused by the user: a lost process, a missed deadline, an error inside a worker. Errors that the
    user caused are raised as UserError, in every process."""

    exit_code = 1


class PermanentFailure(RunFailure):
    """A failure that would recur in every attempt, such as log-probs that differ between trainer and engine."""

    exit_code = 2


class InfrastructureFailure(RunFailure):
    """A resource outside the run was unavailable for longer than the run waits: the disk is full, a server does not
    respond, or the kernel kills processes. The same run may succeed later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class DamagedCheckpoint(UserError):
    """Raised if a checkpoint's files are missing or differ from their records. An earlier checkpoint may be intact."""
