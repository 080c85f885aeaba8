"""Contract of a refit: after it the engine equals a fresh engine started from the exported model."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.load import load
from megarl.config.logprob_check_schema import ROUNDING
from megarl.config.schema import Config
from megarl.core.completion import NO_ROUTE, VersionRun
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import NO_BASELINE, Baseline
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.trained_model import policy_hf_config
from megarl.resharding.families import (
    huggingface_holder,
    quantized_destinations,
    quantized_sources,
    vllm_holder,
    vllm_holders,
)
from megarl.resharding.families.vllm import padded_experts
from megarl.resharding.piece import ITEM_BYTES, Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory, publish
from megarl.resharding.verification import NOTHING, Checksum, Region, regions
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.vllm.environment import environment
from tests.e2e.engine_processes import engine_context
from tests.e2e.run import mapped_shared_memory
from tests.e2e.speculative import scale_embedding
from tests.e2e.tiny_families import (
    GATED_DELTA,
    GATED_DELTA_EXPERTS,
    GLM,
    GPT_OSS,
    KIMI_YARN,
    LATENT,
    SIZES,
    TWO_GROUPS,
    YARN,
)
from tests.paths import BASE
from tests.routes import Replayed
from tests.samples import training_ref
from tests.timing import QUIET_S, RUN_S, SHORT_S, WAIT_S
from tests.tiny_model import add_mtp_layer, store_as_mxfp4, write_tiny_model

pytestmark = pytest.mark.slow
STACKS = "stacks.txt"
"""File for the stack traces of a process that does not respond."""
BUCKET_BYTES = 2**16
"""Bucket size in bytes, smaller than some tensors."""
STEPS_BEFORE_REFIT = 5
FORK = multiprocessing.get_context("fork")


class Remote:
    """A process that builds an object and executes method calls on it."""

    def __init__(self, mp: BaseContext, build, *args):
        # In the fork, the finalizers of earlier tests' TCPStores would wait for threads that the fork lacks.
        gc.collect()
        self._connection, child = mp.Pipe()
        # Use a short path: vLLM creates sockets in the folder, and socket paths are limited to 107 bytes.
        self._scratch = tempfile.TemporaryDirectory(dir="/tmp")
        self._process = mp.Process(target=serve, args=(child, self._scratch.name, build, args))
        self._process.start()
        child.close()  # so that recv raises EOFError when the process exits

    def send(self, method: str, *args) -> None:
        self._connection.send((method, args))

    def receive(self):
        assert self._connection.poll(RUN_S), f"no answer:\n{self._stacks()}"
        try:
            result = self._connection.recv()
        except EOFError:
            self._process.join(RUN_S)
            raise AssertionError(f"the process ended with exit code {self._process.exitcode}") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _stacks(self) -> str:
        """Return the stack traces of the process's threads."""
        stacks = Path(self._scratch.name) / STACKS
        if not stacks.exists():
            return f"the object is not built yet; exit code {self._process.exitcode}"
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(QUIET_S)
        return stacks.read_text()

    def call(self, method: str, *args):
        self.send(method, *args)
        return self.receive()

    def kill_a_worker(self) -> None:
        """Kill one of vLLM's worker processes."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        [*_, last] = [process for process in children if "VLLM::Worker" in " ".join(process.cmdline())]
        last.kill()

    def end(self) -> None:
        """Kill the process and its descendants, and delete their shared memory."""
        parent = psutil.Process(self._process.pid)
        family = [parent, *parent.children(recursive=True)]
        segments = {path for process in family for path in mapped_shared_memory(process)}
        for process in family:
            with suppress(psutil.NoSuchProcess):  # workers exit with their parent
                process.kill()
        self._process.join()
        psutil.wait_procs(family, RUN_S)
        for path in segments:
            path.unlink(missing_ok=True)
        self._scratch.cleanup()


def serve(connection: Connection, scratch: str, build, args) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    stacks = (Path(scratch) / STACKS).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        served = build(*args)
    except Exception as error:  # send the error to the first call
        connection.send(error)
        raise
    while True:
        method, arguments = connection.recv()
        try:
            connection.send(getattr(served, method)(*arguments))
        except Exception as error:
            connection.send(error)


class EngineSide:
    def __init__(self, config: Config, folder: Path, start_with_weights: bool):
        os.environ.update(environment(config.rollout.tp, threads=1, index=0))
        from megarl.rollout.vllm.engine import VllmEngine
        from megarl.rollout.vllm.engine_arguments import rollout_arguments

        extra = dict(config.rollout.vllm_overrides) | ({"load_format": "auto"} if start_with_weights else {})
        rollout = config.rollout.model_copy(update={"vllm_overrides": extra})
        routes = config.actor.experts.replay_routes
        pixels = (config.data.min_pixels, config.data.max_pixels) if config.model.vision else None
        arguments = rollout_arguments(rollout, folder, config.model.dtype, 0, routes, pixels=pixels)
        self.engine = VllmEngine(rollout, arguments, routes)
        if start_with_weights:
            self.engine.hold(0)

    def connect(self, plan, channel, holders, by_loader=False):
        self.engine.connect(CompactPlan.of(plan), channel, holders, by_loader)

    def refit(self, version, expected=None):
        return self.engine.refit(version, expected)

    def wipe(self):
        self.engine._llm.collective_rpc(wipe)

    def sample(self, prompts):
        return asyncio.run(self.engine.generate(requests(prompts)))

    def greedy(self, prompts):
        samples = asyncio.run(self.engine.generate(requests(prompts, greedy=True)))
        return [(sample.response_ids.tolist(), sample.response_logprobs.tolist()) for sample in samples]

    def sample_through_a_refit(self, prompts, version, kv_cache_on_update="keep", pauses=False, greedy=False):
        """Sample through a refit. Return the samples requested before the refit and those requested after it.

        Args:
            kv_cache_on_update: "recompute" also frees the cache during a pause.
            pauses: pause the engine around the refit, as when a trainer uses its devices. The later samples are then
                requested during the pause.
        """
        engine = self.engine
        engine._config = engine._config.model_copy(update={"kv_cache_on_update": kv_cache_on_update})

        async def sample():
            steps, step = [], engine._step
            engine._step = lambda: steps.append(step())
            early = asyncio.create_task(engine.generate(requests(prompts, greedy)))
            while len(steps) < STEPS_BEFORE_REFIT:
                await asyncio.sleep(0)
                if self._is_loading():
                    steps.clear()
            engine._step = step
            tokens = self._pending_tokens()
            if pauses:
                engine.pause()
                if kv_cache_on_update == "recompute":
                    engine.sleep(keeps_weights=False)
            else:
                engine.refit(version)
            late = asyncio.create_task(engine.generate(requests(prompts, greedy)))
            if pauses:
                engine.take_work()
                await asyncio.sleep(SHORT_S)
                engine.refit(version)
                await asyncio.sleep(SHORT_S)
                assert self._pending_tokens() == tokens + [0] * len(prompts)
                assert engine.take_work()[0] < SHORT_S, "the pause was counted as sampling time"
                engine.resume()
            await asyncio.sleep(0)
            assert not early.done()
            return await early, await late

        return asyncio.run(sample())

    def _is_loading(self) -> bool:
        """Return whether the engine still loads images, after which it submits their requests."""
        return self.engine._images is not None and bool(self.engine._images._loading)

    def _pending_tokens(self) -> list[int]:
        states = self.engine._llm.llm_engine.output_processor.request_states
        return [states[item.vllm_id].detokenizer.num_output_tokens() for item in self.engine._pending.values()]

    def sleep(self, keeps_weights: bool):
        self.engine.sleep(keeps_weights)

    def record(self):
        """Record vLLM's wake, sleep, RPC and step calls in `calls` from now on."""
        self.calls, llm = [], self.engine._llm
        llm.sleep = self._recorded(llm.sleep, lambda level, **_: f"sleep {level}")
        llm.wake_up = self._recorded(llm.wake_up, lambda tags: f"wake {tags[0]}")
        llm.collective_rpc = self._recorded(llm.collective_rpc, lambda method, **_: method)
        llm.llm_engine.step = self._recorded(llm.llm_engine.step, lambda: "step")

    def _recorded(self, function, name):
        def call(*args, **kwargs):
            self.calls.append(name(*args, **kwargs))
            return function(*args, **kwargs)

        return call

    def recorded(self):
        return self.calls

    def has_lost_a_rank(self):
        return self.engine.has_lost_a_rank

    def parameters(self):
        return self.engine.parameters()

    def repacking(self):
        return self.engine.repacking()

    def checksums(self):
        return self.engine.checksums()


def requests(prompts: Sequence[Prompt], greedy: bool = False) -> list[SamplingRequest]:
    return [SamplingRequest(f"{i}", prompt, seed=i, greedy=greedy) for i, prompt in enumerate(prompts)]


def wipe(worker) -> None:
    """Overwrite vLLM's parameters with NaN."""
    for parameter in worker._parameters().values():
        parameter.fill_(float("nan"))


class TrainerSide:
    def __init__(self, config: Config, folder: Path, store: Path, rank: int):
        world_size = config.actor.layout.world_size
        self.worker = ActorWorker(config, folder, rank, dist.FileStore(str(store), world_size), threads=1)

    def holder(self):
        return self.worker.holder

    def prepare_refit(self):
        self.worker.prepare_refit()

    def publish(self, for_refit):
        return self.worker.publish(for_refit)

    def connect(self, plan, rendezvous):
        self.worker.connect(plan, rendezvous)

    def send(self):
        return self.worker.send()

    def checksums(self, wanted, plan):
        return self.worker.checksums(wanted, plan)

    def update(self, samples):
        """Run an update with advantages of alternating sign, which moves the weights."""
        training = [training_ref(s, i % 2, Baseline(0.5, 0.5), 0.01) for i, s in enumerate(samples)]
        self.worker.update(LocalBatch(training, [tuple(range(len(samples)))]))
        self.worker.end_step()

    def log_probs(self, samples):
        training = [training_ref(s, 0.0, NO_BASELINE, 0.0) for s in samples]
        self.worker.keep_log_probs("old", LocalBatch(training, [tuple(range(len(samples)))]))
        kept = {name: values.tolist() for name, values in self.worker._kept.get("old", {}).items()}
        self.worker.end_step()
        return kept

    def export(self, plan, transport, out):
        self.worker.export(plan, transport, out)


class TwoModels:
    """Reference log-probs, by transformers, of samples that two models generated in turn."""

    def __init__(self, first: Path, second: Path):
        torch.set_num_threads(1)
        self._models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (first, second)]

    @torch.no_grad()
    def log_probs(self, sample: Sample, keep: bool = True) -> list[float]:
        """Return the log-probs of a sample.

        Args:
            keep: the second model continues with the first one's keys and values instead of recomputing them.
        """
        first, second = self._models
        ids = torch.tensor(sample.token_ids[None]).long()
        # The last token that the first model sampled is input only to the second model.
        read = len(sample.prompt.token_ids) + sample.versions[0].count - 1
        before = first(ids[:, :read], use_cache=True)
        cache = before.past_key_values if keep else second(ids[:, :read], use_cache=True).past_key_values
        after = second(ids[:, read:-1], past_key_values=cache, use_cache=True)
        log_probs = torch.cat((before.logits, after.logits), 1).log_softmax(-1)
        token_log_probs = log_probs.gather(2, ids[:, 1:, None])[0, :, 0]
        return token_log_probs[len(sample.prompt.token_ids) - 1 :].tolist()


@pytest.fixture
def remotes():
    """Return a function that starts Remotes, which are shut down at the end of the test."""
    started: list[Remote] = []

    def start(*args) -> Remote:
        started.append(Remote(*args))
        return started[-1]

    yield start
    for remote in started:
        remote.end()


def config_of(folder: Path, layout: str, tp: int, overrides: Sequence[str] = ()) -> Config:
    """Return a config with the trainer's layout and the engine's TP size."""
    return load(
        BASE,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            "data.source=arithmetic",
            f"actor.layout={layout}",
            "actor.optimizer.lr=3e-3",
            "actor.tokens_per_microbatch=1024",
            f"rollout.tp={tp}",
            "rollout.max_new_tokens=12",
            "rollout.context_length=128",
            "rollout.kv_cache_gib=0.05",
            "rollout.temperature=1",
            # With this limit, some of eight samples wait until others finish.
            "rollout.vllm_overrides={block_size: 32, max_num_seqs: 4}",
            *overrides,
        ],
    )


def prompts() -> list[Prompt]:
    """Return prompts that fill from less than one to several blocks of the prefix cache, which have 32 tokens each."""
    source = random.Random(0)
    lengths = [70, 70, 65, 33, 32, 5, 1, 40]
    return [Prompt(str(i), "", tuple(source.randrange(6, 120) for _ in range(n))) for i, n in enumerate(lengths)]


STAGES, ROWS = "{pp: 2}", "{tp: 2, sequence_parallel: true}"
EXPERTS, EXPERTS_OF_ROWS = "{dp: 2, ep: 2}", "{tp: 2, sequence_parallel: true, ep: 2, etp: 1}"
MODELS = {
    "Llama, tied": ("llama", dict(tie_word_embeddings=True), STAGES),
    "Llama, all biases": ("llama", dict(attention_bias=True, mlp_bias=True) | TWO_GROUPS, ROWS),
    "Mistral": ("mistral", dict(sliding_window=None), STAGES),
    "Mixtral": ("mixtral", dict(num_local_experts=4), EXPERTS),
    "Phi-3": ("phi3", TWO_GROUPS, ROWS),
    "Qwen2": ("qwen2", TWO_GROUPS | dict(hidden_size=128), ROWS),  # vLLM derives head_dim as hidden_size / heads
    "Qwen3": ("qwen3", {}, STAGES),
    "Qwen3, experts": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0], norm_topk_prob=True),
        EXPERTS,
    ),
    "Qwen3, experts that vLLM pads": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True),
        EXPERTS,
    ),
    "DeepSeek-V3": ("deepseek_v3", LATENT | dict(q_lora_rank=24), EXPERTS_OF_ROWS),
    "DeepSeek-V3, direct queries, YaRN": (
        "deepseek_v3",
        LATENT | dict(q_lora_rank=None, rope_parameters=YARN),
        STAGES,
    ),
    "Qwen3.5": ("qwen3_5_text", GATED_DELTA, ROWS),
    "Qwen3.5, experts": ("qwen3_5_moe_text", GATED_DELTA_EXPERTS, EXPERTS_OF_ROWS),
    "Qwen3-Next": ("qwen3_next", GATED_DELTA_EXPERTS, STAGES),
    "GLM-4.6": ("glm4_moe", GLM | TWO_GROUPS | dict(use_qk_norm=True), EXPERTS_OF_ROWS),
    "GLM-4.5-Air": ("glm4_moe", GLM, EXPERTS),
    "Kimi K2": (
        "kimi_k2",
        LATENT | dict(q_lora_rank=24, rope_parameters=KIMI_YARN, rms_norm_eps=1e-2, routed_scaling_factor=2.827),
        EXPERTS_OF_ROWS,
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS, EXPERTS_OF_ROWS),
    "gpt-oss, MXFP4": ("gpt_oss", GPT_OSS, EXPERTS),
}
"""model_type, config.json keys in addition to SIZES, and the layout of the trainer's two ranks."""

OVER_TWO_WORKERS = (
    *("Llama, tied", "Llama, all biases", "Qwen3, experts", "Qwen3, experts that vLLM pads", "DeepSeek-V3"),
    *("GLM-4.6", "Qwen3.5", "Qwen3.5, experts", "Qwen3-Next", "gpt-oss"),
)
EVERY_TIME = {("Qwen3, experts that vLLM pads", 1), ("Llama, tied", 1), ("Qwen3.5", 1)}
"""Cases that always run: padded experts, tied dense weights with adapters, and gated delta nets. `make test-exhaustive`
runs the others. The cluster test of colocated PPO covers engines with two workers, test_colocated_ahead.py covers
refits during requests, and test_speculative.py covers drafts with adapters."""

CASES = [
    pytest.param(name, tp, marks=() if (name, tp) in EVERY_TIME else pytest.mark.exhaustive)
    for name, tp in [*((name, 1) for name in MODELS), *((name, 2) for name in OVER_TWO_WORKERS)]
]
IN_FLIGHT = [("Qwen3", 1), ("Llama, tied", 2)]
REPLAYED = [
    *[("Qwen3, experts", 2), ("Qwen3, experts that vLLM pads", 1), ("Qwen3-Next", 1)],
    ("gpt-oss, MXFP4", 1),
]
"""Cases that replay routes. In bfloat16, near-ties of the router would otherwise route some tokens to other experts."""
FLOAT16 = [("Mistral", 1), ("GLM-4.5-Air", 1)]
BFLOAT16 = [("Qwen3-Next", 1), ("Qwen3.5", 2), ("gpt-oss, MXFP4", 1)]
"""Cases in bfloat16. For this dtype, vLLM would pack convolutions for its CPU kernels. MXFP4 is dequantized to it."""
ADAPTED = [("Llama, tied", 1), ("Qwen3, experts", 1), ("Qwen3.5, experts", 1), ("GLM-4.6", 1)]
"""Cases that train adapters, which every refit merges. The same models with two workers train all weights."""
DRAFTING = [("GLM-4.6", 1)]
"""Cases whose engine drafts tokens with the MTP layer, which has no adapters."""
OWN_DRAFTS = "rollout.speculative.method=mtp"


class Trainers:
    """The trainer's two ranks."""

    def __init__(self, start, config: Config, folder: Path, store: Path):
        self._ranks = [start(FORK, TrainerSide, config, folder, store, rank) for rank in range(2)]
        self.holders = self.call("holder")
        self._rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def begin(self, method, *args) -> None:
        for rank in self._ranks:
            rank.send(method, *args)

    def end(self) -> list:
        return [rank.receive() for rank in self._ranks]

    def call(self, method, *args) -> list:
        self.begin(method, *args)
        return self.end()

    def shared_memory(self, for_refit: bool = True) -> SharedMemory:
        return SharedMemory({h.name: p for h, p in zip(self.holders, self.call("publish", for_refit), strict=True)})

    def rendezvous(self) -> Rendezvous:
        return Rendezvous("127.0.0.1", self._rendezvous.port, "refit", WAIT_S)

    def log_probs(self, samples) -> dict[str, list[float]]:
        """Return the last rank's log-probs; it has them in every layout."""
        return self.call("log_probs", samples)[-1]

    def export_plan(self, hf_config) -> Plan:
        return make_plan(self.holders, [huggingface_holder(hf_config)])

    def export(self, hf_config, transport: SharedMemory, out: Path) -> Path:
        self._ranks[0].call("export", self.export_plan(hf_config), transport, out)
        return out

    def expected(self, hf_config, engine_holders, plan: Plan | None = None) -> dict[Region, Checksum]:
        """Return the checksums that engines should have.

        Args:
            plan: the export plan of the sent tensors if they differ from the weights, as quantized ones do.
        """
        total = dict.fromkeys(regions(engine_holders), NOTHING)
        for part in self.call("checksums", list(total), plan or self.export_plan(hf_config)):
            total |= {region: total[region] + checksum for region, checksum in part.items()}
        return total


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_engine_after_two_refits_equals_fresh_engine(tmp_path, remotes, name, tp):
    model_type, changes, layout = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", model_type, **SIZES | changes)
    if "MXFP4" in name:
        store_as_mxfp4(folder)
    drafts = (name, tp) in DRAFTING
    if drafts:
        add_mtp_layer(folder)
    truncated = [] if (name, tp) in IN_FLIGHT else ["rollout.top_k=7", "rollout.top_p=0.8"]
    routes = ["actor.experts.replay_routes=true"] if (name, tp) in REPLAYED else []
    adapters = ["actor.lora.rank=4"] if (name, tp) in ADAPTED else []
    scaled = "actor.megatron_overrides.optimizer.initial_loss_scale=256.0"
    float16 = ["model.dtype=float16", scaled] if (name, tp) in FLOAT16 else []
    float16 += ["model.dtype=bfloat16"] if (name, tp) in BFLOAT16 else []
    own_drafts = ["actor.mtp.loss_coefficient=0.0", OWN_DRAFTS] if drafts else []
    config = config_of(folder, layout, tp, [*truncated, *routes, *adapters, *float16, *own_drafts])
    hf_config, dtype = policy_hf_config(config, read_config(folder)), config.model.dtype
    trainers = Trainers(remotes, config, folder, tmp_path / "store")
    engine = remotes(engine_context(), EngineSide, config, folder, False)
    padded = padded_experts(engine.call("parameters")[0])
    assert "pads" not in name or padded > changes["moe_intermediate_size"] / tp
    targets = vllm_holders(hf_config, tp, 1, dtype, padded_experts=padded, drafts=drafts)
    plan, shared_memory = ordered(make_plan(trainers.holders, targets, BUCKET_BYTES)), trainers.shared_memory()
    assert not any(
        target.shard.mismatched_params(params)
        for target, params in zip(targets, engine.call("parameters"), strict=True)
    )
    with pytest.raises(RuntimeError, match="Fix: refit it before it generates"):
        engine.call("sample", prompts())

    model_bytes = [
        sum(ITEM_BYTES[one.dtypes[name]] * prod(shape) for name, shape in one.shapes.items()) for one in targets
    ]
    engine.call("connect", plan, shared_memory, targets)
    trainers.call("prepare_refit")
    assert [worker.num_bytes for worker in engine.call("refit", 0)] == model_bytes
    before = engine.call("greedy", prompts())  # fills the prefix cache with keys and values of the old weights
    for version in (1, 2):
        samples = engine.call("sample", prompts())
        assert all(run.version == version - 1 for sample in samples for run in sample.versions)
        trained = trainers.log_probs(samples)
        for sample in samples:  # ROUNDING bounds a mean, and single tokens differ more in 16 bits
            assert np.abs(sample.response_logprobs - trained[sample.id]).mean() <= ROUNDING[dtype]
            assert dtype != "float32" or difference(sample.response_logprobs, trained[sample.id]) <= ROUNDING[dtype]
        kept = [ids for sample in samples for ids in sample.candidate_ids or ()]
        assert bool(kept) == bool(truncated) and all(1 <= len(ids) <= 7 for ids in kept)
        trainers.call("update", samples)
        trainers.call("prepare_refit")
        engine.call("refit", version)
    check_routes(samples, bool(routes), changes)
    assert any(sample.drafts.num_accepted for sample in samples) == drafts
    exported = trainers.export(hf_config, trainers.shared_memory(for_refit=False), tmp_path / "exported")
    late_samples: list[Sample] = []
    if (name, tp) in IN_FLIGHT:
        uninterrupted = engine.call("sample", prompts())
        trainers.call("update", uninterrupted)
        through, late_samples = engine.call("sample_through_a_refit", prompts(), 3)
        old, exported = exported, trainers.export(hf_config, shared_memory, tmp_path / "newer")
        check_samples_through_a_refit(through[:4], uninterrupted, remotes(FORK, TwoModels, old, exported))
        late_samples += through[4:]  # these started after the refit, because the engine runs four at a time
    after = engine.call("greedy", prompts())
    assert after != before, "the updates did not change the greedy samples"

    fresh = remotes(engine_context(), EngineSide, config, exported, True)
    expected = fresh.call("checksums")
    assert engine.call("checksums") == expected
    assert fresh.call("greedy", prompts()) == after
    from_fresh = {sample.id: sample for sample in fresh.call("sample", prompts())}
    for sample in late_samples:
        assert sample.versions == (VersionRun(3, len(sample.response_ids)),)
        assert sample.response_ids.tolist() == from_fresh[sample.id].response_ids.tolist()
        assert difference(sample.response_logprobs, from_fresh[sample.id].response_logprobs) <= 1e-5

    engines = [engine, fresh]
    plan, right = connect_by_p2p(trainers, engines, hf_config, targets)
    check_wrong_weights_are_rejected(trainers, engines, right)
    check_refits_by_p2p(trainers, engines, plan, right, model_bytes, expected)
    assert [remote.call("greedy", prompts()) for remote in engines] == [after, after]
    check_refit_after_sleep(trainers, engines, after)
    if (name, tp) in IN_FLIGHT:
        for remote in engines:
            remote.call("connect", ordered(make_plan(trainers.holders, targets)), shared_memory, targets)
        for version, kv_cache_on_update, pauses in ((7, "recompute", False), (8, "recompute", True), (9, "keep", True)):
            trainers.call("update", engine.call("sample", prompts()))
            sampled = engine.call("sample_through_a_refit", prompts(), version, kv_cache_on_update, pauses, True)
            fresh.call("refit", version)
            old, exported = exported, trainers.export(hf_config, shared_memory, tmp_path / f"{version}")
            check_greedy_samples(*sampled, kv_cache_on_update, fresh, remotes(FORK, TwoModels, old, exported))
    check_lost_worker_is_noticed(engine, tp)


def check_routes(samples: list[Sample], has_routes: bool, changes) -> None:
    """Check that all tokens but the last have routes in every MoE layer, and that all experts occur."""
    if not has_routes:
        assert all(sample.routes is None for sample in samples)
        return
    layers = (SIZES | changes)["num_hidden_layers"] - len(changes.get("mlp_only_layers", ()))
    for sample in samples:
        assert sample.routes.shape == (sample.num_tokens, layers, 2)
        assert (sample.routes[-1] == NO_ROUTE).all()
        assert (sample.routes[:-1, :, 0] != sample.routes[:-1, :, 1]).all()
    routes = np.concatenate([sample.routes[:-1] for sample in samples])
    assert all({*routes[:, layer].flat} == {0, 1, 2, 3} for layer in range(layers))


def check_samples_through_a_refit(samples: list[Sample], uninterrupted: list[Sample], reference: Remote) -> None:
    through = [sample for sample in samples if len(sample.response_ids) > STEPS_BEFORE_REFIT]
    assert len(through) >= 3
    for sample in through:
        old, new = sample.versions
        assert (old.version, old.count, new.version) == (2, STEPS_BEFORE_REFIT, 3)
        whole = next(other for other in uninterrupted if other.id == sample.id)
        assert sample.response_ids[: old.count].tolist() == whole.response_ids[: old.count].tolist()
        assert sample.response_logprobs[: old.count].tolist() == whole.response_logprobs[: old.count].tolist()
        assert difference(sample.response_logprobs, reference.call("log_probs", sample)) <= 1e-4
        recomputed = reference.call("log_probs", sample, False)
        assert difference(sample.response_logprobs, recomputed) > 1e-3, (
            "the two models' keys and values do not differ enough"
        )


def check_greedy_samples(
    samples: list[Sample], late: list[Sample], kv_cache_on_update: str, fresh: Remote, reference: Remote
) -> None:
    """Check greedy samples requested before and after a refit.

    Args:
        fresh: an engine with the new weights and an empty prefix cache.
    """
    answers = [(sample.response_ids.tolist(), sample.response_logprobs.tolist()) for sample in late]
    for (ids, log_probs), (fresh_ids, fresh_log_probs) in zip(answers, fresh.call("greedy", prompts()), strict=True):
        assert ids == fresh_ids and difference(log_probs, fresh_log_probs) <= 1e-5
    through, keeps = [sample for sample in samples[:4] if len(sample.versions) > 1], kv_cache_on_update == "keep"
    assert len(through) >= 3
    whole = [sample.prompt.token_ids.tolist() + sample.response_ids.tolist() for sample in through]
    begun = [len(sample.prompt.token_ids) + STEPS_BEFORE_REFIT for sample in through]
    continued = fresh.call("greedy", [Prompt("", "", ids[:count]) for ids, count in zip(whole, begun, strict=True)])
    for sample, (ids, log_probs) in zip(through, continued, strict=True):
        old, new = sample.versions
        assert (old.count, new.version) == (STEPS_BEFORE_REFIT, old.version + 1)
        assert difference(sample.response_logprobs, reference.call("log_probs", sample, keeps)) <= 1e-4
        assert difference(sample.response_logprobs, reference.call("log_probs", sample, not keeps)) > 1e-3
        if not keeps:
            assert sample.response_ids[old.count :].tolist() == ids[: new.count]
            assert difference(sample.response_logprobs[old.count :], log_probs[: new.count]) <= 1e-4


def connect_by_p2p(
    trainers: Trainers, engines: Sequence[Remote], hf_config, targets: Sequence[Holder]
) -> tuple[Plan, dict[Region, Checksum]]:
    """Connect engines on another node, which receives shared regions once and forwards them. `targets` are the holders
    of one engine.

    Returns:
        The plan, and each engine's expected checksums.
    """
    holders = [
        [replace(target, name=f"vllm:{replica}.{k}", node=1) for k, target in enumerate(targets)]
        for replica in range(2)
    ]
    plan = ordered(make_plan(trainers.holders, [holder for workers in holders for holder in workers], BUCKET_BYTES))
    assert any(bucket.forwards for bucket in plan.buckets)
    trainers.call("connect", plan, rendezvous := trainers.rendezvous())
    for remote, workers in zip(engines, holders, strict=True):
        remote.call("connect", plan, rendezvous, workers)
    return plan, trainers.expected(hf_config, holders[0])


def check_wrong_weights_are_rejected(
    trainers: Trainers, engines: Sequence[Remote], right: dict[Region, Checksum]
) -> None:
    spoiled, (engine, other) = "model.layers.1.input_layernorm.weight", engines
    region = next(region for region in right if region.tensor == spoiled)
    trainers.begin("send")
    other.send("refit", 3, right)
    # With two workers, both fail. The next call must not receive the answer of the second one.
    wrong = rf"weights differ in 1 regions. The first is {spoiled}\[.* in megatron:[01] "
    with pytest.raises(RuntimeError, match=wrong):
        engine.call("refit", 3, right | {region: replace(right[region], value=0)})
    other.receive()
    trainers.end()
    with pytest.raises(RuntimeError, match="Fix: refit it before it generates"):
        engine.call("sample", prompts())


def check_refits_by_p2p(
    trainers: Trainers,
    engines: Sequence[Remote],
    plan: Plan,
    right: dict[Region, Checksum],
    model_bytes: list[int],
    expected: list[dict[str, str]],
) -> None:
    """Check two refits over P2P.

    Args:
        model_bytes: bytes of each worker of an engine.
        expected: checksums of the workers' parameters.
    """
    entering = sum(b.num_bytes for b in plan.buckets for link in b.links if link.source < plan.num_sources)
    assert entering <= sum(model_bytes)
    for version in (4, 5):
        for remote in engines:
            remote.call("wipe")
        trainers.begin("send")
        for remote in engines:
            remote.send("refit", version, right)
        workers = [worker for remote in engines for worker in remote.receive()]
        assert sum(trainers.end()) == entering
        assert [worker.num_bytes for worker in workers] == 2 * model_bytes
        assert all(0 < worker.staging_bytes <= 2 * BUCKET_BYTES for worker in workers)
        assert [remote.call("checksums") for remote in engines] == [expected, expected]


def check_refit_after_sleep(trainers: Trainers, engines: Sequence[Remote], answers) -> None:
    """Check a refit of an engine that slept. An engine that slept without its weights must not sample before it.

    On CPU a sleeping engine keeps its memory but follows the same code path.
    """
    engine, other = engines
    engine.call("sleep", True)
    assert engine.call("greedy", prompts()) == answers
    engine.call("sleep", False)
    with pytest.raises(RuntimeError, match="Fix: refit it before it generates"):
        engine.call("greedy", prompts())
    engine.call("record")
    trainers.begin("send")
    other.send("refit", 6)
    engine.call("refit", 6)
    other.receive()
    trainers.end()
    assert engine.call("greedy", prompts()) == answers
    pause = ["sleep 0", "step", "wake scheduling"]
    assert engine.call("recorded")[:7] == ["wake weights", *pause, "refit", "wake kv_cache", "step"]


def check_lost_worker_is_noticed(engine: Remote, tp: int) -> None:
    """Check that an engine reports a lost worker process, which vLLM only has with TP."""
    assert not engine.call("has_lost_a_rank")
    if tp > 1:
        engine.kill_a_worker()
        with pytest.raises(RuntimeError):
            engine.call("checksums")
        assert engine.call("has_lost_a_rank")


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


QUANTIZED = (
    "model.dtype=bfloat16",
    "rollout.vllm_overrides={block_size: 32, max_num_seqs: 4, quantization: fp8_per_channel}",
)


@pytest.mark.exhaustive
def test_quantizing_engine_loads_whole_tensors(tmp_path, remotes):
    """Such an engine's weights differ from the family's in dtype and shape, and have scales."""
    folder = write_tiny_model(tmp_path / "model", "llama", **SIZES | dict(tie_word_embeddings=True))
    config, hf_config = config_of(folder, STAGES, 1, QUANTIZED), read_config(folder)
    trainers = Trainers(remotes, config, folder, tmp_path / "store")
    engine = remotes(engine_context(), EngineSide, config, folder, False)
    mismatched_params = vllm_holder(hf_config, 1, 0, replica=0, dtype="bfloat16").shard.mismatched_params(
        engine.call("parameters")[0]
    )
    weight = "model.layers.0.self_attn.qkv_proj.weight"
    assert (
        f"{weight} has shape [64, 128] (float8_e4m3fn), but the family expects [128, 64] (bfloat16)"
        in mismatched_params
    )
    assert f"{weight}_scale [128, 1] (float32) does not belong to the family" in mismatched_params

    target = replace(huggingface_holder(hf_config, "bfloat16"), name="vllm:0.0")
    plan, shared_memory = ordered(make_plan(trainers.holders, [target], BUCKET_BYTES)), trainers.shared_memory()
    engine.call("connect", plan, shared_memory, [target], True)
    for version in range(3):
        [worker] = engine.call("refit", version, trainers.expected(hf_config, [target]))
        assert worker.num_bytes == target.shard.num_bytes
        if version < 2:
            trainers.call("update", engine.call("sample", prompts()))
    fresh = remotes(
        engine_context(), EngineSide, config, trainers.export(hf_config, shared_memory, tmp_path / "exported"), True
    )
    expected, answers = fresh.call("checksums"), fresh.call("greedy", prompts())
    assert engine.call("checksums") == expected
    assert engine.call("greedy", prompts()) == answers

    right = trainers.expected(hf_config, [target])
    region = next(region for region in right if region.tensor == "model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(RuntimeError, match=rf"weights differ in 1 regions. The first is {region.tensor}\["):
        engine.call("refit", 3, right | {region: replace(right[region], value=0)})
    rendezvous = trainers.rendezvous()
    trainers.call("connect", plan, rendezvous)
    engine.call("connect", plan, rendezvous, [target], True)
    trainers.begin("send")
    [worker] = engine.call("refit", 4, right)
    assert sum(trainers.end()) == worker.num_bytes
    assert engine.call("checksums") == expected, "the failed refit affected the next one"
    assert engine.call("greedy", prompts()) == answers


BLOCKS = dict(vocab_size=128, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
BLOCKS |= dict(num_hidden_layers=2, intermediate_size=384, max_position_embeddings=256)
"""Sizes that the engine shards at blocks of 128 while the trainer's two tensor-parallel ranks split blocks."""


# vLLM's CPU build has no kernels for quantized experts, so all layers are dense. vLLM dequantizes whole blocks of
# kv_b_proj.
QUANTIZED_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=128, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=3
)
FP8_MODELS = {
    "Llama": ("llama", {}),
    "Qwen3": ("qwen3", {}),
    "DeepSeek-V3, drafts": ("deepseek_v3", LATENT | QUANTIZED_LATENT),
}
"""model_type, and config.json keys in addition to BLOCKS."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FP8_MODELS)
def test_fp8_block_engine_equals_vllm_quantization(name, tmp_path, remotes):
    """After two in-place refits with weights quantized by the trainer, the engine equals a fresh one that quantizes the
    exported model itself. DeepSeek-V3's engine drafts tokens with the MTP layer, which the updates train."""
    model_type, changes = FP8_MODELS[name]
    folder = write_tiny_model(tmp_path / "model", model_type, **BLOCKS | changes, tie_word_embeddings=False)
    common, drafts = ["model.dtype=bfloat16"], "drafts" in name
    if drafts:
        scale_embedding(folder)
        add_mtp_layer(folder)
        common += [OWN_DRAFTS, "actor.mtp.loss_coefficient=0.3"]
    config = config_of(folder, ROWS, 1, [*common, "rollout.quantization=fp8_block"])
    hf_config = policy_hf_config(config, read_config(folder))
    trainers = Trainers(remotes, config, folder, tmp_path / "store")
    engine = remotes(engine_context(), EngineSide, config, folder, False)
    sources = quantized_sources(hf_config, trainers.holders)
    targets = quantized_destinations(hf_config, vllm_holders(hf_config, 1, 1, "bfloat16", drafts=drafts))
    assert targets[0].shard.mismatched_params(engine.call("parameters")[0]) == []
    assert engine.call("repacking") == []
    whole = quantized_destinations(hf_config, [huggingface_holder(hf_config, "bfloat16")])
    trainers.call("prepare_refit")
    shared_memory, plan = trainers.shared_memory(), make_plan(sources, targets, BUCKET_BYTES)
    engine.call("connect", plan, shared_memory, targets)
    for version in range(2):
        trainers.call("prepare_refit")
        [worker] = engine.call("refit", version, trainers.expected(hf_config, targets, make_plan(sources, whole)))
        assert worker.num_bytes == targets[0].shard.num_bytes
        if version == 0:
            samples = engine.call("sample", prompts())
            assert any(sample.drafts.num_accepted for sample in samples) == drafts
            trainers.call("update", samples)
    exported = trainers.export(hf_config, trainers.shared_memory(for_refit=False), tmp_path / "exported")
    by_vllm = "rollout.vllm_overrides={block_size: 32, max_num_seqs: 4, quantization: fp8_per_block}"
    online = config_of(exported, ROWS, 1, [*common, by_vllm])
    fresh = remotes(engine_context(), EngineSide, online, exported, True)
    expected, answers = fresh.call("checksums"), fresh.call("greedy", prompts())
    assert engine.call("checksums") == expected
    assert engine.call("greedy", prompts()) == answers
    of_both = [[sample.drafts for sample in remote.call("sample", prompts())] for remote in (engine, fresh)]
    assert of_both[0] == of_both[1]

    by_loader = [replace(whole[0], name="vllm:0.0")]
    arguments = make_plan(sources, by_loader, BUCKET_BYTES), shared_memory, by_loader, True
    if drafts:
        with pytest.raises(UserError, match="repack weights, so refits cannot write the MTP layer"):
            engine.call("connect", *arguments)
        return
    engine.call("connect", *arguments)
    engine.call("wipe")
    engine.call("refit", 2, trainers.expected(hf_config, by_loader, make_plan(sources, whole)))
    assert engine.call("checksums") == expected
    assert engine.call("greedy", prompts()) == answers


def test_recomputed_tokens_keep_the_routes_of_their_weights(tmp_path, remotes):
    """All weights change while samples are in flight, and the KV cache is recomputed. Tokens that the engine had
    already processed keep the experts chosen by the old weights; later tokens have those of the new weights."""
    model_type, changes, _ = MODELS["Qwen3, experts"]
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        write_tiny_model(folder, model_type, seed, **SIZES | changes)
    config = config_of(folders[0], "{}", 1, ["actor.experts.replay_routes=true"])
    engine = remotes(engine_context(), EngineSide, config, folders[0], True)
    hf_config, dtype = read_config(folders[0]), config.model.dtype
    source, target = huggingface_holder(hf_config, dtype), vllm_holder(hf_config, 1, 0, replica=0, dtype=dtype)
    weights = load_file(folders[1] / "model.safetensors")
    channel = SharedMemory({source.name: publish(weights)})
    engine.call("connect", make_plan([source], [target]), channel, [target])
    early, _ = engine.call("sample_through_a_refit", prompts(), 1, "recompute")
    through = [sample for sample in early if [run.version for run in sample.versions] == [0, 1]]
    assert through
    models = [Replayed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) for folder in folders]
    for sample in through:
        num_old = len(sample.prompt.token_ids) + sample.versions[0].count - 1
        chosen = []
        for model in models:
            model.by(None)
            with torch.no_grad():
                model.model(torch.tensor(sample.token_ids)[None])
            chosen.append(torch.stack(model.own, dim=1).sort(-1).values.numpy())
        routes = np.sort(sample.routes[:-1], axis=-1)
        assert (routes[:num_old] == chosen[0][:num_old]).all()
        assert (chosen[0][:num_old] != chosen[1][:num_old]).any(), "the weights choose the same experts"
        assert (routes[num_old:] == chosen[1][num_old:-1]).all()
