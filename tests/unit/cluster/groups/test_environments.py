"""Training and evaluation rollouts with one engine, with environments in real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.evaluation import config_of_set
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import Completion, VersionRun
from megarl.core.sample import Sample
from megarl.data.prompts import PromptSet
from megarl.rollout.engine import TurnRequest
from megarl.step import requests as training
from megarl.step.evaluation import requests
from tests.children import Children
from tests.paths import QUICKSTART
from tests.unit.cluster.groups.environment_actor import environment_actor, handle_of
from tests.unit.environments.test_runner import EOS_ID, TOKENIZER, prompt

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
WORLDS, AGENTS = ENVIRONMENTS / "worlds.py", ENVIRONMENTS / "agents.py"
SET = {"name": "a", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 40, "stop": ["</answer>"]}


class Engine:
    """An engine that samples the last digit of the seed and records its requests.

    The first turns wait until `num_awaited` of them are in progress.
    """

    def __init__(self, num_awaited: int = 1) -> None:
        self._num_awaited, self._have_arrived = num_awaited, asyncio.Event()
        self.asked: list[TurnRequest] = []
        self.is_lost = False
        self.under_way = self.most_under_way = 0

    def begin(self, turn: TurnRequest) -> asyncio.Future[Completion]:
        return asyncio.ensure_future(self._complete(turn))

    async def _complete(self, turn: TurnRequest) -> Completion:
        self.asked.append(turn)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way == self._num_awaited:
            self._have_arrived.set()
        await self._have_arrived.wait()
        await asyncio.sleep(0.05)
        self.under_way -= 1
        ids = [*TOKENIZER(str(turn.seed % 10))["input_ids"], EOS_ID]
        return Completion(ids, [-1.0] * len(ids), (VersionRun(0, len(ids)),), "stop")


def config(kind: str, given: dict, *overrides: str) -> Config:
    """Return a recipe with this evaluation set in an environment of this kind. It trains in a stateful environment."""
    own = given | {"environment": {"class": f"{AGENTS if kind == 'Delegator' else WORLDS}:{kind}"}}
    return load(
        QUICKSTART,
        [
            f"environment={{class: '{WORLDS}:Numbered', max_consecutive_failures: 2}}",
            f"evaluation.sets={json.dumps([own])}",
            "rollout={max_new_tokens: 400, context_length: 500}",
            "actor.tokens_per_microbatch=4096",
            "batch={prompts_per_step: 2, samples_per_prompt: 2, prompts_per_update: 2}",
            *overrides,
        ],
    )


def drive(settings: Config, phases: Callable[[Any], Awaitable[list]]) -> list:
    async def run() -> list:
        async with environment_actor(settings) as actor:
            return await phases(actor)

    return asyncio.run(run())


def evaluate(settings: Config, actor: Any, engine: Engine, *faults: str) -> Awaitable[list[list[Sample]]]:
    [given] = settings.evaluation.sets
    asked = requests(settings, given, PromptSet(tuple(map(prompt, faults)), "hash"))
    flat = [request for group in asked for request in group]
    return actor.evaluate(flat, handle_of(engine), config_of_set(settings, given))


@pytest.mark.parametrize(("kind", "turns"), [("Counter", 3), ("Delegator", 3)])
def test_turns_use_the_sets_settings_and_fixed_seeds(kind: str, turns: int) -> None:
    settings = config(kind, SET)

    async def evaluate_twice(actor: Any) -> list:
        found = []
        for _ in range(2):
            engine = Engine()
            [samples] = await evaluate(settings, actor, engine, "fine")
            found.append((engine.asked, [sample.response_ids.tolist() for sample in samples]))
        return found

    (asked, ids), (asked_again, ids_again) = drive(settings, evaluate_twice)
    assert len(asked) == turns and len({turn.seed for turn in asked}) == turns
    for turn in asked:
        assert (turn.temperature, turn.top_p, turn.top_k, turn.purpose) == (0.7, 0.9, 5, "evaluation")
        assert turn.stop == ("</answer>",) and turn.max_new_tokens <= 40 and not turn.is_greedy
    assert [turn.seed for turn in asked_again] == [turn.seed for turn in asked] and ids_again == ids


@pytest.mark.parametrize("kind", ["Counter", "Delegator"])
def test_greedy_set_samples_every_turn_greedily(kind: str) -> None:
    settings, engine = config(kind, {"name": "a"}), Engine()
    [samples] = drive(settings, lambda actor: evaluate(settings, actor, engine, "fine"))
    assert samples[0].episode.failure is None
    assert len(engine.asked) == 3 and all(turn.is_greedy for turn in engine.asked)


def test_evaluation_does_not_affect_stateful_environments() -> None:
    settings, engine = config("Numbered", {"name": "a"}), Engine()
    listener = SimpleNamespace(begin=SimpleNamespace(remote=lambda samples, images: None))

    async def train(actor: Any, step: int) -> list[float]:
        [asked, _] = training.requests(settings, step, [prompt("fine"), prompt("fine")])
        return numbers(await actor.train(asked, handle_of(engine), listener))

    async def run(actor: Any) -> list:
        before = await train(actor, 1)
        evaluated = [numbers(await evaluate(settings, actor, engine, "fine", "fine")) for _ in range(2)]
        return [before, *evaluated, await train(actor, 2)]

    assert drive(settings, run) == [[1, 2], [1, 2], [1, 2], [3, 4]]


def numbers(rollouts: list[list[Sample]]) -> list[float]:
    return sorted(sample.episode.outcome + sum(sample.episode.rewards) for [sample] in rollouts)


def test_evaluation_concurrency_is_limited_to_a_training_step() -> None:
    settings, engine = config("Counter", {"name": "a"}), Engine(num_awaited=4)
    rollouts = drive(settings, lambda actor: evaluate(settings, actor, engine, *["fine"] * 9))
    assert len(rollouts) == 9 and engine.most_under_way == 4


def test_failures_neither_end_the_run_nor_leak_processes(children: Children) -> None:
    settings, engine, left = config("Counter", {"name": "a"}, "environment.class=null"), Engine(), []

    async def run(actor: Any) -> list[list[Sample]]:
        assert not children(), "training must have no environment process"
        rollouts = await evaluate(settings, actor, engine, "raise", "raise", "raise", "fine")
        left.extend(children())
        return rollouts

    failures = [samples[-1].episode.failure for samples in drive(settings, run)]
    assert failures == ["step raised KeyError: 'broken world'"] * 3 + [None]
    assert left == []
