"""Schedule requests that join a batch without placeholder drafts."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

_update_after_schedule = Scheduler._update_after_schedule


def install() -> None:
    """Patch vLLM's scheduler in this process."""
    Scheduler._update_after_schedule = _update_without_padding


def _update_without_padding(self: Scheduler, scheduler_output: SchedulerOutput) -> None:
    """Remove the drafts of requests that join the batch in this step. vLLM appends placeholders to a joining request
    with one token to process, so that all requests of the step have the same length, as its CUDA graphs need. Gated
    delta nets would verify them and start from the state that the slot's previous request left. A seeded sample would
    also depend on whether other requests run."""
    output = scheduler_output
    joined = {request.req_id for request in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
    for name in joined & output.scheduled_spec_decode_tokens.keys():
        num_drafts = len(output.scheduled_spec_decode_tokens.pop(name))
        output.num_scheduled_tokens[name] -= num_drafts
        output.total_num_scheduled_tokens -= num_drafts
    _update_after_schedule(self, output)
