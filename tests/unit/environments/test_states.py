"""States in which turns start: their hashes, and how rollouts record them."""

from __future__ import annotations

from megarl.core.sample import Sample
from megarl.environments.states import state_of
from tests.scripted_policy import ScriptedPolicy, hermes_tokenizer
from tests.unit.environments.sessions.test_sessions import Ask, in_session, message_of
from tests.unit.environments.test_runner import Says, config, play


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def states(samples: list[Sample]) -> list[tuple[tuple[int, int], ...]]:
    return [sample.episode.turns for sample in samples]


def test_states_differ_by_role_content_and_calls():
    calls = [[{"id": "1", "function": {"name": name, "arguments": {}}}] for name in ("look", "take")]
    observed = [
        "look",
        user("look"),
        user("Look"),
        [{"role": "tool", "content": "look"}],
        [*user("look"), *user("look")],
        *([{"role": "assistant", "content": "", "tool_calls": own}] for own in calls),
        [7, 8],
        [7, 9],
    ]
    found = [state_of(each) for each in observed]
    assert len(set(found)) == len(observed) and all(0 <= state < 2**64 for state in found)


def test_ids_of_tool_calls_are_no_part_of_the_state():
    def result(name: str) -> list[dict]:
        call = {"id": name, "function": {"name": "look", "arguments": {"at": 1}}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "a door"},
        ]

    assert state_of(result("a")) == state_of(result("b"))


def test_observations_are_the_states():
    """The rollouts write different turns, and observe the same."""
    [first], [second] = play(config(), Says("12", "345", "6", "7"), "fine", "fine")
    expected = tuple(enumerate(map(state_of, (user("fine"), user("1 turns"), user("2 turns")))))
    assert states([first, second]) == [expected, expected]


def test_restarted_conversation_is_the_state_of_its_first_turn():
    [samples] = play(config(), Says("12"), "restart")
    assert states(samples) == [
        ((0, state_of(user("restart"))),),
        ((1, state_of(user("restarted"))), (2, state_of(user("2 turns")))),
    ]


def test_opening_of_token_ids_is_a_state():
    [[sample]] = play(config(), Says("12"), "ids")
    assert sample.episode.turns[0] == (0, state_of([7, 8, 9]))


def test_environment_may_name_its_states():
    [[sample]] = play(config("Keyed"), Says("12"), "fine")
    assert sample.episode.turns == tuple(enumerate(map(state_of, ("3 left", "2 left", "1 left"))))


def test_state_that_is_no_string_fails_the_rollout():
    [[sample]] = play(config("Keyed"), Says("12"), "number")
    assert sample.episode.failure.startswith("step raised TypeError: state has type int. Fix: return a string")


def test_new_messages_are_the_states_of_an_agents_turns():
    """The second request continues the first turn, and the third one starts a conversation."""
    policy = ScriptedPolicy(hermes_tokenizer(), ["One.", "Two.", "Three."])

    async def agent(ask: Ask, *_: object) -> None:
        talk = [*user("What now?"), message_of(await ask(user("What now?")))]
        message_of(await ask([*talk, *user("And?")]))
        message_of(await ask(user("Else?")))

    _, parts = in_session(policy, agent)
    assert [part.turns for part in parts] == [
        [(0, state_of(user("What now?"))), (1, state_of(user("And?")))],
        [(2, state_of(user("Else?")))],
    ]
