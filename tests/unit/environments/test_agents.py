"""Rollouts of agents in real processes, with a scripted policy behind the HTTP endpoint."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.registry import check_environment
from megarl.environments.runner import RolloutRequest, RolloutRunner
from tests.paths import QUICKSTART
from tests.readme import text_of
from tests.scripted_policy import ScriptedPolicy, hermes_tokenizer
from tests.timing import LIMIT_S, WAIT_S

AGENTS = Path(__file__).with_name("agents.py")
TOKENIZER = hermes_tokenizer()


def play(
    kind: str,
    *rollouts: tuple[str, ScriptedPolicy],
    file: Path = AGENTS,
    with_feedback: bool = False,
    agent_s: float = WAIT_S,
) -> list[list[Sample]]:
    """Run one rollout per fault concurrently and return their samples. agent_s: the timeout of an agent."""
    environment = f"environment={{class: '{file}:{kind}', timeout_s: {WAIT_S}, agent_timeout_s: {agent_s}}}"
    overrides = [environment, "rewards.functions=[]"]
    room = ["rollout.max_new_tokens=400", "rollout.context_length=500", "actor.tokens_per_microbatch=4096"]
    teachers = ["teachers.models=[{name: t, feedback: environment}]"] if with_feedback else []
    config = load(QUICKSTART, [*overrides, *room, *teachers])

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


def test_agent_and_sub_agent_become_separate_samples():
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


HANGS = f"run did not return within {LIMIT_S} s. Fix: make it faster, or raise environment.agent_timeout_s"


def test_failing_agents_do_not_affect_others():
    fine = says("a", "b", "c")
    names = ("raise", "hang", "silent", "no reward", "fine")
    policies = ((name, fine if name == "fine" else says("a", "b", "c")) for name in names)
    rollouts = play("Delegator", *policies, agent_s=LIMIT_S)
    failures = [samples[-1].episode.failure for samples in rollouts]
    assert failures[0] == "run raised KeyError: 'broken agent'" and "agents.py" in rollouts[0][0].episode.stack
    assert failures[1] == HANGS
    assert failures[2].startswith("the agent sent no request to the endpoint. Fix: call the OpenAI API at base_url")
    assert len(rollouts[2][0].response_ids) == 0
    assert failures[3:] == [None, None]
    assert [samples[-1].episode.outcome for samples in rollouts[3:]] == [0.0, 2.0]
    assert [samples[-1].episode.info.stop_reason for samples in rollouts] == ["failed"] * 3 + ["done"] * 2


def test_agent_feedback_applies_to_all_samples():
    [samples] = play("Delegator", ("no reward", says("first", "checked", "last")), with_feedback=True)
    assert [sample.episode.feedback for sample in samples] == ["Not rewarded."] * 2
    ends = [sample.prompt.token_ids[: sample.episode.message_end] for sample in samples]
    texts = [TOKENIZER.decode(ids).rpartition("<|im_start|>user\n")[2] for ids in ends]
    assert texts == ["no reward 42 77", "first"]


def test_agent_without_base_class_runs():
    [[sample]] = play("Plain", ("fine", says("slow")))
    assert sample.episode.failure is None and sample.episode.outcome == 4.0


def test_blocking_or_exiting_agent_fails_its_rollout():
    [[sample]] = play("Blocked", ("fine", says("a")), agent_s=LIMIT_S)
    assert sample.episode.failure == HANGS
    [[sample]] = play("Delegator", ("exit", says("a", "a", "a")))
    assert sample.episode.failure == "the environment's process exited (exit status 3) in each of 3 attempts"


def test_agent_of_the_sessions_page_runs(tmp_path):
    [source] = re.findall(r"^```python\n(.*?)^```", text_of("megarl/environments/sessions/README.md"), re.S | re.M)
    (tmp_path / "solver.py").write_text(source)
    policy = says("I think 41.", " 42")
    [[sample]] = play("Solver", ("What?", policy), file=tmp_path / "solver.py")
    assert sample.episode.failure is None and sample.episode.outcome == 1.0
    assert policy.asked[1].token_ids[: len(policy.asked[0].token_ids)] == policy.asked[0].token_ids


def test_engine_error_is_raised_not_recorded_as_failure():
    async def lost(*_: object) -> None:
        raise ConnectionError("the engine is gone")

    with pytest.raises(ConnectionError, match="the engine is gone"):
        play("Delegator", ("fine", lost))


def test_agent_with_wrong_signature_is_rejected():
    with pytest.raises(UserError, match=r"run takes \(self, task\).*define it as run\(self, task, base_url, api_key"):
        check_environment(f"{AGENTS}:TooFew", {})
