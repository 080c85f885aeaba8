"""Speculative decoding does not change tokens, log-probs or weight versions."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.e2e.engine_processes import engine_context
from tests.e2e.speculative import CASES, LONG, OWN_WEIGHTS, measure
from tests.marks import exhaustive_but
from tests.timing import RUN_S

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", exhaustive_but(CASES, "GLM-4.6's MTP, adapters"))
def test_samples_have_the_distribution_of_the_model(case, tmp_path):
    with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
        found = pool.submit(measure, case, tmp_path).result(timeout=RUN_S)
    method = CASES[case][0]

    passes, drafted, accepted = found["drafts"]
    assert 0 < accepted < drafted and drafted <= 3 * passes
    assert max(found["greedy"] + found["whole"] + found["truncated"] + found["stop_logprobs"] + found["joined"]) < 1e-5
    assert all(found["greedy_tokens"])
    assert all(found["reproduced"]), "the seeds gave other tokens in another batch"
    assert found["accepted_in_distribution"] > 0
    statistic, freedom = found["chi_square"]
    assert statistic < quantile(freedom), (statistic, freedom)

    assert found["stopped"], "no stop string ends a response"
    assert all(is_inside and not is_before for is_inside, is_before, _ in found["stopped"]), "the wrong token is last"
    assert any(passes for *_, passes in found["stopped"]), "no stop string ends a response after drafts were verified"

    assert all(versions == [(0, count)] for versions in found["versions"] for _, count in versions)
    mixed = [versions for versions in found["mixed_versions"] if len(versions) > 1]
    assert mixed and all([version for version, _ in versions] == [0, 1] for versions in mixed)
    assert all(sum(count for _, count in versions) <= LONG for versions in mixed)
    assert max(found["mixed"] + found["later"]) < 1e-5
    assert not found["mismatched"]
    if method != "ngram":
        assert found["num_own"] > 10 and found["draft_difference"] == 0.0, (
            "the drafter has other weights than its folder"
        )
    if method == "eagle3":
        assert len(set(found["draft_bytes"])) == 1
        own = OWN_WEIGHTS.get(case, {})
        shared = {"model.embed_tokens.weight": "has_embedding" not in own, "lm_head.weight": "vocab" not in own}
        assert found["shared"] == {name: 0.0 for name in shared if shared[name]}, (
            "the drafter has other weights of the policy"
        )


def quantile(freedom: int) -> float:
    """Return the quantile 0.999 of the chi-square distribution, by Wilson and Hilferty's formula (an error of less
    than 0.1 % above 10 degrees of freedom)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3
