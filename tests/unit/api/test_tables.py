"""Arrow tables of metrics and rollouts contain what the files contain."""

from __future__ import annotations

import json

import pyarrow
import pytest

import megarl

METRICS = [
    {"step": 0, "evaluation/a/avg@1": 0.5},
    {"step": 1, "reward/mean": 0.25, "policy/kl": None, "nonfinite": ["policy/kl"]},
    {"step": 2, "reward/mean": 1, "evaluation/a/avg@1": 0.75},
]
SAMPLES = [
    {
        **{"sample_id": "1.0.0", "step": 1, "prompt": "a", "answer": 2, "reward": 1, "parts": {"f": 1.0}},
        **{"mask": [2, 1], "num_response_tokens": 3, "prompt_ids": [5], "response_ids": [7, 8, 9]},
        **{"rollout_logprobs": [-0.5, -1, -0.25], "token_advantages": [0.5, None, 1], "tokens": ["a", "b", "c"]},
        **{"logprob_differences": [0, 0.5, None], "turn_rewards": [None, 1.0]},
    },
    {"sample_id": "1.0.1", "step": 1, "prompt": "a", "answer": "two", "reward": None, "parts": {}, "failure": "f: …"},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SAMPLES))
    (tmp_path / "rollouts" / "step_000002.jsonl").write_text(json.dumps(SAMPLES[0] | {"step": 2}) + "\n")
    return tmp_path


def test_metrics_have_one_row_per_step(folder):
    table = megarl.read_metrics(folder)
    assert table.to_pydict() == {
        "step": [0, 1, 2],
        "evaluation/a/avg@1": [0.5, None, 0.75],
        "reward/mean": [None, 0.25, 1.0],
        "policy/kl": [None, None, None],
    }
    assert table.schema.field("step").type == pyarrow.int64()


def test_rollouts_have_one_row_per_sample(folder):
    table = megarl.read_rollouts(folder)
    assert table.column("sample_id").to_pylist() == ["1.0.0", "1.0.1", "1.0.0"]
    assert table.column("answer").to_pylist() == ["2", '"two"', "2"]
    assert table.column("parts.f").to_pylist() == [1.0, None, 1.0]
    assert table.column("reward").to_pylist() == [1.0, None, 1.0]
    assert table.column("mask").to_pylist() == [[True, True, False], None, [True, True, False]]
    assert table.column("response_ids").to_pylist() == [[7, 8, 9], None, [7, 8, 9]]
    assert table.column("token_advantages")[0].as_py() == [0.5, None, 1.0]
    elements = {field.name: str(field.type.value_type) for field in table.schema if pyarrow.types.is_list(field.type)}
    assert elements == {
        **dict.fromkeys(("prompt_ids", "response_ids"), "int32"),
        **dict.fromkeys(("rollout_logprobs", "token_advantages", "logprob_differences", "turn_rewards"), "float"),
        **{"mask": "bool", "tokens": "string"},
    }
    assert megarl.read_rollouts(folder, steps=[2]).num_rows == 1


def test_values_of_wrong_types_become_null(folder):
    damaged: dict = {
        "response_ids": [2**31],
        "num_response_tokens": 3,
        "sample_id": 3,
        "step": "1",
        "reward": [],
        "parts": "f",
        "mask": [1, "2"],
        "answer": {"a": 1},
    }
    (folder / "rollouts" / "step_000002.jsonl").write_text(json.dumps(damaged) + "\n" + json.dumps(SAMPLES[0]) + "\n")
    table = megarl.read_rollouts(folder, steps=[2]).to_pydict()
    assert [table[name][0] for name in ("sample_id", "step", "reward", "parts.f", "mask", "response_ids")] == [None] * 6
    for mask in ([2, 2], [10**15], [4, -1]):  # the lengths do not add up to three tokens
        (folder / "rollouts" / "step_000002.jsonl").write_text(json.dumps(damaged | {"mask": mask}) + "\n")
        assert megarl.read_rollouts(folder, steps=[2])["mask"].to_pylist() == [None]
    assert table["answer"] == ['{"a": 1}', "2"] and table["parts.f"][1] == 1.0


def test_images_have_paths_in_the_run_folder(folder):
    """A name that megarl does not write, such as one outside the folder, becomes null."""
    sample = {"sample_id": "3.0.0", "rollout_logprobs": [-0.5, 1], "trained_denoising_steps": [1, 2]}
    names = ["step_000003/3.0.0.png", "step_000003/../../secret.png", "step_000002/3.0.0.png", "/secret.png", 3]
    rows = [sample | {"image": name, "num_denoising_steps": 4} for name in names]
    (folder / "rollouts" / "step_000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = megarl.read_rollouts(folder, steps=[3])
    image = str(folder / "rollouts" / "step_000003" / "3.0.0.png")
    assert table.column("image").to_pylist() == [image, None, None, None, None]
    assert table.column("trained_denoising_steps").to_pylist() == [[1, 2]] * 5
    assert table.column("num_denoising_steps").to_pylist() == [4] * 5
    assert "image" not in megarl.read_rollouts(folder, steps=[1]).column_names


def test_missing_files_are_reported(folder, tmp_path):
    with pytest.raises(megarl.UserError, match=r"has no rollouts of step 3\. Fix: use steps from \[1, 2\]"):
        megarl.read_rollouts(folder, steps=[1, 3])
    for read in (megarl.read_metrics, megarl.read_rollouts):
        with pytest.raises(megarl.UserError, match="Fix: pass"):
            read(tmp_path / "other")
