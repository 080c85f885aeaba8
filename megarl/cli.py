"""The `megarl` command, arguments only: modules that need torch, Megatron, vLLM or Ray are imported in the commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import megarl
from megarl.core.collector import imports
from megarl.core.errors import UserError

app = typer.Typer(
    help="Reinforcement learning of language models: Megatron-core trains, vLLM samples.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at a recipe without running it.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

LONGEST_GRACE_S = 3600.0
"""The most time that `megarl join` waits for the run's end after a signal; the run has less, by checkpoint.grace_s."""

Recipe = Annotated[Path, typer.Argument(metavar="FILE", help="A recipe, such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to change, such as run.steps=3.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megarl {megarl.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Made if it is missing.")] = Path(),
) -> None:
    """Write a recipe with data and a reward function of your own to start from. Nothing is overwritten."""
    from megarl.config import starter

    recipe, *others = starter.write(folder)
    typer.echo(f"wrote {recipe}, {' and '.join(map(str, others))}")
    typer.echo(f"next: megarl check {shlex.quote(str(recipe))}, then megarl train {shlex.quote(str(recipe))}")


@config_app.command()
def show(file: Recipe, overrides: Overrides = None) -> None:
    """Print every key of a recipe with its value."""
    from megarl.config.load import dump, load

    typer.echo(dump(load(file, overrides or ())), nl=False)


@config_app.command()
def explain(file: Recipe, overrides: Overrides = None) -> None:
    """Print the batch arithmetic of a recipe, and check it against the models that are on this machine."""
    from megarl.config.explain import explain
    from megarl.config.load import load
    from megarl.models.run_models import check_local_models
    from megarl.resharding.selection import check_all_selections

    config = load(file, overrides or ())
    typer.echo(explain(config))
    lines, hf_configs = check_local_models(config)
    check_all_selections(config, hf_configs)
    for line in lines:
        typer.echo(f"model       {line}")


@app.command()
def check(file: Recipe, overrides: Overrides = None) -> None:
    """Check all that can be known of a recipe before it runs: rewards, models, data, memory, disk.

    These are the checks that `megarl train` begins with. A model that is not here yet is fetched, as for a run.
    """
    from megarl.config.load import load

    config = load(file, overrides or ())
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        from megarl.run.context import exit_status
        from megarl.run.preflight import print_checks

        raise typer.Exit(exit_status(print_checks, config, scratch))


@app.command()
def train(
    file: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run where, as megarl check does, and start nothing.")
    ] = False,
) -> None:
    """Run a recipe."""
    if dry_run:
        return check(file, overrides)
    from megarl.config.load import load

    config = load(file, overrides or ())
    from megarl.run.beginning import check_beginning

    if line := check_beginning(config):
        typer.echo(line)
        return
    from megarl.cluster.supervision.supervisor import supervised

    with supervised(config.checkpoint.grace_s) as scratch:
        with imports():
            if config.is_offline:
                from megarl.finetune import main
            else:
                from megarl.train import main
        raise typer.Exit(main(config, scratch))


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="As model.path in a recipe, such as runs/latest/model.")
    ],
    file: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For samples and results (RUN_FOLDER/RUN_NAME.evaluation).")
    ] = None,
) -> None:
    """Evaluate a model on the evaluation sets of a recipe, and train nothing."""
    import json

    from megarl.config.load import load

    config = load(file, [f"model.path={json.dumps(model)}", "model.revision=null", *(overrides or ())])
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        with imports():
            from megarl.run.evaluate import main
        folder = out or Path(config.run.folder) / f"{config.run.name}.evaluation"
        raise typer.Exit(main(config, folder.expanduser().absolute(), scratch))


@app.command()
def join(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The run's, which all nodes see, such as runs/quickstart.")
    ],
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="For the run to begin.")] = 600.0,
) -> None:
    """Give this machine to a run of several nodes (cluster.nodes), which `megarl train` begins on another."""
    from megarl.cluster.supervision.supervisor import supervised

    with supervised(grace_s=LONGEST_GRACE_S) as scratch:
        from megarl.cluster.nodes.join import main

        raise typer.Exit(main(folder, scratch, wait))


@app.command()
def launch(
    file: Recipe,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option(metavar="N", help="Nodes that the run takes.")],
    time: Annotated[
        str, typer.Option(metavar="TIME", help="Of one allocation, such as 4:00:00; the run goes on in others.")
    ],
    spares: Annotated[int, typer.Option(metavar="N", help="Further nodes, for those that are lost.")] = 0,
    fewest_nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Go on with fewer replicas while this many nodes are left.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="0 without GPUs.")] = 8,
    gpu: Annotated[str, typer.Option(metavar="GPU", help="Their kind, as in megarl plan.")] = "H100-80GB",
    partition: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="OPTION", help="Of sbatch, such as --qos=high.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="Of the script, such as 'module load cuda'.")
    ] = None,
    grace: Annotated[int, typer.Option(metavar="SECONDS", help="Before the end, when the run is told to save.")] = 120,
    restarts: Annotated[int, typer.Option(metavar="N", help="Further attempts in an allocation.")] = 3,
    stalled: Annotated[int, typer.Option(metavar="N", help="Attempts without a new checkpoint, to give up after.")] = 3,
    container: Annotated[str, typer.Option(metavar="KIND", help="none, pyxis, enroot or apptainer.")] = "none",
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="The container's.")] = None,
    mount: Annotated[list[str] | None, typer.Option(metavar="SOURCE:DESTINATION", help="For the container.")] = None,
    command: Annotated[str | None, typer.Option(metavar="COMMAND", help="Of megarl on the nodes.")] = None,
    template: Annotated[Path | None, typer.Option(metavar="FILE", help="Your copy of launch/slurm.sbatch.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE,VALUE", help="A run for each value, as a job array.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write config and script, and submit nothing.")] = False,
) -> None:
    """Run a recipe as a Slurm job that saves before its time is over and goes on by itself."""
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
    for line in submit.launch(file, overrides or (), request, sweep or (), dry_run):
        typer.echo(line)


@app.command()
def node(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's.")]) -> None:
    """Take part in a job's run on this node: what the script of megarl launch starts."""
    from megarl.launch.task import main

    raise typer.Exit(main(folder))


@app.command()
def reshard(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A recipe, in place of --model, --from and --to."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Hugging Face config.json, or as model.path in a recipe.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="tp=8,pp=16,ep=32,etp=1,dp=4 or hf.")
    ] = None,
    destination: Annotated[
        str | None, typer.Option("--to", metavar="LAYOUT", help="vllm:tp=8,replicas=32, tp=4 or hf.")
    ] = None,
    nodes_of: Annotated[int, typer.Option(metavar="RANKS", help="Ranks on a node.")] = 8,
    bandwidth: Annotated[
        str, typer.Option(metavar="SPEEDS", help="Of one rank, between nodes and inside one, each direction.")
    ] = "inter=50GB/s,intra=400GB/s",
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Both share devices, rank by rank; else they are on different nodes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan how weights move from one layout to another, prove it, and predict its cost. Nothing is moved.

    Of a recipe: from its actor to its engines, on the devices that cluster.placement gives them.
    """
    import json

    from megarl.resharding.planning.preview import reshard, table

    sides = {"--model": model, "--from": source, "--to": destination}
    if file is not None:
        from megarl.config.load import load
        from megarl.planner.refit_preview import preview_refit, transport_of

        given = [option for option, value in {**sides, "--colocated": colocated or None}.items() if value is not None]
        if given:
            raise UserError(f"{given[0]}: {file} is a recipe, which says this itself; leave one of them away")
        config = load(file, overrides or ())
        found = preview_refit(config, nodes_of, bandwidth)
        if not as_json:
            typer.echo(f"refit    {transport_of(config, found)}")
    else:
        missing = [option for option, value in sides.items() if value is None]
        if missing:
            raise UserError(f"{missing[0]}: it is missing; give {', '.join(sides)}, or a recipe")
        found = reshard(model, source, destination, nodes_of, bandwidth, colocated)
    typer.echo(json.dumps(found.as_dict()) if as_json else table(found))


@app.command()
def plan(
    file: Recipe,
    overrides: Overrides = None,
    *,
    gpus: Annotated[str, typer.Option(metavar="GPUS", help="Their number and kind, such as 64xH100-80GB.")],
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="Explain the recipe's own layout; refuse it if it cannot fit.")
    ] = False,
    nodes_of: Annotated[int, typer.Option(metavar="GPUS", help="GPUs on a node.")] = 8,
    prompt_tokens: Annotated[float | None, typer.Option(metavar="TOKENS", help="Of a prompt, the mean.")] = None,
    response_tokens: Annotated[
        float | None, typer.Option(metavar="TOKENS", help="Of a response, the mean (half of the longest).")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate steps whose rollouts begin ahead (rollout.max_staleness).")
    ] = False,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rollouts of a run, whose lengths the simulation has.")
    ] = None,
    emit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the first plan as a recipe.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a picture of it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rank the layouts of a recipe that fit on GPUs, by the predicted time of a step. Pure arithmetic."""
    import json
    from dataclasses import asdict
    from importlib.util import find_spec

    from megarl.config.load import load
    from megarl.planner import plan_text
    from megarl.planner.hardware import read_cluster
    from megarl.planner.plan import plan_recipe, recorded, simulate_steps

    if html is not None and find_spec("matplotlib") is None:  # said before a file of --emit is written
        raise UserError(f"--html {html}: it needs matplotlib; pip install 'megarl[run]'")
    config = load(file, overrides or ())
    planned = plan_recipe(config, read_cluster(gpus, nodes_of), as_it_is, prompt_tokens, response_tokens)
    found = simulate_steps(planned, recorded(lengths)) if simulate or lengths is not None else None
    if as_json:
        simulated = {} if found is None else {"simulated": {key: asdict(run) for key, run in found.items()}}
        typer.echo(json.dumps(plan_text.as_dict(planned) | simulated))
    else:
        typer.echo(plan_text.table(planned))
        if found is not None:
            typer.echo("\n" + plan_text.simulated_table(found))
    if emit is not None:
        plan_text.emit(planned, file, overrides or (), config, emit, gpus)
        typer.echo(f"wrote {emit}", err=as_json)
    if html is not None:
        from megarl.planner import plan_page

        plan_page.write(planned, html)
        typer.echo(f"wrote {html}", err=as_json)


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them, such as rloo.")] = None,
) -> None:
    """List the estimators, objectives, KL forms and aggregations with their options, or show how to choose one."""
    from megarl.config.algorithms import describe, describe_one

    typer.echo(describe() if name is None else describe_one(name))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where runs are to be kept.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings.")] = False,
) -> None:
    """Look at this machine: versions, GPUs, memory, disk, limits. The exit code is 1 if something is to be changed."""
    import json
    from dataclasses import asdict

    from megarl.planner.doctor.examine import examine, table

    findings = examine(folder)
    typer.echo(json.dumps([asdict(finding) for finding in findings]) if as_json else table(findings))
    raise typer.Exit(int(any(finding.state == "problem" for finding in findings)))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="A run, such as runs/latest, or several.")],
) -> None:
    """Write the report of a run, or the comparison of several into the folder of the first, and print its path."""
    import megarl.report
    from megarl.report import comparison

    typer.echo(megarl.report.write(folders[0]) if len(folders) == 1 else comparison.write(folders))


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run that samples, such as runs/latest.")],
    step: Annotated[int | None, typer.Option(metavar="STEP", help="Whose rollout (the newest).")] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="ID", help="Of a sample in the step's file (the first that has token ids).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the weights (those that the run ended or began with).")
    ] = None,
) -> None:
    """Compute a saved rollout in trainer, engine and plain transformers, and name the first layer that differs.

    Each is one process on this machine, one after the other. The exit code is 1 where a layer differs.
    """
    from megarl.run.diagnosis.diagnose import find_rollout, read_config

    read_config(folder)
    find_rollout(folder, step, sample)
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        from megarl.run.diagnosis.diagnose import main

        raise typer.Exit(main(folder, step, sample, model, scratch))


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run, under way or ended.")],
    port: Annotated[int, typer.Option(metavar="PORT", help="0 for a free one.")] = 0,
) -> None:
    """Show the report of a run in a browser on this machine, renewed as it goes on. Ctrl-C ends it, not the run."""
    from contextlib import suppress

    from megarl.report.live import serve

    with serve(folder, port) as (address, answer), suppress(KeyboardInterrupt):
        typer.echo(address)
        sys.stdout.flush()
        answer()


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run, such as runs/latest.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="FOLDER/trace.json where it is left out.")
    ] = None,
) -> None:
    """Write what each process of a run did when, for https://ui.perfetto.dev or chrome://tracing."""
    from megarl.report import chrome_trace

    typer.echo(chrome_trace.write(folder, out))


def main() -> None:
    """Runs the command and exits with its code. The lines of a UserError go to stderr, and the exit code is 2."""
    try:
        app()
    except UserError as error:
        for line in (str(error) or repr(error)).splitlines():
            print(f"megarl: error: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
