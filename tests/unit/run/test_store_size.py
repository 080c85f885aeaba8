"""Runs size Ray's object store from their image files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl import finetune, train
from megarl.config.load import load
from megarl.run import evaluate
from tests import tiny_vision
from tests.paths import BASE
from tests.unit.data.image_data import jsonl, png


class Stop(Exception):
    """Raised instead of starting Ray."""


@pytest.mark.parametrize(("kind", "num_images"), [("train", 2 + 2), ("finetune", 2), ("evaluate", 2)])
def test_object_store_is_sized_from_the_image_files(
    kind: str, num_images: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The data and the evaluation set each have two rows with one image."""
    folder, image = tiny_vision.build(tmp_path / "model", "qwen3_vl"), png(40, 40)
    (tmp_path / "a.png").write_bytes(image)
    prompts, rows = jsonl(tmp_path, *[{"prompt": "<image>", "images": "a.png"}] * 2), tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
    rows.write_text(f"{json.dumps({'messages': messages, 'images': 'a.png'})}\n" * 2)
    keys = [f"model={{path: {folder}, vision: true}}", "rollout={context_length: 512, max_new_tokens: 16}"]
    keys += ["batch={prompts_per_step: 2, prompts_per_update: 2}", "cluster.replace_ranks=false"]
    keys += [f"run.folder={tmp_path}/runs", "data.image_column=images"]
    if kind == "finetune":
        keys += ["algorithm.objective.name=sft", f"data={{source: {rows}, format: messages}}"]
    else:
        sets = f"evaluation.sets=[{{name: a, source: {prompts}, image_column: images}}]"
        keys += [f"data.source={prompts}", sets]
    module, run = {
        "train": (train, train.run),
        "finetune": (finetune, finetune.run),
        "evaluate": (evaluate, lambda config, scratch: evaluate.run(config, tmp_path / "out", scratch)),
    }[kind]
    sizes: list[int] = []

    def session(*_: object, encoded: int, **__: object) -> None:
        sizes.append(encoded)
        raise Stop

    monkeypatch.setattr(module, "Session", session)
    for name in ("runs", "scratch"):
        (tmp_path / name).mkdir()
    with pytest.raises(Stop):
        run(load(BASE, keys), tmp_path / "scratch")
    assert sizes == [num_images * len(image)]
