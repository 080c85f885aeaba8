"""The public API: its names, their documentation, and its import time."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import megarl
from tests.paths import QUICKSTART, ROOT

PUBLIC = [
    "Config",
    "InfrastructureFailure",
    "RunFailure",
    "StopTraining",
    "TrainingResult",
    "UserError",
    "__version__",
    "compute_advantages",
    "compute_token_advantages",
    "convert_to_huggingface",
    "convert_to_megatron",
    "kl_divergence",
    "load_config",
    "pack_samples",
    "plan_layout",
    "plan_reshard",
    "policy_loss",
    "read_metrics",
    "read_rollouts",
    "reshape_checkpoint",
    "run_evaluation",
    "run_training",
]
"""Public names. Removing or renaming one would break users' programs."""


def test_public_names_are_unchanged():
    assert sorted(megarl.__all__) == dir(megarl) == sorted(PUBLIC)
    assert sorted(["__version__", *megarl._MODULES]) == sorted(PUBLIC)


def test_public_names_are_documented_and_typed():
    for name in PUBLIC:
        value = getattr(megarl, name)
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            assert value.__doc__ and "Raises:" in value.__doc__, name
            assert all(parameter.annotation is not parameter.empty for parameter in parameters), name
            assert inspect.signature(value).return_annotation is not inspect.Signature.empty, name


def test_import_loads_no_other_module():
    code = "import sys, megarl; print([name for name in sys.modules if name.startswith('megarl')])"
    command = [sys.executable, "-P", "-c", code]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output == "['megarl']\n"


def test_overrides_keep_their_values():
    overrides = {
        "run.steps": 3,
        "data.system_prompt": 'a: "b" # é\n',
        "actor.optimizer.lr": 1e-6,
        "rewards.judge": None,
    }
    config = megarl.load_config(QUICKSTART, overrides)
    assert config.run.steps == 3 and config.data.system_prompt == 'a: "b" # é\n'
    assert config.actor.optimizer.lr == 1e-6 and config.rewards.judge is None


def test_plans_have_the_figures_of_the_commands():
    config = megarl.load_config(QUICKSTART)
    planned = megarl.plan_layout(config, "2xH100-80GB")
    assert planned.best.problem is None and planned.best.times.seconds > 0
    with pytest.raises(megarl.UserError, match=r"rollout\.sleep=false: .*Fix: set rollout\.sleep=true"):
        megarl.plan_layout(config, "2xH100-80GB", keep_layout=True)
