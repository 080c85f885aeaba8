import datetime
import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.files import file_rows, require_data_file

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
RECORDS = [
    {"question": "1+1?", "answer": "2", "level": 1},
    {"question": "Ünïcode\u2028 line", "answer": None, "level": 2},
]


def write(folder, suffix, records):
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read(path, prompt="question", answer="answer"):
    return list(file_rows(path, prompt, answer))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_read_in_order_with_numbers(tmp_path, suffix):
    rows = read(write(tmp_path, suffix, RECORDS))
    assert [(row.number, row.prompt, row.answer) for row in rows] == [
        (1, "1+1?", "2"),
        (2, "Ünïcode\u2028 line", None),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_are_read_as_prompts(tmp_path, suffix):
    records = [{"question": MESSAGES, "answer": [1, 2]}, {"question": MESSAGES[1:], "answer": []}]
    rows = read(write(tmp_path, suffix, records))
    assert [(row.prompt, row.answer) for row in rows] == [(MESSAGES, [1, 2]), (MESSAGES[1:], [])]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_include_the_requested_columns(tmp_path, suffix):
    path = write(tmp_path, suffix, RECORDS)

    def columns(**further) -> list[dict]:
        return [dict(row.columns) for row in file_rows(path, "question", "answer", further)]

    assert columns() == [{}, {}]
    assert columns(level="f", other=None) == [{"level": 1}, {"level": 2}]
    assert columns(row="f") == RECORDS
    remedy = "Fix: rename the parameter of f to one of the columns question, answer, level"
    missing = rf"rows\.\w+:1: missing column 'other' .*\. {remedy}"
    with pytest.raises(ValueError, match=missing):
        columns(other="f")


def test_non_json_column_is_refused_only_if_requested(tmp_path):
    path = write(tmp_path, ".parquet", [RECORDS[0] | {"day": datetime.date(2026, 1, 1)}])
    assert len(list(file_rows(path, "question", "answer", {"level": None}))) == 1
    with pytest.raises(
        ValueError, match=r":1: column 'day': expected a JSON .*, found date datetime.date\(2026, 1, 1\)"
    ):
        list(file_rows(path, "question", "answer", {"row": None}))


def test_null_fields_of_parquet_messages_are_ignored(tmp_path):
    records = [{"question": [{"name": None, **MESSAGES[1]}], "answer": "2"}]
    path = tmp_path / "rows.parquet"
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    schema = pa.schema([("question", pa.list_(message)), ("answer", pa.string())])
    pq.write_table(pa.Table.from_pylist(records, schema), path)
    assert read(path)[0].prompt == MESSAGES[1:]


def test_parquet_rows_are_numbered_across_row_groups(tmp_path):
    rows = read(write(tmp_path, ".parquet", [{"question": str(i), "answer": i} for i in range(1, 2501)]))
    assert [(row.number, row.prompt, row.answer) for row in rows] == [(i, str(i), i) for i in range(1, 2501)]


def test_blank_lines_are_skipped_but_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"question": "a", "answer": 1}\n\n  \n{"question": "b", "answer": 2}')
    assert [(row.number, row.prompt) for row in read(path)] == [(2, "a"), (5, "b")]


def test_rows_are_read_lazily(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": 1}\nnot JSON\n')
    assert next(file_rows(path, "question", "answer")).prompt == "a"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (
            "prompt",
            "answer",
            r"missing column 'prompt' \(expected: text or a list of \{role, content\} messages with text values\)\. "
            r"Fix: set data\.prompt_column to one of the columns question, answer, level",
        ),
        (
            "question",
            "solution",
            r"missing column 'solution' \(expected: a JSON value .*\. Fix: set data\.answer_column",
        ),
    ],
)
def test_missing_column_error_lists_the_columns(tmp_path, suffix, prompt, answer, message):
    with pytest.raises(ValueError, match=rf"rows{suffix}:1: {message}"):
        read(write(tmp_path, suffix, RECORDS), prompt, answer)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        ([{"role": "user"}], r"list \["),
        ([{"role": "user", "content": None}], r"list \["),
        ([], r"list \[\]"),
        (None, "NoneType None"),
    ],
)
def test_error_of_a_later_row_names_it(tmp_path, suffix, bad, shown):
    records = [{"question": MESSAGES, "answer": 1}, {"question": bad, "answer": 1}]
    with pytest.raises(ValueError, match=rf"rows{suffix}:2: column 'question': expected text or.*, found {shown}.*"):
        read(write(tmp_path, suffix, records))


@pytest.mark.parametrize("bad", [3, True, {"role": "user"}, ["text"], [{**MESSAGES[0], "tool_calls": [1]}], 1.5])
def test_prompt_of_a_wrong_type_is_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: column 'question': expected text or.*, found .*"):
        read(write(tmp_path, ".jsonl", [{"question": bad, "answer": 1}]))


def test_long_value_is_shortened_in_the_message(tmp_path):
    with pytest.raises(ValueError, match="…") as caught:
        read(write(tmp_path, ".jsonl", [{"question": ["x" * 10_000], "answer": 1}]))
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_non_json_answer_is_refused(tmp_path):
    records = [{"question": "a", "answer": datetime.date(2024, 1, 2)}]
    with pytest.raises(ValueError, match=r"rows\.parquet:1: column 'answer': expected a JSON value.*, found date .*"):
        read(write(tmp_path, ".parquet", records))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nonfinite_answer_is_refused(tmp_path, suffix, number):
    """pandas writes NaN for a missing answer."""
    records = [{"question": "a", "answer": 0.5}, {"question": "a", "answer": number}]
    with pytest.raises(ValueError, match=rf"rows{suffix}:2: column 'answer': expected a JSON value.*, found float"):
        read(write(tmp_path, suffix, records))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a", "answer": 1', "invalid JSON"),
        (b'{"question": "\xff", "answer": 1}', "invalid JSON"),
        (b"[1, 2]", "expected one JSON object per line, found list"),
        (b'{"answer": 1}', "missing column 'question'"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "a", "answer": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: {message}"):
        read(path)


def test_source_that_is_not_a_data_file_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a Parquet file"):
        read(tmp_path / "rows.parquet")
    absent, unknown = tmp_path / "absent.jsonl", Path("arithmetics")
    with pytest.raises(
        ValueError,
        match=r"^data\.more_sources=.*absent\.jsonl: not a file\. Fix: set data\.more_sources to .*$",
    ):
        require_data_file(absent, "data.more_sources")
    fix = "Fix: use arithmetic, reasoning_gym:TASK, or a .jsonl or .parquet file"
    with pytest.raises(ValueError, match=rf"^data\.source=arithmetics: unknown data source\. {re.escape(fix)}$"):
        require_data_file(unknown, "data.source")
    with pytest.raises(ValueError, match=r"^data\.more_sources=arithmetics: .* Fix: use a \.jsonl or \.parquet file$"):
        require_data_file(unknown, "data.more_sources")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dotted_name_reaches_into_a_column(tmp_path, suffix):
    """verl's files need this. A column with exactly that name takes precedence."""
    records = [
        {
            "prompt": "a",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"split": "x", "index": 0},
        },
        {
            "prompt": "b",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "y", "index": 1},
        },
    ]
    path = write(tmp_path, suffix, records)
    rows = list(file_rows(path, "prompt", "reward_model.ground_truth", {"extra_info": "f"}, "extra_info.split"))
    assert [(row.prompt, row.answer) for row in rows] == [("a", "1"), ("b", "2")]
    assert rows[1].columns == {"extra_info": {"split": "y", "index": 1}, "extra_info.split": "y"}
    with pytest.raises(
        ValueError, match=r":1: missing column 'reward_model.truth' .* set data.answer_column to one of the columns"
    ):
        next(file_rows(path, "prompt", "reward_model.truth"))
    renamed = [{**record, "reward_model.ground_truth": "own"} for record in records]
    assert next(file_rows(write(tmp_path, suffix, renamed), "prompt", "reward_model.ground_truth")).answer == "own"
