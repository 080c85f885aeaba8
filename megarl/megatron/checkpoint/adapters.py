"""The adapters in a run's checkpoint, as a PEFT folder."""

from __future__ import annotations

from pathlib import Path

from megarl.config.saved import complete
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import UserError
from megarl.data.model_folder import read_config, resolve
from megarl.megatron.checkpoint.source import is_of_a_run, model_path
from megarl.resharding.families.adapters import PREFIX
from megarl.resharding.families.shape import ModelShape
from megarl.resharding.peft_folder import save_adapters
from megarl.resharding.piece import whole
from megarl.resharding.transports.torch_dist import TorchDistFolder


def adapters_to_peft(path: Path, out: Path) -> int:
    """Writes the folder. Returns the bytes of its tensors. Raises UserError for a checkpoint without adapters, and for
    a file that is not what the run wrote.

    path: in a run, `checkpoints/step_…`
    """
    path = model_path(path)
    if not is_of_a_run(path):
        raise UserError(f"{path}: it is no checkpoint of a run; give one of its folders checkpoints/step_…")
    sealed = Checkpoint.open(path.parent)
    sealed.verify(record for record in sealed.files if Path(record.path).parts[0] == path.name)
    config = Config.model_validate(complete(sealed.state["config"], sealed.format))
    if config.actor.adapters is None or path.name != "actor":
        raise UserError(f"{path}: it holds no adapters; convert it with megatron-to-hf")
    with TorchDistFolder(path) as folder:
        stored = {name: tensor.shape for name, tensor in folder.tensors.items() if name.startswith(PREFIX)}
        tensors = {name: folder.read(name, whole(shape)) for name, shape in stored.items()}
        experts = ModelShape.of(read_config(resolve(config.model.path, revision=config.model.revision))).experts
        save_adapters(tensors, config.actor.lora, config.model.path, experts.count if experts else 0, out)
        return sum(tensor.nbytes for tensor in tensors.values())
