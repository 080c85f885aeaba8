"""A text adventure in a randomly generated house: find the key, then open the chest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from megarl.core.errors import UserError
from megarl.environments.protocol import Environment, Opening, Step, Task, Turn

Room = tuple[int, int]
"""(column, row), counted from the west and from the north."""

WAYS: dict[str, Room] = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
COMMANDS = (*WAYS, "take", "open")
RULES = (
    "You are in a house. Find the key, take it, then find the chest and open it. Answer each time with one command: "
    f"{', '.join(COMMANDS)}. The last command of what you write counts."
)
KEY_REWARD, CHEST_REWARD = 0.3, 0.7

_COMMAND = re.compile(rf"\b({'|'.join(COMMANDS)})\b")


@dataclass(frozen=True, slots=True)
class House:
    """A house with a grid of rooms. `doors` contains pairs of connected rooms, each in both orders. `start` is the
    player's first room; `key` and `chest` are the rooms with the key and the chest."""

    doors: frozenset[tuple[Room, Room]]
    start: Room
    key: Room
    chest: Room

    def exits(self, room: Room) -> dict[str, Room]:
        rooms = {way: (room[0] + dx, room[1] + dy) for way, (dx, dy) in WAYS.items()}
        return {way: other for way, other in rooms.items() if (room, other) in self.doors}


def build_house(width: int, height: int, walls: float, random: Random) -> House:
    """Return a random house. `walls` is the fraction of removed doors among those not needed to reach all rooms."""
    rooms = [(x, y) for x in range(width) for y in range(height)]
    pairs = [(a, b) for a in rooms for b in ((a[0] + 1, a[1]), (a[0], a[1] + 1)) if b in rooms]
    random.shuffle(pairs)
    joined = {room: room for room in rooms}

    def root(room: Room) -> Room:
        while joined[room] != room:
            room = joined[room]
        return room

    doors = set()
    for a, b in pairs:
        is_needed = root(a) != root(b)
        if is_needed:
            joined[root(a)] = root(b)
        if is_needed or random.random() >= walls:
            doors |= {(a, b), (b, a)}
    start, key, chest = random.sample(rooms, 3)
    return House(frozenset(doors), start, key, chest)


class TextGameEnvironment(Environment):
    """The text adventure. Taking the key gives a reward of 0.3. Opening the chest gives 0.7 and ends the game."""

    def __init__(self, width: int = 3, height: int = 3, walls: float = 0.5, compass: bool = False, rules: bool = True):
        """
        Args:
            width: width of the house in rooms.
            height: height of the house in rooms.
            walls: fraction of doors to remove, among the doors that are not needed to reach every room.
            compass: show a compass that points to the key, and to the chest once the key is taken.
            rules: explain the rules in a system message. Set it to False if the data explains them.
        """
        if width * height < 3:
            raise UserError(
                f"environment.options: width={width}, height={height}: the house has fewer than 3 rooms, but needs "
                "one each for the start, the key and the chest. Fix: raise width or height"
            )
        self.width, self.height, self.walls = width, height, walls
        self.compass, self.rules = compass, rules
        self.has_key = False

    async def reset(self, task: Task) -> Opening:
        self.house = build_house(self.width, self.height, self.walls, Random(task.seed))
        self.room, self.has_key = self.house.start, False
        system = [{"role": "system", "content": RULES}] if self.rules else []
        return Opening([*system, *task.messages, {"role": "user", "content": self._look()}], state=self._state())

    async def step(self, turn: Turn) -> Step:
        return replace(self._respond(turn), state=self._state())

    def _respond(self, turn: Turn) -> Step:
        command = read_command(turn.text)
        if command is None:
            return Step(f"That is not a command. The commands are {', '.join(COMMANDS)}.", reward=0.0)
        if command in WAYS:
            return self._go(command)
        return self._take() if command == "take" else self._open()

    def _go(self, way: str) -> Step:
        exits = self.house.exits(self.room)
        if way not in exits:
            return Step(f"There is no door to the {way}. {self._look()}", reward=0.0)
        self.room = exits[way]
        return Step(self._look(), reward=0.0)

    def _take(self) -> Step:
        if self.has_key or self.room != self.house.key:
            return Step(f"There is nothing to take. {self._look()}", reward=0.0)
        self.has_key = True
        return Step(f"You take the key. {self._look()}", reward={"key": KEY_REWARD})

    def _open(self) -> Step:
        if self.room != self.house.chest:
            return Step(f"There is nothing to open. {self._look()}", reward=0.0)
        if not self.has_key:
            return Step(f"The chest is locked. {self._look()}", reward=0.0)
        return Step(reward={"chest": CHEST_REWARD}, done=True)

    def _state(self) -> str:
        """Return the room, which observations omit, and whether the player has the key. All rollouts of a group are in
        the same house."""
        return f"room {self.room}, {'with' if self.has_key else 'without'} the key"

    def _look(self) -> str:
        things = {"a key": self.room == self.house.key and not self.has_key, "a chest": self.room == self.house.chest}
        seen = " and ".join(thing for thing, is_here in things.items() if is_here)
        sentences = [f"Doors: {', '.join(self.house.exits(self.room))}."]
        sentences += [f"You see {seen}."] if seen else []
        sentences += ["You have the key."] if self.has_key else []
        sentences += [f"Compass: {self._needle()}."] if self.compass else []
        return " ".join(sentences)

    def _needle(self) -> str:
        x, y = self.house.chest if self.has_key else self.house.key
        dx, dy = x - self.room[0], y - self.room[1]
        signs: Mapping[str, bool] = {"north": dy < 0, "south": dy > 0, "east": dx > 0, "west": dx < 0}
        return ", ".join(way for way, is_right in signs.items() if is_right) or "here"


def read_command(text: str) -> str | None:
    """Return the last command in the text, or the command that a single letter abbreviates. None if there is none."""
    text = text.strip().lower()
    if len(text) == 1:
        return next((command for command in COMMANDS if command[0] == text), None)
    commands = _COMMAND.findall(text)
    return commands[-1] if commands else None
