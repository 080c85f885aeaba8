from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.core.completion import CandidateIds, DraftCounts, VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.environments.protocol import StopReason
from megarl.rewards.sample_file import load_samples, save_samples


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def samples() -> list[Sample]:
    info = RolloutInfo(StopReason.DONE, 2, 1, {"search": 3}, 10, 4)
    messages = ({"role": "user", "content": "half a pair: \ud83d", "tool_calls": [{"arguments": deep(500)}]},)
    episode = Episode(
        info,
        (0.1, None, np.float32(1.5)),
        {"format": 1e-300},
        None,
        messages,
        0,
        True,
        outcome=-0.0,
        turns=((0, 2**64 - 1), (2, 5)),
    )
    columns = {"tuple": (1, ("a", [2])), "keys": {1: "one", (2,): None}, "__tuple__": [1], "inf": [math.inf, math.nan]}
    prompt = Prompt("p", "?", [5, 6], answer={"a": [1, True, 1.0]}, messages=({"role": "user"},), columns=columns)
    arrays = [7, 8], [-1.0, -0.5], [True, False], (VersionRun(2, 1), VersionRun(3, 1))
    routes = np.full((4, 2, 1), 3, np.int16)
    whole = Sample(
        *(
            "1.0",
            prompt,
            *arrays,
            "length",
            "text",
            CandidateIds.of([[7, 9], [8]]),
            "1",
            episode,
            routes,
            [math.nan, 1.0],
        )
    )
    image = PromptImage(1, 2, (1, 2, 4), "0a" * 32)
    short = Sample("2.0", Prompt("q", "", [7, 9, 9], columns={"c": 2}, images=(image,)), [], [], [], (), "stop", "")
    return [replace(whole, drafts=DraftCounts(4, 12, 7)), short]


def test_samples_are_restored_exactly(tmp_path: Path) -> None:
    groups = [(17, 2, samples()), (4, 3, []), (0, 0, samples()[1:])]
    save_samples(groups, tmp_path / "file")
    restored = load_samples(tmp_path / "file")
    # Compare reprs: == ignores dtypes, considers 1, True and 1.0 equal, and NaN different from itself.
    assert repr(restored) == repr([(row, version, [plain(s) for s in group]) for row, version, group in groups])
    whole = restored[0][2][0]
    assert (whole.routes.dtype, whole.response_ids.dtype, whole.response_mask.dtype) == (np.int16, np.int32, np.bool_)
    assert not whole.response_ids.flags.writeable


def test_encoded_images_are_not_saved(tmp_path: Path) -> None:
    image = PromptImage(1, 2, (1, 2, 4), "digest", file=object())
    messages = ({"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image"}]},)
    prompt = Prompt("p", "?", [5, 6, 6], messages=messages, images=(image,))
    save_samples([(0, 0, [replace(samples()[1], prompt=prompt)])], tmp_path / "file")
    [(_, _, [restored])] = load_samples(tmp_path / "file")
    assert restored.prompt.images == (replace(image, file=None),)
    assert restored.prompt.messages == messages


def test_images_of_environments_are_saved_once(tmp_path: Path) -> None:
    files = [bytes([number]) * 1000 for number in range(2)]
    first, second = (PromptImage(2 * i, 2, (1, 2, 4), str(i), file) for i, file in enumerate(files))
    saved = []
    for name in ("1.0.0", "1.0.1"):
        sample = Sample(
            *(name, Prompt("p", "", [9, 9], images=(first,)), [9, 9, 5], [0.0, 0.0, -1.0], [False, False, True]),
            *((VersionRun(0, 3),), "stop", ""),
            response_images=(second,),
        )
        saved.append(sample)
    save_samples([(0, 0, saved)], tmp_path / "file")
    [(_, _, restored)] = load_samples(tmp_path / "file")
    assert restored == saved
    assert [image.file for sample in restored for image in sample.images] == files * 2
    tensors = load_file(tmp_path / "file").values()
    assert sum(tensor.size == 1000 for tensor in tensors) == 2
    assert pickle.loads(pickle.dumps(saved[0])) == saved[0]


def plain(sample: Sample) -> Sample:
    """Return the sample as JSON restores it: its stop reason and reward become plain str and float."""
    if sample.episode is None:
        return sample
    info = replace(sample.episode.info, stop_reason=sample.episode.info.stop_reason.value)
    return replace(sample, episode=replace(sample.episode, info=info, rewards=(0.1, None, 1.5)))


def test_equal_prompts_are_saved_once(tmp_path: Path) -> None:
    long = Prompt("p", "text " * 10_000, range(10_000))
    group = [Sample(str(k), long, [1], [0.0], [True], (VersionRun(0, 1),), "stop", "") for k in range(16)]
    save_samples([(0, 0, group)], tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 2 * (len(long.text) + 4 * 10_000)
    assert load_samples(tmp_path / "file") == [(0, 0, group)]


class Touch:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_pickle_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(Touch(tmp_path / "called")))
    with pytest.raises(UserError, match=r"file: not a sample file written by megarl \(.*\)\. Fix: resume from another"):
        load_samples(tmp_path / "file")
    assert not (tmp_path / "called").exists()


def test_file_without_newer_fields_is_read(tmp_path: Path) -> None:
    """Older versions wrote files without fields that have a default."""
    file = tmp_path / "file"
    save_samples([(17, 2, samples())], file)
    tensors, newer = load_file(file), {"groups": ', "feedback": "", "message_end": null', "prompts": ', "images": '}
    for name, fields in newer.items():
        text = tensors[name].tobytes().decode()
        fields = f'{fields}{{"__tuple__": []}}' if name == "prompts" else fields
        assert fields in text
        tensors[name] = np.frombuffer(text.replace(fields, "").encode(), np.uint8)
    save_file(tensors, file)
    assert repr(load_samples(file)) == repr([(17, 2, [plain(sample) for sample in samples()])])


CHANGES = {
    "text of a number": lambda s: s.replace('"text": "text"', '"text": 5'),
    "unknown class": lambda s: s.replace('"__class__": "Sample"', '"__class__": "Path"'),
    "missing field": lambda s: s.replace('"finish_reason": "length", ', ""),
    "unknown field": lambda s: s.replace('"text": ', '"more": 1, "text": '),
    "unknown reason": lambda s: s.replace('"length"', '"tired"'),
    "missing array": lambda s: s.replace('"__array__": "3"', '"__array__": "99"'),
    "float ids": lambda s: s.replace('"response_ids": {"__array__": "1"}', '"response_ids": {"__array__": "2"}'),
    "lengths": lambda s: s.replace('"count": 1', '"count": 7', 1),
    "no prompt": lambda s: s.replace('"__prompt__": 0', '"__prompt__": 5'),
    "row": lambda s: s.replace("[[17, ", '[["17", '),
    "no list": lambda s: "5",
    "deep": lambda s: "[" * 100_000 + "]" * 100_000,
    "unhashable key": lambda s: '{"__items__": [[[], 1]]}',
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_damaged_file_is_named(tmp_path: Path, change) -> None:
    file = tmp_path / "file"
    save_samples([(17, 2, samples())], file)
    tensors = load_file(file)
    text = tensors["groups"].tobytes().decode()
    assert change(text) != text
    save_file(tensors | {"groups": np.frombuffer(change(text).encode(), np.uint8)}, file)
    with pytest.raises(UserError, match="file: not a sample file written by megarl "):
        load_samples(file)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    save_samples([(17, 2, samples())], file)
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(UserError, match="file: not a sample file"):
        load_samples(file)
    file.unlink()
    with pytest.raises(UserError, match="file: not a sample file"):
        load_samples(file)


def test_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    save_samples([(17, 2, samples())], tmp_path / "file")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode
