"""Sandboxes of an ordinary user, and of root with and without dropping to another user."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl.sandbox.bubblewrap import Bubblewrap
from tests.children import matching
from tests.paths import ROOT
from tests.sandboxes import limits, printed
from tests.timing import HANG_S, POLL_S, WAIT_S

RIGHTS = """
    import os
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(os.getuid(), int(status["CapEff"], 16))
"""

USER = 54321

ORDINARY = f"""
import asyncio, os
from megarl.sandbox.choice import find_provider
from tests.sandboxes import limits, printed

provider = asyncio.run(find_provider(limits(processes=4)))
print(os.getuid(), provider.name, provider.drops_root)
print(printed(provider, "import os; print(os.getuid(), os.path.exists({str(ROOT / "README.md")!r}), os.listdir('.'))"))
print(printed(provider, '''
import os, time
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(600)
except OSError:
    print("refused")
'''))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, all other tests run as an ordinary user")
def test_ordinary_user_can_start_sandboxes():
    """Mounts make the Python installation and the checkout accessible if only root can enter their folders."""
    mounts, folders = [], {sys.prefix, sys.base_prefix, str(ROOT)}
    for folder in sorted(folders):
        top, *between = reversed(Path(folder).parents[:-1])
        if top.stat().st_mode & 1 == 0:
            mounts += [] if str(top) in mounts else ["--perms", "0755", "--tmpfs", str(top)]
            mounts += [option for path in between for option in ("--perms", "0755", "--dir", str(path))]
            mounts += ["--ro-bind", folder, folder]
    rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    command = ["bwrap", "--dev-bind", "/", "/", *mounts, *rights, "--", *user, sys.executable, "-B", "-c", ORDINARY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split("\n") == [f"{USER} bubblewrap False", "1000 False []", "", "refused", "", ""]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("drops_root", "outside"), [(True, 65534), (False, 0)])
def test_root_has_no_capabilities_in_a_sandbox(drops_root, outside):
    provider = Bubblewrap(limits(), drops_root=drops_root)
    assert printed(provider, RIGHTS) == "1000 0\n"

    async def owner() -> int:
        async with await provider.start() as sandbox:
            name = f"of-user-{outside}"
            call = asyncio.create_task(sandbox.run(["bash", "-c", f"exec -a {name} sleep {HANG_S}"]))
            while not (sleeping := matching(psutil.process_iter(), lambda one: one.cmdline()[:1] == [name])):
                await asyncio.sleep(POLL_S)
            [owner] = [process.uids().real for process in sleeping]
            call.cancel()
        return owner

    assert asyncio.run(owner()) == outside
