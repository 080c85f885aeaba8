"""The documentation's pages and their commands."""

from __future__ import annotations

import re

from tests.paths import ROOT
from tools.docs import reference

README = "README.md"
FOLDERS = ("configs", "docs", "launch", "megarl", "tests", "tools")
PAGES = sorted([README, *(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
GENERATED = frozenset(f"docs/{page}" for page in reference.PAGES)
"""Pages of the site that `make docs` generates."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return the text of a second-level section."""
    return text_of(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def command_blocks(page: str) -> list[list[str]]:
    """Return the lines of each ```bash block."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    return [block.strip().splitlines() for block in blocks]


def commands() -> list[str]:
    """Return the different command lines of all pages."""
    return list(dict.fromkeys(line for page in PAGES for block in command_blocks(page) for line in block))
