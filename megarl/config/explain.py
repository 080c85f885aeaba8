"""The batch arithmetic that `megarl config explain` prints."""

from __future__ import annotations

from megarl.config.learning_rate import learning_rate
from megarl.config.model_schema import Layout
from megarl.config.schema import Config


def explain(config: Config) -> str:
    """Return the batch arithmetic as text: the samples and updates per step, the samples per rank, the learning rates,
    the token counts and the processes."""
    batch, rollout, layout = config.batch, config.rollout, config.actor.layout
    unit, trained = "rows" if config.is_offline else "prompts", config.trained_per_prompt
    per_prompt = trained if config.is_offline else batch.samples_per_prompt
    samples = batch.prompts_per_step * per_prompt
    updates = batch.prompts_per_step // batch.prompts_per_update
    again = "" if batch.epochs == 1 else f", in each of {batch.epochs} epochs"
    per_update = batch.prompts_per_update * trained
    rows = {
        "run": f"{config.run.steps:,} steps",
        "step": f"{batch.prompts_per_step:,} {unit} x {per_prompt:,} samples = {samples:,} samples",
        "updates": f"{batch.prompts_per_step:,} / {batch.prompts_per_update:,} {unit} = {updates:,} per step{again}",
        "update": (
            f"{batch.prompts_per_update:,} {unit} x {trained:,} samples = {per_update:,} samples, "
            f"{per_update:,} / dp {layout.dp} = {_share(per_update, layout.dp)} per data-parallel rank"
        ),
        "rate": _rates(config),
        "microbatch": f"samples packed up to {config.actor.tokens_per_microbatch:,} tokens per rank, never split",
        "tokens": _tokens(config, samples),
        "trainer": _ranks(layout),
    }
    if config.placed_teachers:
        by_layout: dict[str, list[str]] = {}
        for teacher, _ in config.placed_teachers:
            by_layout.setdefault(_ranks(config.teachers.layout_of(teacher)), []).append(teacher.name)
        rows["teachers"] = "; ".join(f"{ranks} each: {', '.join(names)}" for ranks, names in by_layout.items())
    if not config.is_offline:
        rows["rollout"] = f"replicas {rollout.replicas} x tp {rollout.tp} = world size {rollout.replicas * rollout.tp}"
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _ranks(layout: Layout) -> str:
    return f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} = world size {layout.world_size}"


def _tokens(config: Config, samples: int) -> str:
    rollout = config.rollout
    if config.samples_images:
        steps, trained = rollout.denoising.num_steps, rollout.denoising.num_trained
        return f"{samples:,} images x {trained} = {samples * trained:,} trained denoising steps, of {steps} per image"
    most = f"at most {samples:,} samples x {rollout.context_length:,} = {samples * rollout.context_length:,} per step"
    if config.is_offline:
        return most
    sampled = f"{samples:,} x {rollout.max_new_tokens:,} = {samples * rollout.max_new_tokens:,} sampled"
    return f"{most}, including {sampled}"


def _rates(config: Config) -> str:
    optimizer, total = config.actor.optimizer, config.num_updates(config.actor)
    rates = [learning_rate(optimizer, done, total) for done in range(total)] or [0.0]
    return (
        f"{optimizer.schedule.name}, {rates[0]:.3g} at the first of {total:,} updates, at most {max(rates):.3g}, "
        f"{rates[-1]:.3g} at the last"
    )


def _share(samples: int, ranks: int) -> str:
    least, more = divmod(samples, ranks)
    return f"{least:,} to {least + 1:,}" if more else f"{least:,}"
