"""Hand-computed tensors of a microbatch, with and without prompt sharing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.core.completion import CandidateIds, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Baseline
from megarl.data.collate import collate, teacher_states
from megarl.data.packing import Lengths, bundle
from tests.packing import packing
from tests.samples import training_ref


def training_sample(name: str, prompt: str, prompt_ids: list[int], response: list[int], weight: float = 0.5):
    n = len(response)
    mask = tuple(i != 1 for i in range(n))  # the second token is masked out
    sample = Sample(
        id=name,
        prompt=Prompt(prompt, "", tuple(prompt_ids)),
        response_ids=tuple(response),
        response_logprobs=tuple(-0.1 * token for token in response),
        response_mask=mask,
        versions=(VersionRun(3, n),),
        finish_reason="stop",
        text="",
    )
    return training_ref(sample, reward=1.0, baseline=Baseline(0.25, 0.5), weight=weight)


def samples_of_one_prompt():
    return [
        training_sample("a", "p", [11, 12, 13], [21, 22]),
        training_sample("b", "p", [11, 12, 13], [31, 32, 33], weight=0.25),
    ]


def test_shared_prompt_appears_once_in_the_pack():
    batch = collate(samples_of_one_prompt(), packing(1, True))
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert batch.document_tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert batch.boundaries.tolist() == [0, 5, 11]
    assert batch.rows.tolist() == [2, 3, 2, 5, 6]  # the prompt's last token predicts the first token of both responses
    assert batch.targets.tolist() == [21, 22, 31, 32, 33]
    assert batch.row_sample.tolist() == [0, 0, 1, 1, 1]
    assert batch.mask.tolist() == [True, False, True, False, True]
    assert batch.weight.tolist() == [0.5, 0.0, 0.25, 0.0, 0.25]
    torch.testing.assert_close(batch.rollout_logprobs, -0.1 * batch.targets)


def test_unshared_prompt_appears_once_per_sample():
    batch = collate(samples_of_one_prompt(), packing(1, False))
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22, 11, 12, 13, 31, 32, 33]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch.document_tokens.tolist() == list(range(11))
    assert batch.rows.tolist() == [2, 3, 7, 8, 9]


def test_candidate_ids_are_padded_to_the_longest_row():
    one, other = samples_of_one_prompt()
    one = replace(one, sample=replace(one.sample, candidate_ids=CandidateIds.of([(21, 7, 8), ()])))
    assert collate([other], packing(1, True)).candidate_ids is None
    batch = collate([one, other], packing(1, True))
    assert batch.candidate_ids.tolist() == [[21, 7, 8], *([[-1, -1, -1]] * 4)]
    assert batch.take_rows(torch.tensor([3, 0])).candidate_ids.tolist() == [[-1, -1, -1], [21, 7, 8]]
    assert collate([one, other], packing(1, True), truncates=False).candidate_ids is None


def test_prompts_with_different_ids_are_not_shared():
    samples = [training_sample("a", "p", [11], [21]), training_sample("b", "q", [11], [22])]
    assert collate(samples, packing(1, True)).tokens.tolist() == [11, 21, 11, 22]


def test_padding_is_one_document_without_rows():
    batch = collate(samples_of_one_prompt(), packing(3, True))
    assert len(batch.tokens) == 9
    assert batch.boundaries.tolist() == [0, 5, 11, 12]
    assert batch.document_tokens.tolist()[-1] == 8
    assert len(batch.rows) == 5


def test_empty_microbatch_consists_of_padding():
    batch = collate([], packing(4, True))
    assert batch.tokens.tolist() == [0] * 4
    assert len(batch.rows) == len(batch.reward) == 0


def test_scores_are_ordered_like_their_samples():
    scores = {"b": torch.tensor([1.0, 2.0, 3.0]), "a": torch.tensor([4.0, 5.0])}
    batch = collate(samples_of_one_prompt(), packing(1, True), old=scores)
    assert batch.old.tolist() == [4.0, 5.0, 1.0, 2.0, 3.0]
    assert batch.reference is None


def test_row_without_a_sample_fails_validation():
    batch = collate(samples_of_one_prompt(), packing(1, True))
    with pytest.raises(AssertionError, match="a row has no sample"):
        replace(batch, row_sample=batch.row_sample + 1).validate()


def routed(item, routes):
    return replace(item, sample=replace(item.sample, routes=np.array(routes, np.int8).reshape(-1, 1, 2)))


def test_routes_are_placed_like_their_tokens():
    """Padding and samples without routes have no routes."""
    first, second = samples_of_one_prompt()
    batch = collate([routed(first, [[k, k + 1] for k in range(5)]), second], packing(4, False))
    places = batch.document_tokens.tolist()
    assert batch.routes[places[:5]].tolist() == [[[k, k + 1]] for k in range(5)]
    assert batch.routes[places[5:]].tolist() == [[[-1, -1]]] * 7
    assert collate([first, second], packing(4, False)).routes is None
    assert collate([routed(first, [[0, 1]] * 5)], packing(4, False), replays=False).routes is None


@pytest.mark.parametrize("alike", [True, False])
def test_prompt_is_shared_only_if_its_routes_agree(alike):
    """The driver predicts the same number of tokens as the rank packs."""
    one, other = [[[1, 2]] * 5, [[1, 2] if alike else [2, 3]] + [[1, 2]] * 5]
    samples = [routed(item, routes) for item, routes in zip(samples_of_one_prompt(), (one, other), strict=True)]
    batch = collate(samples, packing(1, True))
    assert len(batch.tokens) == (8 if alike else 11)
    [first, *_] = bundle([Lengths.of(SampleRef.of(item.sample)) for item in samples], packing(1, True))
    assert first.num_tokens == (8 if alike else 5)


def test_teacher_states_belong_to_the_rows_of_scored_samples():
    refs = [training_sample(name, "p", [11], [21] * n) for name, n in (("a", 3), ("b", 1), ("c", 2))]
    states = {"a": torch.randn(3, 5), "c": torch.randn(2, 5), "other": torch.randn(9, 5)}
    found = teacher_states(refs, states)
    assert found.rows.tolist() == [0, 1, 2, 4, 5]
    assert len(found.parts) == 2 and found.parts[0] is states["a"] and found.parts[1] is states["c"]
    for members in (refs[1:2], []):
        found = teacher_states(members, states)
        assert found.rows.dtype == torch.int64 and len(found.rows) == len(found.parts) == 0


def with_images(sample, *images: PromptImage):
    """Return the reference with images in the sample's prompt."""
    prompt = replace(sample.sample.prompt, images=images)
    return replace(sample, sample=replace(sample.sample, prompt=prompt))


def one_image(start: int, digest: str = "digest") -> PromptImage:
    return PromptImage(start, 2, (1, 2, 4), digest)


def pixels(image: PromptImage) -> torch.Tensor:
    return torch.full((8, 3), float(image.digest[-1] == "t"))


def test_shared_image_has_one_place():
    samples = [with_images(sample, one_image(1)) for sample in samples_of_one_prompt()]
    batch = collate(samples, packing(4, True), pixels=pixels)
    assert batch.images is not None
    assert len(batch.images.pixels()) == 8
    assert batch.images.grids.tolist() == [[1, 2, 4]]
    assert (batch.images.sources.tolist(), batch.images.places.tolist()) == ([0, 1], [1, 2])
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == [
        [0, 1, 1, 3, 4, 3, 4, 5],
        [0, 1, 1, 3, 4, 3, 4, 5],
        [0, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]


def test_image_of_unshared_prompts_has_several_places():
    samples = [with_images(sample, one_image(0)) for sample in samples_of_one_prompt()]
    text = training_sample("c", "q", [11, 12], [21])
    batch = collate([samples[0], text, samples[1]], packing(1, False), pixels=pixels)
    assert batch.images is not None
    assert len(batch.images.pixels()) == 8
    assert (batch.images.sources.tolist(), batch.images.places.tolist()) == ([0, 1, 0, 1], [0, 1, 8, 9])
    assert batch.rotary_positions is not None
    assert batch.rotary_positions[:, 5:8].tolist() == [[0, 1, 2]] * 3


def test_prompts_with_different_images_are_not_shared():
    first, second = samples_of_one_prompt()
    batch = collate(
        [with_images(first, one_image(1, "first")), with_images(second, one_image(1, "second"))],
        packing(1, True),
        pixels=pixels,
    )
    assert batch.images is not None
    assert (batch.images.sources.tolist(), batch.images.places.tolist()) == ([0, 1, 2, 3], [1, 2, 6, 7])
    assert batch.images.pixels().mean(1).tolist() == [1.0] * 8 + [0.0] * 8


def test_images_in_observations_have_places_after_the_prompt():
    """The second sample has the same image in its prompt. Positions after an image continue from its longest side."""
    observed = training_sample("a", "p", [11, 12, 13], [21, 9, 9, 22])
    observed = replace(observed, sample=replace(observed.sample, response_images=(one_image(4),)))
    other = with_images(training_sample("b", "q", [9, 9], [31]), one_image(0))
    batch = collate([observed, other], packing(1, True), pixels=pixels)
    assert batch.images is not None
    assert len(batch.images.pixels()) == 8
    assert (batch.images.sources.tolist(), batch.images.places.tolist()) == ([0, 1, 0, 1], [4, 5, 7, 8])
    assert batch.rotary_positions is not None
    assert batch.rotary_positions.tolist() == [
        [0, 1, 2, 3, 4, 4, 6, 0, 0, 2],
        [0, 1, 2, 3, 4, 4, 6, 0, 0, 2],
        [0, 1, 2, 3, 4, 5, 6, 0, 1, 2],
    ]


def test_patches_are_omitted_without_a_tower():
    samples = [with_images(sample, one_image(1)) for sample in samples_of_one_prompt()]
    batch = collate(samples, packing(1, True))
    assert batch.images is None
    assert batch.rotary_positions is not None
    text = collate(samples_of_one_prompt(), packing(1, True), pixels=pixels)
    assert (text.images, text.rotary_positions) == (None, None)
