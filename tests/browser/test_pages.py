"""The report, the comparison and the live page in headless Chromium without a network."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl import report
from megarl.report import comparison
from megarl.report.live import LiveReport
from tests.browser.chromium import SCREENSHOTS, command
from tests.live_report import serving
from tests.timing import WAIT_S

TEXTS = ["I", " ask", ".", "<tool_call>", "calc(7*6)", "</tool_call>", "\n42\n", "It", " is", " 42", "<b>!</b>"]
RUNS = [6, 1, 4]
MESSAGES = [
    {"role": "assistant", "content": "I ask.<tool_call>calc(7*6)</tool_call>"},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42<b>!</b>"},
]


def sample(step: int, group: int, number: int, **fields) -> dict:
    reward = None if (group, number) == (1, 2) else float(number)
    return {
        "sample_id": f"{step}.{group}.{number}",
        "step": step,
        "prompt_id": f"p{group}",
        "prompt": f"What is 7*6? ({group})",
        "response": "".join(TEXTS),
        "answer": "42",
        "reward": reward,
        "parts": {} if reward is None else {"exact": reward},
        "failure": "TimeoutError: 60 s" if reward is None else None,
        "version": [{"version": step - 2, "count": 6}, {"version": step - 1, "count": 5}],
        "finish_reason": "length" if number == 2 else "stop",
        "stop_reason": "max_turns" if number == 2 else "done",
        "turns": MESSAGES,
        "mask": RUNS,
        "num_response_tokens": len(TEXTS),
        "rollout_logprobs": [-0.5 * i for i in range(len(TEXTS))],
        "tokens": TEXTS,
        "advantage": None if reward is None else reward - 1,
        **(
            {}
            if reward is None
            else {"token_advantages": [reward - 1.0] * 11, "logprob_differences": [0.01] * 10 + [-0.02]}
        ),
        **fields,
    }


def write_run(folder: Path, lr: float, num_steps: int = 3) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"name": folder.name, "model": "tiny"}))
    (folder / "config.resolved.yaml").write_text(f"run:\n  steps: 9\nactor:\n  optimizer: {{lr: {lr}}}\n")
    for step in range(1, num_steps + 1):
        add_step(folder, step)
    return folder


def add_step(folder: Path, step: int) -> None:
    samples = [sample(step, group, number) for group in range(2) for number in range(3)]
    file = folder / "rollouts" / f"step_{step:06d}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in samples))
    row = {"step": step, "reward/mean": step / 4, "reward/std": 0.1, "time/step": 2.0, "policy/entropy": 1.0 / step}
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")


class Elements(HTMLParser):
    """The page's elements after its scripts ran: (tag, attributes, text)."""

    VOID = ("meta", "link", "input", "br", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict, list[str]]] = []
        self._open: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self._open.append(self.all[-1][2])

    def handle_endtag(self, tag):
        if tag not in self.VOID and self._open:
            self._open.pop()

    def handle_data(self, data):
        for texts in self._open:
            texts.append(data)

    def texts(self, css_class: str) -> list[str]:
        return ["".join(t) for _, a, t in self.all if css_class in (a.get("class") or "").split()]

    def attributes(self, css_class: str) -> list[dict]:
        return [a for _, a, _ in self.all if css_class in (a.get("class") or "").split()]


def browse(address: str, folder: Path, *options: str, wait_ms: int = 1000) -> tuple[Elements, str]:
    """Open a page. Return its elements after its scripts ran, and the browser's console errors."""
    flags = ("--enable-logging=stderr", f"--virtual-time-budget={wait_ms}", "--dump-dom")
    ran = subprocess.run([*command(folder), *flags, *options, address], capture_output=True, text=True, timeout=WAIT_S)
    assert ran.returncode == 0, ran.stderr
    return Elements(ran.stdout), "\n".join(line for line in ran.stderr.splitlines() if "CONSOLE" in line)


def with_controls(page: Path, **controls: str) -> str:
    """Copy the page with different initial values of its controls. Return the copy's address."""
    text = page.read_text(encoding="utf-8")
    for control, value in controls.items():
        select = re.search(rf'<select id="{control}".*?</select>', text, re.DOTALL)[0]
        assert f'value="{value}"' in select
        text = text.replace(select, select.replace(f'value="{value}"', f'value="{value}" selected'))
    copy = page.with_name("_".join(("report", *controls.values())) + ".html")
    copy.write_text(text, encoding="utf-8")
    return copy.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(write_run(tmp_path_factory.mktemp("browser") / "first", 1e-6))


def take_picture(address: str, name: str, folder: Path) -> None:
    if SCREENSHOTS:
        picture = f"--screenshot={Path(SCREENSHOTS) / name}.png"
        browse(address, folder, picture, "--window-size=1200,2600")


def test_rollouts_show_turns_tool_calls_and_masked_tokens(page: Path, tmp_path: Path) -> None:
    elements, errors = browse(page.as_uri(), tmp_path)
    take_picture(with_controls(page, color="difference"), "samples", tmp_path)
    assert errors == ""
    assert len(elements.texts("sample")) == 6
    # Spans of masked tokens, which the policy only read, separate the turns.
    titles = [text for text in elements.texts("block") if text.startswith(("turn", "masked"))]
    expected = ("turn 1 · 6 tokensI ask.", "masked, not trained on · 1 token\n42", "turn 2 · 4 tokensIt is 42")
    assert [title[: len(start)] for title, start in zip(titles[:3], expected, strict=True)] == [*expected]
    assert elements.texts("masked") == ["\n42\n"] * 6
    assert "".join(elements.texts("toolcall")[:3]) == "<tool_call>calc(7*6)</tool_call>"
    assert elements.texts("token")[10] == "<b>!</b>"  # markup in a response stays text
    assert not [tag for tag, _, _ in elements.all if tag == "b"]


@pytest.mark.parametrize(
    ("color", "tokens", "colored"),
    [
        ("log-prob", {0: "0%", 9: "68%"}, 60),
        ("difference", {0: "38%", 10: "75%"}, 50),
        ("advantage", {0: "75%"}, 50),
        ("version", {0: "--series-1", 7: "--series-2"}, 60),
    ],
)
def test_tokens_are_colored(page: Path, tmp_path: Path, color: str, tokens: dict, colored: int) -> None:
    """Masked tokens have no color. Samples that were not trained on have colors only for the engine's data."""
    elements, errors = browse(with_controls(page, color=color), tmp_path)
    styles = [attributes.get("style", "") for attributes in elements.attributes("token")]
    assert errors == "" and sum(style != "" for style in styles) == colored
    for number, expected in tokens.items():
        assert expected in styles[number]
    assert not any("style" in attributes for attributes in elements.attributes("masked"))
    assert "difference" in elements.attributes("token")[0]["title"]


def test_samples_of_a_group_are_side_by_side(page: Path, tmp_path: Path) -> None:
    elements, errors = browse(with_controls(page, view="groups", color="advantage"), tmp_path)
    take_picture(with_controls(page, view="groups", color="advantage"), "groups", tmp_path)
    groups = elements.texts("group")
    assert errors == "" and len(groups) == 2
    assert all(f"What is 7*6? ({i})" in group for i, group in enumerate(sorted(groups, key=lambda g: "(1)" in g)))
    assert len(elements.texts("beside")) == 2 and len(elements.texts("sample")) == 6


def test_turns_view_shows_messages_and_failures(page: Path, tmp_path: Path) -> None:
    elements, errors = browse(with_controls(page, view="turns", outcome="failed"), tmp_path)
    assert errors == "" and len(elements.texts("sample")) == 1
    assert [text.removeprefix("assistant") for text in elements.texts("role-assistant")] == [
        "I ask.<tool_call>calc(7*6)</tool_call>",
        "It is 42<b>!</b>",
    ]
    assert len(elements.texts("role-tool")) == 1 and "TimeoutError: 60 s" in elements.texts("failed")


def test_comparison_of_two_runs(page: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", 2e-6, num_steps=5)
    out = comparison.write([page.parent, other])
    elements, errors = browse(out.as_uri(), tmp_path)
    take_picture(out.as_uri(), "comparison", tmp_path)
    tables = ["".join(text) for tag, _, text in elements.all if tag == "table"]
    assert errors == "" and out.name == "against_second.html"
    assert "actor.optimizer.lr1.0e-062.0e-06" in tables[1] and "run.steps" not in tables[1]
    assert "0.250 → 0.500" in tables[0] and "0.250 → 1.000" in tables[0]
    titles = ["".join(text) for tag, _, text in elements.all if tag == "figcaption"]
    assert titles[0].startswith("Reward") and any(title.startswith("Entropy") for title in titles)
    assert [text.split()[0] for text in elements.texts("line")] == ["first", "second"] * len(titles)


def test_live_page_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run finishes its second step after the browser has loaded the page of the first."""
    run = write_run(tmp_path / "watched", 1e-6, num_steps=1)
    render_page, calls = LiveReport.page, []

    def page_then_step(self: LiveReport) -> str:
        text = render_page(self)
        calls.append(text)
        if len(calls) == 2:  # the first call precedes the browser's request
            add_step(run, 2)
        return text

    monkeypatch.setattr(LiveReport, "page", page_then_step)
    with serving(run) as address:
        elements, errors = browse(address, tmp_path, wait_ms=10_000)
    assert errors == ""
    options = ["".join(text) for tag, _, text in elements.all if tag == "option"]
    assert [text for text in options if text.startswith("step ")] == ["step 1", "step 2"] and len(
        calls
    ) == 2  # the page is loaded only once
    assert "0.250 → 0.375" in "".join(text for tag, _, texts in elements.all if tag == "dd" for text in texts)
    assert elements.texts("id")[0].startswith("2.")  # the view stays at the last step
    assert [file.name for file in run.iterdir() if file.suffix == ".html"] == []
