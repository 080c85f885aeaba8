"""The pages on extending megarl."""

from __future__ import annotations

import re

from megarl.models.families import FAMILIES
from megarl.models.multimodal import WHOLE_ONLY
from tests.readme import README, ROOT, text_of

ALGORITHM, ENVIRONMENT = "megarl/algorithms/README.md", "megarl/environments/README.md"
FAMILY = "megarl/resharding/families/README.md"


def test_readme_links_the_pages_in_one_sentence():
    pages = f"[an algorithm]({ALGORITHM}), [an environment]({ENVIRONMENT}) or [a model family]({FAMILY})"
    assert pages in " ".join(text_of(README).split())
    assert text_of(ALGORITHM).startswith("# Adding an algorithm\n")
    assert text_of(ENVIRONMENT).startswith("# Adding an environment\n")
    assert text_of(FAMILY).startswith("# Adding a family\n")


def test_families_appear_only_in_the_files_the_page_names():
    """No other file of the package names a dense family, and every test table of text models has every family that vLLM
    runs without a vision tower. Llama is the default of these tables."""
    named = set(re.findall(r"`((?:megarl|tests)/[a-z_0-9/]+\.py)`", text_of(FAMILY)))
    assert [name for name in named if not (ROOT / name).is_file()] == []
    of_text_models = text_of(FAMILY).partition("# Vision-language models")[0]
    tables = {name: (ROOT / name).read_text() for name in named if name.startswith("tests/") and name in of_text_models}
    assert len(tables) == 5
    families = FAMILIES.keys() - {"llama", *WHOLE_ONLY}
    assert [(name, family) for name, table in tables.items() for family in families if f'"{family}"' not in table] == []
    dense = "|".join(family for family, defaults in FAMILIES.items() if "num_experts_per_tok" not in defaults)
    naming = [path for path in (ROOT / "megarl").rglob("*.py") if re.search(f'"({dense})"', path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in naming} <= named
