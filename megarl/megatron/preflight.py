"""Finds model settings that Megatron rejects. Run as a program, it reads the config and model configs as JSON from
stdin and prints a JSON list of messages."""

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
    """Return one message for each Megatron dataclass that rejects its settings, given the roles' model configs."""
    dtype, messages = getattr(torch, config.model.dtype), []
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
                messages.append(str(error))
    return messages


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(json.dumps(refusals(Config.model_validate(request["config"]), request["models"])))
