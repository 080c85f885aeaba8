"""The environment with code tools, run in a host process as in a real run."""

from __future__ import annotations

import psutil

from tests.timing import WAIT_S
from tests.unit.environments.test_runner import CALL, Says, config, play


def test_calls_of_a_rollout_share_a_sandbox():
    texts = [
        CALL.format("python", "{\"code\": \"open('a.txt', 'w').write('7'); print(6 * 7)\"}"),
        CALL.format("shell", '{"command": "cat a.txt; sleep 1013 & echo; ls /home; id -u"}'),
        "42",
    ]
    settings = config(
        "Tools",
        "environment.class=code",
        f"environment.tool_timeout_s={WAIT_S}",
        "rollout.context_length=3000",
        "rollout.max_new_tokens=2000",
    )
    before = {process.pid for process in psutil.process_iter()}
    [[sample]] = play(settings, Says(*texts), "fine")
    answers = [message["content"] for message in sample.episode.messages if message["role"] == "tool"]
    assert answers[0].strip() == "42"
    assert answers[1].startswith("7\n")
    assert sample.episode.info.tool_calls == {"ok": 2} and sample.text == "42"
    started = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not any(process.info["cmdline"] == ["sleep", "1013"] for process in started), (
        "a process outlived the sandbox"
    )
