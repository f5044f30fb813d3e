"""quantmoe serve with an encoder: OpenAI's client, and the vectors that texts have alone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import openai
import pytest
import schemathesis
import torch
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForTokenClassification

from quantmoe import export, ort_library_path
from quantmoe.serving.app import application
from quantmoe.serving.embeddings import Embeddings, batches
from quantmoe.serving.served_model import ServedModel

TEXTS = ["w5 w9 w11", "w7", "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14", "w99 w2 w7"]
QUEUE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    around = tmp_path_factory.mktemp("encoder")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 128, "sliding_window": 3, "max_position_embeddings": 40}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("openai_privacy_filter", pad_token_id=0, eos_token_id=2, **sizes)
        AutoModelForTokenClassification.from_config(config, dtype=torch.bfloat16).save_pretrained(around / "checkpoint")
    tokenizer = Tokenizer(models.WordLevel({f"w{id}": id for id in range(128)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    tokenizer.save(str(around / "checkpoint" / "tokenizer.json"))
    export(around / "checkpoint", around / "vectors", quantize="none", activations="float")
    return around / "vectors"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Embeddings, int]]:
    with ServedModel(folder, chunk=24) as model, socket.create_server(("127.0.0.1", 0)) as listening:
        server = Embeddings(model, QUEUE)
        web = uvicorn.Server(uvicorn.Config(application(server), log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=asyncio.run, args=[web.serve([listening])])
        thread.start()
        yield server, listening.getsockname()[1]
        web.should_exit = True
        thread.join()


@pytest.fixture
def client(served: tuple[Embeddings, int]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served[1]}/v1", api_key="none", max_retries=0)


def alone(folder: Path, ids: list[int]) -> np.ndarray:
    """The vector that ONNX Runtime gives for one text."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_library_path())
    session = ort.InferenceSession(folder / "model.onnx", options)
    feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    vector: np.ndarray = session.run(["sentence_embedding"], feed)[0][0]
    return vector


def ids_of(text: str) -> list[int]:
    return [1, *(int(word[1:]) for word in text.split()), 2]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_those_of_each_text_alone(client: openai.OpenAI, folder: Path, form: str) -> None:
    """The client decodes base64. Sums of floats have another order in a batch: a few roundings of 2^-24."""
    want = np.array([alone(folder, ids_of(text)) for text in TEXTS])
    asked = TEXTS if form == "float" else [ids_of(text) for text in TEXTS]
    found = client.embeddings.create(model="vectors", input=asked, encoding_format=form)  # type: ignore[arg-type]
    if form == "base64":
        rows = [np.frombuffer(base64.b64decode(one.embedding), "<f4") for one in found.data]  # type: ignore[arg-type]
    else:
        rows = [np.array(one.embedding) for one in found.data]
    assert [one.index for one in found.data] == [0, 1, 2, 3]
    assert np.abs(np.array(rows) - want).max() < 1e-5 * np.abs(want).max()
    assert found.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)


def test_many_clients(served: tuple[Embeddings, int], client: openai.OpenAI, folder: Path) -> None:
    """Each has its own vector; with more than the queue takes, some are refused."""

    def ask(number: int) -> np.ndarray | None:
        try:
            return np.array(client.embeddings.create(model="vectors", input=TEXTS[number % 4]).data[0].embedding)
        except openai.RateLimitError:
            return None

    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(ask, range(48))]
    assert any(vector is not None for vector in found)
    for number, vector in enumerate(found):
        if vector is not None:
            want = alone(folder, ids_of(TEXTS[number % 4]))
            assert np.abs(vector - want).max() < 1e-5 * np.abs(want).max()
    assert served[0]._waiting == 0


def test_a_full_queue(served: tuple[Embeddings, int]) -> None:
    async def ask() -> list[object]:
        server = Embeddings(served[0].model, 1)
        return await asyncio.gather(*(server.vectors([[1, 5, 2]]) for _ in range(4)), return_exceptions=True)

    found = asyncio.run(ask())
    assert [isinstance(one, np.ndarray) for one in found] == [True, True, False, False]


def test_what_is_wrong_is_refused(client: openai.OpenAI) -> None:
    for sent, words, code in (
        ("w5 " * 60, "a text has 62 tokens, expected at most 40: shorten the text", "context_length_exceeded"),
        ([5, 400], "token id 400 is outside the vocabulary, 0 to 127", None),
        ([], "input", None),
    ):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.embeddings.create(model="vectors", input=sent)  # type: ignore[arg-type]
        assert (refused.value.param, refused.value.code) == ("input", code)
    with pytest.raises(openai.NotFoundError, match="model is 'other', expected 'vectors'"):
        client.embeddings.create(model="other", input="w5")
    with pytest.raises(openai.NotFoundError):  # an encoder writes nothing
        client.completions.create(model="vectors", prompt="w5")


def test_texts_of_a_length_run_together() -> None:
    assert batches([3, 1, 9, 2, 3], 6) == [[1, 3], [0, 4], [2]]
    assert batches([100], 6) == [[0]]


@pytest.mark.parametrize("mode", GenerationMode)
def test_answers_are_as_described(served: tuple[Embeddings, int], mode: GenerationMode) -> None:
    described = schemathesis.openapi.from_url(f"http://127.0.0.1:{served[1]}/openapi.json")
    operation = described["/v1/embeddings"]["POST"]
    strategy = operation.as_strategy(generation_mode=mode)

    @given(case=strategy)
    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance])  # a text may be too long

    with contextlib.suppress(Unsatisfiable):
        check()
