from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import dump, load
from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.correction={old: rollout, mask: sequence}"],
            "algorithm.correction.mask=sequence: has no effect unless algorithm.correction.old=trainer. Fix",
        ),
        (
            ["algorithm.correction={weight: token, weight_floor: 2}"],
            "algorithm.correction.weight_floor=2: it must be below algorithm.correction.weight_limit=2. Fix: set",
        ),
        (
            ["algorithm.correction={mask: token, mask_low: 5}"],
            (
                "algorithm.correction.mask_low=5: it must be below algorithm.correction.mask_high=5, or no token is "
                "kept. Fix: set algorithm.correction.mask_low"
            ),
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        ([], None),
        (["rollout.quantization=fp8_block"], "token"),
        (["rollout.quantization=fp8_block", "algorithm.correction.weight=null"], None),
        (["rollout.quantization=fp8_block", "algorithm.correction.weight=sequence"], "sequence"),
        (["rollout.quantization=fp8_block", "algorithm.correction.old=rollout"], None),
        (["algorithm.correction.weight=token"], "token"),
    ],
)
def test_quantized_engines_have_a_correction_by_default(
    overrides: list[str], weight: str | None, tmp_path: Path
) -> None:
    config = recipe(*overrides)
    assert config.algorithm.correction.weight == weight
    assert config.algorithm.correction.weight_limit == 2
    (tmp_path / "dumped.yaml").write_text(dump(config))
    assert load(tmp_path / "dumped.yaml") == config
