"""The safetensors files in a transformers or diffusers folder: their tensors' names, dtypes and shapes, read from the
headers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.errors import UserError
from megarl.core.files import read_foreign_object
from megarl.core.text import encodable
from megarl.models.vision import VisionShape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DIFFUSERS_INDEX, DIFFUSERS_SINGLE = (f"diffusion_pytorch_{name}" for name in (INDEX, SINGLE))
DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported dtypes, as named in safetensors files."""

LONGEST_NAME = 255
LFS_POINTER = b"version https://git-lfs"


class Header(NamedTuple):
    """A tensor's dtype and shape, as its file declares them."""

    dtype: str
    shape: tuple[int, ...]


class Place(NamedTuple):
    """Where a folder stores a tensor: in a stored tensor of the same or another name.

    Attributes:
        expert: index on the first axis of a tensor that stacks all experts; None if the stored tensor is not stacked.
        rows: the part of the rows that belongs to this tensor; None for all rows.
        is_transposed: whether the stored tensor has the columns before the rows.
        scales: file and name of the scales of an MXFP4 tensor; None for other dtypes.
    """

    path: Path
    stored: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    is_transposed: bool = False
    scales: tuple[Path, str] | None = None


class Stack(NamedTuple):
    """A stored tensor that stacks tensors of all experts.

    Attributes:
        shape: shape of the stored tensor.
        experts: tensors of each expert, in expert order; an expert's tensors are concatenated by rows.
        is_transposed: as in Place.
    """

    shape: tuple[int, ...]
    experts: tuple[tuple[str, ...], ...]
    is_transposed: bool


TEXT_PREFIX, TOWER_PREFIX = "model.language_model.", "visual."
"""Prefixes of tensor names in multimodal checkpoints: of the text model, replacing "model.", and of Qwen2.5-VL's vision
tower, replacing "model.visual."."""

STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}
"""Suffix of a tensor that stacks all experts, [experts, rows, columns] -> the projections that its rows fuse. In
checkpoints of Qwen3-VL, the columns precede the rows, unless transformers >= 5 saved them."""

MXFP4_BLOCK, MXFP4_BYTES = 32, 16
"""Number of consecutive elements of a row that share a scale in MXFP4 checkpoints, and their size in bytes."""

DEQUANTIZED = "BF16"
"""The dtype that MXFP4 tensors are dequantized to."""

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
"""Suffixes of gpt-oss's stacked tensors: MXFP4 elements, uint8 [experts, rows, blocks, 16], their scales, uint8
[experts, rows, blocks], and biases. A tensor without a suffix is unquantized, [experts, columns, rows]."""

_SEPARATE_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.down_proj\.weight")
_EXPERT_TENSOR = re.compile(r"(.*\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.(weight|bias)")


def places(folder: Path) -> dict[str, Place]:
    """Return the place of each tensor, by its name in the checkpoint of a text model with separate experts. Raise a
    UserError if files are missing or damaged."""
    found: dict[str, Place] = {}
    files = files_by_tensor(folder)
    for stored, path in files.items():
        name = _canonical_name(stored)
        experts, _, last = stored.rpartition(".")
        if f"{experts}.down_proj{BIAS}" in files and last.startswith(("gate_up_proj", "down_proj")):
            found |= _stacked_with_biases(files, stored)
            continue
        suffix = next((suffix for suffix in STACKED if name.endswith(suffix)), None)
        if suffix is None:
            found[name] = Place(path, stored)
            continue
        found |= _stacked(files, stored, name.removesuffix(suffix), suffix)
    return found


def _canonical_name(stored: str) -> str:
    if stored.startswith(TEXT_PREFIX):
        return f"model.{stored.removeprefix(TEXT_PREFIX)}"
    return f"model.{stored}" if stored.startswith(TOWER_PREFIX) else stored


def stored_name(name: str) -> str:
    """Return a tensor's name in a multimodal checkpoint from its canonical name."""
    is_text = name.startswith("model.") and not name.startswith(f"model.{TOWER_PREFIX}")
    return f"{TEXT_PREFIX}{name.removeprefix('model.')}" if is_text else name


def _stacked(files: Mapping[str, Path], stored: str, prefix: str, suffix: str) -> dict[str, Place]:
    """Return the places of the experts' tensors within a stacked tensor. prefix: prefix of their canonical names."""
    path, projections = files[stored], STACKED[suffix]
    shape, is_transposed = _stored_header(path, stored).shape, _is_transposed(files, stored.removesuffix(suffix))
    # Reject empty tensors: a damaged file could claim any number of experts without elements.
    if len(shape) != 3 or 0 in shape or shape[1 + is_transposed] % len(projections):
        raise UserError(
            f"{path}: {stored} has shape {list(shape)}, which is not a shape of stacked experts. Fix: download it again"
        )
    size = shape[1 + is_transposed] // len(projections)
    return {
        f"{prefix}.experts.{expert}.{projection}.weight": Place(
            path, stored, expert, (part * size, (part + 1) * size), is_transposed
        )
        for expert in range(shape[0])
        for part, projection in enumerate(projections)
    }


def _is_transposed(files: Mapping[str, Path], prefix: str) -> bool:
    """Return whether stacked experts have the columns before the rows: gate_up_proj [experts, hidden, 2 · rows] and
    down_proj [experts, rows, hidden]."""
    names = [prefix + suffix for suffix in STACKED]
    if any(name not in files for name in names):
        return False
    into, out = (_stored_header(files[name], name).shape for name in names)
    return len(into) == len(out) == 3 and into[1:] == (out[2], 2 * out[1])


def _stacked_with_biases(files: Mapping[str, Path], stored: str) -> dict[str, Place]:
    """Return the places of each expert's tensor in one of gpt-oss's stacked tensors; empty for scales."""
    if stored.endswith(SCALES):
        return {}
    path, (dtype, shape) = files[stored], _stored_header(files[stored], stored)
    is_bias, is_packed = stored.endswith(BIAS), stored.endswith(BLOCKS)
    scales = stored.removesuffix(BLOCKS) + SCALES if is_packed else None
    has_axes = len(shape) == (2 if is_bias else 4 if is_packed else 3) and 0 not in shape
    if not has_axes:
        raise UserError(
            f"{path}: {stored} has shape {list(shape)}, which is not a shape of stacked experts. Fix: download it again"
        )
    if scales is not None:
        require_names(path, files, [scales])
        expected = Header("U8", (*shape[:3], MXFP4_BYTES)), Header("U8", shape[:3])
        if expected != (Header(dtype, shape), _stored_header(files[scales], scales)):
            raise UserError(
                f"{path}: {stored} and {scales} do not have the dtype and shapes of MXFP4 blocks and "
                "scales. Fix: download it again"
            )
    experts, _, last = stored.rpartition(".")
    name = f"{last.removesuffix(BIAS)}.bias" if is_bias else f"{last.removesuffix(BLOCKS)}.weight"
    is_transposed = not is_bias and not is_packed
    rows = (0, shape[2] if is_transposed else shape[1])
    place = Place(path, stored, 0, rows, is_transposed, None if scales is None else (files[scales], scales))
    return {f"{experts}.{expert}.{name}": place._replace(expert=expert) for expert in range(shape[0])}


def stacks(shapes: Mapping[str, tuple[int, ...]], vision: VisionShape | None = None) -> dict[str, Stack]:
    """Return stored tensor -> stack for experts that checkpoints store in stacks: those with biases, as in gpt-oss, and
    those of models with a vision tower.

    Args:
        shapes: maps the names of all tensors, as in `places`, to their shapes.
        vision: the model's vision tower; None if it has none.
    """
    members: dict[str, dict[int, tuple[str, ...]]] = {}
    for name in shapes:
        match = _EXPERT_TENSOR.fullmatch(name)
        if match is not None and f"{match[1]}.{match[2]}.down_proj.bias" in shapes:
            stored = f"{match[1]}.{match[3]}{BIAS if match[4] == 'bias' else ''}"
            members.setdefault(stored, {})[int(match[2])] = (name,)
    found = {}
    for stored, experts in members.items():
        names = tuple(experts[number] for number in range(len(experts)))
        found[stored] = Stack((len(names), *reversed(shapes[names[0][0]])), names, not stored.endswith(BIAS))
    return found if vision is None else found | _fused_stacks(shapes, vision.has_transposed_experts)


def _fused_stacks(shapes: Mapping[str, tuple[int, ...]], is_transposed: bool) -> dict[str, Stack]:
    counts: dict[str, int] = {}
    for name in shapes:
        if (match := _SEPARATE_EXPERT.fullmatch(name)) is not None:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    found = {}
    for prefix, count in counts.items():
        for suffix, projections in STACKED.items():
            names = tuple(
                tuple(f"{prefix}.experts.{expert}.{projection}.weight" for projection in projections)
                for expert in range(count)
            )
            rows, columns = sum(shapes[name][0] for name in names[0]), shapes[names[0][0]][1]
            found[prefix + suffix] = Stack(
                (count, columns, rows) if is_transposed else (count, rows, columns), names, is_transposed
            )
    return found


def _stored_header(path: Path, stored: str) -> Header:
    with open_file(path, "numpy") as file:
        require_names(path, list(map(str, file.keys())), [stored])
        tensor = file.get_slice(stored)
        return Header(tensor.get_dtype(), tuple(tensor.get_shape()))


def files_by_tensor(folder: Path) -> dict[str, Path]:
    """Return each tensor's file, by name. Raise a UserError if the folder has no safetensors weights or lacks files."""
    index, single = _index_and_single(folder)
    if index.is_file():
        files = {tensor: folder / name for tensor, name in _weight_map(index).items()}
    elif single.is_file():
        files = dict.fromkeys(open_file(single, "numpy").keys(), single)
    else:
        shards = sorted(folder.glob("*.safetensors"))
        fix = "download the index" if shards else "save the weights as safetensors"
        raise UserError(f"{folder}: contains neither {SINGLE} nor {INDEX}. Fix: {fix}")
    for path in set(files.values()):
        if not path.is_file():
            raise UserError(
                f"{folder}: {index.name} lists {path.name}, but the file does not exist. Fix: download the file"
            )
    return files


def require_files(folder: Path) -> None:
    """Raise the error of `files_by_tensor` if the folder has no safetensors weights or lacks files. The weights are not
    opened, because the safetensors package may not be installed on a login node."""
    index, single = _index_and_single(folder)
    if index.is_file() or not single.is_file():
        files_by_tensor(folder)


def _index_and_single(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the index and of the single weight file, named as in diffusers if either exists under that
    name, else as in transformers."""
    names = ((DIFFUSERS_INDEX, DIFFUSERS_SINGLE), (INDEX, SINGLE))
    pairs = [(folder / index, folder / single) for index, single in names]
    return next((pair for pair in pairs if any(path.is_file() for path in pair)), pairs[-1])


def open_file(path: Path, framework: str) -> Any:
    """Open a safetensors file. Raise a UserError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            raise UserError(f"{path}: a Git LFS pointer, not the file itself. Fix: run git lfs pull") from None
        raise UserError(f"{path}: not a complete safetensors file ({error}). Fix: download it again") from None


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the headers of all tensors in the folder, by name as in `places`. Raise a UserError if files are missing
    or damaged."""
    files = places(folder)
    stored: dict[tuple[Path, str], Header] = {}
    for path in sorted({place.path for place in files.values()}):
        with open_file(path, "numpy") as opened:
            for name in map(str, opened.keys()):
                tensor = opened.get_slice(name)
                stored[path, name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
    require_names(folder, [name for _, name in stored], [place.stored for place in files.values()])
    return {name: _header(place, stored[place.path, place.stored]) for name, place in files.items()}


def _header(place: Place, stored: Header) -> Header:
    if place.rows is None:
        return stored
    start, stop = place.rows
    if place.scales is not None:
        return Header(DEQUANTIZED, (stop - start, stored.shape[2] * MXFP4_BLOCK))
    return Header(stored.dtype, (stop - start, *(stored.shape[1:2] if place.is_transposed else stored.shape[2:])))


def require_tensors(folder: Path, headers: Mapping[str, Header], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a UserError if a tensor in `shapes` is missing, or has a different shape or an unsupported dtype."""
    require_names(folder, headers.keys(), shapes)
    for name, shape in shapes.items():
        require_dtype(folder, name, headers[name].dtype)
        if headers[name].shape != shape:
            raise UserError(
                f"{folder}: {name} has shape {headers[name].shape}, but config.json requires {shape}. Fix: use the "
                "config.json of the model that these weights belong to"
            )


def require_dtype(folder: Path, name: str, dtype: str) -> None:
    """Raise a UserError if a tensor's dtype is not supported."""
    if dtype not in DTYPES:
        raise UserError(
            f"{folder}: {name} has the unsupported dtype {dtype}. Supported dtypes: {', '.join(DTYPES)}. Fix: convert "
            "the weights to one of them"
        )


def require_names(folder: Path, present: Collection[str], names: Collection[str]) -> None:
    """Raise a UserError if one of `names` is not in `present`."""
    missing = next((name for name in names if name not in present), None)
    if missing is not None:
        raise UserError(
            f"{folder}: the checkpoint has no tensor {missing}. Fix: use a complete checkpoint of the model"
        )


def _weight_map(index: Path) -> dict[str, str]:
    names = None
    with suppress(UserError):
        names = read_foreign_object(index).get("weight_map")
    if isinstance(names, dict) and all(isinstance(name, str) and _is_file_name(name) for name in names.values()):
        return names
    raise UserError(f"{index}: not an index of safetensors files. Fix: download it again")


def _is_file_name(name: str) -> bool:
    is_name = Path(name).name == name and name not in ("", "..") and "\0" not in name
    return is_name and encodable(name) == name and len(name.encode()) <= LONGEST_NAME
