"""Engine and trainer agree with transformers on conversations with images in several turns."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage, expand
from megarl.core.sample import Sample
from megarl.data.images import ImageProcessor
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.images import ImageReader, ImageStore
from megarl.environments.runner import RolloutRequest, RolloutRunner
from megarl.rollout.engine import SamplingRequest
from tests.distributed.test_vision import config_with_vision, log_probs
from tests.e2e.engine_processes import engine_context
from tests.e2e.test_refit import config_of, remotes  # noqa: F401
from tests.e2e.test_vision_engine import TOLERANCE, VisionSide, Weights
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.tiny_vision import IMAGE_ID, build, tokenizer
from tests.unit.environments.screens import encoded, picture

pytestmark = pytest.mark.slow

ENVIRONMENT = """
from megarl.environments import Environment, Step
from tests.unit.environments.screens import part, picture, text, user

class Walk(Environment):
    def reset(self, task):
        self.row = int(task.id)
        opening = [user(text("at "), part(picture(50, 100, self.row % 2)))]
        return [None, [*task.messages, *opening], opening][self.row % 3]

    def step(self, turn):
        if turn.number == 0:
            return Step([user(part(picture(90, 40, 3)), text("or"), part(picture(64, 64, 4 + self.row % 2)))])
        if turn.number == 1:
            return Step("<|image_pad|>x", as_is=True)
        if turn.number == 2:
            return Step([user(text("last "), part(picture(64, 64, 4)))])
        return Step(reward=float(self.row), done=True)
"""
"""The raw observation contains the placeholder as an ordinary token, as a turn may."""

TURNS = 4


class RolloutSide(VisionSide):
    def play(self, config, prompts):
        """Return the samples of one rollout per prompt."""
        return asyncio.run(self._play(config, prompts))

    async def _play(self, config, prompts):
        pool = await HostPool.start(host_arguments(config), 1)
        try:
            reader = ImageReader.of(config, Path(config.model.path), ImageStore())
            runner = RolloutRunner(config, tokenizer(), pool, reader)
            rollouts = await asyncio.gather(*(self._run(runner, prompt, i) for i, prompt in enumerate(prompts)))
            return [sample for samples in rollouts for sample in samples]
        finally:
            await pool.close()

    async def _run(self, runner, prompt, seed):
        request = SamplingRequest(f"1.0.{prompt.id}", prompt, seed=seed)

        async def sample(*arguments, images=()):
            return await self.engine.begin(request.turn(*arguments, images=images))

        return await runner.run(RolloutRequest(request.sample_id, prompt, seed, 1), sample)


def row(name: str, folder: Path) -> Prompt:
    """Return a row's prompt with an image."""
    content = [{"type": "text", "text": f"Row {name} "}, {"type": "image"}]
    messages = ({"role": "user", "content": content},)
    ids = tokenizer().apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    file, processor = encoded(picture(64, 64, 9)), ImageProcessor.of(folder)
    grid = processor.grid(64, 64)
    image = PromptImage(0, processor.num_tokens(grid), grid, hashlib.sha256(file).hexdigest(), file)
    token_ids, images = expand(ids, IMAGE_ID, [image])
    return Prompt(name, "", token_ids, messages=messages, images=images)


@pytest.mark.parametrize("kind", exhaustive_but(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), "qwen3_vl"))
def test_conversation_with_images_equals_transformers(kind, tmp_path, remotes):  # noqa: F811
    folder, file = build(tmp_path / "model", kind), tmp_path / "walk.py"
    file.write_text(ENVIRONMENT)
    keys = [
        *("model.vision=true", f"environment={{class: '{file}:Walk', turn_tokens: 6}}", "rewards.functions=[]"),
        *("rollout.max_new_tokens=300", "rollout.context_length=400"),
    ]
    config = config_of(folder, "{}", 1, keys)
    engine = remotes(engine_context(), RolloutSide, config, folder, True)
    samples: list[Sample] = engine.call("play", config, [row(f"{i}", folder) for i in range(6)])
    assert [sample.episode.failure for sample in samples] == [None] * 6
    assert [sample.episode.info.num_turns for sample in samples] == [TURNS] * 6
    assert [len(sample.prompt.images) for sample in samples] == [1, 2, 1] * 2
    for sample in samples:
        assert len(sample.response_images) == 3
        plain = np.ones(sample.num_tokens, bool)
        for image in sample.images:
            plain[image.start : image.stop] = False
        assert IMAGE_ID in sample.token_ids[plain], "the placeholder also occurs as an ordinary token"
    weights = Weights(folder, {image.digest: image.file for sample in samples for image in sample.images})
    weights.assert_equal(samples, {0: weights.model()})

    settings = "rollout={temperature: 1, context_length: 400, max_new_tokens: 300}"
    trainer = config_with_vision(folder, settings, "actor.tokens_per_microbatch=2048")
    group = [(replace(sample, episode=None), float(i)) for i, sample in enumerate(samples)]
    [trained] = run_ranks(1, log_probs, trainer, folder, [group])
    for sample in samples:
        mask = sample.response_mask
        found = trained[sample.id].numpy()[mask]
        np.testing.assert_allclose(found, sample.response_logprobs[mask], rtol=0, atol=TOLERANCE)
