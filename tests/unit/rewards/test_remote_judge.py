"""A judge behind an OpenAI-compatible API, with a real server on a local port."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from megarl.config.load import load
from megarl.config.schema import RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.image_files import ImageFiles
from megarl.data.images import ImageError, decode, shrunk_url
from megarl.environments.batch import judge_batch
from megarl.environments.trial import try_rewards
from megarl.rewards import remote_judge
from megarl.rewards.pool import FunctionPool
from megarl.rewards.rating import TEMPLATE, question, rating
from tests.paths import QUICKSTART
from tests.timing import HANG_S, LIMIT_S, POLL_S, WAIT_S
from tests.unit.data.image_data import encoded, picture, png

CONCURRENCY = 4
MAX_CHARACTERS = 30


class Listener(ThreadingHTTPServer):
    """The HTTP server of all tests, with a pool of processes that send it requests."""

    daemon_threads = True
    request_queue_size = 64
    judge: Server
    """The judge of the current test."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pool = self.new_pool()

    def new_pool(self, outage_s: float = 0.0, **options: object) -> FunctionPool:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        defaults = {"base_url": url, "model": "m", "template": "{prompt}|{response}|{answer}"}
        defaults |= {"timeout_s": WAIT_S, "retries": 0}
        entry = RewardFunction(function="generative_judge", options=defaults | options)
        return FunctionPool([entry], None, 1, WAIT_S, outage_s=outage_s)


class Server:
    """A judge whose behavior is selected by the judged response. Records its requests."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.server_port = listener, listener.server_port
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.active = self.most_active = 0
        self.num_unavailable = 1
        """Number of requests about a flaky response that still fail."""
        self.lock = threading.Lock()
        self.several = threading.Barrier(CONCURRENCY)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def do_POST(self) -> None:
        judge = self.server.judge
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.requests.append(request)
            judge.keys.append(self.headers["Authorization"])
            judge.active += 1
            judge.most_active = max(judge.most_active, judge.active)
        try:
            content = request["messages"][0]["content"]
            _, response, rejection = (content if isinstance(content, str) else content[-1]["text"]).rsplit("|", 2)
            self._answer(judge, response if rejection == "12" else rejection)
        except BrokenPipeError:
            pass
        finally:
            with judge.lock:
                judge.active -= 1

    def _answer(self, judge: Server, response: str) -> None:
        """Echo the response. A judge that quotes ratings repeats them with a space, and this one removes it."""
        action, _, text = response.replace("[ [", "[[").partition(" ")
        text = text if action != "quote" else response.partition(" ")[2]
        if action == "slow":
            time.sleep(HANG_S)
        elif action == "wait":
            judge.several.wait(WAIT_S)
        if action == "drop":
            self.close_connection = True
            return
        num_requests = sum(response in str(request["messages"][0]["content"]) for request in judge.requests)
        is_unavailable = action == "flaky" and num_requests <= judge.num_unavailable
        status = 503 if is_unavailable else int(text) if action == "status" else 200
        if response.startswith("!"):
            status = 422
        if action == "context" and len(text) > MAX_CHARACTERS:
            status = 400
        message = {"content": None if action == "null" else text.strip(".")}
        content = {"choices": [{"message": message}]} if action != "shape" else {"choices": []}
        body = b"no JSON" if action == "plain" else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = Listener()
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield listener
    listener.pool.close()
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def server(listener: Listener) -> Server:
    listener.judge = Server(listener)
    return listener.judge


def judged(
    server: Server,
    *responses: str,
    answer: str = "12",
    text: str = "Q {answer}",
    files: Sequence[bytes] = (),
    **options,
) -> list:
    """Return the results of the responses, computed in the listener's pool or, with `options`, in a new one.
    files: encoded images in the prompt."""
    images = tuple(PromptImage(i, 1, (1, 2, 2), str(i), file) for i, file in enumerate(files))
    prompt = Prompt("p", text, [1] * max(1, len(files)), answer=answer, images=images)
    samples = [
        Sample(str(i), prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", text)
        for i, text in enumerate(responses)
    ]
    pool = server.listener.new_pool(**options) if options else server.listener.pool
    try:
        return [results["generative_judge"] for results in asyncio.run(judge_batch(pool, samples))]
    finally:
        if options:
            pool.close()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("say [[0]]", "[[0]]"),
        ("quote [[10]]", "[ [10]]"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("say ten", "ten"),
                ("say", ""),
                ("null [[10]]", ""),
                ("say <think>[[10]]</think> no", "<think>[[10]]</think> no"),
                ("say <think>[[10]]", "<think>[[10]]"),
            ]
        ),
    ],
)
def test_response_that_is_not_rated_gets_the_worst_rating(server, response, answer):
    [result] = judged(server, response)
    reason = f"the judge's answer has no rating [[1 to 10]]: …{answer!r}"
    assert (result.value, result.failure, result.issues) == (0.0, None, {"unrated": reason, "truncated": None})


def test_response_that_the_server_rejects_is_truncated(server):
    fits, long, poison = judged(server, "context [[10]]", "context [[4]]" + "." * 100, "status 400")
    assert (fits.value, fits.issues["truncated"]) == (1.0, None)
    assert long.value == pytest.approx(1 / 3) and long.issues["unrated"] is None
    assert "returned status 400" in long.issues["truncated"]
    lengths = [len(request["messages"][0]["content"]) for request in server.requests]
    assert max(lengths) == len("Q {answer}|context [ [4]]|12") + 100
    assert (poison.value, poison.failure) == (0.0, None) and "status 400" in poison.issues["truncated"]


def test_response_rejected_in_every_part_gets_the_worst_rating(server):
    [result] = judged(server, "!" * 16)
    assert (result.value, result.failure) == (0.0, None)
    assert "returned status 422" in result.issues["unrated"] and result.issues["truncated"] is None
    asked = [request["messages"][0]["content"].split("|")[1] for request in server.requests]
    assert asked == ["!" * 16, "", "!" * 8, "!" * 4, "!" * 2]


@pytest.mark.parametrize(
    ("response", "failure"),
    [("status 500", "returned status 500"), ("slow [[10]]", f"did not respond within {LIMIT_S} s")],
)
def test_response_that_the_server_fails_on_gets_the_worst_rating(server, response, failure):
    """The server answers the same question with an empty response, so it is available."""
    options = {"timeout_s": LIMIT_S} if "slow" in response else {}
    [result] = judged(server, response, **options)
    assert (result.value, result.failure) == (0.0, None) and failure in result.issues["unrated"]
    [result] = judged(server, "say [[10]]", answer=response, **options)
    assert result.value is None and result.kind == "away" and failure in result.failure


def test_question_that_is_rejected_without_a_response_is_a_failure(server):
    [result] = judged(server, "say [[10]]", answer="status 400")
    assert result.value is None and result.kind == "error" and "returned status 400" in result.failure
    assert server.requests[-1]["messages"][0]["content"] == "Q {answer}||status 400"


def test_responses_to_a_prompt_share_the_empty_question(server):
    """A server that rejects a prompt or its images receives one question per response, and an empty one per prompt."""
    results = judged(server, "say a", "say b", "say c", answer="status 400", text=TWO, files=PICTURES)
    assert [result.value for result in results] == [None] * 3
    texts = [request["messages"][0]["content"][-1]["text"] for request in server.requests]
    assert sorted(text.split("|")[1] for text in texts) == ["", "say a", "say b", "say c"]


def test_ratings_are_rewards_and_invalid_answers_failures(server):
    cases = {
        "say Good. [[10]]": 1.0,
        "say First [[1]], but [[ 5.5 ]]": 0.5,
        "say [[1]]": 0.0,
        "status 404": "returned status 404: ",
        "plain": "returned no message: 'no JSON'",
        "shape": "returned no message: ",
    }
    for (response, expected), result in zip(cases.items(), judged(server, *cases), strict=True):
        if isinstance(expected, float):
            assert result.value == expected, response
        else:
            assert result.value is None and expected in result.failure, response
            assert result.failure.startswith("raised ValueError: ")
    [request] = [item for item in server.requests if "Good" in item["messages"][0]["content"]]
    assert request["messages"] == [{"role": "user", "content": "Q {answer}|say Good. [ [10]]|12"}]
    assert (request["model"], request["temperature"], server.keys[0]) == ("m", 0.0, None)


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        ("status 503", "returned status 503: "),
        ("status 429", "returned status 429: "),
        ("drop", "could not be reached (RemoteProtocolError: "),
    ],
)
def test_unavailable_server_is_an_infrastructure_failure(server, response, failure):
    [result] = judged(server, response)
    assert result.kind == "away" and failure in result.failure
    assert result.failure.startswith("raised ServiceUnavailable: ")


def test_judge_waits_for_a_server_that_recovers(server, monkeypatch):
    """The server is unavailable for the first three requests, each in a separate call. Other samples are judged
    once."""
    monkeypatch.setattr("megarl.core.outage.FIRST_PAUSE_S", POLL_S)
    server.num_unavailable = 3
    results = judged(server, "say [[10]]", "flaky [[1]]", concurrency=1, outage_s=WAIT_S)
    assert [result.value for result in results] == [1.0, 0.0]
    contents = [request["messages"][0]["content"].split("|")[1] for request in server.requests]
    assert contents == ["say [ [10]]"] + ["flaky [ [1]]"] * 4


def test_requests_are_concurrent_up_to_the_limit(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    options = {"concurrency": CONCURRENCY, "api_key_env": "JUDGE_KEY", "timeout_s": WAIT_S}
    results = judged(server, *["wait [[4]]"] * 3 * CONCURRENCY, scale=[0, 4], **options)
    assert [result.value for result in results] == [1.0] * 3 * CONCURRENCY
    assert server.most_active == CONCURRENCY and set(server.keys) == {"Bearer secret"}


def test_only_transient_errors_are_retried(server):
    results = judged(server, "flaky [[10]]", "status 404", "status 429", retries=1)
    assert results[0].value == 1.0
    assert "returned status 404" in results[1].failure and "returned status 429" in results[2].failure
    assert [result.kind for result in results[1:]] == ["error", "away"]
    contents = [request["messages"][0]["content"].split("|")[1] for request in server.requests]
    assert sorted(contents) == ["flaky [ [10]]"] * 2 + ["status 404"] + ["status 429"] * 2


def test_unreachable_server_is_a_failure(server):
    with socket.socket() as reserved:  # bound but not listening, so that no other server can answer on this port
        reserved.bind(("127.0.0.1", 0))
        [result] = judged(server, "say [[10]]", base_url=f"http://127.0.0.1:{reserved.getsockname()[1]}/v1")
    assert result.value is None and "could not be reached (ConnectError: " in result.failure


PICTURES = [png(5, 4), encoded(picture(6, 3, seed=1, mode="RGBA"))]
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
TWO = f"Is {PLACEHOLDER} or {PLACEHOLDER} larger?"


def test_judge_receives_the_images_of_the_prompt(server):
    results = judged(server, "say [[10]]", f"say {PLACEHOLDER} [[1]]", text=TWO, files=PICTURES)
    assert [result.value for result in results] == [1.0, 0.0]
    for request in server.requests:
        [message] = request["messages"]
        *images, text = message["content"]
        assert message["role"] == "user" and len(images) == 2
        for image, file in zip(images, PICTURES, strict=True):
            header, _, content = image["image_url"]["url"].partition(",")
            assert image["type"] == "image_url" and header == "data:image/png;base64"
            received = np.asarray(decode(base64.b64decode(content)))
            np.testing.assert_array_equal(received, np.asarray(decode(file)))
        assert text["type"] == "text" and text["text"].startswith("Is [image 1] or [image 2] larger?|say [")
        assert "<|" not in text["text"]


def test_judge_without_vision_receives_text(server):
    [result] = judged(server, "say [[10]]", text=TWO, files=PICTURES, images=False)
    assert result.value == 1.0
    assert server.requests[0]["messages"][0]["content"] == f"{TWO}|say [ [10]]|12"


@pytest.mark.parametrize("status", [400, 404, 415, 500])
def test_judge_that_rejects_images_is_reported(server, status):
    [result] = judged(server, "say [[10]]", answer=f"status {status}", text=TWO, files=PICTURES)
    assert result.value is None and f"returned status {status}" in result.failure
    assert result.failure.endswith(". Fix: use a judge that accepts images, or set options.images=false")
    [result] = judged(server, "say [[10]]", answer=f"status {status}")
    assert "Fix: " not in result.failure


@pytest.mark.parametrize(("status", "remedy"), [(400, "use a judge that accepts images"), (200, "")])
def test_trial_names_the_remedy_of_a_judge(server, tmp_path, status, remedy):
    """A remedy in the failure message replaces the general one."""
    images = ImageFiles()
    digest = images.add(PICTURES[0], tmp_path).digest
    url = f"http://127.0.0.1:{server.server_port}/v1"
    options = {"base_url": url, "model": "m", "template": "{prompt}|{response}|{answer}", "retries": 0}
    functions = [{"function": "generative_judge", "options": options}]
    config = load(QUICKSTART, [f"rewards.functions={json.dumps(functions)}"])
    answer = f"status {status}" if status != 200 else "shape"
    prompt = Prompt("p", f"{PLACEHOLDER}?", [5], answer, images=(PromptImage(0, 1, (1, 2, 2), digest),))
    pool = FunctionPool(config.rewards.functions, None, 1, WAIT_S)
    try:
        with pytest.raises(UserError) as raised:
            try_rewards(config, pool, [prompt], images)
    finally:
        pool.close()
    line = str(raised.value).splitlines()[0]
    assert line.count("Fix: ") == 1 and remedy in line


def test_large_images_are_shrunk_for_the_judge(server):
    files = [png(80, 40), encoded(picture(60, 60), "JPEG")]
    judged(server, "say [[10]]", text=TWO, files=files, max_pixels=800)
    sizes = []
    for image in server.requests[0]["messages"][0]["content"][:-1]:
        sizes.append(decode(base64.b64decode(image["image_url"]["url"].partition(",")[2])).size)
    assert sizes == [(40, 20), (28, 28)]


def test_each_image_is_encoded_once_and_not_in_the_event_loop(server, monkeypatch):
    """A slow encoder delays no requests, because all images are encoded before the first one."""
    encoded_files, url = [], f"http://127.0.0.1:{server.server_port}/v1"

    def slow(file: bytes, max_pixels: int) -> str:
        assert threading.current_thread() is not threading.main_thread() and not server.requests
        encoded_files.append(file)
        return shrunk_url(file, max_pixels)

    monkeypatch.setattr(remote_judge, "shrunk_url", slow)
    judge = remote_judge.GenerativeJudge(url, "m", "{prompt}|{response}|{answer}", timeout_s=WAIT_S)
    files = [PICTURES, PICTURES, PICTURES[:1], [b"damaged"]]
    ratings = asyncio.run(judge(["Q"] * 4, ["say [[10]]"] * 4, ["12"] * 4, prompt_image_files=files))
    assert sorted(encoded_files) == sorted([*PICTURES, b"damaged"])
    assert ratings[:3] == [1.0] * 3 and isinstance(ratings[3], ImageError)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (f"{PLACEHOLDER}a{PLACEHOLDER}", "[image 1]a[image 2]"),
        (f"{PLACEHOLDER}a{PLACEHOLDER} typed <|image_pad|>", "[image]a[image] typed [image]"),
    ],
)
def test_images_are_numbered_unless_users_typed_placeholders(server, prompt, shown):
    judged(server, "say [[10]]", text=prompt, files=PICTURES)
    assert server.requests[0]["messages"][0]["content"][-1]["text"] == f"{shown}|say [ [10]]|12"


TOKENS = [
    *(
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|image|>",
        "<|image_1|>",
        "<image>",
        "<image_soft_token>",
    ),
    *("<start_of_image>", "<IMG_CONTEXT>", "[IMG]", "[IMG_END]", "<|audio_bos|>"),
]


@pytest.mark.parametrize("files", [[], PICTURES], ids=["no images", "images"])
def test_responses_cannot_contain_image_tokens(server, files):
    text = "<b>image</b> a < image > b"
    judged(server, "say " + "".join(TOKENS) + text + "[[10]]", text=TWO if files else "Q", files=files)
    content = server.requests[0]["messages"][0]["content"]
    question = content[-1]["text"] if files else content
    assert question.endswith("|say " + "[image]" * len(TOKENS) + text + "[ [10]]|12")


def test_default_template_requests_a_parseable_rating():
    assert rating(TEMPLATE, [0, 10]) == 0.5
    content = question(TEMPLATE, "the {response}", "the {answer}", 12)
    assert [content.count(text) for text in ("the {response}", "the {answer}", "12")] == [1, 1, 1]
