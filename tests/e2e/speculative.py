"""Samples of a live engine with speculative decoding, and what transformers computes for them."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from megarl.config.load import load
from megarl.core.completion import NO_DRAFTS
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.models.folder import read_config
from megarl.models.trained_model import policy_hf_config
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.families.eagle import eagle_bytes
from megarl.resharding.families.vllm import padded_experts
from megarl.resharding.piece import Holder, whole
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.shared_memory import SharedMemory, publish
from megarl.rollout.engine import SamplingRequest
from tests.e2e.tiny_families import GATED_DELTA, GATED_DELTA_EXPERTS, GLM, GPT_OSS, LATENT, SIZES
from tests.lora_reference import write_adapters
from tests.paths import BASE
from tests.tiny_model import EOS_ID, add_mtp_layer, write_eagle_draft, write_tiny_model

TWO_LAYERS = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, full_attention_interval=2)
DEEPSEEK = LATENT | dict(q_lora_rank=24, head_dim=64, moe_intermediate_size=32)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "n-grams": ("ngram", "llama", {}),
    "n-grams for Qwen3.5": ("ngram", "qwen3_5_text", GATED_DELTA | TWO_LAYERS),
    "draft model": ("draft_model", "llama", {}),
    "GLM-4.6's MTP": ("mtp", "glm4_moe", GLM | dict(use_qk_norm=True)),
    "GLM-4.6's MTP, adapters": ("mtp", "glm4_moe", GLM | dict(use_qk_norm=True)),
    "DeepSeek-V3's MTP": ("mtp", "deepseek_v3", DEEPSEEK),
    "Qwen3-Next's MTP": ("mtp", "qwen3_next", GATED_DELTA_EXPERTS | TWO_LAYERS),
    "Qwen3.5's MTP": ("mtp", "qwen3_5_text", GATED_DELTA | TWO_LAYERS),
    "Llama's EAGLE-3": ("eagle3", "llama", {}),
    "Qwen3's EAGLE-3": ("eagle3", "qwen3", {}),
    "gpt-oss's EAGLE-3": ("eagle3", "gpt_oss", GPT_OSS),
    "Qwen3-Next's EAGLE-3": ("eagle3", "qwen3_next", GATED_DELTA_EXPERTS | TWO_LAYERS),
}
"""Method, model_type of the policy, and its config.json keys in addition to SIZES."""
RANK, ALPHAS = 4, (8, 16)
"""LoRA rank, and alpha in each of the policy's two versions."""
OWN_WEIGHTS: dict[str, dict[str, Any]] = {
    "Llama's EAGLE-3": dict(vocab=96),
    "gpt-oss's EAGLE-3": dict(vocab=96, has_embedding=True),
}
"""Options of EAGLE-3 drafts that do not share the embedding and the output layer with the policy."""
TRUNCATED = dict(top_k=8, top_p=0.9)
OUTCOMES, TOKENS = 4, 3
"""Number of tokens to choose from, and of sampled tokens, in responses whose distribution is compared."""
NUM_SAMPLES = 1000
PROMPT = (*range(6, 120), 5)
"""Contains every token that can be sampled, so that an n-gram draft exists after each of them."""
STOP = "7"
"""A stop string that occurs inside several tokens."""
FIRST_STEPS = 3
LONG = 40


def measure(case: str, folder: Path) -> dict[str, Any]:
    """Start an engine without weights, refit it, and sample. Return the comparisons with transformers. Runs in a
    separate process."""
    from megarl.rollout.vllm.environment import environment

    os.environ.update(environment(1, threads=1, index=0))
    from megarl.rollout.vllm import engine_arguments, worker_extension
    from megarl.rollout.vllm.engine import VllmEngine

    found: dict[str, Any] = {}
    method, model_type, keys = CASES[case]
    base = write_tiny_model(folder / "base", model_type, **SIZES | keys)
    if "linear_num_key_heads" in keys or method == "eagle3":
        scale_embedding(base)
    if method == "mtp":
        add_mtp_layer(base)
    if "adapters" in case:
        first, second = (adapted(base, folder / f"{alpha}", alpha) for alpha in ALPHAS)
    else:
        first, second = base, changed(base, folder / "second")
    # Use the first version of the policy as the draft model, so that many drafts are accepted, but not all.
    draft = first
    if method == "eagle3":
        draft = write_eagle_draft(folder / "draft", first, **OWN_WEIGHTS.get(case, dict(is_speculators=True)))
    path = str(draft) if method in ("draft_model", "eagle3") else None
    drafts = {"method": method, "tokens": 3, "path": path}
    overrides = [f"model.path={first}", "model.dtype=float32", "data.source=arithmetic", "rollout.context_length=200"]
    overrides += [f"rollout.max_new_tokens={LONG}", "rollout.kv_cache_gib=0.05"]
    overrides += [f"rollout.speculative={json.dumps(drafts)}"]
    overrides += ["actor.mtp.loss_coefficient=0.0"] if method == "mtp" else []
    overrides += [f"actor.lora.rank={RANK}"] if "adapters" in case else []
    config = load(BASE, overrides)
    engine_arguments.NGRAM_LENGTHS = (1, 3)
    engine = VllmEngine(config.rollout, engine_arguments.rollout_arguments(config.rollout, first, "float32", 0))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (first, second)]

    hf_config = policy_hf_config(config, read_config(first))
    source = huggingface_holder(hf_config, "float32")
    weights = read_tensors(source, first)
    [parameters] = engine.parameters()
    holders = [
        vllm_holder(hf_config, 1, 0, 0, "float32", padded_experts=padded_experts(parameters), drafts=method == "mtp")
    ]
    found["mismatched"] = holders[0].shard.mismatched_params(parameters)
    channel = SharedMemory({source.name: publish(weights)})
    engine.connect(CompactPlan.of(make_plan([source], holders)), channel, holders, False)
    engine.refit(0)
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None)

    def sample(requests: Sequence[SamplingRequest]) -> list[Sample]:
        return asyncio.run(engine.generate(requests))

    async def started(early: Sequence[SamplingRequest]) -> asyncio.Task[list[Sample]]:
        """Start sampling, and return the task after a few steps."""
        steps, step = [], engine._step
        engine._step = lambda: steps.append(step())
        running = asyncio.create_task(engine.generate(early))
        while len(steps) < FIRST_STEPS:
            await asyncio.sleep(0)
        engine._step = step
        return running

    async def joined_by_a_token() -> list[Sample]:
        """Sample the prompt with one token while the others are sampled."""
        *others, single = requests()
        running = await started(others)
        joining = await engine.generate([single])
        return [*await running, *joining]

    greedy = sample(requests(greedy=True))
    found["greedy"] = [worst(models[0], item, {}) for item in greedy]
    found["greedy_tokens"] = [item.response_ids.tolist() == most_likely(models[0], item) for item in greedy]
    whole, cut = sample(requests()), sample(requests(**TRUNCATED))
    found["whole"] = [worst(models[0], item, {}) for item in whole]
    found["truncated"] = [worst(models[0], item, TRUNCATED) for item in cut]
    counts = sum((item.drafts for item in (*greedy, *whole)), NO_DRAFTS)
    found["drafts"] = [counts.num_passes, counts.num_drafted, counts.num_accepted]
    found["versions"] = [[(run.version, run.count) for run in item.versions] for item in whole]

    again, joined = [*sample(requests()[:1]), *sample(requests()[1:])], asyncio.run(joined_by_a_token())
    found["joined"] = [worst(models[0], item, {}) for item in joined]
    pairs = zip(whole * 2, again + joined, strict=True)
    found["reproduced"] = [a.response_ids.tolist() == b.response_ids.tolist() for a, b in pairs]

    stopping = sample(requests(stop=(STOP,)))
    ended = [item for item in stopping if item.finish_reason == "stop" and item.response_ids[-1] != EOS_ID]
    found["stopped"] = [
        (*(STOP in engine._tokenizer.decode(ids.tolist()) for ids in (ended_ids, ended_ids[:-1])), passes)
        for ended_ids, passes in ((item.response_ids, item.drafts.num_passes) for item in ended)
    ]
    found["stop_logprobs"] = [worst(models[0], item, {}) for item in stopping]

    many = [
        SamplingRequest(f"{i}", Prompt("p", "", PROMPT), seed=i, max_new_tokens=TOKENS, top_k=OUTCOMES)
        for i in range(NUM_SAMPLES)
    ]
    responses = sample(many)
    found["accepted_in_distribution"] = sum(item.drafts.num_accepted for item in responses)
    found["chi_square"] = chi_square(responses, models[0])

    with torch.no_grad():
        for name, tensor in read_tensors(source, second).items():
            weights[name].copy_(tensor)

    async def through_a_refit() -> list[Sample]:
        running = await started(requests())
        engine.refit(1)
        return await running

    mixed = asyncio.run(through_a_refit())
    found["mixed_versions"] = [[(run.version, run.count) for run in item.versions] for item in mixed]
    found["mixed"] = [continued(models, item) for item in mixed]
    later = sample(requests())
    found["later"] = [worst(models[1], item, {}) for item in later]
    if method == "ngram":
        return found
    policy = {id(weight) for weight in runner.get_model().parameters()}
    held = dict(drafter.model.named_parameters())
    if method == "eagle3":
        shared = {name: weight.data[: SIZES["vocab_size"]] for name, weight in held.items() if id(weight) in policy}
        found["shared"] = {name: (weight - weights[name]).abs().max().item() for name, weight in shared.items()}
        held_bytes = sum(weight.nbytes for weight in held.values())
        found["draft_bytes"] = [held_bytes, eagle_bytes(read_config(draft), 1, "float32")]
    own = {name: weight.data for name, weight in held.items() if id(weight) not in policy}
    kept = {name: weight.clone() for name, weight in own.items()}
    for weight in own.values():
        weight.zero_()
    loaded = second if method == "mtp" else draft
    drafter.model.load_weights(iter(load_file(loaded / "model.safetensors").items()))
    worker_extension._process_weights(drafter.model, torch.float32)
    found["draft_difference"] = max((kept[name] - weight).abs().max().item() for name, weight in own.items())
    found["num_own"] = len(own)
    return found


def read_tensors(source: Holder, folder: Path) -> dict[str, torch.Tensor]:
    with SafetensorsFolder(folder) as file:
        return {name: file.read("", name, whole(shape)).contiguous() for name, shape in source.shapes.items()}


def scale_embedding(folder: Path) -> None:
    """Make the embedding as large as the layers' outputs. The next token then depends more on the last one, so that
    drafts are right more often."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 20
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def changed(folder: Path, target: Path) -> Path:
    """Write a copy of a model with noise added to its weights."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: w + 0.3 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    return write_copy(folder, target, noisy)


def adapted(folder: Path, target: Path, alpha: int) -> Path:
    """Write a copy of a model into which PEFT has merged random adapters. The MTP layer, which transformers does not
    load, is the original one."""
    adapters = write_adapters(target.with_suffix(".adapters"), folder, RANK, alpha)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = target.with_suffix(".merged")
    PeftModel.from_pretrained(model, adapters).merge_and_unload().save_pretrained(merged)
    weights, others = (load_file(path / "model.safetensors") for path in (merged, folder))
    return write_copy(folder, target, others | weights)


def write_copy(folder: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write a copy of a model with these weights."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def requests(**settings: Any) -> list[SamplingRequest]:
    prompts = [PROMPT, (*range(20, 60), 21), (9, 8, 9, 8, 9), (30,)]
    return [SamplingRequest(f"{i}", Prompt(f"{i}", "", p), seed=i, **settings) for i, p in enumerate(prompts)]


@torch.no_grad()
def log_probs(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    for warper in ([TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []) + (
        [TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []
    ):
        logits = warper(None, logits)
    return logits.log_softmax(-1)


@torch.no_grad()
def worst(model: torch.nn.Module, sample: Sample, settings: dict[str, Any]) -> float:
    """Return the largest difference of a response's log-probs."""
    ids, start = torch.tensor(sample.token_ids[None]).long(), len(sample.prompt.token_ids)
    expected = log_probs(model(ids).logits[0, start - 1 : -1], settings).gather(1, ids[0, start:, None])[:, 0]
    return (expected - torch.tensor(sample.response_logprobs)).abs().max().item()


@torch.no_grad()
def most_likely(model: torch.nn.Module, sample: Sample) -> list[int]:
    ids = torch.tensor(sample.token_ids[None]).long()
    return model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def continued(models: Sequence[torch.nn.Module], sample: Sample) -> float:
    """Return the largest difference of the log-probs of a response that a second model continued with the keys and
    values of the first. The second is the first to process the last token that the first sampled."""
    ids, start = torch.tensor(sample.token_ids[None]).long(), len(sample.prompt.token_ids)
    if len(sample.versions) == 1:
        return worst(models[0], sample, {})
    read = start + sample.versions[0].count - 1
    before = models[0](ids[:, :read], use_cache=True)
    cache = before.past_key_values
    # Process tokens one by one, because transformers' gated delta nets ignore the cached state for several tokens.
    after = [models[1](token, past_key_values=cache, use_cache=True).logits for token in ids[:, read:-1].split(1, 1)]
    logits = torch.cat((before.logits, *after), 1)[0, start - 1 :]
    expected = logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
    return (expected - torch.tensor(sample.response_logprobs)).abs().max().item()


@torch.no_grad()
def chi_square(samples: Sequence[Sample], model: torch.nn.Module) -> tuple[float, int]:
    """Return the statistic of Pearson's test against the exact distribution of responses, and its degrees of freedom.
    Responses that are expected fewer than five times are counted together. The requests have fixed seeds, so only
    rounding changes the statistic."""
    settings = {"top_k": OUTCOMES}
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        heads = [head for head in exact if not head or head[-1] != EOS_ID]
        ended = {head: p for head, p in exact.items() if head not in heads}
        logits = model(torch.tensor([[*PROMPT, *head] for head in heads])).logits[:, -1]
        rows = log_probs(logits, settings).exp().double()
        exact = ended | {
            (*head, token): exact[head] * row[token].item()
            for head, row in zip(heads, rows, strict=True)
            for token in row.nonzero()[:, 0].tolist()
        }
    assert abs(sum(exact.values()) - 1) < 1e-5
    observed = Counter(tuple(sample.response_ids.tolist()) for sample in samples)
    assert observed.keys() <= exact.keys(), "a sampled token is not among the most likely ones"
    counts = {response: (observed[response], p * len(samples)) for response, p in exact.items()}
    rare = [pair for pair in counts.values() if pair[1] < 5]
    cells = [pair for pair in counts.values() if pair[1] >= 5]
    if rare:
        cells.append((sum(o for o, _ in rare), sum(e for _, e in rare)))
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
