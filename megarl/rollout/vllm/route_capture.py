"""Record expert routes in a worker of vLLM's CPU build.

vLLM's own capture (enable_return_routed_experts) requires its V2 model runner, whose Triton kernels do not run on CPU.
This capture hooks into the same routers, before expert load balancing, in the V1 runner. It only sees tokens that are
computed in a step, so the prefix cache must be disabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RouteCapture:
    """Records the routes for a worker's requests, by vLLM request id, until they are taken."""

    def __init__(self, runner: GPUModelRunner):
        self._runner, self._execute = runner, runner.execute_model
        self._experts: dict[int, torch.Tensor] = {}
        """layer index -> experts chosen for the tokens in the last step."""
        self._parts: dict[str, list[tuple[int, NDArray[np.int64]]]] = {}
        """request id -> one (position of the first token, routes) per step."""
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                assert isinstance(module.router, BaseRouter), f"{type(module.router).__name__} has no capture hook"
                module.router.set_capture_fn(partial(self._keep, module.layer_id))
        runner.execute_model = self._step

    def take(self, names: Sequence[str]) -> list[NDArray[np.int64]]:
        """Remove and return the routes for these requests, [processed tokens, layers with experts, active experts]."""
        return [self._joined(self._parts.pop(name)) for name in names]

    @staticmethod
    def _joined(parts: Sequence[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
        """Join the routes from all steps of a request. They overlap if the request was preempted and recomputed. A
        token keeps its first routes, because recomputation may use newer weights than those it was sampled with."""
        routes = np.empty((max(start + len(rows) for start, rows in parts), *parts[0][1].shape[1:]), np.int64)
        for start, rows in reversed(parts):
            routes[start : start + len(rows)] = rows
        return routes

    def _keep(self, layer: int, experts: torch.Tensor) -> None:
        self._experts[layer] = experts.clone()

    def _step(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Execute the runner's step and record the routes for its tokens, which are concatenated by request."""
        for name in scheduler_output.finished_req_ids:
            self._parts.pop(name, None)  # only aborted requests remain: completed ones have been taken
        output = self._execute(scheduler_output, *args, **kwargs)
        if not scheduler_output.total_num_scheduled_tokens:
            return output
        routes = torch.stack([self._experts[layer] for layer in sorted(self._experts)], dim=1).numpy()
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        row = 0
        for name in self._runner.input_batch.req_ids:
            count = scheduler_output.num_scheduled_tokens[name]
            self._parts.setdefault(name, []).append((starts[name], routes[row : row + count]))
            row += count
        return output
