"""A learning run on one rank without an engine: the reference implementation in transformers samples the tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import Store
from transformers import AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.core import device
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.megatron.workers.actor import ActorWorker
from tests.parity import RankResult, config_of, local_batch, rank_batches, whole_tensors

PROMPTS, SAMPLES, TOKENS = 8, 8, 8
"""Numbers of prompts per step, of samples per prompt, and of response tokens per sample."""


def learning_config(folder: Path) -> Config:
    return config_of(
        folder,
        "model.dtype=bfloat16",
        "actor.optimizer.lr=0.003",
        f"batch.prompts_per_step={PROMPTS}",
        f"batch.prompts_per_update={PROMPTS}",
        f"batch.samples_per_prompt={SAMPLES}",
        "actor.tokens_per_microbatch=1024",
        "rollout.temperature=1.0",
    )


def learn(store: Store, rank: int, config: Config, folder: Path, steps: int) -> list[float]:
    """Train with GRPO to sample even token ids. Return each step's mean reward, the share of even ids."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device.device())
    rewards = []
    for step in range(steps):
        ranks = [RankResult(worker.holder, {}, {n: w.float().cpu() for n, w in worker.parameters().items()}, {})]
        whole = whole_tensors(policy.config.to_dict(), ranks, "weights")
        policy.load_state_dict({name: whole.get(name, tensor) for name, tensor in policy.state_dict().items()})
        generator = torch.Generator(device.device()).manual_seed(step)
        groups = [_group(policy, f"{step}.{i}", generator) for i in range(PROMPTS)]
        rewards.append(sum(reward for group in groups for _, reward in group) / (PROMPTS * SAMPLES))
        [batch] = rank_batches(config, worker.packing, groups)
        worker.update(local_batch(batch))
        worker.end_step()
    return rewards


@torch.no_grad()
def _group(policy, name: str, generator: torch.Generator) -> list[tuple[Sample, float]]:
    prompt_ids = torch.randint(6, 100, (1, 4), generator=generator, device=generator.device)
    ids = prompt_ids.repeat(SAMPLES, 1)
    logprobs = []
    for _ in range(TOKENS):
        log_p = policy(ids).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        logprobs.append(log_p.gather(1, drawn))
        ids = torch.cat((ids, drawn), 1)
    prompt, drawn = Prompt(name, "", prompt_ids[0].tolist()), ids[:, prompt_ids.shape[1] :]
    mask, run = (True,) * TOKENS, (VersionRun(0, TOKENS),)
    return [
        (
            Sample(f"{name}.{k}", prompt, row.tolist(), sampled.tolist(), mask, run, "length", ""),
            float((row % 2 == 0).float().mean()),
        )
        for k, (row, sampled) in enumerate(zip(drawn, torch.cat(logprobs, 1), strict=True))
    ]
