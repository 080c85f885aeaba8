"""Helpers that load offline data from a few records, as a run would."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.offline import OfflineData, load_offline_data
from tests.paths import BASE
from tests.tiny_model import tiny_tokenizer


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def config_of(source: Path, rows: str, *overrides: str) -> Config:
    name = {"messages": "sft", "preferences": "dpo", "labels": "process_reward_model"}[rows]
    required = [f"data.source={source}", f"data.format={rows}", f"algorithm.objective.name={name}", "model.path=unused"]
    return load(BASE, [*required, *overrides])


def write(folder: Path, records: list[dict], suffix: str = ".jsonl") -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(
    model_folder: Path, folder: Path, rows: str, records: list[dict], *overrides: str, suffix=".jsonl"
) -> OfflineData:
    return load_offline_data(config_of(write(folder, records, suffix), rows, *overrides), model_folder)


def texts(sample) -> tuple[str, str, str]:
    """Return the prompt, the response, and the response with untrained characters as dots."""
    tokenizer = tiny_tokenizer()
    pieces = [tokenizer.decode([token]) for token in sample.response_ids.tolist()]
    trained = "".join(p if flag else "." * len(p) for p, flag in zip(pieces, sample.response_mask, strict=True))
    return tokenizer.decode(sample.prompt.token_ids.tolist()), "".join(pieces), trained
