"""Measure the time of an engine's step outside the model, with megarl's sampling and with vLLM's default, which
detokenizes every token as it is sampled.

.venv/bin/python tools/benchmarks/sampling.py --out tools/benchmarks/results/sampling.json
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmark import load_config, run_benchmark

SEQUENCES, TOKENS = 1024, 24
TOP_K = {"sampled token only": None, "50 most likely tokens": 50}


def record_seconds(processor: Any) -> list[float]:
    """Make vLLM's output processor record the seconds of each call in the returned list."""
    process_outputs, seconds = type(processor).process_outputs, []

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = process_outputs(processor, *arguments, **options)
        seconds.append(time.perf_counter() - begin)
        return result

    processor.process_outputs = timed
    return seconds


def measure(folder: Path, top_k: int | None) -> dict[str, float]:
    """Return the median milliseconds to process a step's outputs in both ways, and the milliseconds to detokenize all
    complete responses."""
    from megarl.core.prompt import Prompt
    from megarl.models.tokenizer import response_text
    from megarl.rollout.engine import SamplingRequest
    from megarl.rollout.vllm.engine import VllmEngine
    from megarl.rollout.vllm.engine_arguments import rollout_arguments

    settings = {"kv_cache_gib": 0.5, "context_length": 64, "max_new_tokens": TOKENS, "top_k": top_k or "null"}
    config = load_config(folder, {f"rollout.{name}": value for name, value in settings.items()})
    rollout = config.rollout.model_copy(update={"vllm_overrides": {"max_num_seqs": SEQUENCES}})
    engine = VllmEngine(rollout, rollout_arguments(rollout, folder, "float32", seed=0))
    engine.hold(1)
    ours = engine._sampling

    def decoding(request: SamplingRequest) -> Any:
        parameters = ours(request)
        parameters.detokenize = True
        return parameters

    asyncio.run(engine.generate([SamplingRequest("first", Prompt("first", "", (5, 6, 7)), seed=0)]))  # warm-up
    found: dict[str, float] = {}
    for name in ("megarl", "vllm"):
        requests = [SamplingRequest(f"{i}", Prompt(f"{i}", "", (5, 6, 7)), seed=i) for i in range(SEQUENCES)]
        if name == "vllm":
            engine._sampling = decoding
        seconds = record_seconds(engine._llm.llm_engine.output_processor)
        samples = asyncio.run(engine.generate(requests))
        found[f"{name}_step_ms"] = round(1000 * statistics.median(seconds), 2)
        if name == "megarl":
            begin = time.perf_counter()
            for sample in samples:
                response_text(engine._tokenizer, [5, 6, 7], sample.response_ids)
            found["megarl_decoding_ms"] = round(1000 * (time.perf_counter() - begin), 2)
    return found


def measure_all(_: object, work: Path) -> dict[str, Any]:
    from megarl.rollout.vllm.environment import environment
    from tests.tiny_model import write_tiny_llama

    os.environ.update(environment(1, threads=2, index=0))
    folder = write_tiny_llama(work)
    runs = {name: measure(folder, top_k) for name, top_k in TOP_K.items()}
    return {"sequences": SEQUENCES, "tokens": TOKENS, "runs": runs}


if __name__ == "__main__":
    run_benchmark(__doc__, measure_all)
