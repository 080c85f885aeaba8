"""An unmodified verifiers environment in an environment process, with its own harness, tool server and rewards, and the
session endpoint as its model."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.core.prompt import Prompt
from megarl.data.turns import ChatTokens
from megarl.environments import Task
from megarl.environments.hosts import HostArguments, HostFailure, HostPool
from megarl.environments.sessions import verifiers_agent
from megarl.environments.sessions.server import SessionServer
from megarl.environments.sessions.session import SessionLimits
from megarl.environments.sessions.verifiers_agent import VerifiersAgent
from megarl.environments.transcript import Part
from megarl.usercode.failures import ProcessLost, kind_of
from tests.paths import ROOT, VERIFIERS
from tests.scripted_policy import ScriptedPolicy, call, hermes_tokenizer
from tests.timing import WAIT_S, wait_until

PACKAGES = Path(__file__).with_name("verifiers_packages")
TOKENIZER = hermes_tokenizer()
LIMITS = SessionLimits(max_turns=8, turn_tokens=None, max_new_tokens=1000, context_length=2000)
ENV = {
    "taskset": {"id": "riddles"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}

UV = f"""#!/bin/sh
# verifiers asks uv for a Python with the packages of the harness program. The current Python has them.
case "$*" in *--help*) echo --script ;; "python find"*) echo {sys.executable} ;; esac
"""


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a temporary HOME and a fake uv. The real one would download packages."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all processes with this folder as HOME, except the current one."""
    found = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("HOME")
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if home == str(folder) and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.mark.slow
def test_verifiers_environment_plays_through_the_endpoint(surroundings: Path) -> None:
    options = {"env": ENV, "path": [str(VERIFIERS), str(PACKAGES)]}
    scripts = {
        0: [call("coat_pocket", coat=0), "The word is amber."],
        1: ["I look." + call("coat_pocket", coat=1), "It is cedar."],
        9: [],
    }
    policies = {idx: ScriptedPolicy(TOKENIZER, script) for idx, script in scripts.items()}

    async def play(server: SessionServer, pool: HostPool, idx: int) -> tuple[Any, list[Part]]:
        host = await pool.take()
        session = server.open(policies[idx], LIMITS, seed=idx)
        task = asdict(Task("a", [], None, {"idx": idx}, 3))
        given = {"base_url": server.base_url, "api_key": session.token, "model": "policy"}
        try:
            rewards = await host.invoke("run", str(idx), 300, task=task, **given)
        except HostFailure as failure:
            rewards = failure
        await host.invoke("close", str(idx), 10)
        return rewards, await server.close(session)

    async def main() -> list[tuple[Any, list[Part]]]:
        server = SessionServer(TOKENIZER, lambda tools: ChatTokens(TOKENIZER, tools))
        await server.start("127.0.0.1")
        pool = await HostPool.start(HostArguments("verifiers", options, WAIT_S, {}), 1)
        assert pool.is_agent and not pool.tools
        played = await asyncio.gather(*(play(server, pool, idx) for idx in scripts))
        assert any("riddles.tool" in " ".join(process.cmdline()) for process in processes_of(surroundings))
        await pool.close()
        await server.stop()
        return played

    first, second, none = asyncio.run(main())
    assert first[0] == {"rewards": {"finds_the_word": 2.0, "looks_first": 0.5}, "feedback": ""}
    assert second[0] == {"rewards": {"finds_the_word": 0.0, "looks_first": 0.5}, "feedback": ""}
    assert "IndexError" in str(none[0]) and none[1] == []
    for idx, (_, samples) in enumerate((first, second)):
        [sample] = samples
        made = sample.transcript.sample("a", Prompt("p", "", []), sample.text, "a", None)
        turns = [asked.completion for asked in policies[idx].asked]
        assert np.array_equal(made.response_ids[made.response_mask], np.concatenate([t.token_ids for t in turns]))
        assert np.array_equal(made.response_logprobs[made.response_mask], np.concatenate([t.logprobs for t in turns]))
        answer = ["amber", "birch"][idx]
        assert f"<tool_response>{answer}</tool_response>" in TOKENIZER.decode(made.response_ids[~made.response_mask])

    wait_until(lambda: not processes_of(surroundings), lambda: processes_of(surroundings))


STUB = """
import json, os, signal
from megarl.usercode.parent import connect, send
parent = connect()
parent.readline()
send(parent, {})
request = json.loads(parent.readline())
if request["index"] == 0:
    os.kill(os.getpid(), signal.SIGKILL)
send(parent, {"id": request["id"], "rewards": {"right": 1.0}})
parent.read()
"""


def test_killed_verifiers_process_does_not_fail_the_rollout(tmp_path, monkeypatch) -> None:
    """The error makes the rollout start over, and the next call starts another process."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr("megarl.environments.sessions.verifiers_agent.PROGRAM", tmp_path / "stub.py")
    agent = VerifiersAgent(env={}, path=[str(ROOT)])

    async def main() -> None:
        with pytest.raises(ProcessLost, match=r"the verifiers process exited \(SIGKILL\)") as lost:
            await agent.run(Task("a", [], None, {"idx": 0}, 3), "", "", "policy")
        assert kind_of(lost.value) == "lost"
        assert await agent.run(Task("a", [], None, {"idx": 1}, 3), "", "", "policy") == {"right": 1.0}
        [program] = verifiers_agent._programs.values()
        await program.result().end()
        verifiers_agent._programs.clear()

    asyncio.run(main())


@pytest.mark.slow
def test_missing_verifiers_environment_is_reported(surroundings: Path) -> None:
    options = {"env": {"taskset": {"id": "riddels"}}, "path": [str(VERIFIERS)]}

    async def main() -> None:
        pool = await HostPool.start(HostArguments("verifiers", options, WAIT_S, {}), 1)
        host = await pool.take()
        given = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model": "policy"}
        try:
            await host.invoke("run", "a", WAIT_S, task=asdict(Task("a", [], None, {}, 3)), **given)
        finally:
            await pool.close()

    with pytest.raises(HostFailure, match=r"verifiers cannot load this environment: .*taskset 'riddels' not found"):
        asyncio.run(main())
