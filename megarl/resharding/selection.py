"""Select parameters with glob patterns over the tensor names in the Hugging Face checkpoint."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from fnmatch import filter as matches
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.models.mtp import trains_mtp
from megarl.models.vision import CANONICAL_PREFIX
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.families.adapters import LAYER, UNQUANTIZED
from megarl.resharding.families.mtp import MTP
from megarl.resharding.piece import Holder

if TYPE_CHECKING:
    from megarl.config.model_schema import Role, Trained
    from megarl.config.schema import Config

EXPERT = re.compile(r"\.experts\.\d+\.")
ONE_PROCESS = dict(tp=1, pp=1, vpp=1, cp=1, ep=1, etp=None, dp=1, first_stage_layers=None, last_stage_layers=None)


def check_all_selections(config: Config, hf_configs: Mapping[Role, Mapping[str, Any]]) -> None:
    """Check the tensor patterns of all models that the run trains. `hf_configs` maps each role to its model's config,
    which includes the score or value head used in training."""
    for role, hf_config in hf_configs.items():
        check_selections(config.placed(role), hf_config)


def check_selections(trained: Trained, hf_config: Mapping[str, Any]) -> None:
    """Check the tensor patterns in a config section (frozen, no_weight_decay) against its model. Raise a UserError if a
    pattern is invalid, or if all parameters are frozen."""
    names = huggingface_holder(hf_config).shapes
    whole = trained.layout.model_copy(update=ONE_PROCESS)
    holder = megatron_holder(hf_config, whole, 0)
    key = f"{trained.section}.optimizer.no_weight_decay"
    whole_parameters(key, select_tensors(key, trained.optimizer.no_weight_decay, names), holder)
    key = f"{trained.section}.frozen"
    selected = select_tensors(key, trained.frozen_patterns, names)
    _refuse_single_experts(key, selected, names)
    frozen = frozen_parameters(trained, hf_config, holder)
    if len(frozen) == len(holder.shapes):
        raise UserError(
            f"{key}={trained.frozen_patterns}: the patterns freeze all parameters. Fix: remove patterns until some "
            "tensors match none"
        )


def _refuse_single_experts(key: str, selected: Collection[str], names: Collection[str]) -> None:
    """Raise a UserError if only some experts in a layer are selected.

    A Megatron checkpoint stores the weights of all experts in one tensor, either with or without optimizer state.
    """
    experts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if EXPERT.search(name):
            experts[EXPERT.sub(".experts.*.", name)].append(name)
    for pattern, members in experts.items():
        frozen = [name for name in members if name in selected]
        if frozen and len(frozen) < len(members):
            raise UserError(
                f"{key}: the patterns match {frozen[0]}, but not {len(members) - len(frozen)} of the layer's "
                f"{len(members)} experts. A checkpoint stores all of them in one tensor. Fix: add {pattern}, or match "
                "none of them"
            )


def frozen_parameters(trained: Trained, hf_config: Mapping[str, Any], holder: Holder) -> list[str]:
    """Return the local names of the holder's parameters that are not trained: those that the patterns select, and the
    MTP layer's unless that layer is trained."""
    key = f"{trained.section}.frozen"
    selected = select_tensors(key, trained.frozen_patterns, huggingface_holder(hf_config).shapes)
    mtp = [] if trains_mtp(hf_config) else [name for name in holder.shapes if MTP in name]
    return [*dict.fromkeys((*whole_parameters(key, selected, holder), *mtp))]


def trains_tower(trained: Trained, hf_config: Mapping[str, Any]) -> bool:
    """Return whether any parameter of the model's vision tower is trained. Adapters apply only to the text model."""
    tower = {name for name in huggingface_holder(hf_config).shapes if name.startswith(CANONICAL_PREFIX)}
    frozen = {name for pattern in trained.frozen_patterns for name in matches(tower, pattern)}
    return trained.adapters is None and tower != frozen


def layer_matrices(holder: Holder) -> list[str]:
    """Return the local names of the attention, MLP and expert matrices in the holder's layers. Routers, gates of shared
    experts, modulations and MTP input projections are excluded."""
    matrices = (name for name, shape in holder.shapes.items() if LAYER in name and len(shape) == 2)
    return [name for name in matrices if not any(part in name for part in UNQUANTIZED)]


def select_tensors(key: str, patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that match any of the glob patterns (`*`, `?`, `[…]`). Raise a UserError that contains the
    config key if a pattern matches no name."""
    selected: set[str] = set()
    for pattern in patterns:
        matching = matches(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names)[:3]
            raise UserError(
                f"{key}: {pattern} matches no tensor in the model. Fix: use a name such as {' or '.join(near)}"
            )
        selected.update(matching)
    return selected


def whole_parameters(key: str, selected: Collection[str], holder: Holder) -> list[str]:
    """Return the local names of the holder's parameters that consist of selected tensors. Raise a UserError if a
    parameter contains both selected and unselected tensors."""
    parts: dict[str, dict[str, None]] = {name: {} for name in holder.shapes}
    for tensor, piece in holder.shard.canonical_pieces:
        parts[piece.local][tensor] = None
    chosen = []
    for local, tensors in parts.items():
        inside = [name for name in tensors if name in selected]
        outside = [name for name in tensors if name not in selected]
        if inside and outside:
            raise UserError(
                f"{key}: the patterns match {', '.join(inside)} but not {', '.join(outside)}. The trainer fuses these "
                f"tensors into one parameter. Fix: match all {len(tensors)} or none"
            )
        if inside:
            chosen.append(local)
    return chosen
