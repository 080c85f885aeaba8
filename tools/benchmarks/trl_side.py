"""TRL's side of quickstart.py and training_step.py, started in an environment with TRL.

`FOLDER STEPS` trains the quickstart; if the folder contains a training_case.Case, its updates run instead. Both write
their results to the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmark import QUICKSTART
from datasets import Dataset
from training_case import Case, padded, peak_rss_bytes, write_result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from megarl.cluster.supervision.memory import MemorySampler
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.timing import Stopwatch
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import load_prompts
from megarl.models.folder import resolve
from megarl.models.tokenizer import load_tokenizer
from megarl.rewards.numeric import numeric_match

PACKAGES = ("trl", "transformers", "accelerate", "torch")
MICROBATCH = 16
"""Number of samples per microbatch for the quickstart."""

IGNORED = -100
"""Label of tokens that the loss ignores."""

COMMON = dict(
    lr_scheduler_type="constant",
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
"""Arguments of every trainer's config."""


class Recorder(TrainerCallback):
    """Writes the metrics of each step of GRPOTrainer under megarl's names."""

    def __init__(self, path: Path) -> None:
        self.watch, self._memory = Stopwatch(), MemorySampler()
        self._path, self._num_tokens = path, 0

    def reward(self, prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        """Return the recipe's reward of each completion."""
        return [float(numeric_match(*triple)) for triple in zip(prompts, completions, answer, strict=True)]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watch = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        times = self.watch.metrics()
        times["time/train"] = times["time/step"] - times["time/rollout"] - times["time/reward"]
        num_tokens, self._num_tokens = state.num_input_tokens_seen - self._num_tokens, state.num_input_tokens_seen
        speed = {"throughput/tokens_per_second": num_tokens / times["time/step"]}
        line = {"step": state.global_step, **times, **speed}
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(line | {"memory/peak_pss_gb": self._memory.peak_gb()[1]}), file=file)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer whose generation and rewards are phases of the recorder's stopwatch."""

    def __init__(self, recorder: Recorder, **arguments: Any) -> None:
        self._recorder = recorder
        super().__init__(**arguments, reward_funcs=recorder.reward, callbacks=[recorder])

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        with self._recorder.watch.phase("rollout"):
            return super()._generate(*arguments, **named)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        with self._recorder.watch.phase("reward"):
            return super()._calculate_rewards(*arguments, **named)


def train_recipe(folder: Path, steps: int) -> None:
    """Train the quickstart with GRPOTrainer. Writes metrics.jsonl and facts.json."""
    config = load(QUICKSTART)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model_folder = resolve(config.model.path)
    tokenizer = load_tokenizer(model_folder)
    optimizer, objective, batch = config.actor.optimizer, config.algorithm.objective.options(), config.batch
    settings = GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=config.run.seed,
        max_steps=steps,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=batch.prompts_per_step * batch.samples_per_prompt // MICROBATCH,
        num_generations=batch.samples_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad_norm,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=objective["clip_low"],
        epsilon_high=objective["clip_high"],
        beta=config.algorithm.kl.coefficient,
        shuffle_dataset=False,
        num_iterations=1,
        **COMMON,
    )
    trainer = TimedTrainer(
        Recorder(folder / "metrics.jsonl"),
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        args=settings,
        train_dataset=_dataset(config, model_folder, tokenizer, steps),
        processing_class=tokenizer,
    )
    trainer.train()
    settings = {"microbatch": MICROBATCH, "threads": torch.get_num_threads()}
    write_result(folder / "facts.json", {"settings": settings}, *PACKAGES)


def _dataset(config: Config, model_folder: Path, tokenizer: Any, steps: int) -> Dataset:
    """Return megarl's prompts in its order, as text in the chat template; TRL tokenizes them itself."""
    prompts = load_prompts(config, model_folder)
    cursor = PromptCursor(len(prompts), config.run.seed, config.data.shuffle)
    chosen = [prompts[i] for i in cursor.take(steps * config.batch.prompts_per_step)]
    assert all(tokenizer(prompt.text)["input_ids"] == list(prompt.token_ids) for prompt in chosen)
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in chosen])


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class GivenSamples(GRPOTrainer):
    """GRPOTrainer on given samples, padded to the longest of the batch as it pads generated ones."""

    def __init__(self, samples: dict[str, torch.Tensor], **arguments: Any) -> None:
        self._samples = samples
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self._samples)


def update_given_samples(folder: Path) -> None:
    """Run the updates of a training_case.Case with the microbatches, loss, clipping and optimizer of GRPOTrainer or, if
    the case has a teacher, of GKDTrainer."""
    case = Case.read(folder)
    torch.set_num_threads(case.threads)
    baseline = psutil.Process().memory_info().rss
    clock = Clock()
    common = dict(
        output_dir=str(folder / "trainer"),
        max_steps=1 + case.updates,
        per_device_train_batch_size=case.microbatch,
        gradient_accumulation_steps=len(case.lengths) // case.microbatch,
        learning_rate=1e-6,
        weight_decay=0.0,
        max_grad_norm=1.0,
        **COMMON,
    )
    trainer = (distilling if case.has_teacher else training)(case, common)
    trainer.add_callback(clock)
    trainer.train()
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    copies = 5 if case.has_teacher else 4  # weights, gradients, Adam's two moments, and the teacher's weights
    result = {
        "seconds": clock.seconds[1:],
        "measured_bytes": peak_rss_bytes() - baseline,
        "state_bytes": 4 * copies * num_parameters,
        "settings": {
            "samples_per_microbatch": case.microbatch,
            "attention": trainer.model.config._attn_implementation,
            "optimizer": trainer.args.optim,
            "threads": case.threads,
        },
    }
    write_result(folder / "trl-0.json", result, *PACKAGES)


def training(case: Case, common: dict[str, Any]) -> GivenSamples:
    """Return a GRPOTrainer on the case's samples."""
    num_samples = len(case.lengths)
    samples = padded(case.ids()) | {
        "advantages": torch.tensor([(-1.0) ** i for i in range(num_samples)]),
        "num_items_in_batch": torch.tensor(sum(response for _, response in case.lengths)),
    }
    settings = GRPOConfig(
        num_generations=2,  # the smallest group that GRPOTrainer accepts
        max_completion_length=case.longest,
        loss_type="dapo",
        beta=0.0,
        num_iterations=1,
        **common,
    )
    return GivenSamples(
        samples,
        model=model_of(case),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * num_samples),
        processing_class=load_tokenizer(resolve(load(QUICKSTART).model.path)),
    )


def distilling(case: Case, common: dict[str, Any]) -> GKDTrainer:
    """Return a GKDTrainer on the case's samples, with a teacher as large as the model."""
    ids = case.ids()

    def collate(rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        parts = padded([ids[row["index"]] for row in rows])
        labels = parts["completion_ids"].masked_fill(parts["completion_mask"] == 0, IGNORED)
        return {
            "input_ids": torch.cat((parts["prompt_ids"], parts["completion_ids"]), 1),
            "attention_mask": torch.cat((parts["prompt_mask"], parts["completion_mask"]), 1),
            "labels": torch.cat((torch.full_like(parts["prompt_ids"], IGNORED), labels), 1),
        }

    return GKDTrainer(
        model=model_of(case),
        teacher_model=model_of(case),
        args=GKDConfig(lmbda=0.0, beta=0.5, temperature=1.0, **common),
        data_collator=collate,
        train_dataset=Dataset.from_list([{"index": i} for i in range(len(ids))]),
        processing_class=load_tokenizer(resolve(load(QUICKSTART).model.path)),
    )


def model_of(case: Case) -> PreTrainedModel:
    config = AutoConfig.for_model(**case.hf_config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if (folder / "case.json").exists():
        update_given_samples(folder)
    else:
        train_recipe(folder, int(sys.argv[2]))
