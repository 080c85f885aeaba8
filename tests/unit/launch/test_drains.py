"""The job script's function `watch_drains` with fakes of Slurm's commands: requests to replace drained nodes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from megarl.cluster.nodes.rendezvous import NODES, NodeRendezvous
from megarl.launch.script import TEMPLATE

FAKES = """
calls=0
sleep() {{ ((++calls <= 2)); }}
sinfo() {{
  echo "$*" >> {run}/asked
  if ((calls == 2)); then printf '%s\\n' 'n1 maintenance at noon' 'n1 maintenance at noon' 'n3 '; fi
}}
run={run} SLURM_JOB_NODELIST=n[0-3]
"""


def test_drained_nodes_are_requested_to_leave(tmp_path: Path) -> None:
    """Slurm lists a node once for each of its partitions."""
    [function] = re.findall(r"^watch_drains\(\) \{\n.*?^\}\n", TEMPLATE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / NODES).mkdir()
    script = FAKES.format(run=tmp_path) + function + "watch_drains"
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert NodeRendezvous(tmp_path / NODES).leave_requests() == {
        "n1": "Slurm drains it (maintenance at noon)",
        "n3": "Slurm drains it ()",
    }
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and all("--nodes=n[0-3] --states=drain,fail" in line for line in asked)
    assert not [file for file in (tmp_path / NODES).iterdir() if file.name.startswith(".")]
