"""An engine on vLLM. The process that holds it has `environment` set before it imports this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from megarl.config.schema import Rollout
from megarl.config.vllm_arguments import batched_tokens
from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.types import CandidateIds, Completion, Sample, VersionRun
from megarl.models.folder import read_config
from megarl.models.huggingface import completed, experts
from megarl.models.tokenizer import response_text
from megarl.resharding.families.quantised import quantization_config
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region
from megarl.rollout.engine import EngineInfo, Sampling, SamplingRequest, SyncStats, TurnRequest
from megarl.rollout.routes import of_layers_with_experts, whole_routes
from megarl.rollout.vllm.engine_arguments import engine_arguments
from megarl.rollout.vllm.worker_extension import Failed, RefitExtension

T = TypeVar("T")

HANDOVERS = 2
"""The rounds of the event loop between two steps: in the first a completion is noted, in the second it is sent."""

INVARIANT_KERNELS = (9, 0)
"""The compute capability from which vLLM's batch-invariant mode computes (VLLM_BATCH_INVARIANT, in its envs.py)."""

PAUSE_S = 0.05
"""The interval at which samples under way look whether a pause is over, or a failed refit has been made good."""


def rollout_arguments(
    config: Rollout,
    model_folder: Path,
    dtype: str,
    seed: int,
    returns_routes: bool = False,
    head_dtype: Literal["float32", "model"] = "float32",
) -> dict[str, Any]:
    """Returns the arguments that `vllm.LLM` is called with. Raises UserError as `engine_arguments` does.

    returns_routes   whether its completions come with the experts that their tokens went to
    head_dtype       model.head_dtype
    """
    if config.batch_invariant:
        _require_invariant_kernels()
    quantization = {} if config.quantization is None else _quantization(config.quantization, model_folder)
    return engine_arguments(
        "rollout",
        model_folder,
        dtype,
        config.tp,
        config.context_length,
        config.kv_cache_gib,
        config.vllm_overrides,
        load_format="dummy",
        # These are log-probs of the distribution that is sampled from: after the temperature.
        logprobs_mode="processed_logprobs",
        max_logprobs=config.top_k or 0,
        max_num_batched_tokens=batched_tokens(config),
        # As the trainer's. vLLM's own default is the model's dtype.
        hf_overrides={"head_dtype": head_dtype} | quantization,
        # On GPU, this kernel for experts leaves their weights as they are, to be written into.
        moe_backend="triton" if device.on_cuda() else "auto",
        # On CPU vLLM has no sleep mode: it keeps its memory, and the calls do nothing else.
        enable_sleep_mode=config.sleep and device.on_cuda(),
        seed=seed,
        **(_route_arguments() if returns_routes else {}),
    )


def _require_invariant_kernels() -> None:
    if device.capability() < INVARIANT_KERNELS:
        raise UserError(
            "rollout.batch_invariant=true: vLLM has kernels that do not depend on the batch for GPUs of compute "
            "capability 9.0 on, such as H100s, and none for this device; set rollout.batch_invariant=false"
        )


def _route_arguments() -> dict[str, Any]:
    """Returns the arguments by which vLLM tells experts, or on CPU, where it cannot, RouteCapture does."""
    return dict(enable_return_routed_experts=True) if device.on_cuda() else dict(enable_prefix_caching=False)


def _quantization(name: str, model_folder: Path) -> dict[str, Any]:
    """Returns what vLLM is told of quantised weights that a refit will bring."""
    hf_config = read_config(model_folder)
    if not device.on_cuda() and experts(completed(hf_config)) is not None:
        raise UserError(
            f"rollout.quantization={name}: {model_folder} has experts, and on CPU no kernel of vLLM for their blocks "
            "has weights where a refit could write them; set rollout.quantization=null, or run this model on GPUs"
        )
    return {"quantization_config": quantization_config(hf_config)}


@dataclass(slots=True)
class _UnderWay:
    """A request that vLLM works on, the id that vLLM gave it, and its completion once there is one."""

    token_ids: list[int]
    request: Sampling
    vllm_id: str
    completion: asyncio.Future[Completion]


class VllmEngine:
    """An engine that starts without weights (`version` None) and gets them by `refit`, as after every later update.

    All calls are made in one thread, by one event loop: a call that comes while others wait for their completions is
    done between two steps of vLLM.
    """

    def __init__(self, config: Rollout, arguments: Mapping[str, Any], returns_routes: bool = False):
        """arguments: those of `rollout_arguments`, for the same `returns_routes`."""
        self.version: int | None = None
        self._config = config
        self._under_way: dict[str, _UnderWay] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._is_paused = False
        self._seconds, self._seconds_until = 0.0, 0.0
        """The time of sampling since it was last asked for, and the moment up to which it is counted."""
        self._num_steps = 0
        """vLLM's steps in this time, in each of which a sample under way gets a token."""
        self._numbers = count()
        self._num_refits = 0
        self._llm = LLM(**arguments)
        self._tokenizer = self._llm.get_tokenizer()
        self._routed = experts(completed(read_config(Path(arguments["model"])))) if returns_routes else None
        """The experts whose numbers completions come with."""
        if self._captures_routes:
            self._ask_workers(RefitExtension.capture_routes)
        self._descriptions = self._ask_workers(RefitExtension.describe)
        for rank, description in enumerate(self._descriptions):
            print(f"engine: rank {rank} is {description}", flush=True)

    async def generate(
        self, requests: Sequence[SamplingRequest], finished: Callable[[list[Sample]], object] = lambda _: None
    ) -> list[Sample]:
        new: list[Sample] = []

        def tell() -> None:
            finished([*new])
            new.clear()

        async def sample(request: SamplingRequest) -> Sample:
            completion = await self._begin(request.prompt.token_ids.tolist(), request)
            if not new:  # once for all that a step of vLLM has completed
                asyncio.get_running_loop().call_soon(tell)
            new.append(self._sample(request, completion))
            return new[-1]

        self._require_weights()
        return await asyncio.gather(*map(sample, requests))

    def num_unfinished_tokens(self, sample_ids: Collection[str]) -> int:
        states = self._llm.llm_engine.output_processor.request_states
        asked = [item for item in self._under_way.values() if getattr(item.request, "sample_id", None) in sample_ids]
        return sum(
            len(item.completion.result().token_ids)
            if item.completion.done()
            else states[item.vllm_id].detokenizer.num_output_tokens()
            for item in asked
        )

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        if not self._under_way:
            self._require_weights()
        return self._begin(request.token_ids.tolist(), request)

    def _require_weights(self) -> None:
        if self.version is None and not self._is_paused:
            raise RuntimeError("the engine holds no trainer weights: a refit must succeed before it generates")

    def _begin(self, token_ids: list[int], request: Sampling) -> asyncio.Future[Completion]:
        """Gives vLLM a request. Returns what will be sampled after these tokens."""
        if not self._is_paused:
            self._wake("weights", "kv_cache")
        name, completion = str(next(self._numbers)), asyncio.get_running_loop().create_future()
        self._under_way[name] = _UnderWay(token_ids, request, self._submit(name, token_ids, request), completion)
        completion.add_done_callback(lambda _: self._forget(name))
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_while_under_way())
        return completion

    def _forget(self, name: str) -> None:
        """Ends the work on a request: vLLM's too, if nobody waits for its completion any more."""
        if self._under_way[name].completion.cancelled():
            self._withdraw([name])
        del self._under_way[name]

    async def _step_while_under_way(self) -> None:
        """Steps vLLM until it has nothing to do, or a step fails, by which all requests fail."""
        self._seconds_until = time.monotonic()
        try:
            while any(not item.completion.done() for item in self._under_way.values()):
                if self._may_step:
                    self._step()
                    self._count_seconds()
                    self._num_steps += 1
                await self._let_others_run()
        except Exception as error:  # of vLLM, for those who wait
            for item in self._under_way.values():
                if not item.completion.done():
                    item.completion.set_exception(error)
        finally:
            self._stepping = None

    @property
    def _may_step(self) -> bool:
        return self.version is not None and not self._is_paused

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self._seconds, self._seconds_until = self._seconds + now - self._seconds_until, now

    def take_seconds(self) -> float:
        """Returns the seconds since this was last asked in which samples were under way, without pauses."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_num_steps(self) -> int:
        """Returns the steps since this was last asked."""
        steps, self._num_steps = self._num_steps, 0
        return steps

    async def _let_others_run(self) -> None:
        """Lets what a step has completed reach those who wait for it, and lets them go on, before the next step."""
        for _ in range(HANDOVERS):
            await asyncio.sleep(0)
        if not self._may_step:
            await asyncio.sleep(PAUSE_S)
            self._seconds_until = time.monotonic()

    def pause(self) -> None:
        self._is_paused = True
        self._end_steps()

    def resume(self) -> None:
        self._is_paused = False
        if self._under_way:
            self._wake("weights", "kv_cache")

    def sleep(self, keeps_weights: bool) -> None:
        assert self._is_paused or not self._under_way, "it would go on sampling"
        if not keeps_weights:
            self.version = None
        self._llm.sleep(level=1 if keeps_weights else 2, mode="keep")

    def _wake(self, *tags: Literal["weights", "kv_cache"]) -> None:
        for tag in tags:
            if tag in self._llm.llm_engine.model_executor.sleeping_tags:
                self._llm.wake_up(tags=[tag])

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        return self._ask_workers(RefitExtension.parameters)

    def repacking(self) -> list[str]:
        return self._ask_workers(RefitExtension.repacking)[0]

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        self._ask_workers(RefitExtension.connect, plan, channel, holders, by_loader)

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        self.version = None
        # The KV cache sleeps on: the trainer may not have made room for it yet.
        self._wake("weights")
        self._end_steps()
        refitted = self._ask_workers(RefitExtension.refit, expected)
        self._num_refits += 1
        if self._config.kv_cache_on_update == "recompute":
            self._forget_keys_and_values()
        else:
            self._begin_again()
        self.hold(version)
        return refitted

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        self._wake("weights")
        found = self._ask_workers(RefitExtension.differing, expected)
        return None if None in found else [line for lines in found for line in lines]

    def facts(self, texts: Sequence[str]) -> EngineInfo:
        head_dtype = dtype_name(self._llm.llm_engine.vllm_config.model_config.head_dtype)
        ids = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return EngineInfo(head_dtype, tuple(ids), self._descriptions[0])

    def hold(self, version: int) -> None:
        """Sets the version of the weights, and so of the tokens from now on."""
        self._llm.llm_engine.set_weight_version(str(version))
        self.version = version

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a process of the engine has died, after which it can do nothing."""
        return getattr(self._llm.llm_engine.model_executor, "is_failed", False)

    def checksums(self) -> list[dict[str, str]]:
        """Returns for each worker: parameter -> SHA-256 of its bytes."""
        return self._ask_workers(RefitExtension.checksums)

    def _ask_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of RefitExtension in every worker, which has it under the same name. Returns their answers.
        Raises the first worker's error."""
        answers = self._llm.collective_rpc(method.__name__, args=args)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return answers

    def _submit(self, name: str, token_ids: list[int], request: Sampling) -> str:
        """Gives vLLM a request. Returns vLLM's own id of it.

        The salt keeps requests apart in the prefix cache: those of one refit's weights reuse no keys and values of
        another's, which samples that it interrupted still need and go on adding to.
        """
        prompt = tokens_input(token_ids, cache_salt=f"{self._num_refits}{request.purpose}")
        return self._llm.llm_engine.add_request(name, prompt, self._sampling(request))

    def _withdraw(self, names: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request([self._under_way[name].vllm_id for name in names], internal=True)

    def _step(self) -> None:
        outputs = [output for output in self._llm.llm_engine.step() if output.request_id in self._under_way]
        for output, routes in zip(outputs, self._routes_of(outputs), strict=True):
            item = self._under_way[output.request_id]
            if not item.completion.done():
                item.completion.set_result(_completion(output, routes))

    @property
    def _captures_routes(self) -> bool:
        """Whether routes are not vLLM's own to tell."""
        return self._routed is not None and not device.on_cuda()

    def _routes_of(self, outputs: Sequence[RequestOutput]) -> list[NDArray[np.signedinteger] | None]:
        """Returns the routes of the tokens of requests that have ended, as in Completion."""
        if self._routed is None or not outputs:
            return [None] * len(outputs)
        if self._captures_routes:
            names = [self._under_way[output.request_id].vllm_id for output in outputs]
            computed = self._ask_workers(RefitExtension.take_routes, names)[0]
        else:
            computed = [of_layers_with_experts(self._routed, output.outputs[0].routed_experts) for output in outputs]
        return [
            whole_routes(self._routed, routes, len(output.prompt_token_ids) + len(output.outputs[0].token_ids))
            for routes, output in zip(computed, outputs, strict=True)
        ]

    def _sample(self, request: SamplingRequest, completion: Completion) -> Sample:
        ids = completion.token_ids
        return Sample(
            id=request.sample_id,
            prompt=request.prompt,
            response_ids=ids,
            response_logprobs=completion.logprobs,
            response_mask=np.ones(len(ids), np.bool_),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=response_text(self._tokenizer, request.prompt.token_ids.tolist(), completion.text_ids.tolist()),
            candidate_ids=completion.candidate_ids,
            routes=completion.routes,
        )

    def _end_steps(self) -> None:
        """Waits for the steps that vLLM has begun before it has the results of earlier ones, as it does on GPU."""
        self._llm.sleep(level=0, mode="keep")
        for _ in range(self._llm.llm_engine.vllm_config.max_concurrent_batches):
            self._step()
        self._llm.wake_up(tags=["scheduling"])

    def _forget_keys_and_values(self) -> None:
        """Has vLLM compute all tokens under way anew, prompts and what has been sampled of the responses, before it
        samples their next ones."""
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def _begin_again(self) -> None:
        """Submits anew the requests that have no token yet: samples that are of the new weights alone then have no keys
        and values of older ones."""
        states = self._llm.llm_engine.output_processor.request_states
        unfinished = {name: item for name, item in self._under_way.items() if not item.completion.done()}
        tokenless = [
            name for name, item in unfinished.items() if not states[item.vllm_id].detokenizer.num_output_tokens()
        ]
        self._withdraw(tokenless)
        for name in tokenless:
            item = unfinished[name]
            item.vllm_id = self._submit(name, item.token_ids, item.request)

    def _sampling(self, request: Sampling) -> SamplingParams:
        stop = [*self._config.stop, *request.stop]
        return SamplingParams(
            temperature=0.0 if request.is_greedy else _given(request.temperature, self._config.temperature),
            top_p=_given(request.top_p, self._config.top_p),
            top_k=_given(request.top_k, self._config.top_k or 0),
            max_tokens=_given(request.max_new_tokens, self._config.max_new_tokens),
            stop=stop,
            include_stop_str_in_output=True,
            logprobs=self._num_kept(request),
            flat_logprobs=True,
            # vLLM looks for texts that stop in what it decodes. Without any it would decode each token when it is
            # sampled, between two steps, and its log-probs' tokens too.
            detokenize=bool(stop),
            seed=request.seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # made for this request alone
        )

    def _num_kept(self, request: Sampling) -> int:
        """Returns how many of the most likely tokens the engine reports beside the sampled one: under top_k, those that
        it keeps."""
        return 0 if request.is_greedy or request.top_k is not None else self._config.top_k or 0


def _given(own: T | None, of_all: T) -> T:
    return of_all if own is None else own


def _completion(output: RequestOutput, routes: NDArray[np.signedinteger] | None) -> Completion:
    [found] = output.outputs
    assert found.finish_reason in ("stop", "length"), f"request {output.request_id}: {found.finish_reason}"
    logprobs = found.logprobs  # flat: for each position the sampled token, then the most likely ones
    return Completion(
        token_ids=found.token_ids,
        logprobs=[logprobs.logprobs[start] for start in logprobs.start_indices],
        versions=tuple(VersionRun(int(run.version), run.end - run.start) for run in found.weight_versions),
        finish_reason=found.finish_reason,
        candidate_ids=_candidate_ids(logprobs),
        stop=found.stop_reason if isinstance(found.stop_reason, str) else None,
        num_cached_tokens=output.num_cached_tokens or 0,
        routes=routes,
    )


def _candidate_ids(logprobs: FlatLogprobs) -> CandidateIds | None:
    """Returns the most likely tokens, as far as they have a probability. Where several are as likely as the last of
    them, the engine keeps more than it reports."""
    starts, ends = (np.asarray(indices, np.int64) for indices in (logprobs.start_indices, logprobs.end_indices))
    is_kept = np.asarray(logprobs.logprobs) > -np.inf
    is_kept[starts] = False  # the sampled token
    if not is_kept.any():
        return None
    counts = np.append(0, np.cumsum(is_kept))
    return CandidateIds(np.asarray(logprobs.token_ids)[is_kept], np.append(0, counts[ends]))
