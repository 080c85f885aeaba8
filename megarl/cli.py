"""The `megarl` command line. Commands import torch, Megatron, vLLM and Ray lazily, so that `--help` stays fast."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import megarl
from megarl.api import convert
from megarl.core.collector import imports
from megarl.core.command_group import CommandGroup
from megarl.core.errors import RunFailure, UserError, missing_module, print_error
from megarl.core.output import escape_unencodable
from megarl.launch.command import AllowChanges, Overrides, Recipe, launch, node, with_allowed

if TYPE_CHECKING:
    from megarl.config.schema import Config

app = typer.Typer(
    help="Reinforcement learning for language and image models. Megatron-core trains; vLLM or diffusers samples.",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    cls=CommandGroup, help="Inspect a recipe without running it.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")
app.add_typer(convert.app, name="convert")

MAX_GRACE_S = 3600.0
"""Maximum time in seconds that `megarl join` gives the run to finish after a signal. The run itself is limited by
checkpoint.grace_s."""


def _load(file: Path, overrides: list[str] | None) -> Config:
    from megarl.config.load import load

    return load(file, overrides or ())


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
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Target folder, created if missing.")] = Path(),
) -> None:
    """Create a starter recipe with example data and a reward function. Existing files are never overwritten."""
    from megarl.config import starter

    recipe, *others = starter.write(folder)
    typer.echo(f"wrote {recipe}, {' and '.join(map(str, others))}")
    command = shlex.quote(str(recipe.absolute()))  # an absolute path works from every directory
    typer.echo(f"next: megarl check {command}, then megarl train {command}")


@config_app.command()
def show(file: Recipe, overrides: Overrides = None) -> None:
    """Print the resolved recipe: every key with its value."""
    from megarl.config.load import dump

    typer.echo(dump(_load(file, overrides)), nl=False)


@config_app.command()
def explain(file: Recipe, overrides: Overrides = None) -> None:
    """Print a recipe's batch arithmetic, and check the recipe against its models if they are available locally."""
    from megarl.config.explain import explain
    from megarl.models.run_models import check_local_models
    from megarl.resharding.selection import check_all_selections

    config = _load(file, overrides)
    typer.echo(explain(config))
    lines, hf_configs = check_local_models(config)
    check_all_selections(config, hf_configs)
    for line in lines:
        typer.echo(f"model       {line}")


@app.command()
def check(file: Recipe, overrides: Overrides = None, allow_changes: AllowChanges = None) -> None:
    """Check a recipe's rewards, models, data, memory and disk without running it.

    `megarl train` runs the same checks at startup. Models that are not in the local cache are downloaded.
    """
    config = _load(file, with_allowed(file, overrides, allow_changes))
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        from megarl.run.context import exit_status
        from megarl.run.preflight import print_checks

        raise typer.Exit(exit_status(print_checks, config, scratch))


@app.command()
def train(
    file: Recipe,
    overrides: Overrides = None,
    allow_changes: AllowChanges = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run the checks of megarl check and exit without training.")
    ] = False,
) -> None:
    """Train a model with a recipe."""
    if dry_run:
        return check(file, overrides, allow_changes)
    config = _load(file, with_allowed(file, overrides, allow_changes))
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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or Hub id, such as runs/latest/model.")],
    file: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder (default: RUN_FOLDER/RUN_NAME.evaluation).")
    ] = None,
) -> None:
    """Evaluate a model on a recipe's evaluation sets without training."""
    import json

    config = _load(file, [f"model.path={json.dumps(model)}", "model.revision=null", *(overrides or ())])
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        with imports():
            from megarl.run.evaluate import main
        folder = out or Path(config.run.folder) / f"{config.run.name}.evaluation"
        raise typer.Exit(main(config, folder.expanduser().absolute(), scratch))


@app.command()
def join(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Run folder on a shared file system, such as runs/quickstart.")
    ],
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds to wait for the run to start.")] = 600.0,
    spare: Annotated[bool, typer.Option("--spare", help="Join as an idle node that may replace a lost one.")] = False,
) -> None:
    """Join this machine to a multi-node run (cluster.nodes) that `megarl train` starts on another machine."""
    from megarl.cluster.supervision.supervisor import supervised

    with supervised(grace_s=MAX_GRACE_S) as scratch:
        from megarl.cluster.nodes.join import main

        raise typer.Exit(main(folder, scratch, wait, spare))


app.command()(launch)
app.command()(node)


@app.command()
def reshard(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Recipe whose refit to plan, instead of --model, --from and --to."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Hugging Face config.json, model folder or Hub id.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="LAYOUT", help="Source layout: tp=8,pp=16,ep=32,etp=1,dp=4 or hf.")
    ] = None,
    destination: Annotated[
        str | None,
        typer.Option("--to", metavar="LAYOUT", help="Destination layout: vllm:tp=8,replicas=32, tp=4 or hf."),
    ] = None,
    nodes_of: Annotated[int, typer.Option(metavar="RANKS", help="Ranks per node.")] = 8,
    bandwidth: Annotated[
        str, typer.Option(metavar="SPEEDS", help="Bandwidth per rank and direction, between and within nodes.")
    ] = "inter=50GB/s,intra=400GB/s",
    colocated: Annotated[
        bool,
        typer.Option("--colocated", help="Place source and destination on the same devices (default: separate nodes)."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan, verify and cost the transfer of weights between two layouts without moving data.

    With a recipe, plan its refit: from the actor to the engines, on the devices that cluster.placement assigns.
    """
    import json

    from megarl.resharding.planning.preview import reshard, table

    sides = {"--model": model, "--from": source, "--to": destination}
    if file is not None:
        from megarl.planner.refit_preview import preview_refit, transport_of

        options = {**sides, "--colocated": colocated or None}
        if redundant := [option for option, value in options.items() if value is not None]:
            raise UserError(f"{redundant[0]}: conflicts with the recipe {file}. Fix: pass only one of them")
        config = _load(file, overrides)
        preview = preview_refit(config, nodes_of, bandwidth)
        if not as_json:
            typer.echo(f"refit    {transport_of(config, preview)}")
    elif model is None or source is None or destination is None:
        missing = next(option for option, value in sides.items() if value is None)
        raise UserError(f"{missing}: required without a recipe. Fix: pass {', '.join(sides)}, or pass a recipe instead")
    else:
        preview = reshard(model, source, destination, nodes_of, bandwidth, colocated)
    typer.echo(json.dumps(preview.as_dict()) if as_json else table(preview))


@app.command()
def plan(
    file: Recipe,
    overrides: Overrides = None,
    *,
    gpus: Annotated[str, typer.Option(metavar="GPUS", help="GPU count and type, such as 64xH100-80GB.")],
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Evaluate the recipe's own layout, and fail if it does not fit.")
    ] = False,
    nodes_of: Annotated[int, typer.Option(metavar="GPUS", help="GPUs per node.")] = 8,
    headroom: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Fraction of GPU memory to leave free (default: 0.08; 0 with --as-is)."),
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(metavar="TOKENS", help="Mean prompt length.")] = None,
    response_tokens: Annotated[
        float | None, typer.Option(metavar="TOKENS", help="Mean response length (default: half of the maximum).")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate steps with asynchronous rollouts (rollout.max_staleness).")
    ] = False,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rollout file with response lengths for the simulation.")
    ] = None,
    emit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the best plan as a recipe.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page that visualizes the best plan.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Compare the best plan with a run's time ledger.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rank the layouts that fit on the given GPUs by predicted step time. Nothing is run."""
    import json
    from dataclasses import asdict

    from megarl.planner import plan_text
    from megarl.planner.hardware import headroom_of, read_cluster
    from megarl.planner.plan import plan_recipe, recorded, simulate_steps

    config = _load(file, overrides)
    cluster = read_cluster(gpus, nodes_of, headroom_of(headroom, as_is))
    planned = plan_recipe(config, cluster, as_is, prompt_tokens, response_tokens)
    simulations = simulate_steps(planned, recorded(lengths)) if simulate or lengths is not None else None
    if as_json:
        simulated = {} if simulations is None else {"simulated": {key: asdict(run) for key, run in simulations.items()}}
        typer.echo(json.dumps(plan_text.as_dict(planned) | simulated))
    else:
        typer.echo(plan_text.table(planned))
        if simulations is not None:
            typer.echo("\n" + plan_text.simulated_table(simulations))
    if run is not None:
        from dataclasses import replace

        from megarl.planner.predicted_time import predicted_causes
        from megarl.run.time_ledger import read_ledger

        measured = replace(read_ledger(run), predicted=predicted_causes(planned.best))
        typer.echo("\n" + measured.describe(), err=as_json)
    if emit is not None:
        plan_text.emit(planned, file, overrides or (), config, emit, gpus)
        typer.echo(f"wrote {emit}", err=as_json)
    if html is not None:
        from megarl.planner import plan_page

        plan_page.write(planned, html)
        typer.echo(f"wrote {html}", err=as_json)


@app.command()
def algorithms(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Estimator or objective, such as rloo (default: all).")
    ] = None,
) -> None:
    """List advantage estimators, objectives, KL forms and aggregations, or show how to use one estimator or
    objective."""
    from megarl.config.algorithms import describe, describe_one

    typer.echo(describe() if name is None else describe_one(name))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings.")] = False,
) -> None:
    """Check this machine's packages, GPUs, memory, disk and limits. The exit code is 1 if there is a problem."""
    import json
    from dataclasses import asdict

    from megarl.planner.doctor.examine import examine, table

    findings = examine(folder)
    typer.echo(json.dumps([asdict(finding) for finding in findings]) if as_json else table(findings))
    raise typer.Exit(int(any(finding.state == "problem" for finding in findings)))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Run folders, such as runs/latest.")],
) -> None:
    """Write an HTML report and print its path. A comparison of several runs is written to the first folder."""
    import megarl.report
    from megarl.report import comparison

    typer.echo(megarl.report.write(folders[0]) if len(folders) == 1 else comparison.write(folders))


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Run folder, such as runs/latest.")],
    reads_all: Annotated[
        bool, typer.Option("--all", help="Compare every rollout file with the ledger (default: about 64 MB of them).")
    ] = False,
) -> None:
    """Prove from a run's files which step trained on which rows and with which weights.

    Exit with 1 and print the first contradiction if the files disagree.
    """
    from megarl.run.audit.audit import audit

    is_proven, lines = audit(folder, reads_all)
    typer.echo("\n".join(lines), err=not is_proven)
    raise typer.Exit(int(not is_proven))


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of an RL run, such as runs/latest.")],
    step: Annotated[int | None, typer.Option(metavar="STEP", help="Step of the rollout (default: the newest).")] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="ID", help="Sample id (default: the first sample with token ids).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Model folder (default: the exported or the initial model).")
    ] = None,
) -> None:
    """Compare trainer, engine and transformers on a saved rollout and report the first layer that differs.

    The three run one after another on this machine. The exit code is 1 if a layer differs.
    """
    from megarl.run.diagnosis.diagnose import find_rollout, read_run_config

    read_run_config(folder)
    find_rollout(folder, step, sample)
    from megarl.cluster.supervision.supervisor import supervised

    with supervised() as scratch:
        from megarl.run.diagnosis.diagnose import main

        raise typer.Exit(main(folder, step, sample, model, scratch))


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a running or finished run.")],
    port: Annotated[int, typer.Option(metavar="PORT", help="Port, 0 for any free port.")] = 0,
) -> None:
    """Serve a live report of a run on localhost. Ctrl-C stops the server, not the run."""
    from contextlib import suppress

    from megarl.report.live import serve

    with serve(folder, port) as (address, server), suppress(KeyboardInterrupt):
        typer.echo(address)
        sys.stdout.flush()
        server.serve_forever()


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Run folder, such as runs/latest.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Output file (default: FOLDER/trace.json).")
    ] = None,
) -> None:
    """Write a timeline of a run's processes for https://ui.perfetto.dev or chrome://tracing."""
    from megarl.report import chrome_trace

    typer.echo(chrome_trace.write(folder, out))


def main() -> None:
    """Run the command and exit with its status. For a UserError or RunFailure, print the error to stderr and exit with
    the error's exit code. If an optional package is missing, print how to install it."""
    escape_unencodable()
    try:
        app()
    except (UserError, RunFailure) as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        line = missing_module(error)
        if line is None:
            raise
        print_error(line)
        sys.exit(UserError.exit_code)


if __name__ == "__main__":
    main()
