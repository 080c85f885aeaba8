"""Links, files and functions in the documentation exist, and the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.config import rules
from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import QUICKSTART
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


def test_keys_in_sentences_have_valid_values(monkeypatch):
    """Rules about several keys are not checked, because sentences omit other keys. Capitals and single letters stand
    for values."""
    monkeypatch.setattr(rules, "check", lambda *_: None)
    key_and_value = re.compile(rf"((?:{'|'.join(Config.model_fields)})\.[a-z_.]+)(?:=|: )(?!\w$|.*\b[A-Z]+\b)(.+)")
    found = set()
    for page in PAGES:
        for code in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)):
            settings = re.split(r" (?=[a-z_]+\.[a-z_.]+=)", " ".join(code.split()))
            matches = [match for setting in settings if (match := key_and_value.fullmatch(setting))]
            if len(matches) == len(settings):
                found |= {f"{match[1]}={match[2]}" for match in matches}
    assert len(found) > 50
    for override in found:
        load(QUICKSTART, [override])


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
