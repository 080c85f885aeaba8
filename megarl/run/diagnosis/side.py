"""Computes the outputs of one implementation (trainer, engine or transformers) in a separate process.

`python -m megarl.run.diagnosis.side SIDE FOLDER` reads the request from FOLDER and writes the outputs to FOLDER.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.schema import Config

SIDES = ("trainer", "engine", "plain")
REQUEST, OUTPUTS = "request.pickle", "outputs.npz"


@dataclass(frozen=True, slots=True)
class Request:
    """The input for one implementation: a config, a model folder and a token sequence."""

    config: Config
    model_folder: Path
    token_ids: list[int]


def compute(side: str, request: Request, scratch: Path) -> Mapping[str, np.ndarray]:
    """Return the outputs of each model stage. Import only the library that the implementation needs."""
    if side == "trainer":
        from megarl.megatron.layer_outputs import layer_outputs as trainer_outputs

        return trainer_outputs(request.config, request.model_folder, request.token_ids, scratch)
    if side == "engine":
        from megarl.core import device
        from megarl.rollout.vllm.environment import environment

        is_invariant = request.config.rollout.batch_invariant
        variables = environment(1, os.cpu_count() or 1, 0, device.on_cuda(), is_invariant)
        os.environ.update(variables, VLLM_RPC_BASE_PATH=str(scratch))
        from megarl.rollout.vllm.layer_outputs import layer_outputs as engine_outputs

        return engine_outputs(request.config, request.model_folder, request.token_ids)
    from megarl.run.diagnosis.plain import layer_outputs as plain_outputs

    return plain_outputs(request.model_folder, request.token_ids)


def main(side: str, scratch: Path) -> None:
    request = pickle.loads((scratch / REQUEST).read_bytes())
    outputs: Mapping[str, Any] = compute(side, request, scratch)  # Any: numpy's stubs match them with allow_pickle
    np.savez(scratch / OUTPUTS, **outputs)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
