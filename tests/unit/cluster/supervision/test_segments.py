from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megarl.cluster.supervision import segments

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


WITH_SEMAPHORE = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker
from pathlib import Path
from megarl.cluster.supervision import segments

segments.name_semaphores(Path(sys.argv[1]))
context = multiprocessing.get_context("spawn")
lock = context.Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # as at the end of a run, before it came to it
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_semaphore_is_known_from_the_moment_it_exists(tmp_path: Path) -> None:
    """Of a process that was killed before anything could be noted, and whose tracker did not remove it."""
    subprocess.run([sys.executable, "-c", WITH_SEMAPHORE, str(tmp_path)])
    [name] = segments.noted(tmp_path)
    assert name.startswith(f"sem.{tmp_path.name}-")
    segments.remove({name})
    assert segments.noted(tmp_path) == set()


def test_nothing_is_noted_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert segments.noted(tmp_path / "gone") == set()
    segments.remove({"megarl-no-such-segment"})
