"""Readers tolerate malformed files in a run folder, or name them in an error."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from megarl.core import files, jsonl
from megarl.core.errors import UserError
from megarl.report import comparison, history, live, write
from megarl.report.live import LiveReport
from megarl.report.viewer import read_rollouts
from megarl.run.folder import RunFolder
from tests.live_report import serving
from tests.timing import WAIT_S

CONFIG = RunFolder(Path()).config.name
HUGE = "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 500 + "]" * 500
ROW = {"prompt": "p", "response": "r", "reward": 1.0, "sample_id": "s"}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "run"}))
    RunFolder(tmp_path).config.write_text("run: {steps: 3}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "rollouts").mkdir()
    RunFolder(tmp_path).rollouts(1).write_text(json.dumps(ROW) + "\n")
    return tmp_path


LINES = [
    *(f'{{"step": 2, "reward/mean": {HUGE}}}', f'{{"step": {HUGE}}}', f'{{"step": 2, "a": {DEEP}}}', NESTED, "7"),
    *(f'{{"step": {"9" * 4000}, "reward/mean": {"9" * 4000}}}', f'{{"step": 2, "reward/mean": {"9" * 400}}}'),
    *(f'{{"step": 2, "a": {NESTED}}}', '{"step": 2, "nonfinite": 7}', '{"step": 2, "nonfinite": [[1]]}', "\ufffd"),
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_report_survives_odd_lines(folder, line):
    for file in (folder / "metrics.jsonl", RunFolder(folder).rollouts(1)):
        with file.open("a") as lines:
            lines.write(f"{line}\n")
    assert write(folder).read_text().startswith("<!DOCTYPE html>")
    LiveReport(folder)
    assert RunFolder(folder).values_of("reward/mean")[1] == 0.5


@pytest.mark.parametrize("field", ["answer", "stop_reason", "failure", "messages", "reward"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400 + ".0", "Infinity"])
def test_infinities_in_any_notation_are_null(folder, field, number):
    """Browsers accept only strict JSON."""
    value = f'[{{"role": "user", "content": {{"a": {number}}}}}]' if field == "messages" else number
    RunFolder(folder).rollouts(1).write_text(
        json.dumps({**ROW, field: 0}).replace(f'"{field}": 0', f'"{field}": {value}')
    )

    def refuse(text: str) -> None:
        raise AssertionError(text)

    json.loads(json.dumps(LiveReport(folder).changes({})), parse_constant=refuse)
    embedded = re.search(r'id="rollouts"[^>]*>(.*?)</script>', write(folder).read_text(), re.DOTALL)
    json.loads(embedded[1], parse_constant=refuse)


@pytest.mark.parametrize(
    "row", [{"reward": "high"}, {"messages": 3}, {"turns": [1]}, {"rollout_logprobs": ["a"]}, {"tokens": 5}, {}]
)
def test_report_survives_samples_with_wrong_types(folder, row):
    evaluation = RunFolder(folder).evaluation("set", 1)
    evaluation.parent.mkdir(parents=True)
    for file in (evaluation, RunFolder(folder).rollouts(1)):
        file.write_text("".join(json.dumps(line) + "\n" for line in (ROW, ROW | row)))
    write(folder)


@pytest.mark.parametrize("name", ["manifest.json", CONFIG])
@pytest.mark.parametrize("text", [HUGE, DEEP, NESTED, "[1]", "{", "{a: [}", "\x00", "run: 3"])
def test_unreadable_manifest_or_config_is_named(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}: not a "):
        write(folder)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", CONFIG, "metrics.jsonl", "rollouts"])
def test_files_that_are_not_regular_are_named(folder, tmp_path_factory, kind, name):
    file = RunFolder(folder).rollouts(1) if name == "rollouts" else folder / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        secret = tmp_path_factory.mktemp("other") / "secret"
        secret.write_text("{}")
        file.symlink_to(secret)
    with pytest.raises(UserError, match=rf"{file.name}: (not a regular file|a symbolic link)"):
        write(folder)


@pytest.mark.parametrize("name", ["report.html", ".report.html"])
def test_report_replaces_pipes_and_links_without_following_them(folder, tmp_path_factory, name):
    other = tmp_path_factory.mktemp("other") / "file"
    other.write_text("mine")
    (folder / name).symlink_to(other)
    write(folder)
    assert other.read_text() == "mine" and (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    write(folder)


def test_live_report_answers_when_a_file_becomes_a_pipe(folder):
    with serving(folder) as url:
        (folder / "metrics.jsonl").unlink()
        os.mkfifo(folder / "metrics.jsonl")
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(url, timeout=WAIT_S)
        assert answer.value.code == 500 and b"metrics.jsonl: not a regular file" in answer.value.read()


@pytest.mark.parametrize("steps", ["abc", "[1]", "{a: 1}", "1e400", "null", "2026-01-01"])
def test_report_survives_odd_target_steps(folder, steps):
    (folder / CONFIG).write_text(f"run: {{steps: {steps}}}\n")
    assert write(folder).read_text().startswith("<!DOCTYPE html>")


def test_a_mask_longer_than_the_tokens_is_cut(folder):
    """The whole mask would have 10 billion values."""
    row = ROW | {"tokens": ["a", "b", "c"], "mask": [1, 1, 10**10]}
    RunFolder(folder).rollouts(1).write_text(json.dumps(row) + "\n")
    [step] = read_rollouts(RunFolder(folder).rollout_files()).steps
    assert step.samples[0]["detail"]["mask"] == [1, 0, 1]


def test_aliases_that_expand_without_bound_are_named(folder):
    levels = (f"a{i}: &a{i} {{a: *a{i - 1}, b: *a{i - 1}, c: *a{i - 1}}}\n" for i in range(1, 25))
    for text, reason in {
        f"a0: &a0 {{a: 1}}\n{''.join(levels)}": "aliases expand to more than 100,000 values",
        "a: &a {b: *a}\n": "an alias contains itself",
    }.items():
        (folder / CONFIG).write_text(text)
        with pytest.raises(UserError, match=rf"{CONFIG}: not a config: {reason}"):
            comparison.write([folder, folder])


def test_long_lines_are_not_read_at_once(folder, monkeypatch):
    for module in (files, jsonl, history):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(files.lines_of, "__defaults__", (100,))
    with (folder / "metrics.jsonl").open("ab") as lines:
        lines.truncate(10**6)
    objects, unreadable = jsonl.read_objects(folder / "metrics.jsonl")
    assert len(objects) == 1 and len(unreadable) > 9000
    assert len(history.read_history(folder / "metrics.jsonl").unreadable) == len(unreadable)


def test_large_files_are_named(folder, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 2000)
    (folder / "manifest.json").write_text("{" + " " * 2000 + "}")
    with pytest.raises(UserError, match=r"manifest\.json: larger than 2,000 bytes"):
        write(folder)


@pytest.mark.parametrize("name", ["against_other.html", ".against_other.html"])
def test_comparison_does_not_follow_links(folder, tmp_path_factory, name):
    victim = tmp_path_factory.mktemp("victim") / "file"
    victim.write_text("mine")
    (folder / name).symlink_to(victim)
    other = victim.parent / "other"
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    assert comparison.write([folder, other]) == folder / "against_other.html"
    assert victim.read_text() == "mine"


def test_live_report_closes_idle_connections(folder, monkeypatch):
    """Another user of the machine could otherwise keep any number of connections open."""
    monkeypatch.setattr(live, "TIMEOUT_S", 0.2)
    with serving(folder) as url, socket.socket() as idle:
        idle.settimeout(WAIT_S)
        idle.connect(("127.0.0.1", urllib.parse.urlsplit(url).port))
        assert idle.recv(1) == b""


def test_endlessly_growing_files_are_read_up_to_their_size(folder, monkeypatch):
    """Another process appends a line whenever a line is read."""
    parse = jsonl.parse_json

    def parse_and_append(text, *arguments):
        with (folder / "metrics.jsonl").open("a") as lines, RunFolder(folder).rollouts(1).open("a") as samples:
            lines.write('{"step": 2}\n')
            samples.write(json.dumps(ROW) + "\n")
        return parse(text, *arguments)

    monkeypatch.setattr(jsonl, "parse_json", parse_and_append)
    report = LiveReport(folder)
    report.page()
    assert RunFolder(folder).values_of("reward/mean") == {1: 0.5}


def test_growing_text_is_read_up_to_its_size(folder, monkeypatch):
    """The file grows whenever its size is read. Its type and its size are checked before its content is read."""
    status = os.fstat
    text = (folder / "manifest.json").read_text()

    def grow(descriptor):
        result = status(descriptor)
        with (folder / "manifest.json").open("a") as file:
            file.write(" " * 1000)
        return result

    monkeypatch.setattr(os, "fstat", grow)
    assert files.read_text(folder / "manifest.json") == text + " " * 1000


NAMES = ["a\nFix: run this", b"\xff\xfe", "\x1b[31mred", "<script>", "a" * 255]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_names_of_evaluation_sets(folder, name):
    file = Path(os.fsdecode(os.path.join(os.fsencode(folder), b"evaluations", os.fsencode(name), b"step_000001.jsonl")))
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(ROW) + "\n")
    (folder / "rollouts" / os.fsdecode(b"step_\xff\n.jsonl")).touch()
    page = write(folder).read_text()
    assert "<script>, worst" not in page
    assert json.dumps(LiveReport(folder).changes({}))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=r": not a regular file\. Fix: remove it") as raised:
        write(folder)
    assert str(raised.value).isprintable()


def test_folder_with_many_files(folder, monkeypatch):
    """Only the files that the report shows are opened."""
    names = [f"step_{number:06d}.jsonl" for number in range(1, 2 * 10**4)] + [f"odd_{i}\n" for i in range(10**4)]
    listed, opened = os.listdir, []
    monkeypatch.setattr(os, "listdir", lambda path: names if Path(path).name == "rollouts" else listed(path))
    real = os.open
    sample = RunFolder(folder).rollouts(1)

    def open_sample(path, *arguments, **options):
        if Path(path).parent.name == "rollouts":
            opened.append(path)
            path = sample
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_sample)
    monkeypatch.setattr(Path, "lstat", lambda self: os.lstat(sample if self.parent.name == "rollouts" else self))
    assert write(folder).read_text().startswith("<!DOCTYPE html>")
    assert 0 < len(opened) < 100
