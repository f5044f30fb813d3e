"""An exported folder behind Ray Serve, with OpenAI's interface: serve.py FOLDER [--replicas 2] [--port 8000]."""

import argparse
import asyncio
import contextlib
import json
import os
import queue
import threading
import time
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
import ray
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, create_model
from ray import serve
from starlette.exceptions import HTTPException as AnyHTTPException

STATIC = {"search": {"chunk_size": 0}, "engine": {"static_batching": {"max_batch_size": 4}}}  # without --paged
BODY = 1 << 20  # bytes of a request at most
app = FastAPI()


class LimitBody:
    """Ends the reading of a body that is too long."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        read = 0

        async def limited():
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > BODY:
                raise HTTPException(413, f"the body has more than {BODY} bytes")
            return message

        await self.app(scope, limited, send)


app.add_middleware(LimitBody)


def refusal(status: int, message: str):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


@app.exception_handler(AnyHTTPException)
async def refused(_, error):
    return refusal(error.status_code, error.detail)


@app.exception_handler(RequestValidationError)
async def invalid(_, error):
    return refusal(400, "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()))


class Ask(BaseModel):  # OpenAI's names, and the engine's for them
    max_generated_tokens: int = Field(256, ge=1, alias="max_tokens")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop_strings: list[str] | None = Field(None, alias="stop", max_length=4)
    stream: bool = Field(False, exclude=True)


AskChat = create_model("AskChat", __base__=Ask, messages=(list[dict[str, str]], Field(min_length=1, exclude=True)))
AskText = create_model("AskText", __base__=Ask, prompt=(str, Field(min_length=1, exclude=True)))


def open_model(config, folder: str):
    """With the installed package's library; the folder's is native code of whoever exported it."""
    found = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))
    name = found["model"]["decoder"]["session_options"].get("custom_ops_library", "")
    try:
        import quantmoe
    except ImportError:
        return og.Model(config)
    library = os.path.realpath(quantmoe.ort_cuda_library_path() if "cuda" in name else quantmoe.ort_library_path())
    if name:
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"custom_ops_library": library}}}}))
    with contextlib.chdir(os.path.dirname(library)):  # else onnxruntime-genai takes none but the model's folder's
        return og.Model(config)


@ray.remote(num_cpus=0, max_restarts=-1)
class Reader:
    """Makes tokens of text, in a process of its own: the tokenizer holds Python's lock for seconds in a long text."""

    def __init__(self, folder: str):
        self.tokenizer = og.Tokenizer(folder)

    def encode(self, prompt: str):
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: str):
        return self.encode(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


@serve.deployment
@serve.ingress(app)
class Serving:
    def __init__(self, folder: str, settings: dict, batch: int, max_prompt: int, max_tokens: int):
        config = og.Config(folder)
        config.overlay(json.dumps(settings))
        self.model, self.batch, self.name = open_model(config, folder), batch, Path(folder).name
        self.tokenizer, self.reader = og.Tokenizer(self.model), Reader.remote(folder)
        self.max_prompt, self.max_tokens = max_prompt, max_tokens
        self.asked, self.failed = queue.Queue(), None
        threading.Thread(target=self.run, daemon=True).start()

    def check_health(self):  # Ray Serve asks, and replaces a replica that raises
        if self.failed:
            raise self.failed

    def run(self):
        """The engine's thread, which alone talks to it. Where it fails so do all requests, also those to come."""
        running = {}
        try:
            engine = og.Engine(self.model)
            events = engine.create_event_buffer(4 * self.batch)
            while True:
                while not self.asked.empty() or not running:
                    tokens, options, tell, _ = asked = self.asked.get()
                    try:
                        turn = og.TurnOptions(request := engine.create_request())
                        for name, value in options.items():
                            getattr(turn, f"set_{name}")(value)
                        request.begin_turn(np.asarray(tokens, np.int32), turn)
                        running[request] = asked
                    except Exception as error:  # a prompt that is too long, say
                        tell(HTTPException(400, str(error)))
                for event in engine.run(events):
                    _, _, tell, gone = running[event.request]
                    if event.token is not None:
                        tell(event.token)
                    if event.finish_reason != og.FinishReason.NONE:
                        failed = event.finish_reason == og.FinishReason.FAILED
                        tell(HTTPException(500, "the engine failed") if failed else event.finish_reason)
                        del running[event.request]
                        event.request.close()
                    elif gone.is_set():
                        event.request.cancel_turn(event.turn_id)
        except Exception as error:
            self.failed = HTTPException(500, f"the engine failed: {error}")
        for _, _, tell, _ in chain(running.values(), iter(self.asked.get, None)):
            tell(self.failed)

    async def pieces(self, read, ask: Ask):
        """Text as it comes, at last why it ended. read: -> the prompt's tokens, which the reader makes."""
        if ask.max_generated_tokens > self.max_tokens:
            raise HTTPException(400, f"max_tokens is {ask.max_generated_tokens}, expected at most {self.max_tokens}")
        try:
            prompt = await read()
        except RuntimeError as error:  # of the tokenizer or the chat template
            raise HTTPException(400, f"{self.name}: {getattr(error, 'cause', error)}") from error
        if not 0 < len(prompt) <= self.max_prompt:
            raise HTTPException(400, f"the prompt has {len(prompt)} tokens, expected 1 to {self.max_prompt}")
        found, gone, stream = asyncio.Queue(), threading.Event(), self.tokenizer.create_stream()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, found.put_nowait)
        self.asked.put((prompt, ask.model_dump(exclude_none=True), tell, gone))
        try:
            while not isinstance(item := await found.get(), og.FinishReason):
                if isinstance(item, HTTPException):
                    raise item
                yield stream.decode(item), None
            yield "", "length" if item == og.FinishReason.MAX_GENERATED_TOKENS else "stop"
        finally:
            gone.set()  # whoever asked has it all, or left

    async def answer(self, read, ask: Ask, kind: str, choice):
        """As one object, or as a stream of them; choice: text -> what a choice has of it."""
        head = {"id": f"{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": self.name}

        def body(text, reason):
            return head | {"choices": [{"index": 0, "finish_reason": reason} | choice(text)]}

        found = [await anext(pieces := self.pieces(read, ask))]  # what is refused is before a stream begins
        if not ask.stream:
            found += [piece async for piece in pieces]
            return body("".join(text for text, _ in found), found[-1][1])

        async def lines():
            yield f"data: {json.dumps(body(*found[0]))}\n\n"
            async for piece in pieces:
                yield f"data: {json.dumps(body(*piece))}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models(self):
        return {"object": "list", "data": [{"id": self.name, "object": "model"}]}

    @app.post("/v1/completions")
    async def text(self, ask: AskText):
        read = partial(self.reader.encode.remote, ask.prompt)
        return await self.answer(read, ask, "text_completion", lambda text: {"text": text})

    @app.post("/v1/chat/completions")
    async def chat(self, ask: AskChat):
        read = partial(self.reader.encode_chat.remote, json.dumps(ask.messages))
        key, kind = ("delta", "chat.completion.chunk") if ask.stream else ("message", "chat.completion")
        return await self.answer(read, ask, kind, lambda text: {key: {"role": "assistant", "content": text}})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-prompt", type=int, help="tokens; default: the model's context without one")
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: the same")
    given = parser.parse_args()
    found = json.loads(Path(given.folder, "genai_config.json").read_text(encoding="utf-8"))
    settings = {} if "engine" in found else STATIC
    (batch,) = (kind["max_batch_size"] for kind in (found | settings)["engine"].values())
    serve.start(http_options={"port": given.port})
    most = dict.fromkeys(("max_ongoing_requests", "max_queued_requests"), 2 * batch)  # more are refused
    serving = Serving.options(num_replicas=given.replicas, **most)
    longest = found["model"]["context_length"] - 1
    limits = given.max_prompt or longest, given.max_tokens or longest
    serve.run(serving.bind(str(Path(given.folder).resolve()), settings, batch, *limits), blocking=True)
