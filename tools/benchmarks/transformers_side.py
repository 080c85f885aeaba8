"""The same updates in plain transformers and torch, started by training_step.py.

Like TRL's trainer, it pads prompts on the left and responses on the right to the longest of each microbatch, and
computes logits for the response only (`logits_to_keep`). It uses torch's fused AdamW and SDPA attention.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from training_case import Case, padded, peak_rss_bytes, timed, write_result
from transformers import AutoConfig, AutoModelForCausalLM

Ids = tuple[list[int], list[int]]


def main() -> None:
    folder = Path(sys.argv[1])
    case = Case.read(folder)
    torch.set_num_threads(case.threads)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    samples = case.ids()
    microbatches = [samples[i : i + case.microbatch] for i in range(0, len(samples), case.microbatch)]
    num_rows = sum(len(response) for _, response in samples)
    update(model, optimizer, microbatches[:1], num_rows)  # fills caches and memory pools
    result = {
        "seconds": timed(lambda: update(model, optimizer, microbatches, num_rows), case.updates),
        "peak_rss_bytes": peak_rss_bytes(),
        "settings": {"samples_per_microbatch": case.microbatch, "attention": "sdpa", "threads": case.threads},
    }
    write_result(folder / "transformers-0.json", result, "torch", "transformers")


def update(model, optimizer: torch.optim.Optimizer, microbatches: Sequence[Sequence[Ids]], num_rows: int) -> None:
    for number, members in enumerate(microbatches):
        loss(model, members, sign=(-1.0) ** number, num_rows=num_rows).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def loss(model, members: Sequence[Ids], sign: float, num_rows: int) -> torch.Tensor:
    """Return the clipped objective at the first update, where the old policy equals the current one."""
    sides = padded(members)
    tokens = torch.cat([sides["prompt_ids"], sides["completion_ids"]], 1)
    mask = torch.cat([sides["prompt_mask"], sides["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    width = sides["completion_ids"].shape[1]
    logits = model(tokens, attention_mask=mask, position_ids=positions, logits_to_keep=width + 1).logits[:, :-1]
    log_prob = torch.log_softmax(logits.float(), -1).gather(2, sides["completion_ids"][..., None])[..., 0]
    ratio = (log_prob - log_prob.detach()).exp()
    surrogate = torch.minimum(ratio * sign, ratio.clamp(0.8, 1.2) * sign)
    return -(surrogate * sides["completion_mask"]).sum() / num_rows


if __name__ == "__main__":
    main()
