"""An engine without vLLM that starts in a second.

It receives the trainer's weights over the real transports. Its tokens are a function of the weights, the seed and the
previous tokens, but not of images.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import ray
import torch
from tokenizers import Tokenizer

from megarl.cluster.groups.engine_actor import EngineProcess
from megarl.cluster.groups.group import ASYNC_OPTIONS
from megarl.config.schema import Config
from megarl.core.completion import Completion, VersionRun
from megarl.core.sample import Sample
from megarl.models.folder import read_config
from megarl.models.vision import add_vision
from megarl.resharding.execute import execute
from megarl.resharding.families import vllm_holders
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel
from megarl.resharding.verification import Checksum, Region, check_weights, differing_regions
from megarl.rollout.engine import EngineInfo, SamplingRequest, SyncStats, TurnRequest

TOKEN_S = 0.005
"""Seconds per token, so that calls overlap and can be interrupted as in a real engine."""

STOP_PROBABILITY = 0.1


class FakeEngine:
    """Implements megarl.rollout.engine.Engine with one worker per rank, all in this process."""

    has_lost_a_rank = False

    def __init__(self, config: Config, model_folder: Path):
        self.version: int | None = None
        self._config, hf_config = config.rollout, read_config(model_folder)
        if config.model.vision:
            hf_config = add_vision(hf_config)
        self._vocab_size, self._end = hf_config["vocab_size"], hf_config["eos_token_id"]
        self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        self._workers = [
            {name: torch.zeros(shape, dtype=getattr(torch, shard.dtypes[name])) for name, shape in shard.shapes.items()}
            for shard in (holder.shard for holder in vllm_holders(hf_config, config.rollout.tp, 1, config.model.dtype))
        ]
        self._digest = 0
        self._is_paused = False
        self._unfinished: dict[str, int] = {}
        """Number of tokens of each unfinished sample, by sample id."""
        self._seconds, self._num_steps = 0.0, 0

    async def generate(
        self, requests: Sequence[SamplingRequest], finished: Callable[[list[Sample]], object]
    ) -> list[Sample]:
        if self.version is None and not self._is_paused:
            raise RuntimeError("the engine has no weights")

        async def sample(request: SamplingRequest) -> Sample:
            completion = await self._complete(request.prompt.token_ids.tolist(), request)
            sampled = Sample(
                id=request.sample_id,
                prompt=request.prompt,
                response_ids=completion.token_ids,
                response_logprobs=completion.logprobs,
                response_mask=np.ones(len(completion.token_ids), np.bool_),
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                text=self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True),
            )
            finished([sampled])
            return sampled

        return await asyncio.gather(*map(sample, requests))

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        return asyncio.ensure_future(self._complete(request.token_ids.tolist(), request))

    async def _complete(self, context: Sequence[int], request: SamplingRequest | TurnRequest) -> Completion:
        limit = self._config.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        tokens: list[int] = []
        versions: list[VersionRun] = []
        begin = time.monotonic()
        try:
            while len(tokens) < limit and self._end not in tokens:
                await asyncio.sleep(TOKEN_S)
                if self.version is None or self._is_paused:
                    continue
                tokens.append(self._next_token([*context, *tokens], 0 if request.is_greedy else request.seed))
                same = bool(versions) and versions[-1].version == self.version
                count = versions.pop().count if same else 0
                versions.append(VersionRun(self.version, count + 1))
                self._unfinished[request.sample_id] = len(tokens)
                self._num_steps += 1
        finally:
            self._unfinished.pop(request.sample_id, None)
            self._seconds += time.monotonic() - begin
        return Completion(
            token_ids=tokens,
            logprobs=[-float(np.log(self._vocab_size))] * len(tokens),
            versions=tuple(versions),
            finish_reason="stop" if self._end in tokens else "length",
        )

    def _next_token(self, tokens: Sequence[int], seed: int) -> int:
        drawn = np.random.default_rng([seed % 2**63, self._digest, *tokens])
        return self._end if drawn.random() < STOP_PROBABILITY else int(drawn.integers(self._vocab_size))

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        return sum(self._unfinished.get(name, 0) for name in sample_ids)

    def take_work(self) -> tuple[float, int]:
        work = self._seconds, self._num_steps
        self._seconds, self._num_steps = 0.0, 0
        return work

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def sleep(self, keeps_weights: bool) -> None:
        if not keeps_weights:
            self.version = None

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        return [
            {name: (tuple(weight.shape), str(weight.dtype).removeprefix("torch.")) for name, weight in weights.items()}
            for weights in self._workers
        ]

    def repacking(self) -> list[str]:
        return []

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        assert not by_loader
        self._links = []
        for holder, weights in zip(holders, self._workers, strict=True):
            part = plan.part([holder.name])
            transport = channel.open(holder.name, weights, part, in_place=True)
            self._links.append((holder, weights, part.into(holder.name), transport))

    def disconnect(self) -> None:
        self._links = []

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        self.version, written = None, []
        for holder, weights, writes, transport in self._links:
            num_bytes = execute(writes, weights, transport)
            checksums = {} if expected is None else check_weights(holder, weights, expected)
            written.append(SyncStats(num_bytes, transport.staging_bytes, checksums))
        self._digest = sum(
            int(weight.view(torch.uint8).to(torch.int64).sum()) * number
            for weights in self._workers
            for number, weight in enumerate(weights.values(), 1)
        )
        self.version = version
        return written

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        return [line for holder, weights, _, _ in self._links for line in differing_regions(holder, weights, expected)]

    def info(self, texts: Sequence[str]) -> EngineInfo:
        ids = (tuple(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
        return EngineInfo("float32", tuple(ids), "an engine without vLLM")


@ray.remote(**ASYNC_OPTIONS)
class EngineActor(EngineProcess):
    """The actor of a FakeEngine. Its process has the same title as one with vLLM."""

    def start(self) -> None:
        self._worker = FakeEngine(self._config, self._model_folder)
