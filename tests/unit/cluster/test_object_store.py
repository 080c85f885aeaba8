"""The object store's estimated size against the size of pickled samples."""

import json
import pickle
from itertools import islice, permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.cluster.object_store import (
    FLOOR_MIB,
    added_image_bytes,
    image_bytes,
    num_samples,
    object_store_mib,
    sample_bytes,
    states_bytes,
)
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import CandidateIds, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.offline import load_offline_data
from megarl.data.prompts import PromptSet, load_prompts
from megarl.models.huggingface import Experts
from tests import tiny_vision
from tests.paths import BASE
from tests.unit.data.image_data import config_of as data_config
from tests.unit.data.image_data import jsonl, png

SOURCE = np.random.default_rng(0)
LONG = ("rollout.context_length=4096", "rollout.max_new_tokens=3072")


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])


def longest_sample(settings: Config, routed: Experts | None = None) -> Sample:
    """Return a sample of the maximum length. Its text has 4.5 letters per token, or 1.5 characters per token in
    Chinese."""
    n, context, top_k = settings.rollout.max_new_tokens, settings.rollout.context_length, settings.rollout.top_k
    candidates = None
    if top_k is not None:
        candidates = CandidateIds.of([SOURCE.integers(150_000, size=top_k) for _ in range(n)])
    return Sample(
        id="12.345.6",
        prompt=Prompt("data.jsonl:12345", "词" * int(1.5 * (context - n)), SOURCE.integers(150_000, size=context - n)),
        response_ids=SOURCE.integers(150_000, size=n),
        response_logprobs=-SOURCE.random(n),
        response_mask=SOURCE.random(n) < 0.5,
        versions=(VersionRun(1, n),),
        finish_reason="length",
        text="x" * int(4.5 * n),
        candidate_ids=candidates,
        routes=None if routed is None else SOURCE.integers(128, size=(context, 5, 8)).astype(np.int8),
    )


@pytest.mark.parametrize("top_k", ["null", "20"])
def test_closed_form_is_a_tight_bound_on_a_sample(top_k):
    wanted = config(*LONG, f"rollout.top_k={top_k}")
    pickled = len(pickle.dumps(longest_sample(wanted), 5))
    assert 0.75 * sample_bytes(wanted, None) <= pickled <= sample_bytes(wanted, None)


@pytest.mark.parametrize(("name", "num_latents"), [("clip", 10), ("diffusion_nft", 1)])
def test_size_bounds_the_latents_of_an_image(name, num_latents):
    """With new noise, only the final latents are stored. They have 16 channels for 8 × 8 pixels."""
    wanted = config("rollout.engine=diffusers", "rollout.denoising.num_steps=10", f"algorithm.objective.name={name}")
    arrays = [np.zeros((num_latents, 16, 64, 64), np.float32), np.zeros((512, 512, 3), np.uint8)]
    arrays += [np.zeros((77 + 256, 4096), np.float32)] * 2  # Stable Diffusion 3's embeddings of two captions
    pickled = sum(len(pickle.dumps(array, 5)) for array in arrays)
    spare = 512 * 512 * 3 * num_latents  # the bound assumes latents of four bytes per pixel instead of one
    assert pickled <= sample_bytes(wanted, None) <= pickled + spare + 2**14


def test_size_includes_routes():
    """The first of six layers is dense."""
    wanted = config(*LONG, "actor.experts.replay_routes=true")
    routed = Experts(128, active=8, intermediate=768, shared_intermediate=0, layers=(False, *(True,) * 5))
    pickled = len(pickle.dumps(longest_sample(wanted, routed), 5))
    assert 0.75 * sample_bytes(wanted, routed) <= pickled <= sample_bytes(wanted, routed)
    assert sample_bytes(config(*LONG), routed) == sample_bytes(config(*LONG), None)


def test_size_includes_token_scores():
    plain = sample_bytes(config(*LONG), None)
    with_values = sample_bytes(config(*LONG, "algorithm.advantage.estimator=gae"), None)
    scores = len(pickle.dumps(torch.zeros(3072), 5))
    assert scores <= with_values - plain <= 1.25 * scores


def test_size_includes_the_log_probs_of_each_teacher():
    one, two = (
        config(*LONG, f"teachers.models=[{names}]")
        for names in ("{name: a, path: x}", "{name: a, path: x}, {name: b, path: y}")
    )
    sizes = [sample_bytes(settings, None) for settings in (config(*LONG), one, two)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] >= 4 * one.rollout.max_new_tokens
    assert (
        sample_bytes(
            config(*LONG, "teachers.models=[{name: a, path: x}]", "algorithm.distillation.coefficient=0"), None
        )
        == sizes[0]
    )


def test_size_includes_hidden_states_for_exact_divergences():
    """Only samples that the step trains on have hidden states: [3072, 100 + 28] each, in bfloat16."""
    step = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=16")
    keys = (*LONG, *step, "teachers.models=[{name: a, path: x}, {name: b, path: y}]")
    sampled = config(*keys, "algorithm.distillation.placement=loss")
    exact = config(*keys, "algorithm.distillation={divergence: jsd, placement: loss}")
    assert object_store_mib(sampled, None, [100, 28]) == object_store_mib(exact, None)
    added = object_store_mib(exact, None, [100, 28]) - object_store_mib(exact, None)
    assert added == pytest.approx(64 * 16 * 3072 * 128 * 2 / 2**20, abs=1)
    assert sample_bytes(exact, None) == sample_bytes(sampled, None)


def test_size_includes_the_most_probable_tokens():
    """Each teacher adds 10 ids, 10 log-probs and the log-prob of the rest, for [3072] tokens of each sample."""
    step = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=16")
    keys = (*LONG, *step, "teachers.models=[{name: a, path: x}, {name: b, path: y}]")
    keys += ("algorithm.distillation={divergence: reverse_kl, top_k: 10, placement: loss}",)
    assert states_bytes(config(*keys), [100, 28]) == 64 * 16 * 3072 * 2 * 21 * 4


def test_size_grows_with_the_batch():
    step = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=16")
    step += ("cluster.replace_ranks=false",)
    assert num_samples(config(*step)) == 64 * 16
    assert num_samples(config(*step, "batch.sampling_rounds=3")) == 3 * 64 * 16
    assert num_samples(config(*step, "algorithm.advantage.estimator=remax")) == 64 * 17
    small, large = (object_store_mib(config(*step, f"batch.samples_per_prompt={n}"), None) for n in (16, 32))
    assert large - FLOOR_MIB == pytest.approx(2 * (small - FLOOR_MIB), abs=1)


def test_size_covers_evaluations_larger_than_a_step():
    """The samples of all sets exist at the same time if their scoring is slow. The previous step's 16 samples may be
    trained again until its copy is complete."""
    some = "{name: a, size: 100, samples_per_prompt: 4, temperature: 1.0}, {name: b, size: 30}, {name: c}"
    step = ("batch={prompts_per_step: 8, samples_per_prompt: 2, prompts_per_update: 8}", "cluster.replace_ranks=true")
    large = config(*step, f"evaluation.sets=[{some}]")
    assert num_samples(large) == 16 + 400 + 30
    assert num_samples(config(*step, "evaluation.sets=[{name: b, size: 15}]")) == 16 + 16
    assert num_samples(config(*step, "evaluation.sets=[{name: b, size: 15}, {name: c, size: 2}]")) == 16 + 17
    of_samples = object_store_mib(large, None) - FLOOR_MIB
    assert of_samples == pytest.approx(446 * sample_bytes(large, None) / 2**20, abs=1)


def test_rows_of_offline_data_count_as_samples(tmp_path: Path):
    pairs = ["algorithm.objective.name=dpo", "data={source: rows.jsonl, format: preferences}"]
    step = (*pairs, "batch.prompts_per_step=8", "batch.prompts_per_update=8")
    assert num_samples(config(*step, "cluster.replace_ranks=false")) == 16
    assert num_samples(config(*step)) == 2 * 16, "the previous step's rows stay until its copy is complete"
    assert num_samples(config(*step, "cluster.copy_every_steps=3")) == 4 * 16


def test_samples_stay_until_the_next_copy():
    step = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=16")
    assert num_samples(config(*step, "cluster.copy_every_steps=3")) == 4 * 64 * 16
    sleeping = (*step, "rollout.sleep=true", "cluster.copy_every_steps=3")
    assert num_samples(config(*sleeping)) == 3 * 64 * 16, "the step waits for its copies"


IMAGES = ("model.vision=true", "cluster.replace_ranks=false", "rollout.context_length=512", "rollout.max_new_tokens=16")


def test_size_includes_the_images_of_the_data(tmp_path: Path):
    """Three of five prompts have images. The drawn prompts are compared with windows of some shuffled epochs. Several
    evaluation sets can be sampled at the same time."""
    folder = tiny_vision.build(tmp_path / "model", "qwen2_5_vl")
    files = [png(40, 40), png(60, 60, seed=1), png(90, 50, seed=2)]
    for number, file in enumerate(files):
        (tmp_path / f"{number}.png").write_bytes(file)
    rows = [{"prompt": "<image>" * len(names), "images": names} for names in (["0.png", "1.png"], ["2.png"], ["0.png"])]
    source = jsonl(tmp_path, *rows, *({"prompt": "a", "images": None} for _ in range(2)))
    data = load_prompts(data_config(source), folder)

    def added(count: int, *evaluation: PromptSet, draws: str = "data.shuffle=true") -> int:
        settings = config(*IMAGES, draws, f"batch={{prompts_per_step: {count}, prompts_per_update: {count}}}")
        return image_bytes(settings, data, evaluation)

    by_row = sorted([len(files[0]) + len(files[1]), len(files[2]), len(files[0])], reverse=True)
    by_index = [len(files[0]) + len(files[1]), len(files[2]), len(files[0]), 0, 0]
    assert added(1) == by_row[0] and added(4) == 2 * (by_row[0] + by_row[1])
    assert added(5) == 2 * (by_row[0] + by_row[1]) + by_row[2] and added(7) == 3 * sum(by_row[:2]) + by_row[2]
    epochs = list(islice(permutations(by_index), 0, None, 7))
    for count in range(1, 12):
        windows = (
            sum([*first, *second, *third][start : start + count])
            for first, second, third in product(epochs[:6], epochs[6:12], epochs[12:])
            for start in range(5)
        )
        assert max(windows) <= added(count)
    assert added(3, draws="data.solved_weight=0.1") == 3 * by_row[0], "each prompt may be drawn on its own"
    assert added(1, data, data) == by_row[0] + 2 * sum(by_row)


def test_size_includes_the_images_of_offline_rows(tmp_path: Path):
    """The samples of a pair share the image of their prompt. Two steps are kept, and none is sampled ahead."""
    folder, file = tiny_vision.build(tmp_path / "model", "qwen3_vl"), png(40, 40)
    (tmp_path / "a.png").write_bytes(file)
    rows = [{"prompt": "<image>", "chosen": "a", "rejected": "b", "images": "a.png"}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ("algorithm.objective.name=dpo", f"data={{source: {tmp_path}/rows.jsonl, format: preferences}}")
    keys += ("data.image_column=images", "rollout.context_length=512", "model.vision=true")
    settings = config(*keys, "batch={prompts_per_step: 2, prompts_per_update: 2}", "cluster.replace_ranks=true")
    assert image_bytes(settings, load_offline_data(settings, folder)) == 2 * 2 * len(file)
    assert image_bytes(settings) == 2 * 2 * 2**20


def test_images_of_unread_data_have_an_assumed_size():
    settings = config(*IMAGES, "batch={prompts_per_step: 6, prompts_per_update: 6}", "rollout.max_staleness=0")
    assert image_bytes(settings) == 6 * 2**20
    assert image_bytes(settings.model_copy(update={"model": settings.model.model_copy(update={"vision": False})})) == 0


def test_size_includes_the_images_that_environments_add():
    """1 MiB each for 4 + 10 + 5 rows, and for the 10 · 3 + 5 samples of an evaluation, which exceed a step's 8."""
    step = "batch={prompts_per_step: 4, prompts_per_update: 4, samples_per_prompt: 2}"
    played = "{name: a, size: 10, samples_per_prompt: 3, temperature: 1.0, environment: {class: 'e.py:E'}}"
    settings = config(*IMAGES, step, f"evaluation.sets=[{played}, {{name: b, size: 5}}]")
    assert image_bytes(settings) == (19 + 35) * 2**20
    assert added_image_bytes(settings) == 35 * 2**20
    assert added_image_bytes(config(*IMAGES, step, "evaluation.sets=[{name: b, size: 5}]")) == 0


def test_configured_size_is_used_unchanged():
    assert object_store_mib(config("cluster.object_store_mib=80"), None) == 80
