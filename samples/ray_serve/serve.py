"""An exported folder behind Ray Serve, with OpenAI's interface: serve.py FOLDER [--replicas 2] [--port 8000]."""

import argparse
import asyncio
import json
import queue
import threading
import time
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, create_model
from ray import serve

STATIC = {"search": {"chunk_size": 0}, "engine": {"static_batching": {"max_batch_size": 4}}}  # without --paged
app = FastAPI()


class Ask(BaseModel):  # OpenAI's names, and the engine's for them
    max_generated_tokens: int = Field(256, ge=1, alias="max_tokens")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop_strings: list[str] | None = Field(None, alias="stop")
    stream: bool = Field(False, exclude=True)


AskChat = create_model("AskChat", __base__=Ask, messages=(list[dict[str, str]], Field(min_length=1, exclude=True)))
AskText = create_model("AskText", __base__=Ask, prompt=(str, Field(min_length=1, exclude=True)))


@serve.deployment
@serve.ingress(app)
class Serving:
    def __init__(self, folder: str, settings: dict, batch: int):
        config = og.Config(folder)
        config.overlay(json.dumps(settings))
        self.model, self.batch, self.name = og.Model(config), batch, Path(folder).name
        self.tokenizer = og.Tokenizer(self.model)
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

    async def pieces(self, prompt: str, ask: Ask):
        """Text as it comes, at last why it ended."""
        found, gone, stream = asyncio.Queue(), threading.Event(), self.tokenizer.create_stream()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, found.put_nowait)
        self.asked.put((self.tokenizer.encode(prompt), ask.model_dump(exclude_none=True), tell, gone))
        try:
            while not isinstance(item := await found.get(), og.FinishReason):
                if isinstance(item, HTTPException):
                    raise item
                yield stream.decode(item), None
            yield "", "length" if item == og.FinishReason.MAX_GENERATED_TOKENS else "stop"
        finally:
            gone.set()  # whoever asked has it all, or left

    async def answer(self, prompt: str, ask: Ask, kind: str, choice):
        """As one object, or as a stream of them; choice: text -> what a choice has of it."""
        head = {"id": f"{time.time_ns():x}", "object": kind, "created": int(time.time()), "model": self.name}

        def body(text, reason):
            return head | {"choices": [{"index": 0, "finish_reason": reason} | choice(text)]}

        found = [await anext(pieces := self.pieces(prompt, ask))]  # what is refused is before a stream begins
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
        return await self.answer(ask.prompt, ask, "text_completion", lambda text: {"text": text})

    @app.post("/v1/chat/completions")
    async def chat(self, ask: AskChat):
        try:
            prompt = self.tokenizer.apply_chat_template(json.dumps(ask.messages), add_generation_prompt=True)
        except RuntimeError as error:
            raise HTTPException(400, f"{self.name}: {error}") from error
        key, kind = ("delta", "chat.completion.chunk") if ask.stream else ("message", "chat.completion")
        return await self.answer(prompt, ask, kind, lambda text: {key: {"role": "assistant", "content": text}})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    found = json.loads(Path(given.folder, "genai_config.json").read_text(encoding="utf-8"))
    settings = {} if "engine" in found else STATIC
    (batch,) = (kind["max_batch_size"] for kind in (found | settings)["engine"].values())
    serve.start(http_options={"port": given.port})
    most = dict.fromkeys(("max_ongoing_requests", "max_queued_requests"), 2 * batch)  # more are refused
    serving = Serving.options(num_replicas=given.replicas, **most)
    serve.run(serving.bind(str(Path(given.folder).resolve()), settings, batch), blocking=True)
