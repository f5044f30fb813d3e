"""quantmoe serve with the demo model: OpenAI's client, many requests at once, and whatever else may be sent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from once import made_once
from pydantic import BaseModel
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from support.chosen_there import choosing_there

from quantmoe import Generator, ModelError, OptionError, Text, export
from quantmoe.exporter.folder.interface import BLOCK as BLOCK_SLOTS
from quantmoe.runtime.choosing.constraint import RuleError
from quantmoe.serving.answers import ChatAnswers, TextAnswers
from quantmoe.serving.app import BODY, Server, _objects, application
from quantmoe.serving.choosing import Chances
from quantmoe.serving.prefixes import BLOCK, Block, Prefixes
from quantmoe.serving.protocol import Message
from quantmoe.serving.scheduler import Event, Request
from quantmoe.serving.served_model import ServedModel

DEMO = Path(__file__).parents[2] / "samples" / "demo_model"
PROMPTS = ["The sea was", "Then said the captain", "In the beginning", "And the king", "The old house", "Let us go up",
           "He that hath", "Behold, the day"]  # fmt: skip
MESSAGES: Any = [{"role": "user", "content": "a"}]
CAPACITY, QUEUE = 512, 16
#: as Hermes' and Qwen's: calls are JSON in tags, and a prompt may open reasoning
TEMPLATE = """
{%- for tool in tools or [] %}<tool_call>{"name": {{ tool.function.name }}, "arguments": ..}</tool_call> {% endfor %}
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{% endfor %}
{%- if enable_thinking %}<think>{% endif %}
{%- if false %}</think>{% endif %}"""
CITY = {"type": "object", "properties": {"city": {"enum": ["Ur", "Rome"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}
]


def make(folder: Path, checkpoint: str, **options: Any) -> None:
    export(DEMO / checkpoint, folder, **options)
    tokenizer = folder / "tokenizer_config.json"
    fields = json.loads(tokenizer.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    tokenizer.write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, lambda to: make(to, "checkpoint"), "served")


@contextlib.contextmanager
def running(
    folder: Path,
    rows: int = 4,
    key: str | None = None,
    capacity: int = CAPACITY,
    queue: int = QUEUE,
    opened: Callable[[Path], Any] = ServedModel,
    size: int | None = None,
    prefix_cache: int = 1 << 28,
) -> Iterator[tuple[Server, int]]:
    """A server in this process, and its port."""
    with opened(folder) as model, socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(model, rows, capacity, queue=queue, prefix_bytes=prefix_cache, cache_bytes=size)
        web = uvicorn.Server(uvicorn.Config(application(server, key), log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=asyncio.run, args=[web.serve([listening])])
        thread.start()
        try:
            yield server, listening.getsockname()[1]
        finally:
            web.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Server, int]]:
    with running(folder) as found:
        yield found


@pytest.fixture
def client(served: tuple[Server, int]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served[1]}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[str, int], str]]:
    """The likeliest answer of the Generator, which runs one prompt alone."""
    with Generator(folder) as model:
        text = Text(folder)

        def answer(prompt: str, count: int) -> str:
            ids = text.ids(prompt, begins=True)
            found = [id for id in model.generate(ids, count, text.stop).tokens if id not in text.stop]
            return text.decode([*ids, *found]).removeprefix(text.decode(ids))

        yield answer


def send(port: int, path: str, body: bytes | str, method: str = "POST", **headers: str) -> tuple[int, Any, Any]:
    """The status, headers and object that answer a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json"} | headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, json.loads(answer.read())


def complete(client: openai.OpenAI, prompt: Any, count: int = 16, **options: Any) -> Any:
    return client.completions.create(model="served", prompt=prompt, max_tokens=count, **{"temperature": 0} | options)


def count(server: Server, name: str) -> float:
    """One of the server's metrics."""
    return server.metrics.registry.get_sample_value(f"quantmoe_{name}") or 0.0


def settled(server: Server, seconds: float = 30) -> bool:
    """Wait until no request runs or waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not count(server, "requests_running") and not count(server, "requests_waiting"):
            return True
        time.sleep(0.02)
    return False


def test_an_answer_is_the_generators(client: openai.OpenAI, alone: Callable[[str, int], str]) -> None:
    found = complete(client, PROMPTS[0], 20)
    assert found.choices[0].text == alone(PROMPTS[0], 20)
    assert found.choices[0].finish_reason == "length"
    assert (found.model, found.object, found.usage.completion_tokens) == ("served", "text_completion", 20)
    chat = client.chat.completions.create(
        model="served", messages=[{"role": "user", "content": PROMPTS[0]}], max_completion_tokens=20, temperature=0
    )
    assert chat.choices[0].message.content == alone(PROMPTS[0], 20)
    assert chat.choices[0].message.role == "assistant"


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = complete(client, PROMPTS[1], 30)
    parts = [*complete(client, PROMPTS[1], 30, stream=True, stream_options={"include_usage": True})]
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * 29 + ["length"]
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPTS[1]}]}]
    chunks = client.chat.completions.create(
        model="served", messages=messages, max_tokens=30, temperature=0, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].text
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * 29


def test_tokens_that_come_together_are_one_object(served: tuple[Server, int]) -> None:
    """With the role in the first object, and the texts and chances of all tokens."""
    events = [(n % 2, Event(text=part, token=5, chances=Chances(-1.0, [(5, -1.0)]))) for n, part in enumerate("abcd")]
    assert _objects(events, together=False) == [(index, [event]) for index, event in events]
    together = _objects(events, together=True)
    assert [(index, "".join(event.text for event in told)) for index, told in together] == [(0, "ac"), (1, "bd")]
    text = served[0].text
    requests = [Request(ids=[1], max_new_tokens=4, tell=lambda _: None, top=1) for _ in range(2)]
    for kind in (TextAnswers, partial(ChatAnswers, parser=partial(text.parser, [1]))):
        answers = kind("m", text.tokenizer, [[1]], requests)
        for begins in (True, False):
            (choice,) = answers.part(*together[0], False)["choices"]
            said = choice["text"] if "text" in choice else choice["delta"]["content"]
            assert said == "ac"
            assert begins == ("role" in choice.get("delta", {})) or "text" in choice
            assert len(choice["logprobs"].get("content") or choice["logprobs"]["tokens"]) == 2
        assert answers.usage()["completion_tokens"] == 4


def test_requests_that_run_together_have_their_own_answers(
    served: tuple[Server, int], client: openai.OpenAI, alone: Callable[[str, int], str]
) -> None:
    counts = [10 + 7 * number for number in range(len(PROMPTS))]
    expected = [alone(prompt, most) for prompt, most in zip(PROMPTS, counts, strict=True)]
    before = count(served[0], "step_seconds_count")
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda prompt, most: complete(client, prompt, most).choices[0].text, PROMPTS, counts)]
    assert found == expected
    assert count(served[0], "step_seconds_count") - before < 0.9 * sum(counts)


def test_requests_together_have_the_logits_of_each_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU of the same bytes. tests/benchmarks/serving_logits.py compares them on GPUs, by a bound."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import serving_logits

    command = ["serving_logits.py", str(folder), "--device", "cpu", "--count", "4", "--tokens", "8", "--length", "300"]
    monkeypatch.setattr(sys, "argv", [*command, "--bound", "0"])
    serving_logits.main()
    assert "after the prompt, in equal parts: 4 of 4 have equal bytes" in capsys.readouterr().out
    alone = serving_logits.alone

    def moved(*given: Any) -> list[np.ndarray]:
        first, *rest = alone(*given)
        return [first, *(logits * np.float32(1.01) for logits in rest)]

    monkeypatch.setattr(serving_logits, "alone", moved)
    with pytest.raises(SystemExit, match="logits are farther apart than they may be"):
        serving_logits.main()


def test_a_request_joins_while_another_runs(served: tuple[Server, int], client: openai.OpenAI) -> None:
    long = complete(client, PROMPTS[2], 300, stream=True)
    next(iter(long))
    assert complete(client, PROMPTS[3], 5).choices[0].finish_reason == "length"
    assert count(served[0], "requests_running") == 1  # the long one still does
    assert sum(1 for _ in long) == 299


def test_stop_seed_n_and_bias(client: openai.OpenAI) -> None:
    text = complete(client, PROMPTS[0], 20).choices[0].text
    stopped = complete(client, PROMPTS[0], 20, stop=[text[8:12], "nowhere"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[8:12])], "stop")
    drawn = [
        [choice.text for choice in complete(client, PROMPTS[0], 12, temperature=1.0, seed=seed, n=3).choices]
        for seed in (5, 5, -6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3
    several = complete(client, [PROMPTS[0], PROMPTS[1]], 6, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == complete(client, PROMPTS[0], 6).choices[0].text
    assert several.choices[2].text == complete(client, PROMPTS[1], 6).choices[0].text
    biased = complete(client, PROMPTS[0], 4, logit_bias={"17": 100}, logprobs=1).choices[0]
    assert len(set(biased.logprobs.tokens)) == 1


def test_logprobs_are_of_the_models_logits(client: openai.OpenAI, folder: Path) -> None:
    chat = client.chat.completions.create(
        model="served",
        messages=[{"role": "user", "content": PROMPTS[4]}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs.content
    with Generator(folder) as model:
        found = model.greedy(Text(folder).ids(PROMPTS[4]), 5).logits
    for entry, logits in zip(content, found, strict=True):
        chances = np.sort(logits - np.log(np.exp(logits.astype(np.float64)).sum()))[::-1]
        assert entry.logprob == entry.top_logprobs[0].logprob == pytest.approx(chances[0], abs=1e-5)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(chances[:3].tolist(), abs=1e-5)
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content


@contextlib.contextmanager
def saying(server: Server, text: str) -> Iterator[None]:
    """The model gives this text."""
    ids = [*server.text.ids(text), *server.text.stop]

    class Said:
        def __init__(self, *_: Any):
            self.left = iter(ids)

        def __call__(self, _: np.ndarray) -> int:
            return next(self.left)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantmoe.serving.choosing.Sampler", Said)
        yield


def test_a_developers_message(served: tuple[Server, int]) -> None:
    """It is the system's where the template knows no developer, which would drop it."""
    template = served[0].text.template
    assert template is not None
    message = Message(role="developer", content="Be kind.")
    assert [message.given(knows)["role"] for knows in (template.knows_developer, True)] == ["system", "developer"]


def test_tools_and_reasoning(served: tuple[Server, int], client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    ask = partial(client.chat.completions.create, model="served", messages=messages, tools=TOOLS, max_tokens=200)
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ur"}}</tool_call>'
    with saying(served[0], "I look.</think>See: " + call):
        whole = ask(extra_body=thinking).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(extra_body=thinking, stream=True)]
    message = whole.message
    assert (message.content, message.reasoning_content, whole.finish_reason) == ("See:", "I look.", "tool_calls")
    (called,) = message.tool_calls
    assert (called.type, called.function.name, json.loads(called.function.arguments)) == (
        "function", "weather", {"city": "Ur"},
    )  # fmt: skip
    assert chunks[-1].finish_reason == "tool_calls"
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "See:"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    assert "".join(call.function.arguments or "" for call in calls) == called.function.arguments
    assert {call.index for call in calls} == {0}
    # the call and its result are part of the next prompt
    messages += [message, {"role": "tool", "tool_call_id": called.id, "content": "Sunny."}]
    answer = ask()
    text = served[0].text
    rendered = text.template.render([m if isinstance(m, dict) else m.model_dump() for m in messages], TOOLS)
    assert answer.usage.prompt_tokens == len(text.ids(rendered))
    assert '"city": "Ur"}' in rendered
    assert rendered.endswith("</tool_call>Sunny.")
    assert ask(tool_choice="none").usage.prompt_tokens < answer.usage.prompt_tokens
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (called,) = ask(tool_choice=choice, seed=1).choices[0].message.tool_calls
        assert called.function.name == "weather"
        assert "city" in json.loads(called.function.arguments)


def test_what_openais_client_sends_by_itself(client: openai.OpenAI) -> None:
    """A tool of a class is strict; an answer that is sent back has fields without values."""

    class Weather(BaseModel):
        city: str

    ask = partial(client.chat.completions.create, model="served", max_tokens=5, temperature=0, service_tier="auto",
                  prompt_cache_key="a", safety_identifier="b", modalities=["text"])  # fmt: skip
    strict: Any = openai.pydantic_function_tool(Weather)
    assert strict["function"]["strict"] is True
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    answer = ask(messages=messages, tools=[strict])
    again: Any = [*messages, answer.choices[0].message.model_dump(), *messages]
    found = ask(messages=again, tools=[strict])
    del strict["function"]["strict"]
    assert ask(messages=again, tools=[strict]).choices[0].message == found.choices[0].message


def test_answers_follow_a_rule(client: openai.OpenAI) -> None:
    age: Any = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}  # which the demo's model would write without an end
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    found = client.chat.completions.create(
        model="served", messages=messages, seed=3, response_format=form, n=2, max_tokens=100
    )
    for choice in found.choices:
        assert json.loads(choice.message.content)["age"] <= 99
        assert choice.finish_reason == "stop"
    said = complete(client, PROMPTS[0], 20, temperature=1, extra_body={"regex": "(sea|king)( and (sea|king)){2}"})
    assert re.fullmatch("(sea|king)( and (sea|king)){2}", said.choices[0].text)
    for fields, words in (
        ({"regex": "("}, "the regular expression is refused"),
        ({"regex": "a", "grammar": 'start: "b"'}, "follows regex and grammar, expected one of them"),
        ({"grammar": "start: start"}, r"an answer cannot follow its rule: \w+; give a simpler rule"),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as error:
            complete(client, PROMPTS[0], extra_body=fields)
        assert error.value.param == next(iter(fields))
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="the JSON schema is refused") as error:
        client.chat.completions.create(model="served", messages=messages, response_format=wrong)
    assert error.value.param == "response_format"


def test_a_rule_that_fails_later_is_the_requests(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuleError("too complex")

    monkeypatch.setattr("quantmoe.runtime.choosing.constraint.Constraint.add", fail)
    with pytest.raises(openai.BadRequestError, match="too complex"):
        complete(client, PROMPTS[0], 3, extra_body={"regex": "a+"})


def test_a_variable_of_the_template_may_have_any_name(client: openai.OpenAI) -> None:
    names = {"self": 1, "1 x": 2, "range": 3, "enable_thinking": False}
    found = client.chat.completions.create(
        model="served", messages=MESSAGES, max_tokens=2, extra_body={"chat_template_kwargs": names}
    )
    assert found.usage.completion_tokens == 2


def test_an_error_of_the_server_is_openais_too(served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served[0], "complete", None)
    status, _, answer = send(served[1], "/v1/completions", json.dumps({"prompt": "a"}))
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"] == "an error of the server, TypeError; its log says more"


def test_models_health_and_metrics(served: tuple[Server, int], client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["served"]
    assert client.models.retrieve("served").owned_by == "quantmoe"
    assert send(served[1], "/health", "", "GET")[::2] == (200, {"status": "ok"})
    connection = http.client.HTTPConnection("127.0.0.1", served[1])
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    assert any(line.startswith("quantmoe_generated_tokens_total ") for line in lines)
    assert any(line.startswith('quantmoe_requests_total{path="/health",status="200"}') for line in lines)
    with pytest.raises(openai.NotFoundError, match="model is 'gpt', expected 'served'"):
        client.completions.create(model="gpt", prompt="a")


def test_the_begin_of_a_prompt_is_computed_once(served: tuple[Server, int], client: openai.OpenAI) -> None:
    server, words = served[0], "And it came to pass in those days that the king went up. " * 12
    ids = server.text.ids(words, begins=True)
    first = complete(client, words, 40)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    again = complete(client, words, 40)
    assert again.choices[0].text == first.choices[0].text
    whole = (len(ids) - 1) // BLOCK * BLOCK
    assert again.usage.prompt_tokens_details.cached_tokens == whole > 2 * BLOCK
    # another prompt shares the front only, and a conversation goes on after its answer
    other = complete(client, [*ids[:70], *ids[:9]], 5)
    assert other.usage.prompt_tokens_details.cached_tokens == 64
    answered = server.text.ids(words + first.choices[0].text, begins=True)
    following = complete(client, [*answered[: len(ids) + 38], 5, 6, 7], 5)
    assert following.usage.prompt_tokens_details.cached_tokens == (len(ids) + 38) // BLOCK * BLOCK
    before = count(server, "cached_tokens_total")
    shared = complete(client, [*ids[:-3], 9, 9], 3, n=3)  # the first computes what the others take
    assert len({choice.text for choice in shared.choices}) == 1
    assert count(server, "cached_tokens_total") - before == 3 * ((len(ids) - 2) // BLOCK * BLOCK)


def test_states_of_a_hybrid_are_kept_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = made_once(tmp_path_factory, lambda to: make(to, "hybrid"), "served-hybrid")
    words = "And it came to pass in those days that the king went up. " * 12
    with running(folder) as (server, port), Generator(folder) as model:
        asked = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

        def ask(ids: list[int]) -> tuple[int, str]:
            found = asked.completions.create(model=folder.name, prompt=ids, max_tokens=12, temperature=0)
            return found.usage.prompt_tokens_details.cached_tokens, found.choices[0].text

        def expected(ids: list[int]) -> str:
            tokens = [id for id in model.generate(ids, 12, server.text.stop).tokens if id not in server.text.stop]
            return server.text.decode([*ids, *tokens]).removeprefix(server.text.decode(ids))

        ids = server.text.ids(words, begins=True)
        last = (len(ids) - 8) // BLOCK * BLOCK
        assert ask(ids) == (0, expected(ids))
        assert ask(ids) == (last, expected(ids))
        branch = [*ids[:100], *ids[:40]]
        assert ask(branch) == (0, expected(branch))  # states are of the first prompt's end; now also of the branch
        assert ask([*ids[:100], *ids[50:80]]) == (96, expected([*ids[:100], *ids[50:80]]))
        with ThreadPoolExecutor(3) as pool:
            prompts = [ids, branch, ids[50:]]
            assert [text for _, text in pool.map(ask, prompts)] == [*map(expected, prompts)]


@pytest.mark.parametrize(("prefix_cache", "parts"), [(0, 1), (1 << 28, 2)])
def test_a_prompt_is_divided_where_states_are_kept(
    tmp_path_factory: pytest.TempPathFactory, prefix_cache: int, parts: int
) -> None:
    folder = made_once(tmp_path_factory, lambda to: make(to, "hybrid"), "served-hybrid")
    with running(folder, prefix_cache=prefix_cache) as (server, port):
        rows, read = server.scheduler._rows, list[int]()
        reading = rows.read
        rows.read = lambda row, ids: read.append(len(ids)) or reading(row, ids)
        asked = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        asked.completions.create(model=folder.name, prompt=[*range(3, 103)], max_tokens=2, temperature=0)
    assert len(read) == parts
    assert sum(read) == 100


@pytest.mark.parametrize("checkpoint", ["checkpoint", "hybrid"])
def test_tokens_that_a_gpu_chooses(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> None:
    """Requests of several kinds of sampling run together, come and go, and have the tokens that they have alone."""
    folder = made_once(tmp_path_factory, lambda to: make(to, checkpoint), f"served-{checkpoint}")
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    asks: list[dict[str, Any]] = [
        {"temperature": 0},
        drawn,
        drawn | {"seed": 6},
        drawn | {"extra_body": {"repetition_penalty": 1.3}, "frequency_penalty": 0.5},
        drawn | {"logit_bias": {"17": 4.0}},
        drawn | {"extra_body": {"regex": "(sea|king)( and (sea|king)){9}"}},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "stop": ["e"]},
    ]
    ways: list[Callable[[Path], Any]] = [ServedModel, lambda path: choosing_there(ServedModel(path))]
    found = []
    for opened in ways:
        with running(folder, opened=opened) as (server, port):
            asked = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

            def ask(number: int, asked: openai.OpenAI = asked) -> Any:
                fields = {"model": folder.name, "prompt": PROMPTS[number % 5], "max_tokens": 9 + 5 * (number % 7)}
                answer = asked.completions.create(**fields, **asks[number % len(asks)])
                return answer.choices[0].model_dump(), answer.usage.completion_tokens

            with ThreadPoolExecutor(7) as pool:
                found.append([*pool.map(ask, range(2 * len(asks)))])
            assert settled(server)
            assert server.scheduler._choosing._kinds == {}
            made = getattr(server.model, "made", [])
    assert found[0] == found[1]
    assert len(made) >= 5


def test_a_request_hears_of_a_token_while_the_next_one_is_computed(folder: Path) -> None:
    with running(folder, rows=1, opened=lambda path: choosing_there(ServedModel(path))) as (server, _):
        heard: list[int] = []  # runs that had begun when a token was heard
        rows, started, ended = server.scheduler._rows, [0], threading.Event()
        start = rows.start

        def counting(tokens: Any) -> Any:
            started[0] += 1
            return start(tokens)

        rows.start = counting  # type: ignore[method-assign]

        def tell(event: Event) -> None:
            heard.append(started[0])
            if event.reason is not None:
                ended.set()

        server.scheduler.submit([Request(ids=[5, 6, 7], max_new_tokens=4, tell=tell, after=True, ends=False)])
        assert ended.wait(30)
        assert heard == [1, 2, 3, 3]


@pytest.mark.parametrize("there", [False, True])
def test_a_cache_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, alone: Callable[[str, int], str], there: bool
) -> None:
    """Requests of a paged folder have the tokens that they have alone, also where blocks are too few for all."""
    folder = made_once(tmp_path_factory, lambda to: make(to, "checkpoint", paged=True), "served-paged")
    words = "And it came to pass in those days that the king went up. " * 26

    def opened(path: Path) -> Any:
        return choosing_there(ServedModel(path)) if there else ServedModel(path)

    with ServedModel(folder) as model:
        block = sum(int(np.prod(shape[1:])) * dtype.itemsize for shape, dtype in model.past.values())
    with running(folder, opened=opened, size=5 * block) as (server, port):
        asked = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert {len(buffer.here()) for buffer in server.scheduler._rows._blocks.values()} == {5}
        ids = server.text.ids(words, begins=True)
        asks = [(words, 60), *((prompt, 10 + 9 * number) for number, prompt in enumerate(PROMPTS)), (words, 20)]
        assert BLOCK_SLOTS < len(ids) < CAPACITY - 60

        def ask(prompt: str, most: int) -> Any:
            return asked.completions.create(model=folder.name, prompt=prompt, max_tokens=most, temperature=0)

        with ThreadPoolExecutor(7) as pool:
            found = [*pool.map(lambda asked: ask(*asked), asks)]
        assert [answer.choices[0].text for answer in found] == [alone(*asked) for asked in asks]
        assert ask(words, 3).usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // BLOCK * BLOCK
        assert settled(server)
        assert sorted(server.scheduler._rows._free) == [1, 2, 3, 4]
    words = f"cache_memory is 1000, expected at least {3 * block} for 512 tokens of a request"
    with pytest.raises(OptionError, match=words), running(folder, size=1000):
        pass


def test_the_memory_for_prompts_is_limited() -> None:
    def block() -> Block:
        return Block({"key": np.zeros(100, np.uint8)})

    kept = Prefixes(350, stateful=False)
    one, two = Prefixes.names(range(3 * BLOCK)), Prefixes.names(range(1, 1 + 2 * BLOCK))
    for name in one:
        kept.add(name, block())
    kept.use(one)
    for name in two:
        kept.add(name, block())
    assert [len(kept.find(names)[0]) for names in (one, two)] == [1, 2]  # the ends of the older prompt have gone
    none = Prefixes(0, stateful=False)
    none.add(one[0], block())
    assert none.find(one) == ([], 0)


def test_more_requests_than_the_queue_takes_are_refused(served: tuple[Server, int], client: openai.OpenAI) -> None:
    assert settled(served[0])
    streams = [complete(client, PROMPTS[0], 400, stream=True) for _ in range(4)]
    waiting = [threading.Thread(target=complete, args=[client, PROMPTS[0], 1]) for _ in range(QUEUE)]
    for thread in waiting:
        thread.start()
    end = time.monotonic() + 30
    while count(served[0], "requests_waiting") < QUEUE and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(openai.RateLimitError, match="too many requests wait") as refused:
        complete(client, PROMPTS[0])
    assert refused.value.response.headers["retry-after"] == "1"
    assert refused.value.code == "rate_limit_exceeded"
    for stream in streams:
        stream.close()
    for thread in waiting:
        thread.join()
    assert complete(client, PROMPTS[0], 3).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="n is 21 for 1 prompts, expected at most 20"):
        complete(client, PROMPTS[0], n=21)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(served: tuple[Server, int], stream: bool) -> None:
    server, port = served
    assert settled(server)
    before = count(server, "generated_tokens_total")
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": CAPACITY, "ignore_eos": True, "stream": stream})
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        end = time.monotonic() + 30
        while count(server, "generated_tokens_total") < before + 3 and time.monotonic() < end:
            time.sleep(0.005)
    assert settled(server)
    assert 3 <= count(server, "generated_tokens_total") - before < CAPACITY - 8


BAD = {
    "not JSON": ("{", 400, "the body is no JSON, from character 1 on"),
    "empty": ("", 400, "the body is missing; add it"),
    "no object": ("[1, 2]", 400, "the body is a list of 2, expected an object"),
    "bytes": (b"\xff\x00\x80", 400, "the body cannot be read, expected a JSON object in UTF-8"),
    "nested": ("[" * 100_000, 400, "the body cannot be read"),
    "nested objects": ('{"prompt": ' * 100_000, 400, "the body cannot be read"),
    "many digits": ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", 400, "the body cannot be read"),
    "a wrong token": (json.dumps({"prompt": [5, 10**6]}), 400, "token id 1000000 is outside the vocabulary"),
    "a wrong bias": (json.dumps({"prompt": "a", "logit_bias": {"999999": 1}}), 400, "logit_bias has token id 999999"),
    "a long prompt": (
        json.dumps({"prompt": "the " * 600}),
        400,
        "expected at most 511: shorten the prompt, or start the server",
    ),
    "a large body": (json.dumps({"prompt": "the " * (BODY // 4)}), 413, f"more than {BODY} bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_is_refused(served: tuple[Server, int], kind: str) -> None:
    body, status, words = BAD[kind]
    found, _, answer = send(served[1], "/v1/completions", body)
    assert found == status, answer
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


#: fields of a request to /v1/completions, or with messages to /v1/chat/completions; the field at fault, and the words
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "is missing; add it"),
    ({"prompt": 5}, "prompt", "is 5, expected text or a list"),
    ({"prompt": ""}, "prompt", 'is "", expected text that is not empty or a list'),
    ({"prompt": []}, "prompt", "is an empty list, expected text or a list that is not empty"),
    ({"prompt": ["a", 5]}, "prompt[1]", "is 5, expected text"),
    ({"prompt": [5, "a"]}, "prompt[1]", 'is "a", expected a whole number'),
    ({"prompt": [5, 2**40]}, "prompt[1]", "is 1099511627776, expected less than 2147483648"),
    ({"prompt": [[5], [-1]]}, "prompt[1][0]", "is -1, expected at least 0"),
    ({"prompt": ["a"] * 129}, "prompt",
     "has a list of 129 entries, expected token ids, or at most 128 texts or lists of token ids"),
    ({"prompt": [[5]] * 200_000}, "prompt",
     "has a list of 200000 entries, expected token ids, or at most 128 texts or lists of token ids"),
    ({"prompt": [[5], [-1] * 200_000]}, "prompt",
     "has a list of 200000 entries, expected token ids, or at most 128 texts or lists of token ids"),
    ({"prompt": "\ud800"}, "prompt", 'is "\\ud800", expected text without half of a surrogate pair or a list'),
    ({"prompt": "a", "n": "2"}, "n", 'is "2", expected a whole number'),
    ({"prompt": "a", "n": 129}, "n", "is 129, expected at most 128"),
    ({"prompt": "a", "seed": 2**64}, "seed", "is 18446744073709551616, expected less than 9223372036854775808"),
    ({"prompt": "a", "temperature": float("inf")}, "temperature", "is Infinity, expected a finite number"),
    ({"prompt": "a", "temperature": "hot" * 20}, "temperature", f'is "{("hot" * 20)[:40]}", expected a number'),
    ({"prompt": "a", "top_p": 0}, "top_p", "is 0, expected more than 0"),
    ({"prompt": "a", "stop": ["a"] * 5}, "stop", "is a list of 5, expected text or at most 4 entries"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", 'is "x", expected token ids as keys'),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "is 101, expected at most 100"),
    ({"prompt": "a", "stream": 1}, "stream", "is 1, expected true or false"),
    ({"prompt": "a", "metadata": [1]}, "metadata", "is a list of 1, expected an object"),
    ({"prompt": "a", "sufix": "b"}, "sufix", "is no known field; leave it out"),
    ({"prompt": "a", "suffix": "b"}, "suffix", 'is "b", expected nothing: it is not supported'),
    ({"prompt": "a", "echo": True}, "echo", "is true, expected false"),
    ({"prompt": "a", "stream_options": {}}, "stream_options",
     "is given without stream; send stream: true, or leave it out"),
    ({"messages": MESSAGES, "stream_options": {"include_usage": True}, "stream": False}, "stream_options",
     "is given without stream; send stream: true, or leave it out"),
    ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs",
     "is given without logprobs; send logprobs: true, or leave it out"),
    ({"messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "is 21, expected at most 20"),
    ({"messages": {}}, "messages", "is an object, expected a list"),
    ({"messages": ["hi"]}, "messages[0]", 'is "hi", expected an object'),
    ({"messages": [*MESSAGES, {"role": "boss", "content": "a"}]}, "messages[1].role",
     'is "boss", expected "system", "developer", "user", "assistant" or "tool"'),
    ({"messages": [{"role": "user"}]}, "messages[0]",
     "has no content, expected text; only a message with tool_calls needs none"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0].type", 'is "image_url", expected "text"'),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", "is missing; add it"),
    ({"messages": MESSAGES, "tool_choice": "any"}, "tool_choice",
     'is "any", expected "auto", "none" or "required" or an object'),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice",
     'is "required" without tools; send tools, or leave it out'),
    ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
     "tool_choice", 'is the tool "clock", expected one of ["weather"]'),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs",
     "has tools, which messages and tools give; leave it out"),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities[0]", 'is "audio", expected "text"'),
    ({"messages": MESSAGES, "response_format": "json"}, "response_format", 'is "json", expected an object'),
    ({"messages": MESSAGES, "response_format": {}}, "response_format.type", "is missing; add it"),
    ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type",
     'is "xml", expected one of "text", "json_object", "json_schema"'),
    ({"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {}}},
     "response_format.json_schema.schema", "is missing; add it"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_field_is_named(served: tuple[Server, int], fields: dict[str, Any], param: str, words: str) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    status, _, answer = send(served[1], path, json.dumps(fields))
    assert status == 400
    assert answer["error"] == {
        "message": f"{param} {words}", "type": "invalid_request_error", "param": param, "code": None,
    }  # fmt: skip


def test_a_body_of_no_json_names_the_header(served: tuple[Server, int]) -> None:
    found = send(
        served[1], "/v1/completions", '{"prompt": "a"}', **{"content-type": "application/x-www-form-urlencoded"}
    )
    assert found[0] == 400
    assert "expected the header content-type: application/json" in found[2]["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_that_is_much_too_long_is_not_tokenized(
    served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(served[0].text, "ids", None)
    monkeypatch.setattr(served[0].text, "encode", None)
    words = "the sea was " * 250_000
    fields = {"prompt": words} if path == "/v1/completions" else {"messages": [{"role": "user", "content": words}]}
    status, _, answer = send(served[1], path, json.dumps(fields))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert re.fullmatch(
        r"the prompt has at least \d{6} tokens, expected at most 511: shorten the prompt, or start the server with a "
        "larger --max-length",
        answer["error"]["message"],
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_others_are_answered_while_a_prompt_is_tokenized(
    served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    ids, began, go_on = served[0].text.ids, threading.Event(), threading.Event()

    def slow(text: str, begins: bool = False) -> list[int]:
        began.set()
        assert go_on.wait(60)
        return ids(text, begins)

    monkeypatch.setattr(served[0].text, "ids", slow)
    fields = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, served[1], path, json.dumps(fields | {"max_tokens": 1}))
        assert began.wait(60)
        try:
            assert send(served[1], "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 1}))[0] == 200
        finally:
            go_on.set()
        assert answer.result()[0] == 200


def test_a_prompt_longer_than_the_model_has_no_other_way_out(folder: Path) -> None:
    with ServedModel(folder) as model:
        context = model.context
    with running(folder, rows=1, capacity=context) as (_, port):
        status, _, answer = send(port, "/v1/completions", json.dumps({"prompt": [5] * context}))
    words = f"the prompt has {context} tokens, expected at most {context - 1}: shorten the prompt"
    assert (status, answer["error"]["message"]) == (400, words)


def test_errors_do_not_name_the_servers_path(served: tuple[Server, int], monkeypatch: pytest.MonkeyPatch) -> None:
    template = served[0].text.template
    assert template is not None

    def refuse(*_: Any, **__: Any) -> str:
        raise ModelError(f"{template.path}: roles must alternate")

    monkeypatch.setattr(template, "render", refuse)
    _, _, answer = send(served[1], "/v1/chat/completions", json.dumps({"messages": MESSAGES}))
    assert answer["error"]["message"] == f"{template.path.name}: roles must alternate"


def test_a_hidden_token_sends_nothing(served: tuple[Server, int], client: openai.OpenAI) -> None:
    """Marks of reasoning are such tokens. Each chunk except the first has something."""
    ask = partial(client.chat.completions.create, model="served", messages=MESSAGES, max_tokens=200, stream=True)
    with saying(served[0], "I look.</think>See."):
        chunks = [chunk.choices[0] for chunk in ask(extra_body={"chat_template_kwargs": {"enable_thinking": True}})]
    first, *rest = chunks
    assert first.delta.role == "assistant"
    for chunk in rest:
        said = chunk.delta.model_dump(exclude_unset=True)
        assert any(said.values()) or chunk.finish_reason == "stop"
        assert "" not in said.values()
    with saying(served[0], "I look.</think>See."):
        chosen = [chunk.choices[0] for chunk in ask(logprobs=True)]
    assert len(chosen) > len(chunks)  # each token has its probability


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, PROMPTS[0], temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, "the " * 600)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    for path, method, status in (("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        assert "message" in send(client.base_url.port, path, "", method)[2]["error"], status


def test_a_key_is_asked_for(folder: Path) -> None:
    with running(folder, key="secret", rows=1) as (_, port):
        body = json.dumps({"prompt": "a", "max_tokens": 1})
        status, _, answer = send(port, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert send(port, "/v1/completions", body, authorization="Bearer secre")[0] == 401
        assert send(port, "/metrics", "", "GET")[0] == 401
        assert send(port, "/v1/completions", body, authorization="Bearer secret")[0] == 200
        assert send(port, "/health", "", "GET")[0] == 200


def test_a_failure_ends_all_requests_and_is_in_health(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(folder, rows=2) as (server, port):

        def fail(*_: Any) -> None:
            raise RuntimeError("broken by the test")

        monkeypatch.setattr(server.scheduler._rows, "start", fail)
        body = json.dumps({"prompt": "a", "max_tokens": 5})
        status, _, answer = send(port, "/v1/completions", body)
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert answer["error"]["message"] == "the server has failed: broken by the test"
        assert send(port, "/health", "", "GET")[0] == 503
        assert send(port, "/v1/completions", body)[0] == 503


def test_an_error_of_a_step_ends_only_its_requests(
    served: tuple[Server, int], client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = served[0].scheduler._rows

    def fail(*_: Any) -> None:
        raise ModelError("broken by the test")

    with monkeypatch.context() as context:
        context.setattr(rows, "start", fail)
        with pytest.raises(openai.InternalServerError, match="broken by the test"):
            complete(client, PROMPTS[0], 5)
    assert settled(served[0])
    assert complete(client, PROMPTS[0], 5).usage.completion_tokens == 5


def test_a_request_that_cannot_begin_is_told(
    served: tuple[Server, int], client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr("quantmoe.serving.choosing.Sampler", None)
        with pytest.raises(openai.InternalServerError, match="TypeError: 'NoneType' object is not callable"):
            complete(client, PROMPTS[0], 5)
    assert settled(served[0])
    assert complete(client, PROMPTS[0], 5).usage.completion_tokens == 5


@pytest.mark.parametrize("mode", GenerationMode)
def test_answers_are_as_described(folder: Path, mode: GenerationMode) -> None:
    """Requests that the description allows and others: answers have a described status, type and schema."""
    with running(folder, capacity=24, queue=512) as (_, port):
        described = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json")
        for operation in described.get_all_operations():
            strategy = operation.ok().as_strategy(generation_mode=mode)

            @given(case=strategy)
            @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
            def check(case: schemathesis.Case) -> None:
                # a prompt may be too long, and a token outside the vocabulary: the description cannot say so
                case.call_and_validate(excluded_checks=[positive_data_acceptance])

            with contextlib.suppress(Unsatisfiable):  # nothing in it can be wrong
                check()


def test_random_clients_that_leave(served: tuple[Server, int], alone: Callable[[str, int], str]) -> None:
    """64 clients for QUANTMOE_SERVE_SECONDS, of which some leave at any time; the others have their whole answers."""
    server, port = served
    seconds, draw = float(os.environ.get("QUANTMOE_SERVE_SECONDS", 4)), random.Random(1)
    expected, end = {prompt: alone(prompt, 40) for prompt in PROMPTS}, time.monotonic() + seconds
    assert settled(server)

    def run(client: int) -> dict[str, int]:
        found, draw = {"whole": 0, "left": 0, "refused": 0}, random.Random(client)
        while time.monotonic() < end:
            prompt, stream = draw.choice(PROMPTS), draw.random() < 0.5
            fields = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": stream}
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                connection.request("POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json"})
                if draw.random() < 0.4:
                    connection.sock.settimeout(draw.random() * 0.2)
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        connection.getresponse().read(draw.randrange(1, 2000))
                    found["left"] += 1
                    continue
                answer = connection.getresponse()
                body = answer.read().decode()
                if answer.status == 429:
                    found["refused"] += 1
                    time.sleep(0.05)
                    continue
                assert answer.status == 200, body
                if stream:
                    lines = [line.removeprefix("data: ") for line in body.split("\n\n")[:-1]]
                    assert lines.pop() == "[DONE]"
                    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
                else:
                    text = json.loads(body)["choices"][0]["text"]
                assert text == expected[prompt]
                found["whole"] += 1
            finally:
                connection.close()
        return found

    with ThreadPoolExecutor(64) as pool:
        results = [*pool.map(run, [draw.randrange(1 << 30) for _ in range(64)])]
    total = {name: sum(result[name] for result in results) for name in results[0]}
    assert total["whole"] > 0, total
    assert total["left"] > 0, total
    assert settled(server), total
    assert len(server.scheduler._free) == 4


def test_the_command(folder: Path) -> None:
    command = [sys.executable, "-m", "quantmoe.exporter.command", "serve", str(folder), "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = subprocess.run([*command, str(port)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"quantmoe: --port is {port}, 127.0.0.1 cannot listen there: " in refused.stderr
    with subprocess.Popen([*command, "0", "--batch", "2"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("served at http://127.0.0.1:"), line
            port = int(line.partition("/v1")[0].rpartition(":")[2])
            body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 3})
            assert send(port, "/v1/completions", body)[2]["usage"]["completion_tokens"] == 3
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
