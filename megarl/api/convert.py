"""`megarl convert`: convert between Hugging Face folders and Megatron checkpoints.

Commands import torch and Megatron lazily, so that `megarl --help` stays fast.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megarl.core.command_group import CommandGroup
from megarl.core.errors import UserError

if TYPE_CHECKING:
    from megarl.megatron.checkpoint.conversion import Options

app = typer.Typer(
    cls=CommandGroup,
    help="Convert between Hugging Face folders and Megatron checkpoints, in one process, tensor by tensor.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path, typer.Option(help="Output folder. It is renamed into place once complete.")]
Checkpoint = Annotated[
    Path, typer.Option(help="Megatron checkpoint (torch_dist), or a run's checkpoints/step_… (the actor) or …/critic.")
]
HuggingFace = Annotated[
    Path | None,
    typer.Option("--hf", help="Folder with the model's config.json and tokenizer (default: from the checkpoint)."),
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages.")]
Vpp = Annotated[int, typer.Option(min=1, help="Virtual stages per pipeline stage.")]
Ep = Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")]
Etp = Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks per expert (default: --tp).")]
FirstStage = Annotated[int | None, typer.Option(min=1, help="Layers in the first stage (default: even split).")]
LastStage = Annotated[int | None, typer.Option(min=1, help="Layers in the last stage (default: even split).")]
ShardGb = Annotated[float, typer.Option(min=0, help="Maximum size of a weights file in GB (10^9 bytes).")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Target dtype (default: unchanged).")
]
Verify = Annotated[bool, typer.Option(help="Verify checksums of a run's checkpoint, and read the output back.")]


@app.command()
def hf_to_megatron(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder with safetensors.")],
    out: Out,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_stage_layers: FirstStage = None,
    last_stage_layers: LastStage = None,
    dtype: Dtype = None,
    verify: Verify = True,
) -> None:
    """Convert a Hugging Face folder to a Megatron checkpoint, which can be loaded with any layout."""
    from megarl.megatron.checkpoint.conversion import huggingface_to_megatron, layout_of_files

    with _options(dtype, verify) as options:
        layout = layout_of_files(tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers)
        _report(out, huggingface_to_megatron(hf, out, layout, options))


@app.command()
def megatron_to_hf(
    checkpoint: Checkpoint,
    out: Out,
    hf: HuggingFace = None,
    shard_gb: ShardGb = 5.0,
    dtype: Dtype = None,
    verify: Verify = True,
) -> None:
    """Convert a Megatron checkpoint to a Hugging Face folder."""
    from megarl.megatron.checkpoint.conversion import megatron_to_huggingface

    with _options(dtype, verify) as options:
        _report(out, megatron_to_huggingface(checkpoint, out, hf, round(shard_gb * 1e9), options))


@app.command()
def adapters_to_hf(
    checkpoint: Checkpoint,
    out: Out,
    hf: Annotated[Path | None, typer.Option(help="Folder of the base model (default: the run's model.path).")] = None,
    shard_gb: ShardGb = 5.0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Target dtype (default: the run's).")
    ] = None,
    verify: Verify = True,
) -> None:
    """Merge the adapters of a LoRA run's checkpoint into the model and write a Hugging Face folder."""
    from megarl.megatron.checkpoint.adapters import adapters_to_huggingface

    with _options(dtype, verify) as options:
        _report(out, adapters_to_huggingface(checkpoint, out, options, hf, round(shard_gb * 1e9)))


@app.command()
def adapters_to_peft(checkpoint: Checkpoint, out: Out) -> None:
    """Write the adapters of a LoRA run's checkpoint as a PEFT folder, or in the diffusers format if it is an image
    model."""
    from megarl.megatron.checkpoint.adapters import adapters_to_peft

    _report(out, adapters_to_peft(checkpoint, out))


@app.command()
def reshape(
    checkpoint: Checkpoint,
    out: Out,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_stage_layers: FirstStage = None,
    last_stage_layers: LastStage = None,
    hf: HuggingFace = None,
    dtype: Dtype = None,
    verify: Verify = True,
) -> None:
    """Convert a Megatron checkpoint to another layout, including optimizer state."""
    from megarl.megatron.checkpoint.conversion import layout_of_files, reshape

    with _options(dtype, verify) as options:
        layout = layout_of_files(tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers)
        _report(out, reshape(checkpoint, out, layout, hf, options))


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Megatron checkpoint (torch_dist), or a run's checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every tensor.")] = False,
) -> None:
    """Print a checkpoint's model, tensors, dtypes and files."""
    from megarl.megatron.checkpoint.description import describe

    description = describe(checkpoint)
    typer.echo(json.dumps(description.__dict__, indent=1) if as_json else description.text())


@app.callback()
def _callback() -> None:
    prepare_process()


def prepare_process() -> None:
    """Configure this process before torch and Megatron are imported."""
    # Raise SystemExit on SIGTERM, so that an interrupted conversion deletes its partial output.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Importing Megatron emits warnings about optional packages that conversions do not need.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Allocate tensors in huge pages, because page faults of small pages would take longer than filling the tensors.
    # torch reads this variable only once.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Hide the GPUs, because conversions run on the CPU. This avoids CUDA contexts, and Megatron skips its compiler.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _with_options(text: str) -> str:
    """Replace layout keys in an error message with the corresponding command-line options."""
    from megarl.resharding.selection import ONE_PROCESS

    keys = "|".join(ONE_PROCESS)
    pattern = rf"\b({keys})(?==)|(?<=\bset )({keys})\b|(?<=\braise )({keys})\b"
    return re.sub(pattern, lambda match: f"--{match[0].replace('_', '-')}", text)


@contextmanager
def _options(dtype: str | None, verify: bool) -> Iterator[Options]:
    """Yield the options for a conversion, with one progress bar per task. Error messages name command-line options
    instead of config keys."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from megarl.megatron.checkpoint.conversion import Options

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        tasks = {}

        def progress(action: str, num_bytes: int, total: int) -> None:
            if action not in tasks:
                tasks[action] = bar.add_task(action, total=total)
            bar.advance(tasks[action], num_bytes)

        try:
            yield Options(dtype, verify, progress)
        except UserError as error:
            raise UserError(_with_options(str(error))) from None


def _report(out: Path, num_bytes: int) -> None:
    typer.echo(f"{out}: {num_bytes / 1e9:.3f} GB of tensors")
