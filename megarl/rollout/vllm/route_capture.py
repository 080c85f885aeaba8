"""Keeps the experts that tokens go to, in a worker of vLLM's CPU build.

vLLM's own capture (enable_return_routed_experts) stands on its second model runner, whose kernels are Triton's: it does
not start on a CPU. This one listens to the same routers, before experts are moved for balance, under the first runner.
It sees what a step computes; vLLM's prefix cache is therefore off, by which tokens would not be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RouteCapture:
    """The routes of a worker's requests, by the id that vLLM gives each, until they are taken."""

    def __init__(self, runner: GPUModelRunner):
        self._runner, self._execute = runner, runner.execute_model
        self._experts: dict[int, torch.Tensor] = {}
        """The experts of the tokens that were computed last, by the layer's number."""
        self._parts: dict[str, list[tuple[int, NDArray[np.int64]]]] = {}
        """The routes of each request, as steps computed them, each with the place of its first token."""
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                assert isinstance(module.router, BaseRouter), f"{type(module.router).__name__} tells no experts"
                module.router.set_capture_fn(partial(self._keep, module.layer_id))
        runner.execute_model = self._step

    def take(self, names: Sequence[str]) -> list[NDArray[np.int64]]:
        """Returns the routes of these requests' tokens from the first to the last that was computed, in the layers with
        experts, [tokens, layers, experts per token], and forgets them."""
        return [self._joined(self._parts.pop(name)) for name in names]

    @staticmethod
    def _joined(parts: Sequence[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
        """Joins the parts of a request. Where it had to give its cache away, its tokens were computed twice."""
        routes = np.empty((max(start + len(rows) for start, rows in parts), *parts[0][1].shape[1:]), np.int64)
        for start, rows in parts:
            routes[start : start + len(rows)] = rows
        return routes

    def _keep(self, layer: int, experts: torch.Tensor) -> None:
        self._experts[layer] = experts.clone()

    def _step(self, scheduled: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Does the runner's step, whose batch has the tokens of one request after those of another."""
        for name in scheduled.finished_req_ids:
            self._parts.pop(name, None)  # withdrawn: whoever completes one has taken its routes by now
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            routes = torch.stack([self._experts[layer] for layer in sorted(self._experts)], dim=1).numpy()
            self._share_out(scheduled, routes)
        return output

    def _share_out(self, scheduled: SchedulerOutput, routes: NDArray[np.int64]) -> None:
        old = scheduled.scheduled_cached_reqs
        begins = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        row = 0
        for name in self._runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens[name]
            self._parts.setdefault(name, []).append((begins[name], routes[row : row + count]))
            row += count
