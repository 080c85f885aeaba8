"""Concurrent requests to one child process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from megarl.usercode import child_process
from megarl.usercode.child_process import ChildFailure, ConcurrentChild
from tests.timing import HANG_S, SHORT_S, WAIT_S, wait_until

CODE = """
import json, os, sys, threading, time
from megarl.usercode.parent import connect, send
parent = connect()
arguments = json.loads(parent.readline())
eval(arguments.get("first", "None"))
send(parent, {"hello": arguments})
waiting = []
for line in parent:
    request = json.loads(line)
    if "act" in request:
        exec(request["act"])
    elif "wait" in request:
        waiting.append(request)
    else:
        for other in [request, *reversed(waiting)]:
            send(parent, {"id": other["id"], "number": other.get("number")})
        waiting.clear()
"""


@asynccontextmanager
async def opened(**arguments: str) -> AsyncIterator[ConcurrentChild]:
    child = ConcurrentChild([sys.executable, "-c", CODE])
    try:
        assert await child.open(arguments, WAIT_S) == {"hello": arguments}
        yield child
    finally:
        await child.end()
        assert not psutil.pid_exists(child.pid)
        assert not child._waiting and child._writer.transport.is_closing()


def run(test: Callable[[ConcurrentChild], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened() as child:
            await test(child)

    asyncio.run(main())


def test_replies_reach_their_requests_in_any_order():
    async def test(child: ConcurrentChild) -> None:
        waiting = [asyncio.create_task(child.request(WAIT_S, wait=True, number=i)) for i in range(5)]
        await asyncio.sleep(0)
        replies = await asyncio.gather(child.request(WAIT_S, number=5), *waiting)
        assert [reply["number"] for reply in replies] == [5, 0, 1, 2, 3, 4]
        assert not child.is_over

    run(test)


def test_timeout_fails_one_request_and_keeps_the_process():
    async def test(child: ConcurrentChild) -> None:
        with pytest.raises(ChildFailure) as caught:
            await child.request(SHORT_S, wait=True)
        assert caught.value.timed_out and not child.is_over
        # The late reply to the failed request arrives during this one.
        assert (await child.request(WAIT_S, number=7))["number"] == 7

    run(test)


def test_cancelled_request_does_not_disturb_others():
    async def test(child: ConcurrentChild) -> None:
        cancelled = asyncio.create_task(child.request(wait=True))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert (await child.request(WAIT_S, number=1))["number"] == 1
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    run(test)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("os._exit(3)", "exit status 3"),
        ("parent.write(b'{\"id\": '); parent.flush(); os._exit(3)", "exit status 3"),
        ("parent.write(b'garbage\\n'); parent.flush()", "sent a message that is not a JSON object"),
        ("parent.write(b'{\"id\": []}\\n'); parent.flush()", "sent a message that is not a JSON object"),
        (f"parent.close(); time.sleep({HANG_S})", "closed its connection"),
    ],
)
def test_end_of_the_process_fails_all_requests(monkeypatch: pytest.MonkeyPatch, act: str, reason: str):
    if act.startswith("parent.close()"):
        monkeypatch.setattr(child_process, "EXIT_S", SHORT_S)

    async def test(child: ConcurrentChild) -> None:
        requests = [child.request(WAIT_S, wait=True), child.request(WAIT_S, act=act), child.request(WAIT_S, wait=True)]
        for failure in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(failure, ChildFailure)
            assert (str(failure), failure.timed_out) == (reason, False)
        assert child.is_over and not psutil.pid_exists(child.pid)
        assert child._writer.transport.is_closing()
        await child.post({"unread": True})
        with pytest.raises(ChildFailure, match=f"^{reason}$"):
            await child.request(WAIT_S)

    run(test)


@pytest.mark.parametrize("act", ["send(parent, {})", "send(parent, {'id': 99})"])
def test_reply_without_a_request_is_ignored(act: str):
    async def test(child: ConcurrentChild) -> None:
        with pytest.raises(ChildFailure):
            await child.request(SHORT_S, act=act)
        assert (await child.request(WAIT_S, number=1))["number"] == 1

    run(test)


def test_second_reply_to_a_request_is_ignored():
    async def test(child: ConcurrentChild) -> None:
        twice = "parent.write(2 * (json.dumps({'id': request['id']}).encode() + b'\\n')); parent.flush()"
        await child.request(WAIT_S, act=twice)
        assert (await child.request(WAIT_S, number=1))["number"] == 1

    run(test)


def test_process_that_leaves_its_connection_to_another_is_over():
    async def test(child: ConcurrentChild) -> None:
        waiting = asyncio.create_task(child.request(wait=True))
        fork = f"pid = os.fork()\nif pid == 0: os.setsid(); time.sleep({HANG_S})"
        reply = await child.request(
            WAIT_S, act=f"{fork}\nsend(parent, {{'id': request['id'], 'pid': pid}})\nos._exit(0)"
        )
        try:
            await asyncio.to_thread(wait_until, lambda: child.is_over)
            assert not waiting.done()
            await child.end()
            with pytest.raises(ChildFailure, match=r"^exit status 0$"):
                await waiting
        finally:
            os.kill(reply["pid"], signal.SIGKILL)

    run(test)


def test_event_loop_runs_while_the_process_is_killed(monkeypatch):
    async def test(child: ConcurrentChild) -> None:
        threads, fail = [], child._failure
        monkeypatch.setattr(child, "_failure", lambda error: threads.append(threading.current_thread()) or fail(error))
        with pytest.raises(ChildFailure):
            await child.request(WAIT_S, act="os._exit(0)")
        assert threads and threading.main_thread() not in threads

    run(test)


def test_endless_message_fails_all_requests(monkeypatch):
    monkeypatch.setattr("megarl.usercode.child_process.MAX_MESSAGE_BYTES", 2**20)

    async def test(child: ConcurrentChild) -> None:
        with pytest.raises(ChildFailure, match=r"^sent a message of more than "):
            await child.request(WAIT_S, act="while True: parent.write(b' ' * 65536)")

    run(test)


def test_end_fails_pending_requests():
    async def test(child: ConcurrentChild) -> None:
        pending = asyncio.create_task(child.request(WAIT_S, wait=True))
        await asyncio.sleep(0)
        await child.end()
        with pytest.raises(ChildFailure, match=r"^SIGKILL$"):
            await pending

    run(test)


def test_process_that_does_not_read_blocks_only_its_own_requests():
    async def test(child: ConcurrentChild) -> None:
        async with opened() as other:
            stuck = asyncio.create_task(child.request(SHORT_S, act=f"time.sleep({HANG_S})"))
            flood = asyncio.create_task(child.request(SHORT_S, text="a" * 50_000_000))
            assert (await other.request(WAIT_S, number=2))["number"] == 2
            for failure in await asyncio.gather(stuck, flood, return_exceptions=True):
                assert isinstance(failure, ChildFailure) and failure.timed_out

    run(test)


@pytest.mark.parametrize(
    ("first", "reason"),
    [("sys.exit(4)", "exit status 4"), ("parent.write(b'hi\\n')", "sent a message that is not a JSON object")],
)
def test_failure_before_the_first_message_is_reported(first: str, reason: str):
    async def main() -> None:
        child = ConcurrentChild([sys.executable, "-c", CODE])
        with pytest.raises(ChildFailure, match=f"^{reason}$"):
            await child.open({"first": first}, WAIT_S)
        assert not psutil.pid_exists(child.pid)

    asyncio.run(main())


def test_slow_start_is_a_timeout():
    async def main() -> None:
        child = ConcurrentChild([sys.executable, "-c", CODE])
        with pytest.raises(ChildFailure) as caught:
            await child.open({"first": f"time.sleep({HANG_S})"}, SHORT_S)
        assert caught.value.timed_out and not psutil.pid_exists(child.pid)

    asyncio.run(main())
