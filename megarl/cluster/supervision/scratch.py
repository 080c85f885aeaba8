"""The folder on each node for files of a run that are not needed after it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MEGARL_SCRATCH"
"""The variable by which the processes that a node's supervisor starts know the node's folder."""


def own_scratch() -> Path:
    """Returns the folder of the node that this process is on, inside `supervised`."""
    return Path(os.environ[VARIABLE])
