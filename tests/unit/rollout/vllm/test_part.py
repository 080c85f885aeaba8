"""Parts of an engine that spans several nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.entrypoints.llm as entrypoint
from vllm import LLM

from megarl.config.load import load
from megarl.rollout.vllm import part
from megarl.rollout.vllm.engine_arguments import rollout_arguments
from megarl.rollout.vllm.environment import ENDS_WITH_PARENT
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama


class Stop(Exception):
    """Raised to stop the startup once vLLM's configuration has been created."""


def test_all_parts_have_the_same_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the scheduler started more sequences than another node's ranks support, the engine would crash."""
    monkeypatch.setenv(ENDS_WITH_PARENT, "")
    folder, configs = write_tiny_llama(tmp_path), []
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.tp=2", "rollout.context_length=64"]
    rollout = load(BASE, [*keys, "rollout.max_new_tokens=32"]).rollout
    arguments = rollout_arguments(rollout, folder, "float32", seed=0)

    def capture_first(engine_args: Any, usage_context: Any, **_: Any) -> None:
        configs.append(engine_args.create_engine_config(usage_context))
        raise Stop

    def capture_other(config: Any) -> Any:
        configs.append(config)
        return SimpleNamespace(register_failure_callback=lambda died: died())

    monkeypatch.setattr(entrypoint, "LLMEngine", SimpleNamespace(from_engine_args=capture_first))
    monkeypatch.setattr(part, "MultiprocExecutor", capture_other)
    first, other = (part.part_arguments(number, 2, "127.0.0.1", 1) for number in (0, 1))
    with pytest.raises(Stop):
        LLM(**arguments | first)
    assert part.PartRanks(arguments | other).died.is_set()
    first_config, other_config = configs
    assert first_config.scheduler_config == other_config.scheduler_config
    assert (
        first_config.compilation_config.cudagraph_capture_sizes
        == other_config.compilation_config.cudagraph_capture_sizes
    )
    assert first_config.cache_config == other_config.cache_config
    assert [c.parallel_config.node_rank for c in configs] == [0, 1]
    assert {(c.parallel_config.nnodes, c.parallel_config.world_size) for c in configs} == {(2, 2)}
