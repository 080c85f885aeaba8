import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megarl.report.viewer import MAX_CHARACTERS, MAX_SAMPLES, MAX_STEPS, read_rollouts, spread, spread_stably


def write_step(folder, step, samples, tail=""):
    path = folder / f"step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples) + tail)
    return path


def sample(reward, **fields):
    return {"step": 1, "sample_id": "a", "prompt": "p", "response": "r", "reward": reward, **fields}


@given(st.integers(0, 300), st.integers(2, 40))
def test_spread_is_even_and_keeps_both_ends(size, limit):
    chosen = spread(range(size), limit)
    assert len(chosen) == min(size, limit)
    assert chosen[:1] + chosen[-1:] == ([0, size - 1] if size else [])
    gaps = {after - before for before, after in pairwise(chosen)}
    assert all(gap > 0 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(0, 300), st.integers(2, 40))
def test_stable_spread_keeps_most_items_when_one_is_appended(size, limit):
    chosen = spread_stably(range(size), limit)
    assert min(size, limit // 2) <= len(chosen) <= min(size, limit)
    assert chosen[:1] + chosen[-1:] == ([0, size - 1] if size else [])
    assert len({after - before for before, after in pairwise(chosen[:-1])}) <= 1
    after = spread_stably(range(size + 1), limit)
    assert set(after) <= {*chosen, size}


def test_samples_are_sorted_by_reward_with_failed_ones_last(tmp_path):
    path = write_step(tmp_path, 1, [sample(0.0), sample(None, failure="timeout"), sample(1.0), sample(-1.0)])
    (step,) = read_rollouts({1: path}).steps
    assert [entry["reward"] for entry in step.samples] == [1.0, 0.0, -1.0, None]
    assert step.samples[-1]["failure"] == "timeout"


def test_steps_and_samples_are_capped(tmp_path):
    rewards = range(3 * MAX_SAMPLES)
    numbers = range(1, 3 * MAX_STEPS + 1)
    samples = [sample(reward) for reward in rewards]
    rollouts = read_rollouts({number: write_step(tmp_path, number, samples) for number in numbers})
    assert rollouts.num_steps == len(numbers)
    assert MAX_STEPS / 2 <= len(rollouts.steps) <= MAX_STEPS
    assert (rollouts.steps[0].step, rollouts.steps[-1].step) == (1, numbers[-1])
    for step in rollouts.steps:
        shown = [entry["reward"] for entry in step.samples]
        assert len(shown) == MAX_SAMPLES
        assert (shown[0], shown[-1]) == (max(rewards), 0)
        assert step.num_samples == len(samples)


def test_middle_of_long_texts_is_omitted(tmp_path):
    text = "b" + "x" * MAX_CHARACTERS + "e"
    (step,) = read_rollouts({1: write_step(tmp_path, 1, [sample(1.0, response=text, prompt="short")])}).steps
    shown = step.samples[0]["response"]
    assert shown[0] == "b" and shown[-1] == "e"
    assert "… 2 characters omitted …" in shown
    assert shown.count("x") == MAX_CHARACTERS - 2
    assert step.samples[0]["prompt"] == "short"


def test_partial_line_is_counted_as_unreadable(tmp_path):
    (step,) = read_rollouts({1: write_step(tmp_path, 1, [sample(1.0)], tail='{"step": 1, "resp')}).steps
    assert (len(step.samples), step.num_samples, step.unreadable) == (1, 1, 1)


def test_nan_reward_becomes_none(tmp_path):
    (step,) = read_rollouts({1: write_step(tmp_path, 1, [sample(float("nan")), sample(0.0)])}).steps
    assert [entry["reward"] for entry in step.samples] == [0.0, None]


def test_samples_have_the_mean_log_prob(tmp_path):
    """The mean is None if a log-prob is not finite or the field is missing."""
    samples = [
        sample(3.0, rollout_logprobs=[-1.0, -2.0], advantage=0.5),
        sample(2.0, rollout_logprobs=[float("-inf")], advantage=None),
        sample(1.0, rollout_logprobs=[]),
        sample(0.0),
    ]
    (step,) = read_rollouts({1: write_step(tmp_path, 1, samples)}).steps
    assert [entry["mean_logprob"] for entry in step.samples] == [-1.5, None, None, None]
    assert [entry["advantage"] for entry in step.samples] == [0.5, None, None, None]
    assert "rollout_logprobs" not in step.samples[0]
