"""GRPO in bfloat16 on one GPU improves the reward."""

from __future__ import annotations

from tests.gpu.gpus import needs_gpus, run_on_gpus
from tests.gpu.learning import learn, learning_config
from tests.gpu.models import write_model

STEPS = 20


@needs_gpus(1)
def test_reward_rises(tmp_path):
    """A random policy samples even ids half of the time."""
    folder = write_model(tmp_path, "dense")
    [rewards] = run_on_gpus(1, learn, learning_config(folder), folder, STEPS)
    assert 0.35 < rewards[0] < 0.65 and rewards[-1] > 0.9, rewards
