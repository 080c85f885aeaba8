"""An engine with a vision tower equals transformers, before and after refits, for prompts with and without images."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.images import ImageProcessor
from megarl.models.folder import read_config
from megarl.models.vision import add_vision
from megarl.models.weight_files import TEXT_PREFIX
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.shared_memory import SharedMemory, publish
from megarl.rollout.engine import SamplingRequest
from tests.e2e import test_refit
from tests.e2e.engine_processes import engine_context
from tests.e2e.test_refit import EngineSide, config_of, remotes  # noqa: F401
from tests.marks import exhaustive_but
from tests.tiny_vision import IDS, IMAGE_ID, build, tokenizer

pytestmark = pytest.mark.slow

SIZES = ((64, 64), (90, 40), (50, 100))
"""Widths and heights of the images in pixels."""
PROMPTS = ((0,), (1, 2), (), (2,), (0, 0, 1), (), (1,), (0,))
"""The images in each prompt."""
TOLERANCE = 1e-5
STAND_IN = IDS["<|video_pad|>"]
BLOCK = 32
"""Number of tokens in a block of the prefix cache in `config_of`."""


class VisionSide(EngineSide):
    def sample_with_prefixes(self, prompts, prefix):
        requests = [replace(request, prefix=prefix) for request in test_refit.requests(prompts)]
        return self._sample(requests)

    def sample_and_count(self, prompts):
        """Return the samples, and the digests of the images whose patches the engine computed."""
        images, digests = self.engine._images, []
        convert = images._convert
        images._convert = lambda image: digests.append(image.digest) or convert(image)
        samples = self.sample(prompts)
        images._convert = convert
        return samples, digests

    def sample_resized(self, prompt):
        """Sample a prompt whose grid differs from the one that the engine computes."""
        image = replace(prompt.images[0], grid=(1, 2, 2), digest="other")
        return self._sample([SamplingRequest("resized", replace(prompt, images=(image,)), seed=0)])

    def spoil_deepstack(self):
        """Overwrite the buffers of deepstack features, as level-2 sleep does on GPUs."""
        self.engine._llm.collective_rpc(spoil_deepstack)

    def _sample(self, requests):
        return asyncio.run(self.engine.generate(requests))


def spoil_deepstack(worker) -> None:
    for tensor in getattr(worker.model_runner.get_model(), "deepstack_input_embeds", None) or ():
        tensor.fill_(100.0)


def prompts(folder: Path) -> list[Prompt]:
    processor, rng = ImageProcessor.of(folder), np.random.default_rng(0)
    images = []
    for width, height in SIZES:
        stream = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8)).save(stream, "PNG")
        file, grid = stream.getvalue(), processor.grid(width, height)
        images.append(PromptImage(0, processor.num_tokens(grid), grid, hashlib.sha256(file).hexdigest(), file))
    return [_prompt(f"{i}", [images[k] for k in each]) for i, each in enumerate(PROMPTS)]


def _prompt(name: str, images: Sequence[PromptImage]) -> Prompt:
    ids, placed = tokenizer().encode(f"Question {name}?"), []
    for image in images:
        ids.append(IDS["<|vision_start|>"])
        placed.append(replace(image, start=len(ids)))
        ids += [IMAGE_ID] * image.num_tokens + [IDS["<|vision_end|>"]]
    return Prompt(name, "", ids + tokenizer().encode("Answer:"), images=tuple(placed))


def canonical(stored: str) -> str:
    name = stored.replace(TEXT_PREFIX, "model.", 1)
    return f"model.{name}" if name.startswith("visual.") else name


class Weights:
    """Weights that refits send, and a transformers model with the same weights."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]):
        self._folder, self._processor, self._files = folder, ImageProcessor.of(folder), files
        self.tensors = {canonical(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        publish(self.tensors)

    def change(self, prefix: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.tensors.items():
            if name.startswith(prefix):
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))

    def model(self) -> torch.nn.Module:
        model = AutoModelForImageTextToText.from_pretrained(self._folder, dtype=torch.float32).eval()
        own = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.tensors[canonical(name)])
            # transformers would replace a sampled placeholder by image features, so use a different id with the same
            # embedding.
            embedding = model.get_input_embeddings().weight
            embedding[STAND_IN] = embedding[IMAGE_ID]
        return model

    @torch.no_grad()
    def log_probs(self, sample: Sample, models: Mapping[int, torch.nn.Module]) -> list[float]:
        """Return the log-probs of a sample, given the model of each version. A second version continues with the keys
        and values of the first."""
        first, last = models[sample.versions[0].version], models[sample.versions[-1].version]
        images, num_prompt = sample.images, len(sample.prompt.token_ids)
        ids = torch.tensor(sample.token_ids[None]).long()
        types, extra = torch.zeros_like(ids), {}
        for image in images:
            types[0, image.start : image.stop] = 1
        inputs = ids.where((ids != IMAGE_ID) | types.bool(), STAND_IN)
        if images:
            pixels = torch.from_numpy(self._processor.patches([self._files[image.digest] for image in images]))
            extra = dict(pixel_values=pixels, image_grid_thw=torch.tensor([image.grid for image in images]))
        grids = extra.get("image_grid_thw")
        places, _ = first.model.get_rope_index(inputs, image_grid_thw=grids, mm_token_type_ids=types)
        split = num_prompt + sample.versions[0].count - 1 if len(sample.versions) > 1 else ids.shape[1] - 1
        before = first(inputs[:, :split], position_ids=places[..., :split], use_cache=True, **extra)
        logits = [before.logits]
        if split < ids.shape[1] - 1:
            after = last(
                inputs[:, split:-1],
                position_ids=places[..., split:-1],
                past_key_values=before.past_key_values,
                use_cache=True,
            )
            logits.append(after.logits)
        log_probs = torch.cat(logits, 1).log_softmax(-1)
        return log_probs.gather(2, ids[:, 1:, None])[0, num_prompt - 1 :, 0].tolist()

    def assert_recomputed(self, samples: Sequence[Sample], models: Mapping[int, torch.nn.Module]) -> None:
        """Require that the second version recomputed the keys and values of images and tokens."""
        for sample in samples:
            num_old, newest = sample.versions[0].count, models[sample.versions[1].version]
            expected = self.log_probs(sample, dict.fromkeys(models, newest))[num_old:]
            np.testing.assert_allclose(sample.response_logprobs[num_old:], expected, rtol=0, atol=TOLERANCE)

    def assert_equal(self, samples: Sequence[Sample], models: Mapping[int, torch.nn.Module]) -> None:
        for sample in samples:
            trained = sample.response_mask.nonzero()[0]
            expected = np.array(self.log_probs(sample, models))[trained]
            np.testing.assert_allclose(sample.response_logprobs[trained], expected, rtol=0, atol=TOLERANCE)


def assert_prompts(samples: Sequence[Sample], asked: Sequence[Prompt]) -> None:
    """Require that the samples have the tokens and images of their prompts, without the encoded images."""
    expected = [prompt.with_files([None] * len(prompt.images)) for prompt in asked]
    assert [sample.prompt.images for sample in samples] == [prompt.images for prompt in expected]
    assert [sample.prompt.token_ids.tolist() for sample in samples] == [p.token_ids.tolist() for p in expected]


@pytest.mark.parametrize("kind", exhaustive_but(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), "qwen3_vl"))
def test_engine_with_images_equals_transformers(kind, tmp_path, remotes):  # noqa: F811
    """Cover several images of different sizes, a repeated image, and no image. Refit the tower alone, then all weights
    during sampling, keeping or recomputing the KV cache."""
    folder = build(tmp_path / "model", kind)
    config = config_of(folder, "{}", 1, ["model.vision=true"])
    engine = remotes(engine_context(), VisionSide, config, folder, True)
    asked = prompts(folder)
    weights = Weights(folder, {image.digest: image.file for prompt in asked for image in prompt.images})
    models = {0: weights.model()}
    samples, digests = engine.call("sample_and_count", asked)
    assert len(digests) == len(set(digests)) == len(SIZES), "requests share patches"
    weights.assert_equal(samples, models)
    assert_prompts(samples, asked)

    policy = add_vision(read_config(folder))
    source = huggingface_holder(policy, "float32")
    target = vllm_holder(policy, 1, 0, replica=0, dtype="float32")
    channel = SharedMemory({source.name: publish(weights.tensors)})
    engine.call("connect", make_plan([source], [target]), channel, [target])
    weights.change("model.visual.", 1)
    engine.call("spoil_deepstack")
    engine.call("refit", 1)
    models[1] = weights.model()
    weights.assert_equal(engine.call("sample", asked), models)

    prefixed = engine.call("sample_with_prefixes", asked, (IMAGE_ID, 65, IMAGE_ID))
    assert all(sample.response_ids[:3].tolist() == [IMAGE_ID, 65, IMAGE_ID] for sample in prefixed)
    assert_prompts(prefixed, asked)
    weights.assert_equal(prefixed, models)

    for version, kv_cache, pauses in ((2, "keep", False), (3, "recompute", False), (4, "recompute", True)):
        weights.change("", version)
        early, late = engine.call("sample_through_a_refit", asked, version, kv_cache, pauses)
        models[version] = weights.model()
        through = [sample for sample in early if len(sample.versions) == 2]
        assert any(sample.prompt.images for sample in through)
        assert_prompts(early, asked)
        assert_prompts(late, asked)
        weights.assert_equal(late, models)
        if kv_cache == "keep":
            weights.assert_equal(early, models)
        else:
            weights.assert_recomputed(through, models)

    # Cache a prefix that contains all images of its prompt, so that vLLM admits the next request without patches. The
    # refit then clears the cache.
    [cached] = [prompt for prompt in asked if prompt.images and len(prompt.token_ids) > BLOCK >= prompt.images[-1].stop]
    engine.call("sample", [cached])
    weights.change("", 5)
    early, late = engine.call("sample_through_a_refit", [cached], 5, "recompute")
    models[5] = weights.model()
    weights.assert_recomputed(early, models)
    weights.assert_equal(late, models)

    with pytest.raises(UserError, match=r"this node produces grid \(1, 4, 4\), but the driver computed \(1, 2, 2\)"):
        engine.call("sample_resized", asked[0])
