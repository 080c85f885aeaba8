"""Log file of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from megarl.cluster.supervision.logs import log_to
log_to(Path(sys.argv[1]))
print("a\\ud800b")
print("c\\ud800d", file=sys.stderr)
"""


def test_log_accepts_lone_surrogates(tmp_path: Path) -> None:
    """A reward function may print a response that contains them."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "log")])
    assert done.returncode == 0
    assert sorted((tmp_path / "log").read_text().splitlines()) == [r"a\ud800b", r"c\ud800d"]
