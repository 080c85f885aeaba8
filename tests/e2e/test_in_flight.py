"""The driver updates engines' weights while they sample.

tests/e2e/test_colocated_ahead.py runs every time, and trains on samples that continue through a refit.
"""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from megarl.cluster import session
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.placement import place
from megarl.cluster.supervision.supervisor import supervised
from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.models.folder import read_config
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.shared_memory import SharedMemory, publish
from megarl.rollout.engine import SamplingRequest
from tests.e2e.tiny_families import SIZES
from tests.paths import BASE
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
LONG = 400


def drive(folder: Path, result: Path) -> None:
    """Sample eight long responses, and change the weights as soon as the driver waits for them."""
    overrides = [f"model.path={folder}", "model.dtype=float32", "data.source=arithmetic"]
    overrides += [f"rollout.max_new_tokens={LONG}", f"rollout.context_length={LONG + 8}", "rollout.kv_cache_gib=0.05"]
    config, session.CHECK_S = load(BASE, [*overrides, "cluster.object_store_mib=80"]), 0.01
    source = huggingface_holder(read_config(folder), "float32")
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in source.shapes.items()}
    with supervised() as scratch, session.Session(config, folder, scratch) as ray_session:
        engines = EngineGroup(ray_session, config, folder, place(config, cores=1).engines)
        engines.start().result()
        channel = SharedMemory({source.name: publish(weights)})
        assert engines.connect(CompactPlan.of(make_plan([source], engines.holders)), channel).result()
        refits: list[int] = []

        def refit() -> None:
            if len(refits) < 2:
                for weight in weights.values():
                    weight.mul_(1.1)
                ray_session.submit(engines.start_refit(len(refits), None), "refit", "refit").result()
                refits.append(len(refits))

        refit()
        requests = [SamplingRequest(f"{i}", Prompt(f"{i}", "", (i + 5, 7)), seed=i) for i in range(8)]
        samples = engines.generate([requests]).result(meanwhile=refit)[0]
        (result / "versions.json").write_text(
            json.dumps([(sample.version_oldest, sample.version_newest) for sample in samples])
        )
        (result / "aborted.json").write_text(json.dumps(abort_one_of_two(engines, requests)))


def abort_one_of_two(engines: EngineGroup, requests: list[SamplingRequest]) -> dict:
    """Abort long requests as soon as short concurrent ones have finished. Return the results of both."""
    short = [replace(request, sample_id=f"short {i}", max_new_tokens=20) for i, request in enumerate(requests)]

    def tokens(samples: list[SampleRef]) -> list[list[int]]:
        return [sample.response_ids.tolist() for sample in ray.get([item.sample for item in samples])]

    long, concurrent = engines.generate([requests]), engines.generate([short])
    beside = tokens(concurrent.result()[0])
    engines.router.abort([[request.sample_id for request in requests]])
    num_tokens = long.result()[0].num_tokens
    actors = engines.actors.values()
    left = ray.get([engine.__ray_call__.remote(lambda actor: len(actor._worker._pending)) for engine in actors])
    return {
        "tokens": num_tokens,
        "left": left,
        "beside": beside,
        "alone": tokens(engines.generate([short]).result()[0]),
    }


def test_samples_continue_through_a_refit(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "llama", **SIZES | dict(max_position_embeddings=LONG + 8))
    process = multiprocessing.get_context("spawn").Process(target=drive, args=(folder, tmp_path))
    process.start()
    process.join(RUN_S)
    assert process.exitcode == 0
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert [oldest for oldest, _ in versions] == 8 * [0]
    assert max(newest for _, newest in versions) == 1, "no sample was running when the weights arrived"
    aborted = json.loads((tmp_path / "aborted.json").read_text())
    assert 8 * 10 < aborted["tokens"] < 8 * LONG, "the long requests were not aborted midway"
    assert aborted["left"] == [0] and aborted["beside"] == aborted["alone"]
