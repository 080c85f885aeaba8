"""The pages of the documentation, and the commands in them."""

from __future__ import annotations

import re

from tests.paths import ROOT

README = "README.md"
FOLDERS = ("configs", "launch", "megarl", "tests", "tools")
PAGES = sorted([README, *(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return what is under a heading of the second level."""
    return text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def command_blocks(page: str) -> list[list[str]]:
    """Return the commands of each ```bash block, line by line."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    return [block.strip().splitlines() for block in blocks]


def commands() -> list[str]:
    """Return the commands of all pages."""
    return [line for page in PAGES for block in command_blocks(page) for line in block]
