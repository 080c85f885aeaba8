"""Write the tables of verl and TRL keys from megarl.config.names. Usage: `python tools/key_tables.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from megarl.config.names import TRL, TRL_WITHOUT_KEY, VERL, WITHOUT_KEY

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- keys:begin -->\n", "<!-- keys:end -->\n"


def render(page: str, table: Iterable[str]) -> str:
    """Return the page with the table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{''.join(table)}{END}{after}"


def key_table(trainer: str, keys: Mapping[str, str], without_key: Mapping[str, str]) -> Iterator[str]:
    yield f"| {trainer} | megarl | |\n|---|---|---|\n"
    for target, names in groupby(sorted(keys, key=keys.get), keys.get):
        equivalents, _, note = target.partition(" (")
        yield f"| {_code(sorted(names))} | {_code(equivalents.split(' and '))} | {note.removesuffix(')')} |\n"
    for name, reason in sorted(without_key.items()):
        yield f"| `{name}` | none | {reason} |\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES = {
    "configs/coming-from-verl.md": ("verl", VERL, WITHOUT_KEY),
    "docs/tutorials/porting-from-trl.md": ("TRL", TRL, TRL_WITHOUT_KEY),
}
"""Page -> arguments of `key_table`."""


if __name__ == "__main__":
    for name, arguments in PAGES.items():
        path = ROOT / name
        path.write_text(render(path.read_text(encoding="utf-8"), key_table(*arguments)), encoding="utf-8")
