from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from megarl.cluster.supervision import segments
from tests.timing import HANG_S

CHILD = """
import mmap, os, sys
maps = []
for path in sys.argv[1:]:
    with open(path, "a+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
os.unlink(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """Yield paths of segments that do not exist yet."""
    paths = [segments.SHARED_MEMORY / f"megarl-test-{uuid4().hex}" for _ in range(6)]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_segments_of_a_killed_process_are_removed(tmp_path: Path, paths: list[Path]) -> None:
    """Segments that the process only mapped stay: those of earlier programs, and those that other processes use."""
    unlinked, noted, late, earlier, served, unmapped = paths
    earlier.touch()
    segments.note_earlier(tmp_path)
    unmapped.touch()
    with served.open("a+b") as file, subprocess.Popen(["sleep", str(HANG_S)], stdin=file) as server:
        held = [str(path) for path in (unlinked, noted, late, earlier, served)]
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, *held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            child.stdout.readline()
            mapped = {segment for segment in segments.mapped() if segment.name.startswith("megarl-test-")}
            assert {segment.name for segment in mapped} == {path.name for path in (noted, late, earlier, served)}
            segments.note(tmp_path)
            child.kill()
        assert noted.exists() and late.exists()
        segments.remove(segments.created(tmp_path))
        server.kill()
    assert [path for path in paths if path.exists()] == [earlier, served, unmapped]


def test_reused_segment_name_is_a_different_segment(tmp_path: Path, paths: list[Path]) -> None:
    made, renewed, *_ = paths
    segments.note_earlier(tmp_path)
    for path in (made, renewed):
        path.touch()
    mapped = segments._existing([made.name, renewed.name])
    renewed.rename(renewed.with_name(f"{renewed.name}-first"))
    renewed.touch()
    renewed.with_name(f"{renewed.name}-first").unlink()
    segments.remove(segments.created(tmp_path, mapped))
    assert (made.exists(), renewed.exists()) == (False, True)


WITH_SEMAPHORE = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker
from pathlib import Path
from megarl.cluster.supervision import segments
from tests.timing import HANG_S

segments.name_semaphores(Path(sys.argv[1]))
context = multiprocessing.get_context("spawn")
lock = context.Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # as at the end of a run, before it cleans up
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_semaphore_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """The process was killed before it recorded the semaphore, and its resource tracker did not remove it."""
    scratch = tmp_path / f"megarl-test-{uuid4().hex}"
    scratch.mkdir()
    segments.note_earlier(scratch)
    subprocess.run([sys.executable, "-c", WITH_SEMAPHORE, str(scratch)])
    [semaphore] = segments.created(scratch)
    assert semaphore.name.startswith(f"sem.{scratch.name}-")
    segments.remove({semaphore})
    assert segments.created(scratch) == set()


def test_missing_scratch_folder_has_no_segments(tmp_path: Path, paths: list[Path]) -> None:
    paths[0].touch()
    assert segments.created(tmp_path / "gone", segments._existing([paths[0].name])) == set()
    segments.remove({segments.Segment(1, "megarl-no-such-segment")})
