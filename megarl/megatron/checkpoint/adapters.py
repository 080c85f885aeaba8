"""The adapters in a run's checkpoint, as a PEFT folder, or merged into their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.config.model_schema import Lora
from megarl.config.saved import complete
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import UserError
from megarl.megatron.checkpoint.conversion import Options
from megarl.megatron.checkpoint.source import is_of_a_run, model_path
from megarl.models.folder import read_config, resolve
from megarl.models.shape import ModelShape
from megarl.models.weights_hash import weights_hash
from megarl.resharding.families import huggingface_holder
from megarl.resharding.families.adapters import PREFIX, A, B, of_each_expert
from megarl.resharding.folder import SHARD_BYTES, write_folder
from megarl.resharding.peft_folder import save_adapters
from megarl.resharding.piece import Holder, Rectangle, whole
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.torch_dist import TorchDistFolder
from megarl.resharding.transports.transport import Readable


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The adapters in a checkpoint.

    config     of the run
    folder     where the factors are
    base       a Hugging Face folder of the model that they are for
    base_hash  what weights_hash gave of its weights when the run began (None: format 1 does not say)
    """

    config: Config
    folder: TorchDistFolder
    base: Path
    base_hash: str | None

    @property
    def lora(self) -> Lora:
        return self.config.actor.lora

    @property
    def num_experts(self) -> int:
        experts = ModelShape.of(read_config(self.base)).experts
        return experts.count if experts else 0

    def factors(self) -> dict[str, torch.Tensor]:
        """Returns all factors by PEFT's names, as views of the checkpoint's files; one that experts share has no
        expert's number in its name."""
        stored = {name: tensor.shape for name, tensor in self.folder.tensors.items() if name.startswith(PREFIX)}
        return {name: self.folder.read(name, whole(shape)) for name, shape in stored.items()}


class MergedWeights(Readable):
    """The transport of a model's weights with adapters merged: the products are added in float32, to weights of the
    dtype that the run had them in."""

    def __init__(self, base: SafetensorsFolder, weights: Holder, adapters: StoredAdapters):
        """weights: the holder of all weights, with the dtypes of the run."""
        self._base, self._weights, self._scale = base, weights, adapters.lora.scale
        self._factors = {
            each: factor
            for name, factor in adapters.factors().items()
            for each in of_each_expert(name, adapters.num_experts)
        }
        found = weights.dtypes.items()
        dtypes = {name: dtype if self._factor(name, A) is None else "float32" for name, dtype in found}
        self.holder = replace(weights, name="merged", shard=replace(weights.shard, dtypes=dtypes))
        """The holder of the weights as they are read."""

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return getattr(torch, self.holder.dtypes[parameter])

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        weight = self._base.read(source, parameter, rectangle).to(getattr(torch, self._weights.dtypes[parameter]))
        inner, outer = self._factor(parameter, A), self._factor(parameter, B)
        if inner is None:
            return weight
        rows, columns = (slice(start, stop) for start, stop in rectangle)
        return torch.addmm(weight.float(), outer[rows], inner[:, columns], alpha=self._scale)

    def _factor(self, parameter: str, factor: str) -> torch.Tensor | None:
        return self._factors.get(f"{PREFIX}{parameter.removesuffix('.weight')}.{factor}.weight")


def adapters_to_peft(path: Path, out: Path) -> int:
    """Writes a PEFT folder. Returns the bytes of its tensors. See _open for the path and errors."""
    with _open(path, None) as adapters:
        factors = adapters.factors()
        save_adapters(factors, adapters.lora, adapters.config.model.path, adapters.num_experts, out)
        return sum(factor.nbytes for factor in factors.values())


def adapters_to_huggingface(
    path: Path, out: Path, options: Options, huggingface: Path | None = None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes the model with the adapters merged as a Hugging Face folder, as an export of the run at this step would.
    Returns the bytes of tensors written. Raises UserError for a model that is not the run's.

    options  a dtype of None is the run's
    See _open for the other arguments and errors, and write_folder for shard_bytes.
    """
    with _open(path, huggingface) as adapters, SafetensorsFolder(adapters.base) as base:
        if adapters.base_hash not in (None, weights_hash(adapters.base)):
            raise UserError(
                f"{adapters.base}: its weights are not those that the adapters of {path} were trained beside; give "
                "--hf, a folder with these"
            )
        hf_config, dtype = read_config(adapters.base), adapters.config.model.dtype
        weights = huggingface_holder(hf_config, dtype)
        base.described(weights)  # raises what is wrong with the folder
        transport = MergedWeights(base, weights, adapters)
        source, destination = transport.holder, huggingface_holder(hf_config, options.dtype or dtype)
        plan = make_plan([source], [destination])
        check_plan(plan, [source], [destination])
        return write_folder(
            plan, transport, hf_config, adapters.base, out, shard_bytes, options.verify, options.progress
        )


@contextmanager
def _open(path: Path, huggingface: Path | None) -> Iterator[StoredAdapters]:
    """Opens the adapters of a checkpoint. Raises UserError for a checkpoint without any, and for a file that is not
    what the run wrote.

    path         in a run, `checkpoints/step_…`
    huggingface  a folder with the model that they are for (None: the run's `model.path`)
    """
    path = model_path(path)
    if not is_of_a_run(path):
        raise UserError(f"{path}: it is no checkpoint of a run; give one of its folders checkpoints/step_…")
    sealed = Checkpoint.open(path.parent)
    sealed.verify(record for record in sealed.files if Path(record.path).parts[0] == path.name)
    config = Config.model_validate(complete(sealed.state["config"], sealed.format))
    if config.actor.adapters is None or path.name != "actor":
        raise UserError(f"{path}: it holds no adapters; convert it with megatron-to-hf")
    revision = config.model.revision if huggingface is None else None
    base = resolve(str(huggingface or config.model.path), key="--hf", revision=revision)
    with TorchDistFolder(path) as folder:
        base_hash = sealed.state.get("models", {}).get("model.path", {}).get("hash")
        yield StoredAdapters(config, folder, base, base_hash)
