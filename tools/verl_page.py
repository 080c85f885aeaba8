"""Write the table of configs/coming-from-verl.md from megarl.config.names. Usage: `python tools/verl_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from megarl.config.names import VERL, WITHOUT_KEY

PAGE = Path(__file__).parents[1] / "configs" / "coming-from-verl.md"
BEGIN, END = "<!-- keys:begin -->\n", "<!-- keys:end -->\n"


def render(page: str) -> str:
    """Return the page with the table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{''.join(_table())}{END}{after}"


def _table() -> Iterator[str]:
    yield "| verl | megarl | |\n|---|---|---|\n"
    for target, names in groupby(sorted(VERL, key=VERL.get), VERL.get):
        keys, _, note = target.partition(" (")
        yield f"| {_code(sorted(names))} | {_code(keys.split(' and '))} | {note.removesuffix(')')} |\n"
    for name, reason in sorted(WITHOUT_KEY.items()):
        yield f"| `{name}` | none | {reason} |\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
