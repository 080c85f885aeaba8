"""Links, files and functions in the documentation exist, and the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.readme import GENERATED, PAGES, README, ROOT, section, text_of


def test_readme_is_short():
    assert len(text_of(README).splitlines()) <= 200


def test_every_page_is_reachable_from_the_readme():
    reached, new = set(), {README}
    while new:
        reached |= new
        new = {target for page in new for target, _ in links(page) if target in PAGES} - reached
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_and_anchors_exist(page):
    for target, anchor in links(page):
        assert (ROOT / target).exists() or target in GENERATED, f"{page} links to {target}, which does not exist"
        if anchor and target not in GENERATED:
            assert anchor in anchors(target), f"{page} links to #{anchor} of {target}, which has no such heading"


def test_paths_in_the_readmes_tree_exist():
    tree = re.search(r"```\n(.*?)```", section(README, "Where things are"), re.DOTALL).group(1)
    for line in tree.splitlines():
        name = line.split()[0]
        path = ROOT / ("megarl/" if line.startswith("  ") else "") / name
        assert path.exists(), f"{name} is in the README's tree, but not in the repository"


def links(page: str) -> list[tuple[str, str]]:
    """Return the file and the anchor of every link within the repository."""
    found = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text_of(page))
    folder = (ROOT / page).parent
    return [(relative(folder / target) if target else page, anchor) for target, anchor in found]


def relative(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT.resolve()))


def anchors(page: str) -> set[str]:
    """Return GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
