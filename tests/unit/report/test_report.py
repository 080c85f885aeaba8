import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl import report
from megarl.report.page import SCRIPTS

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)> &lt;b&gt; <!--"
RESOURCES = Path(report.__file__).parent


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text by the id of the enclosing element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str | None, str] = {}
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._id = attributes.get("id", self._id if tag in ("li", "div", "dt", "dd") else tag)

    def handle_data(self, data):
        self.texts[self._id] = self.texts.get(self._id, "") + data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def make_run(folder, num_steps, *, target=14, tail="", rollouts=(), charts=False):
    """Write a run's folder. charts: whether to include metrics for several charts."""
    (folder / "rollouts").mkdir()
    (folder / "manifest.json").write_text(json.dumps({"name": "test", "model": "tiny", "note": ATTACK}))
    (folder / "config.resolved.yaml").write_text(f"run:\n  steps: {target}\nmodel:\n  path: <i>tiny</i>\n")
    lines = [
        {
            "step": step,
            "reward/mean": step / 10,
            "reward/std": 0.1,
            "kl/<script>": 0.5,
        }
        | (metrics_of_charts(step) if charts else {})
        for step in range(1, num_steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    for step, samples in rollouts:
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
    return folder


def metrics_of_charts(step):
    return {
        "time/rollout": 2.0,
        "time/step": 5.0,
        "memory/peak_rss_gb": 9.0,
        "memory/peak_pss_gb": step / 4,
        "throughput/tokens_per_second": 1000.0 * step,
        "mismatch/logprob_abs_max": 1e-6 * step,
    }


def sample(**fields):
    return {"sample_id": "0.0", "prompt": "p", "response": "r", "reward": 1.0, **fields}


def write(folder):
    path = report.write(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def embedded_rollouts(text):
    return json.loads(Page(text).texts["rollouts"])["steps"]


def charts_in(text):
    return json.loads(Page(text).texts["chart-data"])["charts"]


def test_summary_shows_the_final_values(tmp_path):
    summary = Page(write(make_run(tmp_path, 5, target=5, charts=True))).texts["summary"]
    for shown in ("0.100 → 0.400", "5 of 5", "25s", "3,000", "1.25 GB", "5.0e-06"):
        assert shown in summary


def test_reward_chart_is_first_and_other_metrics_follow(tmp_path):
    titles = [chart["title"] for chart in charts_in(write(make_run(tmp_path, 3, charts=True)))]
    assert titles[0] == "Reward"
    assert titles[-1] == "kl/<script>"
    assert "Time by phase" in titles and "Memory" in titles
    assert "Entropy" not in titles  # the run has no entropy metric


@pytest.mark.parametrize("num_steps", [0, 1, 10_000])
def test_report_supports_any_number_of_steps(tmp_path, num_steps):
    text = write(make_run(tmp_path, num_steps, target=num_steps or 1, charts=num_steps > 1))
    assert len(text) < 2_000_000
    assert (len(charts_in(text)) > 0) == (num_steps > 0)
    assert ("No step has finished" in text) == (num_steps == 0)


def test_notes_list_missing_and_nonfinite_data(tmp_path):
    nonfinite = '"policy/loss": null, "nonfinite": ["policy/loss"]'
    tail = f'{{"step": 4, {nonfinite}, "policy/skipped_updates": 2.0}}\n{{"step": 5, "rew'
    notes = Page(write(make_run(tmp_path, 3, tail=tail))).texts["notes"]
    assert "The run has reached step 4 of 14." in notes
    assert "metrics.jsonl: skipped line 5, which could not be parsed" in notes
    assert "policy/loss was NaN or infinite at step 4." in notes
    assert "policy/skipped_updates: 2 skipped because of a NaN or infinite gradient." in notes


def test_complete_run_has_no_notes(tmp_path):
    assert '<ul id="notes"></ul>' in write(make_run(tmp_path, 3, target=3))


def test_rollouts_are_embedded(tmp_path):
    version = [{"version": 0, "count": 2}]
    trained = {"num_response_tokens": 2, "rollout_logprobs": [-0.25, -0.75], "advantage": 0.7}
    kept = sample(version=version, answer="12", parts={"exact_match": 1.0}, **trained)
    text = write(make_run(tmp_path, 1, rollouts=[(1, [sample(reward=0.0), kept])]))
    (step,) = embedded_rollouts(text)
    assert [entry["reward"] for entry in step["samples"]] == [1.0, 0.0]
    del kept["rollout_logprobs"]
    absent = dict.fromkeys(("failure", "finish_reason", "prompt_id", "rollout_id", "stop_reason"))
    assert step["samples"][0] == {**kept, **absent, "mean_logprob": -0.5}
    assert "This section shows all 2 samples of the run" in text


def test_rollout_note_describes_the_selection(tmp_path):
    many = [sample(reward=float(index)) for index in range(200)]
    rollouts = [(step, many if step == 1 else [sample()]) for step in range(1, 31)]
    text = write(make_run(tmp_path, 1, rollouts=rollouts))
    assert "This section shows 16 of 30 steps, evenly spaced, and 143 of the 215 samples in these steps" in text


def test_markup_in_run_data_is_escaped(tmp_path):
    attacked = sample(prompt=ATTACK, response=ATTACK, answer=ATTACK, failure=ATTACK)
    text = write(make_run(tmp_path, 1, rollouts=[(1, [attacked])]))
    page = Page(text)
    assert embedded_rollouts(text)[0]["samples"][0]["response"] == ATTACK
    # The data cannot open or close an element.
    data = re.search(r'id="rollouts">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert not set("<>&") & set(data)
    assert page.all("img") == page.all("i") == page.all("b") == []
    assert page.all("script") == [
        *({"type": "application/json", "id": name} for name in ("chart-data", "rollouts")),
        {},
    ]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    # The scripts insert rollouts and metrics as text, never as markup.
    for script in (*SCRIPTS, "dom.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", read(script))


def read(name):
    return (RESOURCES / name).read_text(encoding="utf-8")


def test_security_policy_allows_only_the_embedded_script(tmp_path):
    text = write(make_run(tmp_path, 1))
    script = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for a in Page(text).all("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy


def test_page_loads_no_external_resources(tmp_path):
    text = write(make_run(tmp_path, 3, rollouts=[(1, [sample()])]))
    for _, attributes in Page(text).elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), attributes
    assert not re.search(r"@import|url\((?!#)", text)


def test_report_is_deterministic(tmp_path):
    folder = make_run(tmp_path, 3, rollouts=[(1, [sample()])])
    assert write(folder) == write(folder)


def test_lone_surrogates_are_replaced(tmp_path):
    text = write(make_run(tmp_path, 1, rollouts=[(1, [sample(response="a\ud800b\u0000")])]))
    assert embedded_rollouts(text)[0]["samples"][0]["response"] == "a?b\u0000"


def test_run_without_metrics_has_a_report(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "early"}))
    assert "No step has finished" in write(tmp_path)


def test_report_requires_a_run_folder(tmp_path):
    with pytest.raises(
        ValueError, match=r"not a run folder \(no metrics.jsonl or manifest.json\). Fix: pass a run folder"
    ):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_notes_list_the_changes_in_the_manifest(tmp_path):
    folder = make_run(tmp_path, 3)
    changes = [{"after_step": 2, "key": "actor.optimizer.lr", "from": 1e-6, "to": 2e-6}, {"key": "malformed"}, 3]
    (folder / "manifest.json").write_text(json.dumps({"changes": changes}))
    notes = report.page.notes(report.page.read_contents(folder))
    assert [note for note in notes if "changed" in note] == [
        "actor.optimizer.lr changed from 1.0e-06 to 2.0e-06 after step 2."
    ]
