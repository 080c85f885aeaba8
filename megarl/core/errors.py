"""Error types that distinguish user mistakes from failures, each with the exit code of the command."""

from __future__ import annotations


class UserError(ValueError):
    """An error that the user can fix in the recipe, the data or on the machine; the message explains how. Every other
    exception, including other ValueErrors, is a failure and is reported with its process, log and stack."""

    exit_code = 2


def prefix_lines(prefix: str, message: str) -> str:
    """Prefix each line of an error message, except indented lines, which contain code or a stack."""
    return "\n".join(line if line.startswith("    ") else f"{prefix}{line}" for line in message.splitlines())


def install_extra(extra: str) -> str:
    """Return a remedy that installs an extra, such as `run`. megarl is not on PyPI, and the package
    named megarl there belongs to another project."""
    return f"run pip install '.[{extra}]' in a checkout of megarl, or pip install 'FILE.whl[{extra}]' with its wheel"


class TooLittleSpace(UserError):
    """A disk has less free space than a command needs."""


class RunFailure(RuntimeError):
    """A failure not caused by the user: a lost process, a missed deadline, an error inside a worker. Errors that the
    user caused are raised as UserError, in every process."""

    exit_code = 1


class InfrastructureFailure(RunFailure):
    """A resource outside the run was unavailable for longer than the run waits: the disk is full, a server does not
    respond, or the kernel kills processes. The same run may succeed later."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class DamagedCheckpoint(UserError):
    """Raised if a checkpoint's files are missing or differ from their records. An earlier checkpoint may be intact."""
