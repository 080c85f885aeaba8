"""The README's command blocks, and which test or target runs each."""

from __future__ import annotations

import re

from tests.paths import ROOT


def command_blocks() -> list[list[str]]:
    """Commands of each ```bash block, line by line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [block.strip().splitlines() for block in blocks]


def commands() -> list[str]:
    return [line for block in command_blocks() for line in block]
