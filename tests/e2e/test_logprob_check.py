"""The log-prob check on canary prompts names the fault between a real trainer and a real engine."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_train import write_recipe

pytestmark = pytest.mark.slow

FIRST = {
    "weights": "  1. weights: the checksums of 1 out of ",
    "temperature": "  1. temperature or truncation: the engine's log-probs match the trainer's at temperature 0.7 (",
    "kernels": "  1. kernels: the only remaining cause, because greedy tokens differ by ",
}


@pytest.fixture(scope="module")
def messages(series, model, tmp_path_factory) -> dict[str, str | None]:
    """The faults leave a broken engine. No other run has its temperature, so none shares it."""
    folder = tmp_path_factory.mktemp("disagreements")
    recipe = write_recipe(folder, model)
    series.train(recipe, "rollout.temperature=0.7", learn="tests.e2e.disagreements:check")
    return json.loads((folder / "runs/tiny/messages.json").read_text())


def test_check_passes_without_a_fault(messages) -> None:
    assert messages["nothing"] is None


@pytest.mark.parametrize("name", FIRST)
def test_fault_is_ranked_first(messages, name: str) -> None:
    assert FIRST[name] in messages[name]
    assert (
        "\n  excluded: " in messages[name]
        and "chat template or tokenization (engines receive token ids" in messages[name]
    )
    assert ("weights (the checksums of all " in messages[name]) == (name != "weights")
