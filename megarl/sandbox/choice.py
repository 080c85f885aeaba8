"""Selects the sandbox provider according to the config's `sandbox` section."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING

from megarl.core.errors import UserError
from megarl.sandbox.apptainer import Apptainer
from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.provider import OWN_AGENT, SYSTEM_PATH, Provider
from megarl.sandbox.sandbox import Command, SandboxError

if TYPE_CHECKING:
    from megarl.config import schema

INSTALL = (
    "install bubblewrap 0.8 or later (`apt-get install bubblewrap`, or `conda install -c conda-forge bubblewrap` "
    "without root) on a kernel that allows unprivileged user namespaces (sysctl user.max_user_namespaces, on Ubuntu "
    "also kernel.apparmor_restrict_unprivileged_userns=0), or install Apptainer and set sandbox.image to an "
    "existing image, or set sandbox.unsafe=allow, which gives programs all permissions of this user"
)


class Unsafe(Provider):
    """Runs programs as ordinary processes of this user, with access to the network and all of the user's files. Limits
    are enforced, except for those on the number and the total size of files. A program's processes are killed with it.
    A hostile program can evade both. Each sandbox has its own folder, but programs are not confined to it."""

    name = "unsafe"

    def command(self) -> Command:
        folder = tempfile.mkdtemp(prefix="megarl-sandbox-")
        path = f"{os.path.dirname(sys.executable)}:{SYSTEM_PATH}"
        return Command([*OWN_AGENT, folder, path, "removes_folder"], folder=folder)


async def find_provider(limits: schema.Sandbox, deadline_s: float | None = None) -> Provider:
    """Return a provider whose sandboxes work on this machine. Raise UserError if there is none. `deadline_s` is the
    default lifetime of a sandbox, in seconds."""
    reasons = []
    for provider in _candidates(limits, deadline_s):
        try:
            await provider.try_out()
            return provider
        except SandboxError as error:
            reasons.append(f"{provider.name}: {error}")
    details = "; ".join(dict.fromkeys(reasons))
    problem = f"sandbox.provider={limits.provider}: programs cannot be isolated on this machine ({details})"
    if limits.unsafe == "refuse":
        raise UserError(f"{problem}. Fix: {INSTALL}")
    provider = Unsafe(limits, deadline_s)
    await provider.try_out()
    print(
        f"{problem}. With sandbox.unsafe=allow, they run as ordinary processes of this user",
        file=sys.stderr,
        flush=True,
    )
    return provider


def _candidates(limits: schema.Sandbox, deadline_s: float | None) -> list[Provider]:
    """Return the providers that the config allows, in order of preference. Root stays root in a sandbox only if it
    cannot switch to a different user, as in containers with a single user."""
    first = Bubblewrap(limits, deadline_s)
    bubblewrap = [first, Bubblewrap(limits, deadline_s, drops_root=False)] if first.drops_root else [first]
    apptainer = [Apptainer(limits, deadline_s)]
    by_name = {"bubblewrap": bubblewrap, "apptainer": apptainer}
    if limits.provider != "auto":
        return list(by_name[limits.provider])
    return [*bubblewrap, *(apptainer if limits.image is not None else [])]
