"""The application: OpenAI's interface over a scheduler."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from quantmoe.exporter.errors import ContextError, ModelError, OptionError
from quantmoe.exporter.folder.json_files import read_object, vocabulary_of
from quantmoe.exporter.folder.sampling_options import sampling_of
from quantmoe.runtime.chat import TemplateArguments, Text
from quantmoe.runtime.choosing.constraint import Grammar, RuleError
from quantmoe.serving import protocol
from quantmoe.serving.answers import Answers, ChatAnswers, TextAnswers
from quantmoe.serving.embeddings import Embeddings
from quantmoe.serving.mail import Inbox, Mail
from quantmoe.serving.metrics import Metrics
from quantmoe.serving.protocol import Ask, AskChat, AskText, AskVectors
from quantmoe.serving.scheduler import BusyError, ClosedError, Event, Request, Scheduler
from quantmoe.serving.served_model import ServedModel
from quantmoe.serving.wrong_fields import wrong_field

#: bytes of a request's body at most
BODY = 4 << 20
#: tokens of an answer of /v1/completions, as OpenAI's
TOKENS = 16
#: path that needs no key, and all paths that are counted by name
HEALTH = "/health"
PATHS = (HEALTH, "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings")
#: OpenAI's types of errors; of other statuses below 500 invalid_request_error, above server_error
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.Error} for status in (400, 401, 404, 413, 429, 500, 503)
}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class Refused(Exception):  # noqa: N818
    """A request that is answered with OpenAI's error object.

    Args:
        param: the field at fault. code: OpenAI's word for it.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        headers = {"retry-after": "1"} if self.status in (429, 503) else None
        # in ASCII: a message may have half of a surrogate pair of what was sent
        return Response(json.dumps(self.body), self.status, headers, "application/json")


class Gone(Exception):  # noqa: N818
    """The client has gone, so nobody reads the answer."""


class Door:
    """Checks of each request: it is counted, needs the key, and has a limited body.

    Args:
        key: clients send ``Authorization: Bearer KEY``; None: they send nothing.
        paths: those that are counted by name.
    """

    def __init__(self, app: Any, metrics: Metrics, key: str | None, paths: Sequence[str]):
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, read = scope["path"], 0

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = path if path in self._paths else "other"
                self._metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        async def limited() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY:
                raise HTTPException(413, f"the body has more than {BODY} bytes, expected at most so many")
            return message

        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._key is None or path == HEALTH or hmac.compare_digest(given, self._key):
            await self._app(scope, limited, counted)
            return
        refused = Refused(401, "no valid API key; send the header Authorization: Bearer KEY", None, "invalid_api_key")
        await refused.response()(scope, receive, counted)


class Server:
    """A model and its scheduler. Arguments are as of :class:`Scheduler`."""

    def __init__(
        self,
        model: ServedModel,
        rows: int,
        capacity: int,
        *,
        queue: int,
        prefix_bytes: int,
        cache_bytes: int | None = None,
    ):
        folder = model.path.parent
        self.model, self.text, self.name, self.began = model, Text(folder), folder.resolve().name, int(time.time())
        self.metrics, self.most = Metrics(), rows + queue
        self._carries: Mail | None = None
        self._file = folder / "generation_config.json"
        self._config, self._vocabulary = read_object(self._file), vocabulary_of(read_object(folder / "config.json"))
        sampling_of(self._config, self._file, self._vocabulary)  # a file at fault is said at once
        self.scheduler = Scheduler(
            model,
            self.text,
            self.metrics,
            rows=rows,
            capacity=capacity,
            queue=queue,
            prefix_bytes=prefix_bytes,
            cache_bytes=cache_bytes,
        )

    @property
    def failed(self) -> BaseException | None:
        """Why the scheduler has ended; None: it runs."""
        return self.scheduler.failed

    def close(self) -> None:
        """End all requests."""
        self.scheduler.close()

    async def complete(self, ask: AskText, http: HttpRequest) -> Response:
        """Answer a request to /v1/completions."""
        given = ask.prompt if isinstance(ask.prompt, list) else [ask.prompt]
        if isinstance(given[0], int):
            given = [given]
        self._check(ask, len(given))
        with _refusing(self, "prompt"):
            prompts = [await self._ids(p, begins=True) if isinstance(p, str) else p for p in given]
        return await self._answer(ask, http, prompts, TextAnswers)

    async def chat(self, ask: AskChat, http: HttpRequest) -> Response:
        """Answer a request to /v1/chat/completions."""
        if (template := self.text.template) is None:
            raise Refused(400, f"{self.name} has no chat template; use /v1/completions", "messages")
        self._check(ask, 1)

        def render() -> tuple[TemplateArguments, str]:
            arguments = ask.arguments()
            messages = [message.given(template.knows_developer) for message in ask.messages]
            return arguments, template.render(messages, **arguments.rendered_with())

        with _refusing(self, "messages"):
            arguments, rendered = await _apart(render)
            ids = await self._ids(rendered, begins=False)
        kind = partial(ChatAnswers, parser=partial(self.text.parser, ids, arguments))
        return await self._answer(ask, http, [ids], kind, arguments)

    async def _ids(self, text: str, *, begins: bool) -> list[int]:
        """Return the token ids of a prompt, unless it is much too long."""
        self.scheduler.length.check_text(text)
        found: list[int] = await _apart(partial(self.text.ids, begins=begins), text)
        return found

    def _check(self, ask: Ask, prompts: int) -> None:
        """Check what needs no tokens."""
        _check_model(self, ask.model)
        if prompts * (ask.n or 1) > self.most:
            words = f"n is {ask.n or 1} for {prompts} prompts, expected at most {self.most} answers together"
            raise Refused(400, words, "n")

    async def _answer(
        self,
        ask: Ask,
        http: HttpRequest,
        prompts: Sequence[Sequence[int]],
        kind: Callable[..., Answers],
        arguments: TemplateArguments | None = None,
    ) -> Response:
        """Return one object, or a stream of them."""
        mail = self._mail()
        heard = mail.open(streamed=bool(ask.stream))
        requests = self._requests(ask, prompts, mail, heard)
        rules = ask.rules()
        field = {"json_schema": "response_format"}
        with _refusing(self, next((field.get(kind, kind) for kind in rules), "tool_choice")):
            await _apart(self._constrain, requests, rules, arguments)
        with _refusing(self, "prompt" if isinstance(ask, AskText) else "messages"):
            self.scheduler.submit(requests)
        answers = kind(self.name, self.text.tokenizer, prompts, requests)
        events = _events(http, requests, heard)
        if ask.stream:
            usage = bool(ask.stream_options and ask.stream_options.include_usage)
            refusing = partial(_refusing, self)
            with refusing():
                first = await anext(events)  # an error before it has a status
            lines = _lines(answers, first, events, usage=usage, refusing=refusing, mail=mail)
            return StreamingResponse(lines, media_type="text/event-stream")
        with _refusing(self):
            async for found in events:
                for index, event in found:
                    answers.add(index, event)
        return JSONResponse(answers.whole())

    def _constrain(
        self, requests: Sequence[Request], rules: Mapping[str, str], arguments: TemplateArguments | None
    ) -> None:
        """Make answers follow a rule, or call a tool that they must call.

        Raises:
            OptionError: there are several rules, or it is no rule.
        """
        found = {kind: Grammar(kind, text) for kind, text in rules.items()}  # type: ignore[arg-type]
        calls = None if arguments is None else self.text.calls(arguments)
        found |= {} if calls is None else {"tool_choice": calls}
        if len(found) > 1:
            raise OptionError(f"the answer follows {' and '.join(found)}, expected one of them")
        for request in requests:
            for grammar in found.values():
                request.constraint = self.text.constraint(grammar, request.ids, self.model.vocabulary)
                request.constraint.allowed()  # here, as the first time may take seconds

    def _mail(self) -> Mail:
        """Return the mail of the event loop that runs."""
        loop = asyncio.get_running_loop()
        if self._carries is None or self._carries.loop is not loop:
            self._carries = Mail(loop)
        return self._carries

    def _requests(self, ask: Ask, prompts: Sequence[Sequence[int]], mail: Mail, heard: Inbox) -> list[Request]:
        each, text = ask.n or 1, isinstance(ask, AskText)
        most = ask.most or (TOKENS if text else self.scheduler.capacity)
        requests = []
        for number in range(len(prompts) * each):
            seed = None if ask.seed is None else (ask.seed + number % each) % 2**64
            with _refusing(self):
                sampling = sampling_of(self._config, self._file, self._vocabulary, **ask.sampling(), seed=seed)

            def tell(event: Event, number: int = number) -> None:
                mail.put(heard, (number, event), ends=event.reason is not None or event.error is not None)

            ids = list(prompts[number // each])
            request = Request(
                ids=ids, max_new_tokens=most, tell=tell, after=text, stop=ask.stops, sampling=sampling, top=ask.top
            )
            request.ends = not ask.ignore_eos
            requests.append(request)
        return requests


async def _apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns that may take long."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(call, *arguments))


@contextlib.contextmanager
def _refusing(server: Server | Embeddings, param: str | None = None) -> Iterator[None]:
    """Make errors of a request answers."""
    try:
        yield
    except ContextError as error:
        raise Refused(400, _public(server, error), param, "context_length_exceeded") from None
    except OptionError as error:
        raise Refused(400, _public(server, error), param) from None
    except ModelError as error:
        asked = param or isinstance(error, RuleError)
        raise Refused(400 if asked else 500, _public(server, error), param) from None
    except MemoryError as error:
        raise Refused(500, _public(server, error) or "out of memory") from None
    except ClosedError as error:
        raise Refused(503, _public(server, error)) from None
    except BusyError:
        raise Refused(429, "too many requests wait; send this one again later", None, "rate_limit_exceeded") from None


def _public(server: Server | Embeddings, error: BaseException) -> str:
    """Return the words of an error without the path of the model's folder."""
    return str(error).replace(os.path.join(server.model.path.parent, ""), "")


async def _events(
    http: HttpRequest, requests: Sequence[Request], heard: Inbox
) -> AsyncIterator[list[tuple[int, Event]]]:
    """Yield what all answers hear, with the number of the answer, until the last of them ends.

    Raises:
        Gone: the client has gone. Exception: that of an event.
    """

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        heard.put(None)
        heard.wake()

    watching, left = asyncio.ensure_future(watch()), len(requests)
    try:
        while left:
            found = []
            for item in await heard.take():
                if item is None:
                    raise Gone
                if item[1].error is not None:
                    raise item[1].error
                left -= item[1].reason is not None
                found.append(item)
            yield found
    finally:
        watching.cancel()
        for request in requests:
            request.gone = True


def _objects(found: Sequence[tuple[int, Event]], *, together: bool) -> list[tuple[int, list[Event]]]:
    """Return the number of an answer and its events for each object that a client gets."""
    if not together:
        return [(index, [event]) for index, event in found]
    of_answers: dict[int, list[Event]] = {}
    for index, event in found:
        of_answers.setdefault(index, []).append(event)
    return [*of_answers.items()]


async def _lines(
    answers: Answers,
    found: list[tuple[int, Event]],
    events: AsyncIterator[list[tuple[int, Event]]],
    *,
    usage: bool,
    refusing: Callable[[], contextlib.AbstractContextManager[None]],
    mail: Mail,
) -> AsyncIterator[str]:
    """Yield the lines of server-sent events."""

    def line(content: Any) -> str:
        return f"data: {json.dumps(content)}\n\n"

    try:
        while found:
            parts = [answers.part(index, told, usage) for index, told in _objects(found, together=mail.many)]
            if lines := "".join(line(part) for part in parts if part is not None):
                yield lines
            with refusing():
                found = await anext(events, [])
    except Gone:
        return
    except Refused as error:
        yield line(error.body)
        return
    if usage:
        yield line(answers.last())
    yield "data: [DONE]\n\n"


def _check_model(server: Server | Embeddings, name: str | None) -> None:
    if name not in (None, server.name):
        raise Refused(404, f"model is {name!r}, expected {server.name!r}", "model", "model_not_found")


async def _vectors(server: Embeddings, ask: AskVectors) -> Response:
    """Answer a request to /v1/embeddings."""
    _check_model(server, ask.model)
    given = ask.input if isinstance(ask.input, list) else [ask.input]
    if isinstance(given[0], int):
        given = [given]
    with _refusing(server, "input"):
        texts = [await _apart(server.ids, text) if isinstance(text, str) else text for text in given]
        found = await server.vectors(texts)
    coded = ask.encoding_format == "base64"
    vectors = [base64.b64encode(one.astype("<f4").tobytes()).decode() if coded else one.tolist() for one in found]
    data = [{"object": "embedding", "index": number, "embedding": one} for number, one in enumerate(vectors)]
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, texts)))
    return JSONResponse({"object": "list", "model": server.name, "data": data, "usage": usage})


def application(server: Server | Embeddings, key: str | None = None) -> FastAPI:
    """Return the application of a server.

    Args:
        key: the API key that clients send; None: they need none.
    """

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await _apart(server.close)

    app = FastAPI(
        title="QuantMoE",
        summary="An exported model with OpenAI's interface",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    post = partial(app.post, response_model_exclude_none=False, responses=_ERRORS | _STREAM)

    @app.get(HEALTH, response_model=protocol.Health, responses=_ERRORS)
    async def health() -> Response:
        if server.failed is not None:
            raise Refused(503, f"the server has failed: {_public(server, server.failed)}")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=_ERRORS)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", response_model=protocol.Models, responses=_ERRORS)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(server)]})

    @app.get("/v1/models/{name}", response_model=protocol.Model, responses=_ERRORS)
    async def model(name: str) -> Response:
        _check_model(server, name)
        return JSONResponse(_model(server))

    if isinstance(server, Embeddings):

        @app.post("/v1/embeddings", response_model=protocol.Vectors, responses=_ERRORS)
        async def embeddings(ask: AskVectors) -> Response:
            return await _vectors(server, ask)
    else:

        @post("/v1/completions", response_model=protocol.TextAnswer)
        async def completions(ask: AskText, http: HttpRequest) -> Response:
            return await server.complete(ask, http)

        @post("/v1/chat/completions", response_model=protocol.ChatAnswer)
        async def chat(ask: AskChat, http: HttpRequest) -> Response:
            return await server.chat(ask, http)

    _add_error_handlers(app)
    app.add_middleware(Door, metrics=server.metrics, key=key, paths=PATHS)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Make every error an answer as OpenAI's interface has it."""

    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(Gone)
    async def gone(_: HttpRequest, error: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        words = {
            400: "the body cannot be read, expected a JSON object in UTF-8",
            404: f"{http.url.path} does not exist; /openapi.json lists the paths",
            405: f"{http.method} is not for {http.url.path}; send {(error.headers or {}).get('Allow')}",
        }
        response = Refused(error.status_code, words.get(error.status_code, error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(_: HttpRequest, error: Exception) -> Response:
        return Refused(500, f"an error of the server, {type(error).__name__}; its log says more").response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        words, param = wrong_field(error.errors(), error.body)
        return Refused(400, words, param).response()


def _model(server: Server | Embeddings) -> dict[str, Any]:
    return {"id": server.name, "object": "model", "created": server.began, "owned_by": "quantmoe"}
