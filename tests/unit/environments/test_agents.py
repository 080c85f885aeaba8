"""Rollouts of agents that live in real processes and reach a scripted policy by HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.core.types import Prompt, Sample
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.registry import check_environment
from megarl.environments.runner import RolloutRequest, RolloutRunner
from tests.paths import QUICKSTART
from tests.readme import text_of
from tests.scripted_policy import ScriptedPolicy, hermes_tokenizer

AGENTS = Path(__file__).with_name("agents.py")
TOKENIZER = hermes_tokenizer()


def play(kind: str, *rollouts: tuple[str, ScriptedPolicy], file: Path = AGENTS) -> list[list[Sample]]:
    """Return the samples of a rollout for each fault, side by side."""
    timeout_s = 10 if file == AGENTS else 60
    environment = f"environment={{class: '{file}:{kind}', timeout_s: 2, agent_timeout_s: {timeout_s}}}"
    overrides = [environment, "rewards.functions=[]"]
    room = ["rollout.max_new_tokens=400", "rollout.context_length=500", "actor.tokens_per_microbatch=4096"]
    config = load(QUICKSTART, [*overrides, *room])

    async def run() -> list[list[Sample]]:
        pool = await HostPool.start(host_arguments(config), 1)
        try:
            runner = RolloutRunner(config, TOKENIZER, pool)
            await runner.start("127.0.0.1")
            calls = []
            for i, (fault, policy) in enumerate(rollouts):
                prompt = Prompt(f"row{i}", fault, [], "42", ({"role": "user", "content": fault},))
                calls.append(runner.run(RolloutRequest(f"1.{i}", prompt, seed=11, task_seed=77), policy))
            return await asyncio.gather(*calls)
        finally:
            await pool.close()

    return asyncio.run(run())


def says(*texts: str, **settings: float) -> ScriptedPolicy:
    return ScriptedPolicy(TOKENIZER, texts, **settings)


def test_samples_of_an_agent_and_of_the_agent_that_it_asks():
    [samples] = play("Delegator", ("fine", says("first", "checked", "last")))
    main, checker = samples
    assert [TOKENIZER.decode(s.response_ids[s.response_mask], skip_special_tokens=True) for s in samples] == [
        "firstlast",
        "checked",
    ]
    assert (main.id, checker.id, checker.rollout_id, main.rollout_id) == ("1.0", "1.0/1", "1.0", "1.0")
    assert (main.text, main.episode.is_last, checker.episode.is_last) == ("last", True, False)
    assert (main.episode.first_turn, checker.episode.first_turn) == (0, 1)
    assert main.episode.outcome == checker.episode.outcome == 5.0
    assert main.episode.parts == {"length": 4.0, "bonus": 1.0}
    info = main.episode.info
    assert (info.stop_reason, info.num_turns, info.num_samples) == ("done", 3, 2)
    assert main.episode.messages[0]["content"] == "fine 42 77"
    assert TOKENIZER.decode(main.prompt.token_ids).endswith("fine 42 77<|im_end|>\n<|im_start|>assistant\n")
    assert main.prompt.answer == "42"


def test_agents_fail_by_themselves():
    fine = says("a", "b", "c")
    names = ("raise", "hang", "silent", "no reward", "fine")
    rollouts = play("Delegator", *((name, fine if name == "fine" else says("a", "b", "c")) for name in names))
    failures = [samples[-1].episode.failure for samples in rollouts]
    assert failures[0] == "run raised KeyError: 'broken agent'" and "agents.py" in rollouts[0][0].episode.stack
    assert failures[1] == "run did not return within 10 s"
    assert failures[2] == "the agent sent no request to the endpoint" and len(rollouts[2][0].response_ids) == 0
    assert failures[3:] == [None, None]
    assert [samples[-1].episode.outcome for samples in rollouts[3:]] == [0.0, 2.0]
    assert [samples[-1].episode.info.stop_reason for samples in rollouts] == ["failed"] * 3 + ["done"] * 2


def test_a_class_that_is_derived_from_nothing():
    [[sample]] = play("Plain", ("fine", says("slow")))
    assert sample.episode.failure is None and sample.episode.outcome == 4.0


def test_an_agent_that_blocks_or_ends_its_process_costs_its_rollouts():
    [[sample]] = play("Blocked", ("fine", says("a")))
    assert sample.episode.failure == "run did not return within 10 s"
    [[sample]] = play("Delegator", ("exit", says("a")))
    assert sample.episode.failure == "the environment ended its process (exit status 3)"


def test_the_agent_of_the_page_on_sessions(tmp_path):
    [source] = re.findall(r"^```python\n(.*?)^```", text_of("megarl/environments/sessions/README.md"), re.S | re.M)
    (tmp_path / "solver.py").write_text(source)
    policy = says("I think 41.", " 42")
    [[sample]] = play("Solver", ("What?", policy), file=tmp_path / "solver.py")
    assert sample.episode.failure is None and sample.episode.outcome == 1.0
    assert policy.asked[1].token_ids[: len(policy.asked[0].token_ids)] == policy.asked[0].token_ids


def test_an_error_of_the_engine_is_no_failure_of_the_agent():
    async def lost(*_: object) -> None:
        raise ConnectionError("the engine is gone")

    with pytest.raises(ConnectionError, match="the engine is gone"):
        play("Delegator", ("fine", lost))


def test_a_run_with_other_arguments_is_said_before_anything_starts():
    with pytest.raises(UserError, match=r"run takes \(self, task\).*define it as run\(self, task, base_url, api_key"):
        check_environment(f"{AGENTS}:TooFew", {})
