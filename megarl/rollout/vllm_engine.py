"""An engine on vLLM. The process that holds it has `environment` set before it imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput

from megarl import device
from megarl.batch import Sample, VersionRun
from megarl.config.schema import Rollout
from megarl.resharding.piece import Holder
from megarl.resharding.plan import Plan
from megarl.resharding.transports.transport import Channel
from megarl.resharding.verification import Checksum, Region
from megarl.rollout.engine import Refitted, SamplingRequest
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.worker_extension import Failed


class VllmEngine:
    """Starts without weights (`version` None) and gets them by `refit`, as after every later update."""

    def __init__(self, config: Rollout, model_folder: Path, dtype: str, replica: int, seed: int):
        self.version: int | None = None
        self._config = config
        self._replica = replica
        arguments = engine_arguments(model_folder, dtype, config.tp, config.context_length, config.kv_cache_gib) | dict(
            load_format="dummy",
            # Log-probs of the distribution that is sampled from: after the temperature.
            logprobs_mode="processed_logprobs",
            max_num_batched_tokens=max(2048, config.context_length),
            # Of a mixture of experts' kernels on GPU, the one that leaves the weights as they are, to be written into.
            moe_backend="triton" if device.on_cuda() else "auto",
            seed=seed,
        )
        self._llm = LLM(**{**arguments, **config.vllm_extra})

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        if self.version is None:
            raise RuntimeError("the engine holds no trainer weights: a refit must succeed before it generates")
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt.token_ids)} for request in requests],
            [self._sampling(request) for request in requests],
            use_tqdm=False,
        )
        return [
            _sample(request, output.outputs[0], self.version) for request, output in zip(requests, outputs, strict=True)
        ]

    def connect(self, plan: Plan, channel: Channel, holders: Sequence[Holder]) -> None:
        self._ask_workers("connect", plan, channel, holders)

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[Refitted]:
        self.version = None
        refitted = self._ask_workers("refit", expected)
        # Cached keys and values are those of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to drop its prefix cache: requests are still running")
        self.version = version
        return refitted

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a process of its own has died, after which it can do nothing."""
        return getattr(self._llm.llm_engine.model_executor, "is_failed", False)

    def checksums(self) -> list[dict[str, str]]:
        """Per worker: parameter -> SHA-256 of its bytes."""
        return self._llm.collective_rpc("checksums")

    def parameter_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return self._llm.collective_rpc("parameter_shapes")

    def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        """Of RefitExtension. Raises the first worker's error."""
        answers = self._llm.collective_rpc(method, args=args)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return answers

    def _sampling(self, request: SamplingRequest) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if request.greedy else self._config.temperature,
            top_p=self._config.top_p,
            max_tokens=self._config.max_new_tokens,
            logprobs=0,
            seed=request.seed,
        )


def _sample(request: SamplingRequest, completion: CompletionOutput, version: int) -> Sample:
    ids = tuple(completion.token_ids)
    assert completion.finish_reason in ("stop", "length"), f"{request.sample_id}: {completion.finish_reason}"
    return Sample(
        id=request.sample_id,
        prompt=request.prompt,
        response_ids=ids,
        response_logprobs=tuple(
            position[token].logprob for position, token in zip(completion.logprobs, ids, strict=True)
        ),
        response_mask=(True,) * len(ids),
        versions=(VersionRun(version, len(ids)),),
        finish_reason=completion.finish_reason,
        text=completion.text,
    )
