"""The HTML page of a plan: its content, and that it loads no external resources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.planner.hardware import read_cluster
from megarl.planner.plan import Planned, plan_recipe
from megarl.planner.plan_page import render, write
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import layout_keys, recipe


def planned(folder: Path, gpus: str, *overrides: str, model: str = "Qwen2.5-7B") -> Planned:
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    config = recipe(f"model.path={folder}", "actor.recompute=full", *overrides)
    return plan_recipe(config, read_cluster(gpus), as_is=True)


def test_page_shows_the_ranks_of_each_gpu(tmp_path):
    engines = ("rollout.tp=2", "rollout.replicas=8", "rollout.kv_cache_gib=4")
    page = render(planned(tmp_path, "16xH100", *layout_keys(tp=2, pp=2, cp=2, dp=2), *engines))
    cells = re.findall(r"<td class=stage(\d)>(\d+)<span>(.*?)</span><span>(.*?)</span></td>", page)
    assert [int(gpu) for _, gpu, _, _ in cells] == list(range(16))
    assert [int(stage) for stage, _, _, _ in cells] == [0] * 8 + [1] * 8
    assert cells[0][2:] == ("trainer: stage 0, dp 0, cp 0, tp 0", "engine 0, tp 0")
    assert cells[15][2:] == ("trainer: stage 1, dp 1, cp 1, tp 1", "engine 7, tp 1")
    assert page.count("<th>node ") == 2


def test_page_shows_disaggregated_roles(tmp_path):
    keys = ("cluster.placement=disaggregated", "rollout.replicas=4", "rollout.kv_cache_gib=4")
    page = render(planned(tmp_path, "8xH100", *layout_keys(tp=2, dp=2), *keys))
    assert "<td class=stage0>3<span>trainer: dp 1, tp 1</span></td>" in page
    assert "<td>4<span>engine 0</span></td>" in page
    assert "disaggregated: trainer on GPUs 0-3, engine on GPUs 4-7." in page


def test_page_shows_every_phase_and_loads_nothing(tmp_path):
    keys = (*layout_keys(tp=2, dp=4), "rollout.replicas=8", "rollout.kv_cache_gib=4", "run.name=a-b")
    found = planned(tmp_path, "8xH100", *keys, "algorithm.kl.coefficient=0.1")
    page = render(found)
    for phase in (*(load.phase for load in found.best.loads), *found.best.times.phases):
        assert phase.partition(",")[0] in page
    assert page.count("<svg") == 2 and "a-b on 8 x H100-80GB" in page
    assert not re.search(r"<script|<link rel=.stylesheet|(src|href)=.http|url\(http", page)
    assert "default-src 'none'" in page


def test_existing_page_is_not_overwritten(tmp_path):
    found = planned(tmp_path, "8xH100", *layout_keys(tp=2, dp=4), "rollout.replicas=8")
    write(found, tmp_path / "plan.html")
    with pytest.raises(UserError, match=r"plan.html: already exists, and megarl does not overwrite it"):
        write(found, tmp_path / "plan.html")


def test_eight_gpus_and_the_node_fit_the_page(tmp_path):
    """The page's main element has a width of 1080 pixels."""
    page = render(planned(tmp_path, "8xH100", *layout_keys(tp=2, dp=4), "rollout.replicas=8"))
    assert int(re.search(r'class="gpus" style="min-width: (\d+)px"', page)[1]) <= 1080
    assert "table-layout: fixed" in page
