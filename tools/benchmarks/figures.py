"""Write the recorded results into the documentation, with the templates in pages/.

.venv/bin/python tools/benchmarks/figures.py --write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.append(str(ROOT))  # this file is run as a script and imported by tests

from megarl.run.time_causes import CAUSES
from tools.benchmarks.benchmark import QUIET_PERCENT, machine
from tools.benchmarks.goodput import GPUS, TARGET
from tools.benchmarks.predictions import FACTOR

RESULTS = FOLDER / "results"
WIDTH = 120
PAGES: dict[str, tuple[str, ...]] = {
    "README.md": ("headlines",),
    "configs/README.md": ("learning", "learning_curves", "image_learning", "published", "recipes"),
    "tools/benchmarks/README.md": ("figures", "gpu"),
}
"""Page -> its blocks, each with a template."""

PLANNED = {name: case["title"] for name, case in yaml.safe_load((FOLDER / "cases/reshard.yaml").read_text()).items()}
"""Titles of the plans that commands.py makes, in the order of its results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the blocks into the pages instead of printing them")
    if parser.parse_args().write:
        write()
    else:
        print("\n\n".join(render(block) for blocks in PAGES.values() for block in blocks))


def write() -> None:
    """Update the blocks of every page in place."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(rendered(page, path.read_text(encoding="utf-8")), encoding="utf-8")


def record(name: str, runs: Mapping[str, Any], known: Iterable[str]) -> None:
    """Replace runs in a result, and update the pages. Other runs are kept if they are `known`. The order is that of
    `known`."""
    if not runs:
        return
    found = result(name)["runs"] | runs
    merged = {run: found[run] for run in known if run in found}
    content = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "runs": merged}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    write()


def rendered(page: str, content: str) -> str:
    """Return a page with new blocks, each between <!-- NAME:begin --> and <!-- NAME:end -->."""
    for name in PAGES[page]:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = content.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{page}: the page must contain {begin} followed by {end}. Fix: add both markers")
        content = f"{before}{begin}\n{render(name)}\n{end}{after}"
    return content


def render(template: str, section: str | None = None) -> str:
    """Return the rendered text of a template, or of one of its blocks."""
    found = ENVIRONMENT.get_template(f"{template}.md.j2")
    if section is not None:
        return "".join(found.blocks[section](found.new_context())).strip()
    return re.sub(r"\n{3,}", "\n\n", found.render()).strip()


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machine_of(found: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence, which names a result's machine."""
    cpu, _, cores = found["machine"]["cpu"].partition(", ")
    number = cores.removesuffix(" cores")
    return f"Measured on {number} {cpu} cores with {found['machine']['memory_gib']} GiB of RAM and no GPU"


def moved(run: Mapping[str, Any]) -> str:
    """Return a description of both sides of a plan."""
    engines = dict(option.split("=") for option in run["destination"].removeprefix("vllm:").split(","))
    return f"{run['figures']['ranks_source']:,} ranks → {engines['replicas']} engines of TP{engines['tp']}"


def proven(run: Mapping[str, Any]) -> Mapping[str, Any]:
    assert run["figures"]["written_once"] and not run["figures"]["bytes_wasted"]
    return run


def meanwhile(found: Mapping[str, Any], end: str = ":") -> str:
    """Return the end of a sentence, with the load of other processes if the machine was not quiet."""
    percent = found["cpu_percent_elsewhere"]
    busy = f", while other processes used {percent:.0f} % of the machine's CPU time" if percent > QUIET_PERCENT else ""
    return busy + end


def by_size(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the published runs sorted by model, in order of first appearance, and then by number of GPUs."""
    models = list(dict.fromkeys(run["model"] for run in runs))
    return sorted(runs, key=lambda run: (models.index(run["model"]), int(run["gpus"].partition("x")[0])))


def is_miss(run: Mapping[str, Any]) -> bool:
    return not 1 / FACTOR <= run["ratio"] <= FACTOR


def actor_seconds(run: Mapping[str, Any]) -> float:
    return sum(seconds for name, seconds in run["phases"].items() if name.startswith("actor"))


def learned(found: Mapping[str, Any], option: str, rate: float, key: str = "learned") -> Any:
    return next(run[key] for run in found["runs"] if (run["option"], run["lr"]) == (option, rate))


def learned_ratios(found: Mapping[str, Any], option: str, rate: float) -> list[float]:
    pairs = zip(learned(found, option, rate), learned(found, "float32", rate), strict=True)
    return [own / exact for own, exact in pairs]


def samples_to_reach(curve: Mapping[str, Sequence[float]], reward: float) -> float | None:
    """Return the number of samples up to the first step with this reward."""
    reached = (count for count, mean in zip(curve["samples"], curve["reward"], strict=True) if mean >= reward)
    return next(reached, None)


def samples_to_stay_within(curve: Mapping[str, Sequence[float]], part: str, limit: float) -> float | None:
    """Return the number of samples up to the step from which on a part stays within a limit."""
    above = [step for step, value in enumerate(curve[part]) if value > limit]
    first = above[-1] + 1 if above else 0
    return curve["samples"][first] if first < len(curve["samples"]) else None


def measured(curve: Mapping[str, Sequence[float]], part: str, samples: int, digits: str = ".2f") -> str:
    """Return a table's cell with the value after a number of samples, empty if no step ended there."""
    value = dict(zip(curve["samples"], curve[part], strict=True)).get(samples)
    return "" if value is None else f"{value:{digits}} "


def power(value: float) -> str:
    return f"{value:g}".replace("e-0", "e-")


def sizes(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size}" for name, size in layout.items())


def text(paragraph: str) -> str:
    """Return a paragraph wrapped at the pages' width."""
    return fill(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER / "pages"),
    trim_blocks=True,
    undefined=StrictUndefined,
    autoescape=False,
)
ENVIRONMENT.filters |= {"text": text, "f": format}
ENVIRONMENT.tests["miss"] = is_miss
ENVIRONMENT.globals |= dict(
    **dict(result=lambda name: result(name), machine_of=machine_of, moved=moved, proven=proven, meanwhile=meanwhile),
    **dict(by_size=by_size, actor_seconds=actor_seconds, power=power),
    **dict(learned=learned, learned_ratios=learned_ratios, sizes=sizes, mean=mean),
    **dict(samples_to_reach=samples_to_reach, samples_to_stay_within=samples_to_stay_within, measured=measured),
    **dict(GOODPUT_GPUS=GPUS, GOODPUT_TARGET=TARGET, CAUSES=CAUSES),
    **dict(median=median, FACTOR=FACTOR, QUIET_PERCENT=QUIET_PERCENT, PLANNED=PLANNED),
)

if __name__ == "__main__":
    main()
