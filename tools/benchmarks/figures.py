"""The tables in the documentation of what was measured, from the recorded results.

.venv/bin/python tools/benchmarks/figures.py --write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # as a script, and as a module of the tests

from tools.benchmarks.machine import QUIET_PERCENT  # noqa: E402
from tools.benchmarks.published_steps import FACTOR  # noqa: E402

RESULTS = Path(__file__).with_name("results")
WIDTH = 120
PLANNED = {
    "deepseek-v3": "DeepSeek-V3 (671B)",
    "deepseek-v3-whole-experts": "…, whole experts on each worker",
    "llama-3.1-405b": "Llama-3.1-405B",
    "qwen3-235b-nemo-rl-16-nodes": "Qwen3-235B-A22B, NeMo-RL's layout",
    "qwen3-235b-nemo-rl-32-nodes": "…, NeMo-RL's on more nodes",
    "qwen3-235b-slime": "…, slime's",
    "qwen3-235b-verl": "…, verl's",
    "qwen3-235b-verl-colocated": "…, verl's, on the same GPUs",
}
"""Cases of reshard.py, in the order of its results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put them into their pages, between their markers")
    if parser.parse_args().write:
        write()
    else:
        print("\n\n".join(make() for blocks in PAGES.values() for make in blocks.values()))


def write() -> None:
    """Renders the blocks of every page from the results, in place."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(rendered(page, path.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(page: str, content: str) -> str:
    """Returns the page with its blocks as the results make them, each between <!-- NAME:begin --> and
    <!-- NAME:end -->."""
    for name, make in PAGES[page].items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = content.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{page} has no {begin} with {end} after it; put the markers back")
        content = f"{before}{begin}\n{make()}\n{end}{after}"
    return content


def headlines() -> str:
    """The README's figures: a line for each of the larger comparisons."""
    run, against_trl, refitting, head = map(result, ("quickstart", "step_vs_trl", "refit", "linear_head"))
    megarl, trl = against_trl["megarl"], against_trl["trl"]
    seconds = megarl["median_seconds"]["step"] / trl["median_seconds"]["step"]
    memory = megarl["peak_pss_gb"] / trl["peak_pss_gb"]
    speed = result("step_mixed")["ratio_of_tokens_per_second"]
    logits = 100 * head["share_of_logits"]["tiled"]
    plan = result("reshard")["runs"]["deepseek-v3"]
    lead = f"""{machine_of(run)}. The [benchmarks](tools/benchmarks/README.md) have all figures, and how each was
        taken."""
    rows = [
        [
            "`make quickstart` on a fresh clone (model converted before)",
            f"{run['seconds']['total'] / 60:.1f} minutes, {run['peak_pss_gb']:.2f} GB at its peak",
        ],
        [
            f"A step of it, against TRL {trl['versions']['trl']}'s `GRPOTrainer`",
            f"{seconds:.2f} of the time, {memory:.2f} of the memory",
        ],
        [
            "Training on samples of mixed lengths, against transformers, padded",
            f"{speed:.2f} × the tokens per second",
        ],
        [
            f"A refit of {refitting['gigabytes']:.2f} GB over gloo, against gathering and loading whole tensors",
            f"{refitting['gloo, against the common way']:.1f} × as fast",
        ],
        [
            f"The head in tiles, against full logits of {head['vocabulary']:,} entries a token",
            f"{head['ratio_of_seconds']:.2f} of the time, {logits:.1f} % of the logits' memory",
        ],
        [
            f"Planning and proving a refit of {PLANNED['deepseek-v3']}, {moved(plan)}",
            f"{plan['seconds']:.0f} s, {plan['peak_gb']:.2f} GB",
        ],
    ]
    return f"{text(lead)}\n\n{table(['', ''], rows)}"


def figures() -> str:
    training = (step_against_trl, training_step, update_against_trl)
    sections = (
        quickstart,
        *training,
        shared_prefixes,
        refit,
        saving,
        converting,
        linear_head,
        sampling,
        staleness,
        environments,
        rounding,
        lost_updates,
        memory,
        rewards,
        driver,
        start,
        sandbox,
        plans,
    )
    return "\n\n".join(section() for section in sections)


def learning() -> str:
    header = ["", "at the start", "at the end", "steps until 0.9", "control"]
    rows = []
    for name, run in result("learning")["runs"].items():
        unknown = "at most" if run["last"] >= 0.9 else "not in"
        until = str(run["steps_to_optimum"] or f"{unknown} {run['steps']}")
        control = "" if run["control_last"] is None else f"{run['control_last']:.2f}"
        rows.append([name, f"{run['first']:.2f}", f"{run['last']:.2f}", until, control])
        for part, shares in run.get("parts", {}).items():
            rows.append([f"{name}: {part}", f"{shares['first']:.2f}", f"{shares['last']:.2f}", "", ""])
    return table(header, rows)


def published() -> str:
    runs = result("published_steps")["runs"]
    models = list(dict.fromkeys(run["model"] for run in runs))  # by their size
    rows, missed = [], 0
    for run in sorted(runs, key=lambda run: (models.index(run["model"]), int(run["gpus"].partition("x")[0]))):
        off = "" if not run["overlapped"] else ", one step off"
        phases, (tp, replicas) = run["phases"], run["engines"]
        training = sum(seconds for name, seconds in phases.items() if name.startswith("actor"))
        is_miss = not 1 / FACTOR <= run["ratio"] <= FACTOR
        missed += is_miss
        rows.append(
            [
                run["model"],
                run["gpus"].replace("x", " × "),
                f"{run['who']}{off}",
                sizes(run["layout"]),
                f"{replicas} × TP{tp}",
                f"{run['seconds']:.0f} s",
                f"{run['predicted']:.0f} s",
                f"{phases['rollout']:.0f} + {training:.0f} s",
                f"{run['ratio']:.2f}{' (missed)' if is_miss else ''}",
            ]
        )
    header = ["", "GPUs", "published by", "trainer", "engines", "published", "predicted", "of it rollout, training"]
    notes = f"""Stated factor: {FACTOR:g}. {missed} of {len(rows)} runs are missed by more, both of DeepSeek-V3: what
        its engines over several nodes and its trainer wait for beside their kernels is not in the arithmetic."""
    return f"{table([*header, 'predicted / published'], rows)}\n\n{text(notes)}"


def recipes() -> str:
    rows = []
    for run in sorted(result("recipes")["runs"], key=lambda run: (run["parameters"], run["gpus"], run["recipe"])):
        engines = "–" if run["engines"] is None else f"{run['engines'][0]} × TP{run['engines'][1]}"
        rollout = "–" if run["rollout"] is None else f"{run['rollout']:.0f} s"
        ahead = "–" if run["faster_ahead"] is None else f"{run['faster_ahead']:.2f} ×"
        nodes = "1 node" if run["nodes"] == 1 else f"{run['nodes']} nodes"
        rows.append(
            [
                run["model"],
                f"{run['gpus']} ({nodes})",
                f"[{run['algorithm']}](h100/{run['recipe']}.yaml)",
                sizes(run["layout"]),
                engines,
                f"{run['seconds']:.0f} s",
                rollout,
                f"{run['training']:.0f} s",
                ahead,
                f"{run['fullest_gib']:.0f} GiB",
                f"{run['tokens'] / run['seconds'] / run['gpus']:,.0f}",
            ]
        )
    header = ["", "GPUs", "recipe", "trainer", "engines", "a step", "rollout", "training", "a step ahead"]
    return table([*header, "fullest GPU", "tokens per GPU and second"], rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headlines": headlines},
    "configs/README.md": {"learning": learning, "published": published, "recipes": recipes},
    "tools/benchmarks/README.md": {"figures": figures},
}
"""Page -> the names of its blocks, and what makes each."""


def quickstart() -> str:
    found = result("quickstart")
    seconds, reward = found["seconds"], found["reward"]
    step, steps = seconds["median_step"], len(reward["per_step"])
    lead = f"{machine_of(found)} ([data](results)):"
    what = f"`make quickstart` on a fresh clone: environment, {steps} steps, export, report (model converted before)"
    parts = f"{step['rollout']:.1f} + {step['train']:.1f} + {step['refit']:.2f}"
    rows = [
        [what, f"{seconds['total'] / 60:.1f} minutes"],
        ["Reward, first step → mean of the last three", f"{reward['first']:.2f} → {reward['last_three']:.2f}"],
        ["A step (median): rollout + training + refit", f"{parts} = {step['step']:.1f} s"],
        ["Peak memory, all processes (PSS)", f"{found['peak_pss_gb']:.2f} GB"],
        ["Largest difference of trainer's and engine's log-prob of one token", f"{found['mismatch']['max']:.0e}"],
    ]
    return f"{lead}\n\n{table(['', ''], rows)}"


def step_against_trl() -> str:
    found = result("step_vs_trl")
    megarl, trl = found["megarl"], found["trl"]
    lead = f"""The same step against TRL {trl["versions"]["trl"]}'s `GRPOTrainer` (transformers generation), same model,
        prompts, reward and machine, one after the other, by `python tools/benchmarks/step_vs_trl.py`:"""
    rows = []
    for title, name in (("total", "step"), ("rollout", "rollout"), ("training", "train")):
        rows.append(compared(title, megarl["median_seconds"][name], trl["median_seconds"][name], "s"))
    rows.append(compared("peak memory", megarl["peak_pss_gb"], trl["peak_pss_gb"], "GB"))
    slower = [
        f"{side['settings']['microbatch']}: {side['median_seconds']['step']:.0f} s and {side['peak_pss_gb']:.1f} GB"
        for side in found["trl_slower_settings"]
    ]
    others = f" (of {', of '.join(slower)})" if slower else ""
    notes = f"TRL ran with a microbatch of {trl['settings']['microbatch']}{others}."
    elsewhere = [side["cpu_percent_elsewhere"] for side in (megarl, trl)]
    if max(elsewhere) > QUIET_PERCENT:
        notes += f""" Other processes had {elsewhere[0]:.0f} % of the machine's CPU time during megarl's part and
            {elsewhere[1]:.0f} % during TRL's."""
    return f"{text(lead)}\n\n{table(['Median step', 'megarl', 'TRL', 'ratio'], rows)}\n\n{text(notes)}"


def training_step() -> str:
    lead = """One training step of SmolLM2-135M's shape, float32, against the same model in transformers with torch's
        AdamW (its fastest microbatch), same tokens and rows of the head, by
        `python tools/benchmarks/training_step.py`"""
    rows, busiest = [], {"cpu_percent_elsewhere": 0.0}
    for what, title, side, other, name, target in (
        ("equal", "samples of equal lengths", "megarl", "transformers", "transformers: ", " (target 0.9)"),
        ("mixed", "mixed lengths", "megarl", "transformers", "transformers, padded: ", ""),
        ("padded", "mixed lengths, packed against padded microbatches of megarl", "packed", "padded", "", ""),
    ):
        found = result(f"step_{what}")
        speeds = [f"{found[one]['tokens_per_second']:.0f}" for one in (side, other)]
        rows.append([title, speeds[0], name + speeds[1], f"{found['ratio_of_tokens_per_second']:.2f}{target}"])
        busiest = max(busiest, found, key=lambda one: one["cpu_percent_elsewhere"])
    return f"{text(lead + meanwhile(busiest))}\n\n{table(['Tokens per second', 'megarl', 'other', 'ratio'], rows)}"


def update_against_trl() -> str:
    found = result("step_trl")
    mixed, equal = found["mixes"]["mixed"], found["mixes"]["equal"]
    samples, size = len(mixed["lengths"]), mixed["trl"]["settings"]["samples_per_microbatch"]
    options = f"--samples {samples} --trl-microbatch {size} --updates {len(mixed['megarl']['seconds'])}"
    lead = f"""An update of GRPO against TRL {mixed["trl"]["versions"]["trl"]}'s `GRPOTrainer` on the same {samples}
        samples (its microbatch: {size}), and the memory above weights, gradients and Adam's state, by
        `python tools/benchmarks/training_step.py trl {options}`"""
    rows = []
    for title, mix in (
        ("mixed lengths (targets 0.7 and 0.5)", mixed),
        ("equal lengths, where both are bound by the same products", equal),
    ):
        sides = [
            f"{mix[side]['median_seconds']:.1f} s, {mix[side]['bytes_above_state'] / 1e6:,.0f} MB"
            for side in ("megarl", "trl")
        ]
        rows.append([title, *sides, f"{mix['ratio_of_seconds']:.2f}, {mix['ratio_of_bytes_above_state']:.2f}"])
    return f"{text(lead + meanwhile(found))}\n\n{table(['', 'megarl', 'TRL', 'ratios'], rows)}"


def shared_prefixes() -> str:
    found = result("shared_prefixes")
    lead = """An update of SmolLM2-135M in which what samples begin with stands in their pack once, against the same
        samples each by itself, the median of 3, by `python tools/benchmarks/shared_prefixes.py`"""
    rows = []
    for name, case in found["cases"].items():
        shared, apart = (median(case["seconds"][way]) for way in ("shared", "apart"))
        row = [name, f"{shared:.1f} s", f"{apart:.1f} s", f"{case['ratio_of_seconds']:.2f} (target 0.4)"]
        rows.append([*row, f"{case['ratio_of_tokens']:.2f}"])
    header = ["", "shared", "apart", "ratio", "of the tokens"]
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}"


def refit() -> str:
    found = result("refit")
    tp, pp = found["trainer"]["tp"], found["trainer"]["pp"]
    lead = f"""A refit of SmolLM2-135M's {found["gigabytes"]:.2f} GB from {tp * pp} trainer ranks (TP{tp}·PP{pp}) into
        an engine of one, by `python tools/benchmarks/refit.py`; the common way gathers whole tensors, sends them and
        calls vLLM's `load_weights`:"""
    of_copy = f"{found['shared memory, of the plain copy']:.2f} of the copy (target 0.4)"
    predicted = f"{found['predicted_seconds']:.3f} s predicted from the measured link"
    faster = f"{found['gloo, against the common way']:.1f} × as fast (target 3); {predicted}"
    rows = []
    for way, title, note in (
        ("plain copy", "a plain copy of the same bytes", ""),
        ("shared memory", "shared memory", of_copy),
        ("common way, gloo", "the common way, gloo", ""),
        ("gloo", "shard to shard, gloo", faster),
    ):
        figures = f"{median(found['seconds'][way]):.3f}", f"{found['gigabytes_per_second'][way]:.3g}"
        rows.append([title, *figures, note])
    return f"{text(lead)}\n\n{table(['', 'seconds', 'GB/s', ''], rows)}"


def saving() -> str:
    found = result("step_saving")
    saves = len(found["layouts"]["1 process"][0]["saves"])
    lead = f"""How long a save of SmolLM2-135M's shape in float32 keeps a rank from training (the median of {saves}),
        beside a plain copy of as many bytes in memory, by `python tools/benchmarks/training_step.py saving`"""
    rows = []
    for layout, ranks in found["layouts"].items():
        slowest = max(ranks, key=lambda rank: rank["stall_seconds"])
        stall, copy, disk = (slowest[key] for key in ("stall_seconds", "copy_seconds", "seconds_to_the_disk"))
        of_copy = f"{copy:.2f} s ({stall / copy:.2f})"
        rows.append([layout, f"{slowest['bytes'] / 1e9:.2f} GB", f"{stall:.2f} s", of_copy, f"{disk:.1f} s"])
    header = ["The slowest rank", "saves", "waits", "plain copy (waiting / copy)", "on the disk after"]
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}"


def converting() -> str:
    found = result("convert")
    lead = f"""`megarl convert` on a model of {found["num_parameters"] / 1e9:.1f}B parameters in bfloat16
        ({found["gb"]:.1f} GB), to TP2·PP2 and back, against reading its bytes from the disk and writing as many, by
        `python tools/benchmarks/convert.py`"""
    rows = []
    for name, run in found["runs"].items():
        plain = run["read_seconds"] + run["write_seconds"]
        figures = f"{run['seconds']:.1f} s", f"{plain:.1f} s", f"{run['ratio']:.2f}", f"{run['peak_gb']:.2f} GB"
        rows.append([f"`{name}`", *figures])
    header = ["", "takes", "plain reading and writing", "ratio (target 2)", "memory (target 2 GB)"]
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}"


def linear_head() -> str:
    found = result("linear_head")
    size = f"{found['vocabulary']:,} × {found['hidden']:,} and {found['tokens']:,} tokens"
    megabytes, share = found["tiled"]["extra_bytes"] / 1e6, 100 * found["share_of_logits"]["tiled"]
    return text(
        f"""The head against full logits, {size}, forward and backward in {found["dtype"]}, by
        `python tools/benchmarks/linear_head.py`{meanwhile(found, "")}: {found["ratio_of_seconds"]:.2f} of the time
        (target 0.9), and {megabytes:.0f} MB beside inputs and gradients, {share:.1f} % of the logits (target 5 %),
        against {found["plain"]["extra_bytes"] / 1e9:.1f} GB."""
    )


def memory() -> str:
    found = result("step_memory")
    ratios = []
    for layout, ranks in found["layouts"].items():
        of_ranks = [f"{rank['measured_to_closed_form']:.2f}" for rank in ranks]
        ratios.append(f"{' and '.join(dict.fromkeys(of_ranks))} ({layout})")
    return text(
        f"""A rank's peak memory, measured, over its closed form (`megarl/cluster/memory/rank.py`), by
        `… training_step.py memory`{meanwhile(found, "")}: {", ".join(ratios)}; target: within 15 %."""
    )


def sampling() -> str:
    found = result("sampling")
    lead = f"""What vLLM's outputs of a step with {found["sequences"]:,} sequences take, between two steps of the model,
        median of {found["tokens"]}, by `python tools/benchmarks/sampling.py`"""
    rows = [
        [name, f"{run['megarl_step_ms']:.1f} ms", f"{run['vllm_step_ms']:.1f} ms"]
        for name, run in found["runs"].items()
    ]
    ends = [run["megarl_decoding_ms"] for run in found["runs"].values()]
    notes = f"""megarl decodes each response once, at its end: {max(ends):.0f} ms for all of them together."""
    header = ["Log-probs of", "megarl", "vLLM, decoding each token"]
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}\n\n{text(notes)}"


def staleness() -> str:
    found = result("staleness")
    lead = f"""Rollouts a step ahead of training (`rollout.max_staleness=1`) against steps in turn, the quickstart's
        model, engine and trainer on a core each, mean of {found["steps"]} steps, by
        `python tools/benchmarks/staleness.py`"""
    rows = [
        [
            max_staleness,
            f"{run['tokens_per_second']:.0f}",
            f"{run['step_s']:.1f} s",
            f"{100 * run['engines_idle']:.0f} %",
            f"{100 * run['actor_idle']:.0f} %",
            str(int(run["staleness_max"])),
        ]
        for max_staleness, run in found["runs"].items()
    ]
    header = ["max_staleness", "tokens/s", "a step", "engine idle", "trainer idle", "oldest sample"]
    notes = f"""Gain: {found["gain"]:.2f} x."""
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}\n\n{text(notes)}"


def environments() -> str:
    found = result("environments")
    run, spent = found["run"], found["run"]["cpu_ms_per_turn"]
    lead = f"""{run["rollouts"]} rollouts of {found["turns_per_rollout"]} turns at once, each with a call of a tool that
        takes {found["tool_median_s"]} s (median, log-normal), by `python tools/benchmarks/environments.py`"""
    rows = [
        ["Time in which the engine had nothing to do", f"{100 * run['engine_idle_share']:.1f} %"],
        ["CPU time a turn: the process that makes the rollouts", f"{spent['rollouts']:.2f} ms"],
        ["…, the environments' processes", f"{spent['environments']:.2f} ms"],
        ["…, the engine's, beside its steps", f"{spent['engine, beside its steps']:.2f} ms"],
        [
            f"Later turns' prompts ({run['mean_later_prompt_tokens']:,} tokens) that the engine had cached",
            f"{100 * run['cached_share_of_later_prompts']:.1f} %",
        ],
    ]
    return f"{text(lead + meanwhile(found))}\n\n{table(['', ''], rows)}"


def rounding() -> str:
    found = result("rounding")
    means = found["mean_differences"]
    orders = [mean for name, mean in means.items() if name.startswith("sums")]
    return text(
        f"""In bfloat16 two computations of SmolLM2-135M that differ in nothing but the order of sums are
        {min(orders):.3f} to {max(orders):.3f} nats a token apart, and its own decoding of one token at a time from the
        pass over all of them {means["one token at a time - bfloat16"]:.3f}: a trainer and an engine cannot be nearer
        unless they are the same bit by bit.
        One of them is {means["bfloat16 - float32"]:.3f} from float32 (`python tools/benchmarks/rounding.py`, the mean
        over {found["tokens"]} tokens). With linear layers in fp8 blocks (`rollout.quantization=fp8_block`) it is
        {means["weights in fp8 blocks - bfloat16"]:.3f} away, and with activations in fp8, too, as GPUs have them,
        {means["weights and activations in fp8 - bfloat16"]:.3f}."""
    )


def lost_updates() -> str:
    found = result("lost_updates")
    rates = sorted({run["lr"] for run in found["runs"]}, reverse=True)
    runs = {(run["option"], run["lr"]): run for run in found["runs"]}
    exact = [runs["float32", rate]["learned"] for rate in rates]
    gains = " and ".join(
        f"{mean(learned):.4f} nats a token at {power(rate)}" for learned, rate in zip(exact, rates, strict=True)
    )
    lead = f"""What rounded parameters learn of {found["updates"]} updates, over what float32 learns on the same samples
        ({gains}): the mean over {found["seeds"]} seeds, the least and the most; and the share of the elements that an
        update changes; by `python tools/benchmarks/lost_updates.py`"""
    rows = []
    for option in dict.fromkeys(run["option"] for run in found["runs"]):
        row = [option]
        for rate, reference in zip(rates, exact, strict=True):
            run = runs[option, rate]
            ratios = [own / other for own, other in zip(run["learned"], reference, strict=True)]
            row.append(f"{mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
            row.append(f"{100 * run['changed_share']:.1f} %")
        rows.append(row)
    header = [title for rate in rates for title in (f"learned at {power(rate)}", "changed")]
    return f"{text(lead + ':')}\n\n{table(['', *header], rows)}"


def rewards() -> str:
    found = result("rewards")
    lead = f"""What {found["processes"]} processes of a run's pool of reward functions take to judge responses of
        {found["response_characters"]:,} characters, median of {len(next(iter(found["runs"].values())))} times
        {found["samples"]:,}, by `python tools/benchmarks/rewards.py`"""
    rows = [
        [case, f"{rate:,.0f}", f"{found['cpu_ms_per_answer'][case]:.2f} ms"]
        for case, rate in found["answers_per_second"].items()
    ]
    header = ["", "answers a second (target of math_match: 1,000)", "CPU time of an answer"]
    return f"{text(lead + meanwhile(found))}\n\n{table(header, rows)}"


def driver() -> str:
    found = result("driver")
    driving, rank = found["driver"], found["rank"]
    many, few = sorted(driving["peak_bytes_by_tokens"].items(), key=lambda item: -int(item[0]))
    samples = found["prompts"] * found["samples_per_prompt"]
    collate = 1e6 * rank["cpu_seconds"]["collate"] / rank["tokens"]
    lead = f"""What the driver does in a step of {samples:,} samples of {found["tokens"]:,} tokens for
        {found["ranks"]:,} ranks, and one rank with its samples, on stub answers, by
        `python tools/benchmarks/driver.py`"""
    rows = [
        ["The driver, a step (target 3)", f"{sum(driving['cpu_seconds'].values()):.2f} s of CPU"],
        ["Its peak memory", " and ".join(f"{size / 1e6:.1f} MB at {int(n):,} tokens" for n, size in (many, few))],
        ["A rank, a step (target 1)", f"{sum(rank['cpu_seconds'].values()):.3f} s of CPU"],
        ["A token, pickled (target 9)", f"{rank['bytes'] / rank['tokens']:.2f} bytes"],
        ["A token, collated (target 0.15)", f"{collate:.3f} µs"],
    ]
    return f"{text(lead + meanwhile(found))}\n\n{table(['', ''], rows)}"


def start() -> str:
    found = result("start")
    parts = found["driver_cpu_seconds"]
    shares = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.1)
    return text(
        f"""The driver's own share of the start of {found["model"]} on {found["ranks"]:,} ranks with
        engines {found["engines"]}, on stub answers, by `python tools/benchmarks/start.py`, while the stubs had the
        other core: {sum(parts.values()):.0f} s of CPU (target 60): {shares}."""
    )


def sandbox() -> str:
    found = result("sandbox")
    user = "root, which is another user in them" if found["as_root"] else "an ordinary user"
    lead = f"""Programs in sandboxes of bubblewrap on {found["machine"]["cores"]} cores, {found["at_once"]} at a time,
        each in a sandbox of its own but for the last row, started by {user}, by
        `python tools/benchmarks/sandbox.py`"""
    rows = []
    for name, run in found["runs"].items():
        milliseconds = [f"{1000 * run[kind]:.0f} ms" for kind in ("median_seconds", "cpu_seconds")]
        rows.append([name, f"{run['per_second']:.1f} (target 20)", *milliseconds])
    return f"{text(lead + meanwhile(found))}\n\n{table(['', 'programs a second', 'each takes', 'of CPU'], rows)}"


def plans() -> str:
    found = result("reshard")
    lead = f"""Plans of published models ([how](#plans-of-published-models)), by
        `python tools/benchmarks/reshard.py`{meanwhile(found, "")}. No byte is wasted in any of them; the last two
        columns are those of the simulated schedule:"""
    rows = []
    for name, run in found["runs"].items():
        plan = run["figures"]
        assert plan["written_once"] and not plan["bytes_wasted"]
        rows.append(
            [
                f"{PLANNED[name]}, {moved(run)}",
                f"{run['seconds']:.0f} s ({run['cpu_seconds']:.0f} s of CPU)",
                f"{run['peak_gb']:.2f} GB",
                f"{plan['source_balance']:.2f}",
                f"{plan['predicted_seconds']:.2f} s",
                f"{plan['predicted_seconds'] / plan['floor_seconds']:.3f}",
            ]
        )
    header = ["takes", "memory", "busiest source / mean", "predicted refit", "over the least possible"]
    return f"{text(lead)}\n\n{table(['`megarl reshard`', *header], rows)}"


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machine_of(found: Mapping[str, Any]) -> str:
    """Names what the result was taken on, as the beginning of a sentence."""
    cpu, _, cores = found["machine"]["cpu"].partition(", ")
    return f"On {cores} of an {cpu} and {found['machine']['memory_gib']} GiB, without a GPU"


def moved(run: Mapping[str, Any]) -> str:
    """Names both sides of a plan."""
    engines = dict(option.split("=") for option in run["destination"].removeprefix("vllm:").split(","))
    return f"{run['figures']['ranks_source']:,} ranks → {engines['replicas']} engines of TP{engines['tp']}"


def meanwhile(found: Mapping[str, Any], end: str = ":") -> str:
    """Returns the end of a phrase, after what else the machine did where it was not quiet."""
    percent = found["cpu_percent_elsewhere"]
    busy = f", while other processes had {percent:.0f} % of the machine's CPU time" if percent > QUIET_PERCENT else ""
    return busy + end


def power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def sizes(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size}" for name, size in layout.items())


def compared(title: str, megarl: float, other: float, unit: str) -> list[str]:
    return [title, f"{megarl:.1f} {unit}", f"{other:.1f} {unit}", f"{megarl / other:.2f}"]


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def text(paragraph: str) -> str:
    """Returns the paragraph in lines as long as those of the pages."""
    return fill(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
