"""Patch vLLM's scheduler to omit placeholder drafts for requests that join a batch."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

_update_after_schedule = Scheduler._update_after_schedule


def install() -> None:
    """Patch vLLM's scheduler in this process."""
    Scheduler._update_after_schedule = _update_without_padding


def _update_without_padding(self: Scheduler, scheduler_output: SchedulerOutput) -> None:
    """Remove the drafts of requests that join the batch in this step. If a joining request has one token to process,
    vLLM pads it with placeholder drafts, because its CUDA graphs need requests of equal length. Gated delta nets would
    verify these drafts from the state of the slot's previous request. Seeded samples would also depend on concurrent
    requests."""
    output = scheduler_output
    joined = {request.req_id for request in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
    for name in joined & output.scheduled_spec_decode_tokens.keys():
        num_drafts = len(output.scheduled_spec_decode_tokens.pop(name))
        output.num_scheduled_tokens[name] -= num_drafts
        output.total_num_scheduled_tokens -= num_drafts
    _update_after_schedule(self, output)
