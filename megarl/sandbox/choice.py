"""The choice of what isolates programs, as section `sandbox` of a config makes it."""

from __future__ import annotations

import sys

from megarl.config import schema
from megarl.core.errors import UserError
from megarl.sandbox.apptainer import Apptainer
from megarl.sandbox.bubblewrap import Bubblewrap
from megarl.sandbox.provider import Provider
from megarl.sandbox.sandbox import SandboxError
from megarl.sandbox.unsafe import Unsafe

INSTALL = (
    "install bubblewrap 0.8 or later (`apt-get install bubblewrap`, or `conda install -c conda-forge bubblewrap` "
    "without root), on a kernel that lets users make namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0); or Apptainer, with sandbox.image; or set sandbox.unsafe=allow, "
    "with which programs can do whatever this user can"
)


async def find_provider(limits: schema.Sandbox, deadline_s: float | None = None) -> Provider:
    """Returns a provider whose sandboxes work here, which is tried. Raises UserError if there is none.

    deadline_s: how long a sandbox may live, unless it is started with another time."""
    reasons = []
    for provider in _candidates(limits, deadline_s):
        try:
            await provider.try_out()
            return provider
        except SandboxError as error:
            reasons.append(f"{provider.name}: {error}")
    why = "; ".join(dict.fromkeys(reasons))
    asked = f"sandbox.provider={limits.provider}: programs cannot be isolated here ({why})"
    if limits.unsafe == "refuse":
        raise UserError(f"{asked}; {INSTALL}")
    provider = Unsafe(limits, deadline_s)
    await provider.try_out()
    print(f"{asked}; sandbox.unsafe=allow: they run as ordinary processes of this user", file=sys.stderr, flush=True)
    return provider


def _candidates(limits: schema.Sandbox, deadline_s: float | None) -> list[Provider]:
    """Returns the providers that the config admits, best first. Root stays root in a sandbox only where it cannot be
    another user, as in containers that have but one."""
    drops = Bubblewrap(limits, deadline_s)
    bubblewrap = [drops, Bubblewrap(limits, deadline_s, drops_root=False)] if drops.drops_root else [drops]
    apptainer = [Apptainer(limits, deadline_s)]
    by_name = {"bubblewrap": bubblewrap, "apptainer": apptainer}
    if limits.provider != "auto":
        return list(by_name[limits.provider])
    return [*bubblewrap, *(apptainer if limits.image is not None else [])]
