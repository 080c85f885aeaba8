"""An engine on vLLM. The process that holds it has `environment` set before it imports this module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from megarl.config.huggingface import completed, experts
from megarl.config.schema import Rollout
from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.types import CandidateIds, Sample, VersionRun
from megarl.data.model_folder import read_config
from megarl.data.tokenizer import response_text
from megarl.planning.reserves import batched_tokens
from megarl.resharding.families.quantised import quantization_config
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel
from megarl.resharding.verification import Checksum, Region
from megarl.rollout.engine import Refitted, SamplingRequest
from megarl.rollout.vllm.engine_arguments import engine_arguments
from megarl.rollout.vllm.worker_extension import Failed, RefitExtension

T = TypeVar("T")

PAUSE_S = 0.05
"""The interval at which samples under way look whether a failed refit has been made good."""


def rollout_arguments(config: Rollout, model_folder: Path, dtype: str, seed: int) -> dict[str, Any]:
    """Returns the arguments that `vllm.LLM` is called with. Raises UserError as `engine_arguments` does."""
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
        # In bfloat16, logits near 20 lie 0.06 to 0.13 apart; the trainer's are in float32, too.
        hf_overrides={"head_dtype": "float32"} | quantization,
        # On GPU, this kernel for experts leaves their weights as they are, to be written into.
        moe_backend="triton" if device.on_cuda() else "auto",
        # On CPU vLLM has no sleep mode: it keeps its memory, and the calls do nothing else.
        enable_sleep_mode=config.sleep and device.on_cuda(),
        seed=seed,
    )


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
    """A request that vLLM works on, the id that vLLM gave it, and in the end its completion."""

    request: SamplingRequest
    vllm_id: str
    completion: CompletionOutput | None = None


class VllmEngine:
    """An engine that starts without weights (`version` None) and gets them by `refit`, as after every later update.

    All calls are made in one thread, by one event loop: a call that comes while `generate` waits for its samples is
    done between two steps of vLLM, for any number of `generate` at once.
    """

    def __init__(self, config: Rollout, arguments: Mapping[str, Any]):
        """arguments: those of `rollout_arguments`."""
        self.version: int | None = None
        self._config = config
        self._under_way: dict[str, _UnderWay] = {}
        self._numbers = count()
        self._num_refits = 0
        self._llm = LLM(**arguments)
        self._tokenizer = self._llm.get_tokenizer()
        for rank, description in enumerate(self._ask_workers(RefitExtension.describe)):
            print(f"engine: rank {rank} is {description}", flush=True)

    async def generate(
        self, requests: Sequence[SamplingRequest], finished: Callable[[list[Sample]], object] = lambda _: None
    ) -> list[Sample]:
        if self.version is None:
            raise RuntimeError("the engine holds no trainer weights: a refit must succeed before it generates")
        self._wake("weights", "kv_cache")
        numbered = {str(next(self._numbers)): request for request in requests}
        self._under_way |= {name: _UnderWay(request, self._submit(name, request)) for name, request in numbered.items()}
        samples: dict[str, Sample] = {}
        try:
            while len(samples) < len(numbered):
                if self.version is not None:
                    self._step()
                if new := self._completed(numbered.keys() - samples.keys()):
                    samples |= new
                    finished([*new.values()])
                await asyncio.sleep(PAUSE_S if self.version is None else 0)
            return [samples[name] for name in numbered]
        finally:
            self._withdraw([name for name in numbered if self._under_way[name].completion is None])
            for name in numbered:
                del self._under_way[name]

    def sleep(self, keeps_weights: bool) -> None:
        assert not self._under_way, "asleep, it would lose the samples under way"
        if not keeps_weights:
            self.version = None
        self._llm.sleep(level=1 if keeps_weights else 2)

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

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[Refitted]:
        self.version = None
        # The KV cache sleeps on: the trainer may not have made room for it yet.
        self._wake("weights")
        self._pause()
        refitted = self._ask_workers(RefitExtension.refit, expected)
        self._num_refits += 1
        self._begin_again()
        self.hold(version)
        return refitted

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

    def _submit(self, name: str, request: SamplingRequest) -> str:
        """Gives vLLM the request. Returns vLLM's own id of it.

        The salt keeps requests apart in the prefix cache: those of one refit's weights reuse no keys and values of
        another's, which samples that it interrupted still need and go on adding to.
        """
        prompt = tokens_input(request.prompt.token_ids.tolist(), cache_salt=f"{self._num_refits}{request.purpose}")
        return self._llm.llm_engine.add_request(name, prompt, self._sampling(request))

    def _withdraw(self, names: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request([self._under_way[name].vllm_id for name in names], internal=True)

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            self._under_way[output.request_id].completion = output.outputs[0]

    def _completed(self, names: Iterable[str]) -> dict[str, Sample]:
        """Returns the samples of those of these requests that vLLM has completed."""
        under_way = [(name, self._under_way[name]) for name in names]
        return {
            name: self._sample(item.request, item.completion) for name, item in under_way if item.completion is not None
        }

    def _sample(self, request: SamplingRequest, completion: CompletionOutput) -> Sample:
        assert completion.finish_reason in ("stop", "length"), f"{request.sample_id}: {completion.finish_reason}"
        logprobs = completion.logprobs  # flat: for each position the sampled token, then the most likely ones
        ids = completion.token_ids
        shown = ids[:-1] if completion.finish_reason == "stop" else ids  # the token that ends it may be no special one
        return Sample(
            id=request.sample_id,
            prompt=request.prompt,
            response_ids=ids,
            response_logprobs=[logprobs.logprobs[start] for start in logprobs.start_indices],
            response_mask=np.ones(len(ids), np.bool_),
            versions=tuple(VersionRun(int(run.version), run.end - run.start) for run in completion.weight_versions),
            finish_reason=completion.finish_reason,
            text=response_text(self._tokenizer, request.prompt.token_ids.tolist(), shown),
            candidate_ids=_candidate_ids(logprobs),
        )

    def _pause(self) -> None:
        """Waits for the steps that vLLM has begun before it has the results of earlier ones, as it does on GPU."""
        self._llm.sleep(level=0, mode="keep")
        for _ in range(self._llm.llm_engine.vllm_config.max_concurrent_batches):
            self._step()
        self._llm.wake_up(tags=["scheduling"])

    def _begin_again(self) -> None:
        """Submits anew the requests that have no token yet: samples that are of the new weights alone then have no keys
        and values of older ones."""
        states = self._llm.llm_engine.output_processor.request_states
        unfinished = {name: item for name, item in self._under_way.items() if item.completion is None}
        tokenless = [
            name for name, item in unfinished.items() if not states[item.vllm_id].detokenizer.num_output_tokens()
        ]
        self._withdraw(tokenless)
        for name in tokenless:
            unfinished[name].vllm_id = self._submit(name, unfinished[name].request)

    def _sampling(self, request: SamplingRequest) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if request.is_greedy else _given(request.temperature, self._config.temperature),
            top_p=_given(request.top_p, self._config.top_p),
            top_k=_given(request.top_k, self._config.top_k or 0),
            max_tokens=_given(request.max_new_tokens, self._config.max_new_tokens),
            logprobs=self._num_kept(request),
            flat_logprobs=True,
            # Else vLLM would decode each token when it is sampled, between two steps, and its log-probs' tokens too.
            detokenize=False,
            seed=request.seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _num_kept(self, request: SamplingRequest) -> int:
        """Returns how many of the most likely tokens the engine reports beside the sampled one: under top_k, those that
        it keeps."""
        return 0 if request.is_greedy or request.top_k is not None else self._config.top_k or 0


def _given(own: T | None, of_all: T) -> T:
    return of_all if own is None else own


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
