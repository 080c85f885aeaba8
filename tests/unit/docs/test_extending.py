"""The claims of the pages on extending megarl."""

from __future__ import annotations

import re

from megarl.models.huggingface import FAMILIES
from tests.readme import README, ROOT, text_of

ALGORITHM, ENVIRONMENT = "megarl/algorithms/README.md", "megarl/environments/README.md"
FAMILY = "megarl/resharding/families/README.md"


def test_the_readme_leads_to_the_pages_side_by_side():
    pages = (
        f"[Adding an algorithm]({ALGORITHM}), [Adding an environment]({ENVIRONMENT}) and [Adding a family]({FAMILY})"
    )
    assert pages in " ".join(text_of(README).split())
    assert text_of(ALGORITHM).startswith("# Adding an algorithm\n")
    assert text_of(ENVIRONMENT).startswith("# Adding an environment\n")
    assert text_of(FAMILY).startswith("# Adding a family\n")


def test_adding_a_family_touches_what_its_page_names():
    """A dense family's name is in no other file of the package, and every family is in every table of the tests. Llama
    is what these have where they do not say."""
    named = set(re.findall(r"`((?:megarl|tests)/[a-z_0-9/]+\.py)`", text_of(FAMILY)))
    assert [name for name in named if not (ROOT / name).is_file()] == []
    tables = {name: (ROOT / name).read_text() for name in named if name.startswith("tests/")}
    assert len(tables) == 5
    added = FAMILIES.keys() - {"llama"}
    assert [(name, family) for name, table in tables.items() for family in added if f'"{family}"' not in table] == []
    dense = "|".join(family for family, defaults in FAMILIES.items() if "num_experts_per_tok" not in defaults)
    knowing = [path for path in (ROOT / "megarl").rglob("*.py") if re.search(f'"({dense})"', path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in knowing} <= named
