import asyncio
import re
from random import Random

import pytest

from megarl.core.errors import UserError
from megarl.environments.registry import check_environment
from megarl.environments.shipped.text_game import WAYS, build_house, read_command
from tests.unit.environments.shipped.turns import question, task, turn

TextGame = check_environment("text_game", {"width": 4})
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}


class Player:
    """A player that knows only the game's text. It searches the house depth first and tries every action everywhere."""

    def __init__(self, game: TextGame, seen: str):
        self.game, self.seen = game, seen
        self.rewards: list[float] = []
        self.is_done = False

    def say(self, text: str) -> None:
        step = asyncio.run(self.game.step(turn(text)))
        self.rewards.append(step.reward if isinstance(step.reward, float) else sum(step.reward.values()))
        self.is_done, self.seen = step.done, step.observation or ""

    def explore(self, place=(0, 0), visited=None) -> None:
        visited = {(0, 0)} if visited is None else visited
        for command in ("take", "open"):
            self.say(command)
            if self.is_done:
                return
        for way in re.search(r"Doors: (.*?)\.", self.seen)[1].split(", "):
            other = (place[0] + WAYS[way][0], place[1] + WAYS[way][1])
            if other not in visited:
                visited.add(other)
                self.say(way)
                self.explore(other, visited)
                if self.is_done:
                    return
                self.say(BACK[way])


def begun(seed: int, **options) -> Player:
    game = TextGame(**options)
    return Player(game, asyncio.run(game.reset(task(seed=seed))).messages[-1]["content"])


@pytest.mark.parametrize("walls", [0.0, 0.5, 1.0])
def test_every_house_can_be_won_from_its_descriptions(walls):
    for seed in range(30):
        player = begun(seed, width=4, height=3, walls=walls)
        player.explore()
        if not player.is_done:  # explore again if it found the chest before the key
            player.explore()
        assert player.is_done
        assert sum(player.rewards) == pytest.approx(1.0)
        assert sorted(set(player.rewards)) == [0.0, 0.3, 0.7]


def test_walls_never_disconnect_a_room():
    """A spanning tree of the 12 rooms has 11 doors, the full grid 17."""
    counts = {walls: len(build_house(4, 3, walls, Random(1)).doors) // 2 for walls in (0.0, 1.0)}
    assert counts == {0.0: 17, 1.0: 11}


def test_compass_leads_to_the_goal_without_walls():
    for seed in range(20):
        player = begun(seed, width=4, height=4, walls=0.0, compass=True)
        for _ in range(14):
            way = re.search(r"Compass: (\w+)", player.seen)[1]
            player.say({"here": "take" if "You see a key" in player.seen else "open"}.get(way, way))
            if player.is_done:
                break
        assert player.is_done


def test_house_depends_only_on_the_seed():
    assert begun(1, width=5, height=5).game.house == begun(1, width=5, height=5).game.house
    assert begun(1, width=5, height=5).game.house != begun(2, width=5, height=5).game.house


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("north", "north"),
        ("I was in the north. So I go EAST!", "east"),
        (" w\n", "west"),
        ("o", "open"),
        ("northern", None),
        ("it's", None),
        ("", None),
    ],
)
def test_last_command_of_a_turn_counts(text, command):
    assert read_command(text) == command


def test_unknown_command_is_reported():
    player = begun(0)
    step = asyncio.run(player.game.step(turn("dance")))
    assert step.observation == "That is not a command. The commands are north, south, east, west, take, open."
    assert (step.reward, step.done) == (0.0, False)


def test_chest_is_locked_without_the_key():
    player = begun(0)
    player.game.room = player.game.house.chest
    assert asyncio.run(player.game.step(turn("open"))).observation.startswith("The chest is locked.")


def test_messages_of_the_data_row_precede_the_game():
    messages = asyncio.run(TextGame(rules=False).reset(task(question("Win!")))).messages
    assert messages[0]["content"] == "Win!" and messages[1]["content"].startswith("Doors: ")
    assert [message["role"] for message in asyncio.run(TextGame().reset(task())).messages] == ["system", "user"]


def test_state_is_the_room_and_the_key():
    """Failed commands and a walk in a circle lead back to the state of the opening. The key changes it."""
    game = TextGame(width=2, height=2, walls=0.0)
    opening = asyncio.run(game.reset(task(seed=0))).state
    ways = ("east", "west") if game.room[0] == 0 else ("west", "east")
    states = [asyncio.run(game.step(turn(command))).state for command in ("dance", "open", *ways)]
    assert states[:2] == [opening] * 2 and states[2] != opening and states[3] == opening
    game.room = game.house.key
    before = asyncio.run(game.step(turn("dance"))).state
    assert asyncio.run(game.step(turn("take"))).state != before


def test_house_with_two_rooms_is_rejected():
    with pytest.raises(
        UserError, match=r"options: width=1, height=2: .* fewer than 3 rooms.* Fix: raise width or height"
    ):
        TextGame(width=1, height=2)
    TextGame(width=1, height=3)
