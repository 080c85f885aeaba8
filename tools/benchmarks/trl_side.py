"""The same updates in TRL, which training_step.py starts in an environment that has TRL.

A GRPOTrainer as `trl_step.py` has one, whose samples are given instead of generated: padded to the longest of the whole
batch, as it pads those that it generates. All else is its own: microbatches, loss, clipping, optimizer.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from training_case import Case
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megarl.config.load import load
from megarl.models.folder import resolve
from megarl.models.tokenizer import load_tokenizer

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
SAMPLES_PER_PROMPT = 2
"""The fewest that it takes. Prompts are different all the same."""


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class GivenSamples(GRPOTrainer):
    def __init__(self, samples: dict[str, torch.Tensor], **arguments: Any) -> None:
        self._samples = samples
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self._samples)


def main() -> None:
    folder = Path(sys.argv[1])
    case = Case.read(folder)
    torch.set_num_threads(case.threads)
    baseline = psutil.Process().memory_info().rss
    clock = Clock()
    trainer = trainer_of(case, folder, clock)
    trainer.train()
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    result = {
        "seconds": clock.seconds[1:],
        "measured_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline,
        "state_bytes": 4 * 4 * num_parameters,  # weights, gradients and Adam's two moments, in float32
        "settings": {
            "samples_per_microbatch": case.microbatch,
            "attention": trainer.model.config._attn_implementation,
            "optimizer": trainer.args.optim,
            "loss_type": trainer.args.loss_type,
            "threads": case.threads,
        },
        "versions": {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }
    (folder / "trl-0.json").write_text(json.dumps(result), encoding="utf-8")


def trainer_of(case: Case, folder: Path, clock: Clock) -> GRPOTrainer:
    config = AutoConfig.from_pretrained(folder)
    num_samples = len(case.lengths)
    arguments = GRPOConfig(
        output_dir=str(folder / "trainer"),
        max_steps=1 + case.updates,
        per_device_train_batch_size=case.microbatch,
        gradient_accumulation_steps=num_samples // case.microbatch,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=case.longest,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GivenSamples(
        padded(case),
        model=AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * num_samples),
        processing_class=load_tokenizer(resolve(load(QUICKSTART).model.path)),
        callbacks=[clock],
    )


def padded(case: Case) -> dict[str, torch.Tensor]:
    """Prompts [samples, longest prompt] padded on the left, responses [samples, longest response] on the right."""
    samples = case.ids()
    widths = [max(len(sample[part]) for sample in samples) for part in (0, 1)]
    prompts = [torch.tensor([0] * (widths[0] - len(prompt)) + prompt) for prompt, _ in samples]
    responses = [torch.tensor(response + [0] * (widths[1] - len(response))) for _, response in samples]
    prompt_mask = [torch.arange(widths[0]) >= widths[0] - len(prompt) for prompt, _ in samples]
    response_mask = [torch.arange(widths[1]) < len(response) for _, response in samples]
    return {
        "prompt_ids": torch.stack(prompts),
        "prompt_mask": torch.stack(prompt_mask).long(),
        "completion_ids": torch.stack(responses),
        "completion_mask": torch.stack(response_mask).long(),
        "advantages": torch.tensor([(-1.0) ** i for i in range(len(samples))]),
        "num_items_in_batch": torch.tensor(sum(len(response) for _, response in samples)),
    }


if __name__ == "__main__":
    main()
