"""Write the checkpoint in `saved` of the current format: `python -m tests.unit.run.saved_format`.

Do this once for each new format. Folders of earlier formats stay as megarl wrote them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from megarl.core.checkpoint import FORMAT
from tests.unit.run.test_resume import PROMPTS, config, save, start

SAVED = Path(__file__).parent / "saved"


def write(target: Path) -> None:
    """Save a checkpoint after two steps of a run in `runs`, as `megarl train` does."""
    with tempfile.TemporaryDirectory() as root:
        settings = config(Path(root))
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"folder": "runs"})})
        shutil.copytree(save(start(config(Path(root)), PROMPTS), settings, 2), target)


if __name__ == "__main__":
    write(SAVED / f"format_{FORMAT}")
