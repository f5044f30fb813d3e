"""samples/ray_serve with two replicas of the demo model; QUANTMOE_RAY_PYTHON has its requirements (make test-serve)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from quantmoe import Generator, export

PYTHON = os.environ.get("QUANTMOE_RAY_PYTHON")
SAMPLES = Path(__file__).parents[2] / "samples"
PROMPT = "The sea was"
#: of an answer in which a fault comes: a busy machine's client reads the first when a replica has made hundreds
TOKENS = 3000
pytestmark = pytest.mark.skipif(not PYTHON, reason="make test-serve runs it")
#: what a replica's process runs first: its scheduler fails once the file is there, which one of them finds
BREAKING = """
import os
import sys
if any("default_worker" in text for text in sys.orig_argv):
    from quantmoe.serving.batching.scheduler import Scheduler
    turn = Scheduler._turn
    def broken(self):
        try:
            os.unlink(os.environ["BREAKS"])
        except FileNotFoundError:
            return turn(self)
        raise RuntimeError("broken by the test")
    Scheduler._turn = broken
"""
server = folder = ""


@pytest.fixture(scope="module", autouse=True)
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    global server, folder
    folder = str(tmp_path_factory.mktemp("served") / "demo")
    export(SAMPLES / "demo_model" / "checkpoint", folder)
    tokenizer = Path(folder, "tokenizer_config.json")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.write_text(
        json.dumps(json.loads(tokenizer.read_text(encoding="utf-8")) | {"chat_template": template}), encoding="utf-8"
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = f"http://localhost:{port}"
    log = tmp_path_factory.mktemp("log") / "log"
    command = [PYTHON, SAMPLES / "ray_serve" / "serve.py", folder, "--port", str(port), "--batch", "4", "--queue", "8"]
    (log.parent / "sitecustomize.py").write_text(BREAKING, encoding="utf-8")
    with log.open("wb") as to:
        environment = os.environ | {"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(log.parent), "BREAKS": f"{folder}/breaks"}
        process = subprocess.Popen(command, stdout=to, stderr=to, env=environment, start_new_session=True)
    try:
        for _ in range(180):
            assert process.poll() is None, log.read_text(errors="replace", encoding="utf-8")
            try:
                urllib.request.urlopen(server + "/v1/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail(log.read_text(errors="replace", encoding="utf-8"))
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def post(path: str, **fields: Any) -> Any:
    body = json.dumps(fields).encode()
    request = urllib.request.Request(server + path, body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def complete(**fields: Any) -> str:
    with post("/v1/completions", **{"prompt": PROMPT, "temperature": 0} | fields) as answer:
        return json.load(answer)["choices"][0]["text"]


def stream(**fields: Any) -> Iterator[tuple[str, str | None]]:
    with post("/v1/completions", **{"prompt": PROMPT, "temperature": 0, "stream": True} | fields) as answer:
        for line in answer:
            if not line.strip():
                continue
            assert line.startswith(b"data: ")
            if line == b"data: [DONE]\n":
                return
            found = json.loads(line[6:])
            if "error" in found:
                raise EOFError(found["error"]["message"])
            choice = found["choices"][0]
            yield choice["text"], choice["finish_reason"]
    raise EOFError("the stream ended without [DONE]")


def refused(path: str, **fields: Any) -> tuple[int, str]:
    """The status and message of a refusal, which has the form of OpenAI's."""
    with pytest.raises(urllib.error.HTTPError) as error:
        post(path, **fields)
    found = json.load(error.value)["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["type"] == "invalid_request_error"
    return error.value.code, found["message"]


def processes(name: bytes) -> set[int]:
    """Return those whose command begins so."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # one that has just ended
            if path.read_bytes().startswith(name):
                found.add(int(path.parent.name))
    return found


def replicas() -> set[int]:
    return processes(b"ray::ServeReplica:")


def both() -> set[int]:
    """Wait until there are two replicas: on a busy machine Ray Serve may replace one that is late."""
    deadline = time.monotonic() + 90
    while len(found := replicas()) != 2:
        assert time.monotonic() < deadline, found
        time.sleep(1)
    return found


def expected(count: int) -> str:
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    ids = tokenizer.encode(PROMPT).ids
    return tokenizer.decode(ids + Generator(folder).greedy(ids, count).tokens)[len(PROMPT) :]


def test_text_is_that_of_generate() -> None:
    assert complete(max_tokens=30) == expected(30)
    pieces = list(stream(max_tokens=30))
    assert "".join(text for text, _ in pieces) == expected(30)
    assert [reason for _, reason in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) > 20  # as it is written
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: complete(max_tokens=30), range(6))) == {expected(30)}


def test_chat() -> None:
    ask = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "temperature": 0}
    with post("/v1/chat/completions", **ask) as answer:
        found = json.load(answer)
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": expected(9)}
    with post("/v1/chat/completions", **ask, stream=True) as answer:
        lines = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    assert {line["object"] for line in lines} == {"chat.completion.chunk"}
    assert "".join(line["choices"][0]["delta"]["content"] for line in lines) == expected(9)


def test_refusals() -> None:
    assert refused("/v1/completions", prompt=PROMPT, max_tokens=0) == (400, "max_tokens is 0, expected at least 1")
    assert refused("/v1/chat/completions", messages=[])[0] == 400
    assert refused("/v1/completions", prompt=PROMPT, stop=list("abcde"))[0] == 400


def test_too_many_are_refused_and_the_others_answered() -> None:
    refusal = threading.Event()

    def ask(_: int) -> str:
        try:
            for _ in stream(max_tokens=3000):  # until somebody is refused
                if refusal.is_set():
                    break
        except urllib.error.HTTPError as error:
            refusal.set()
            return str(error.code)
        return "answered"

    with ThreadPoolExecutor(60) as pool:
        found = list(pool.map(ask, range(60)))
    assert set(found) in ({"503", "answered"}, {"429", "answered"}, {"429", "503", "answered"})  # Ray's, a replica's
    assert complete(max_tokens=60) == expected(60)


def test_clients_that_go_away_leave_it_well() -> None:
    for count in range(5):
        asked = stream(max_tokens=3000)
        for _ in range(count + 1):
            next(asked)
        asked.close()
    assert complete(max_tokens=30) == expected(30)


def lose(fault: Callable[[set[int]], None]) -> None:
    """What becomes of 8 requests when a fault comes to one of two replicas, given their processes."""
    before = both()
    whole = expected(TOKENS)

    begun = threading.Semaphore(0)

    def ask(_: int) -> str:
        said = ""
        try:
            for text, _ in stream(max_tokens=TOKENS):
                if not said:
                    begun.release()
                said += text
        except (OSError, EOFError, HTTPException):
            return "lost"
        return said

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(8)]
        for _ in range(8):
            assert begun.acquire(timeout=200)
        fault(before)
        found = [future.result() for future in asked]
    assert set(found) == {"lost", whole}


def check_replaced(before: set[int]) -> None:
    deadline = time.monotonic() + 90
    while len(replicas() & before) != 1 or len(replicas()) != 2:
        assert time.monotonic() < deadline
        time.sleep(1)
    assert complete(max_tokens=30) == expected(30)


def test_a_replica_that_is_killed_loses_only_its_requests() -> None:
    before = both()
    lose(lambda pids: os.kill(min(pids), signal.SIGKILL))
    check_replaced(before)


def test_a_scheduler_that_fails_loses_only_its_requests() -> None:
    before = both()
    lose(lambda _: Path(folder, "breaks").touch())

    def ask(_: int) -> str:
        try:
            complete(max_tokens=1)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        return ""

    said = set(map(ask, range(40)))  # every other request goes there, until Ray Serve has asked for its health
    text = "the server has failed: broken by the test"
    failed = {"message": text, "type": "server_error", "param": None, "code": None}
    assert said == {"", f"503 {json.dumps({'error': failed})}"}
    check_replaced(before)
