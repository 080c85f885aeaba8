"""The program that computes one side in a process of its own: `python -m megarl.run.diagnosis.side SIDE FOLDER` reads
the request in the folder and writes its answer there."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.config.schema import Config

SIDES = ("trainer", "engine", "plain")
REQUEST, ANSWER = "request.pickle", "answer.npz"


@dataclass(frozen=True, slots=True)
class Request:
    """What a side computes: a sequence, with the weights of a folder."""

    config: Config
    model_folder: Path
    token_ids: list[int]


def compute(side: str, request: Request, scratch: Path) -> Mapping[str, np.ndarray]:
    """Return what comes out of each stage of the model. What each side needs is imported here."""
    if side == "trainer":
        from megarl.megatron.layer_outputs import layer_outputs as of_trainer

        return of_trainer(request.config, request.model_folder, request.token_ids, scratch)
    if side == "engine":
        from megarl.core import device
        from megarl.rollout.vllm.environment import environment

        is_invariant = request.config.rollout.batch_invariant
        variables = environment(1, os.cpu_count() or 1, 0, device.on_cuda(), is_invariant)
        os.environ.update(variables, VLLM_RPC_BASE_PATH=str(scratch))
        from megarl.rollout.vllm.layer_outputs import layer_outputs as of_engine

        return of_engine(request.config, request.model_folder, request.token_ids)
    from megarl.run.diagnosis.plain import layer_outputs as of_plain

    return of_plain(request.model_folder, request.token_ids)


def main(side: str, scratch: Path) -> None:
    request = pickle.loads((scratch / REQUEST).read_bytes())
    np.savez(scratch / ANSWER, **compute(side, request, scratch))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
