"""Contract between trainer and engine: after two refits the engine is one that was started from the exported model."""

from __future__ import annotations

import multiprocessing
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.batch import GroupStatistics, Prompt, TrainingSample
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.megatron.actor_worker import ActorWorker
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.planner import make_plan
from megarl.resharding.transports.shared_memory import SharedMemory
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.environment import environment
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
DEADLINE_S = 180
NUM_SAMPLES = 8


class Remote:
    """A process that answers calls by name on an object that it builds for itself."""

    def __init__(self, context: str, build, *args):
        mp = multiprocessing.get_context(context)
        self._connection, theirs = mp.Pipe()
        self._process = mp.Process(target=serve, args=(theirs, build, args), daemon=True)
        self._process.start()

    def send(self, method: str, *args) -> None:
        self._connection.send((method, args))

    def receive(self):
        assert self._connection.poll(DEADLINE_S), "no answer"
        result = self._connection.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def call(self, method: str, *args):
        self.send(method, *args)
        return self.receive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(connection: Connection, build, args) -> None:
    served = build(*args)
    while True:
        method, arguments = connection.recv()
        try:
            connection.send(getattr(served, method)(*arguments))
        except Exception as error:
            connection.send(error)


class EngineSide:
    def __init__(self, config: Config, folder: Path, start_with_weights: bool):
        os.environ.update(environment(config.rollout.tp, threads=1))
        from megarl.rollout.vllm_engine import VllmEngine

        extra = dict(config.rollout.vllm_extra) | ({"load_format": "auto"} if start_with_weights else {})
        rollout = config.rollout.model_copy(update={"vllm_extra": extra})
        self.engine = VllmEngine(rollout, folder, "float32", replica=0, seed=0)
        self.engine.version = 0 if start_with_weights else None

    def refit(self, plan, transport, version):
        return self.engine.refit(plan, transport, version)

    def sample(self, prompts):
        return self.engine.generate([SamplingRequest(f"{i}", prompt, seed=i) for i, prompt in enumerate(prompts)])

    def greedy(self, prompts):
        from vllm import SamplingParams

        outputs = self.engine._llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=12, logprobs=0),
            use_tqdm=False,
        )
        completions = [output.outputs[0] for output in outputs]
        return [
            (tuple(c.token_ids), [position[t].logprob for position, t in zip(c.logprobs, c.token_ids, strict=True)])
            for c in completions
        ]

    def shapes(self):
        return self.engine.parameter_shapes()

    def checksums(self):
        return self.engine.checksums()


class TrainerSide:
    def __init__(self, config: Config, folder: Path, store: Path, rank: int):
        world_size = config.actor.layout.world_size
        self.worker = ActorWorker(config, folder, rank, dist.FileStore(str(store), world_size), threads=1)

    def holder(self):
        return self.worker.holder

    def publish(self):
        return self.worker.publish()

    def update(self, samples):
        """Advantages alternate in sign, so that every update moves the weights."""
        training = [TrainingSample(s, i % 2, GroupStatistics(0.5, 0.5, 2), 0.01) for i, s in enumerate(samples)]
        return self.worker.update(training, [tuple(range(len(samples)))])

    def log_probs(self, samples):
        training = [TrainingSample(s, 0.0, GroupStatistics(0.0, 1.0, 1), 0.0) for s in samples]
        self.worker.score("old", training, [tuple(range(len(samples)))])
        kept = {name: values.tolist() for name, values in self.worker._kept.get("old", {}).items()}
        self.worker.end_step()
        return kept

    def export(self, plan, transport, out):
        self.worker.export(plan, transport, out)


@pytest.fixture
def remotes():
    """Starts processes and ends them with the test."""
    started: list[Remote] = []

    def start(*args) -> Remote:
        started.append(Remote(*args))
        return started[-1]

    yield start
    for remote in started:
        remote.end()


def config_of(folder: Path) -> Config:
    return load(
        BASE,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            "data.source=arithmetic",
            "actor.layout.pp=2",
            "actor.optimizer.lr=3e-3",
            "actor.tokens_per_microbatch=1024",
            "rollout.max_new_tokens=12",
            "rollout.context_length=128",
            "rollout.kv_cache_gib=0.05",
            "rollout.vllm_extra={block_size: 32}",
        ],
    )


def prompts() -> list[Prompt]:
    """Some fill several blocks of 32 tokens, which the prefix cache keeps, some less than one."""
    source = random.Random(0)
    lengths = [70, 70, 65, 33, 32, 5, 1, 40]
    return [Prompt(str(i), "", tuple(source.randrange(6, 120) for _ in range(n))) for i, n in enumerate(lengths)]


# What vLLM's CPU kernels can: heads of 32, experts of a multiple of 32 rows.
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_hidden_layers=2,
    intermediate_size=128,
    max_position_embeddings=256,
)
# The latent's size and the positions' are those of vLLM's CPU kernel.
LATENT = dict(
    num_key_value_heads=2,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=16,
    v_head_dim=24,
    moe_intermediate_size=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=1.0,
)
MODELS = {
    "Llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "Llama, all biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "Mistral": ("mistral", dict(sliding_window=None)),
    "Mixtral": ("mixtral", dict(num_local_experts=4)),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, experts": (
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[0], norm_topk_prob=True),
    ),
    "DeepSeek-V3": ("deepseek_v3", LATENT | dict(q_lora_rank=24)),
    "DeepSeek-V3, direct queries, YaRN": ("deepseek_v3", LATENT | dict(q_lora_rank=None, rope_parameters=YARN)),
}


@pytest.mark.parametrize("name", MODELS)
def test_engine_after_two_refits_is_a_fresh_engine(tmp_path, remotes, name):
    model_type, changes = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", model_type, **SIZES | changes)
    config, hf_config = config_of(folder), read_config(folder)
    trainers = [remotes("fork", TrainerSide, config, folder, tmp_path / "store", rank) for rank in range(2)]
    engine = remotes("spawn", EngineSide, config, folder, False)

    def on_all(method, *args):
        for trainer in trainers:
            trainer.send(method, *args)
        return [trainer.receive() for trainer in trainers]

    holders = on_all("holder")
    transport = SharedMemory({h.name: p for h, p in zip(holders, on_all("publish"), strict=True)})
    target = vllm_holder(hf_config, 1, 0, 0)
    plan = make_plan(holders, [target])
    assert engine.call("shapes") == [target.shapes]

    with pytest.raises(RuntimeError, match="a refit must succeed before it generates"):
        engine.call("sample", prompts())
    bytes_of_model = sum(4 * torch_numel(shape) for shape in target.shapes.values())
    assert engine.call("refit", plan, transport, 0) == bytes_of_model
    before = engine.call("greedy", prompts())  # fills the prefix cache with the old weights' keys and values
    for version in (1, 2):
        samples = engine.call("sample", prompts())
        assert all(run.version == version - 1 for sample in samples for run in sample.versions)
        trained = trainer_log_probs(on_all, samples)
        for sample in samples:
            assert max(abs(a - b) for a, b in zip(sample.response_logprobs, trained[sample.id], strict=True)) <= 1e-4
        on_all("update", samples)
        engine.call("refit", plan, transport, version)
    after = engine.call("greedy", prompts())
    assert after != before, "the updates did not change what the model says"

    exported = tmp_path / "exported"
    trainers[0].call("export", make_plan(holders, [huggingface_holder(hf_config)]), transport, exported)
    fresh = remotes("spawn", EngineSide, config, exported, True)
    assert fresh.call("checksums") == engine.call("checksums")
    assert fresh.call("greedy", prompts()) == after


def trainer_log_probs(on_all, samples) -> dict[str, list[float]]:
    """The last pipeline stage has them."""
    return on_all("log_probs", samples)[-1]


def torch_numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)
