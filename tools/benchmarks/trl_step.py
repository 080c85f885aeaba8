"""TRL's side of step_vs_trl.py, which starts it in an environment that has TRL.

Trains the recipe with GRPOTrainer and writes into FOLDER: `metrics.jsonl`, a line for each step with the keys of
megarl's own, and `facts.json`, what the figures were measured with.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

from megarl.cluster.supervision.memory import MemorySampler
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.timing import Stopwatch
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import load_prompts
from megarl.models.folder import resolve
from megarl.models.tokenizer import load_tokenizer
from megarl.rewards.numeric import numeric_match


class Recorder(TrainerCallback):
    """Times every step, from before its generation to after its optimizer step, and writes it down."""

    def __init__(self, path: Path) -> None:
        self.watch = Stopwatch()
        self._path = path
        self._memory = MemorySampler()
        self._num_tokens = 0
        self._step: dict[str, float] = {}

    def reward(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        answer: Sequence[str],
        **_: Any,
    ) -> list[float]:
        """The recipe's reward of each completion; TRL calls it once a step."""
        rewards = [float(numeric_match(*triple)) for triple in zip(prompts, completions, answer, strict=True)]
        self._step["reward/mean"] = fmean(rewards)
        self._step["response/length_mean"] = fmean(map(len, completion_ids))
        return rewards

    def on_step_begin(self, args: GRPOConfig, state: TrainerState, control: Any, **_: Any) -> None:
        self.watch = Stopwatch()

    def on_step_end(self, args: GRPOConfig, state: TrainerState, control: Any, **_: Any) -> None:
        times = self.watch.metrics()
        times["time/train"] = times["time/step"] - times["time/rollout"] - times["time/reward"]
        num_tokens, self._num_tokens = state.num_input_tokens_seen - self._num_tokens, state.num_input_tokens_seen
        line = {
            "step": state.global_step,
            **self._step,
            **times,
            "throughput/tokens_per_second": num_tokens / times["time/step"],
            "memory/peak_pss_gb": self._memory.peak_gb()[1],
        }
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)


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


def main() -> None:
    arguments = _parse()
    config = load(arguments.recipe)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model_folder = resolve(config.model.path)
    tokenizer = load_tokenizer(model_folder)
    trainer = TimedTrainer(
        Recorder(arguments.folder / "metrics.jsonl"),
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        args=_grpo_config(config, arguments),
        train_dataset=_dataset(config, model_folder, tokenizer, arguments.steps),
        processing_class=tokenizer,
    )
    trainer.train()
    facts = json.dumps(_facts(trainer), indent=2)
    (arguments.folder / "facts.json").write_text(facts + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True, help="TRL's per_device_train_batch_size")
    return parser.parse_args()


def _grpo_config(config: Config, arguments: argparse.Namespace) -> GRPOConfig:
    """The recipe in TRL's words. One generation and one optimizer step a step, so no pass for old log-probs."""
    optimizer, objective, batch = config.actor.optimizer, config.algorithm.objective.options(), config.batch
    return GRPOConfig(
        output_dir=str(arguments.folder / "trainer"),
        seed=config.run.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.microbatch,
        gradient_accumulation_steps=batch.prompts_per_step * batch.samples_per_prompt // arguments.microbatch,
        num_generations=batch.samples_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
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
        num_iterations=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _dataset(config: Config, model_folder: Path, tokenizer: PreTrainedTokenizerBase, steps: int) -> Dataset:
    """The prompts that megarl takes, in its order, as text in the chat template: TRL tokenises them itself."""
    prompts = load_prompts(config, model_folder)
    cursor = PromptCursor(len(prompts), config.run.seed, config.data.shuffle)
    chosen = [prompts[i] for i in cursor.take(steps * config.batch.prompts_per_step)]
    for prompt in chosen:
        assert tokenizer(prompt.text)["input_ids"] == list(prompt.token_ids), (
            f"TRL would read {prompt.text!r} otherwise"
        )
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in chosen])


def _facts(trainer: GRPOTrainer) -> dict[str, Any]:
    return {
        "settings": {
            "microbatch": trainer.args.per_device_train_batch_size,
            "optimizer": trainer.args.optim,
            "attention": trainer.model.config._attn_implementation,
            "dtype": str(trainer.model.dtype),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: version(name) for name in ("trl", "transformers", "accelerate", "datasets", "torch")},
    }


if __name__ == "__main__":
    main()
