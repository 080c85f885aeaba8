from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megarl.cluster import segments

CHILD = """
import mmap, os, sys
maps = []
for path in sys.argv[1:]:
    with open(path, "w+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
os.unlink(sys.argv[2])
print(flush=True)
sys.stdin.read()
"""


def test_those_of_a_killed_process_are_known_and_removed(tmp_path: Path) -> None:
    held, unlinked, foreign = (segments.SHARED_MEMORY / f"{tmp_path.name}-{i}" for i in range(3))
    foreign.touch()
    command = [sys.executable, "-c", CHILD, str(held), str(unlinked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert {name for name in segments.mapped() if name.startswith(tmp_path.name)} == {held.name}
        segments.note(tmp_path)
        child.kill()
    assert held.exists()
    assert held.name in segments.noted(tmp_path)
    segments.remove(segments.noted(tmp_path))
    assert not held.exists()
    assert foreign.exists()
    foreign.unlink()


def test_nothing_is_noted_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert segments.noted(tmp_path / "gone") == set()
    segments.remove({"megarl-no-such-segment"})
