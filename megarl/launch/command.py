"""The commands `megarl launch` and `megarl node`. Their functions import the launcher lazily, so that `--help` stays
fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="FILE", help="Recipe, such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to override, such as run.steps=3.")
]

AllowChanges = Annotated[
    list[str] | None,
    typer.Option("--allow-changes", metavar="KEY", help="Key that may change when the run resumes (repeatable)."),
]
"""Keys to add to run.allow_changes."""


def with_allowed(file: Path, overrides: list[str] | None, allow_changes: list[str] | None) -> list[str]:
    """Return the overrides, with the given keys added to the recipe's run.allow_changes. Commas may separate keys."""
    overrides, keys = overrides or [], [key.strip() for text in allow_changes or () for key in text.split(",")]
    if not keys:
        return overrides
    from megarl.config.load import changes_allowed_by

    listed = changes_allowed_by(file, overrides)
    return [*overrides, f"run.allow_changes={json.dumps([*listed, *(key for key in keys if key not in listed)])}"]


def launch(
    file: Recipe,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of nodes that the run uses.")],
    time: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Time limit per allocation, such as 4:00:00. The run resumes in the next allocation."
        ),
    ],
    spares: Annotated[int, typer.Option(metavar="N", help="Number of spare nodes that replace lost nodes.")] = 0,
    fewest_nodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="After node losses, continue on at least N nodes with fewer replicas."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="GPUs per node, 0 for CPU runs.")] = 8,
    gpu: Annotated[str, typer.Option(metavar="GPU", help="GPU type, as in megarl plan.")] = "H100-80GB",
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Additional sbatch option, such as --qos=high.")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="Setup line in the script, such as 'module load cuda'.")
    ] = None,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", help="Seconds before the time limit at which the run saves.")
    ] = 120,
    restarts: Annotated[int, typer.Option(metavar="N", help="Restarts within one allocation.")] = 3,
    stalled: Annotated[int, typer.Option(metavar="N", help="Give up after N attempts without a new checkpoint.")] = 3,
    container: Annotated[
        str, typer.Option(metavar="KIND", help="Container runtime: none, pyxis, enroot or apptainer.")
    ] = "none",
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image.")] = None,
    mount: Annotated[list[str] | None, typer.Option(metavar="SOURCE:DESTINATION", help="Container mount.")] = None,
    command: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Command that starts megarl on the nodes.")
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Job script template, such as a modified copy of launch/slurm.sbatch."),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,VALUE", help="Submit one run per value as a job array.")
    ] = None,
    allow_changes: AllowChanges = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write config and script without submitting the job.")
    ] = False,
) -> None:
    """Submit a recipe as a Slurm job that saves before its time limit and resumes automatically."""
    from megarl.launch import submit
    from megarl.launch.request import Request

    request = Request(
        nodes=nodes,
        time=time,
        spares=spares,
        fewest=fewest_nodes,
        gpus=gpus_per_node,
        gpu=gpu,
        partition=partition,
        account=account,
        grace=grace,
        restarts=restarts,
        stalled=stalled,
        container=container,
        image=image,
        mounts=mount or (),
        command=command,
        setup=setup or (),
        options=option or (),
        template=template,
    )
    for line in submit.launch(file, with_allowed(file, overrides, allow_changes), request, sweep or (), dry_run):
        typer.echo(line)


def node(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Run folder.")]) -> None:
    """Run this node's part of a Slurm job. The script from megarl launch calls it."""
    from megarl.launch.task import main

    raise typer.Exit(main(folder))
