"""Record the results of public libraries on a small batch, as reference data for the unit tests.

pip install --no-deps --target FOLDER -r tools/references/requirements.txt
PYTHONPATH=FOLDER .venv/bin/python tools/references/record.py

This writes batch.json and a file per library, with its name and version, to tests/published_numbers/. The numbers for
agents come from repositories that are not packages. To record agents.json as well, clone them and pass their folder:

for name in NVIDIA-NeMo/RL langfengQ/DrMAS RAGEN-AI/RAGEN; do (cd CLONES && git clone https://github.com/$name); done
PYTHONPATH=FOLDER .venv/bin/python tools/references/record.py CLONES
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import of_agents
import of_torchrl
import of_trl
import of_verl
from batch import make

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "published_numbers"
LIBRARIES = {"verl": of_verl, "trl": of_trl, "torchrl": of_torchrl}


def main() -> None:
    batch = make()
    FOLDER.mkdir(exist_ok=True)
    write("batch", batch)
    for name, library in LIBRARIES.items():
        write(name, {"library": name, "version": version(name), "numbers": library.numbers(batch)})
    for clones in sys.argv[1:]:
        write("agents", of_agents.numbers(Path(clones)))


def write(name: str, content: dict[str, Any]) -> None:
    """Write a JSON object with one line per entry, to keep diffs small."""
    lines = [f"{json.dumps(key)}: {_shown(value)}" for key, value in content.items()]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(_rounded(value))
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(_rounded(own))}" for key, own in value.items()) + "\n}"


def _rounded(value: Any) -> Any:
    """Round numbers to 12 digits, which removes noise in the last bits but is finer than the tests' tolerances."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, list):
        return [_rounded(own) for own in value]
    return {key: _rounded(own) for key, own in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
