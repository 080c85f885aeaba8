"""The program that asks Megatron which settings of a run's models it refuses: it reads config and models as JSON on
stdin, and prints a JSON list of lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.megatron.model.build import data_parallel_config, transformer_config
from megarl.megatron.optimizer import optimizer_config


def refusals(config: Config, hf_configs: Mapping[Role, Mapping[str, Any]]) -> list[str]:
    """Return a line for each of Megatron's dataclasses that refuses its settings. hf_configs: the configs of the
    models, by role."""
    dtype, found = getattr(torch, config.model.dtype), []
    for role, hf_config in hf_configs.items():
        settings = config.placed(role)
        for build in (
            partial(transformer_config, settings, hf_config, dtype),
            partial(optimizer_config, settings, dtype),
            partial(data_parallel_config, settings),
        ):
            try:
                build()
            except ValueError as error:
                found.append(str(error))
    return found


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(refusals(Config.model_validate(request["config"]), request["models"])))
