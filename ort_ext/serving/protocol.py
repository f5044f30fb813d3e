"""Fields of OpenAI's requests and answers. FastAPI describes the interface with them."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from quantmoe.runtime.chat import GIVEN, TemplateArguments

#: answers to one request at most
ANSWERS = 128
#: texts of a request for vectors at most, as OpenAI's
TEXTS = 2048
Whole = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[StrictFloat, Field(allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Id = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Text = Annotated[StrictStr, Field(min_length=1)]


def _at_most(texts: int) -> BeforeValidator:
    """Return a check of a long list's entries at once: pydantic makes an error for each of them and each type."""

    def check(value: Any) -> Any:
        lists = [value, *(entry for entry in value if isinstance(entry, list))] if isinstance(value, list) else []
        for found in lists:
            if len(found) > texts and not all(type(entry) is int and 0 <= entry < 2**31 for entry in found):
                raise ValueError(
                    f"has a list of {len(found)} entries, expected token ids, or at most {texts} texts or lists of "
                    "token ids"
                )
        return value

    return BeforeValidator(check)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Options):
    include_usage: StrictBool | None = None
    include_obfuscation: Literal[False] | None = None


class Ask(Options):
    """Fields of both kinds of requests. Without a value, sampling is as in generation_config.json."""

    model: StrictStr | None = Field(None, description="the name in /v1/models")
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Bias] | None = None
    seed: Whole | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    ignore_eos: StrictBool | None = Field(None, description="go on after the model's end tokens")
    n: Annotated[Whole, Field(ge=1, le=ANSWERS)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    regex: Text | None = Field(None, description="the answer follows this regular expression")
    grammar: Text | None = Field(None, description="the answer follows this grammar, in Lark's or llama.cpp's syntax")
    user: StrictStr | None = Field(None, description="has no effect")
    metadata: dict[str, StrictStr] | None = Field(None, description="has no effect")
    store: StrictBool | None = Field(None, description="has no effect")
    service_tier: StrictStr | None = Field(None, description="has no effect")
    prompt_cache_key: StrictStr | None = Field(None, description="has no effect")
    safety_identifier: StrictStr | None = Field(None, description="has no effect")

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, given: StreamOptions | None, others: ValidationInfo) -> StreamOptions | None:
        if given is not None and not others.data.get("stream"):
            raise ValueError("is given without stream; send stream: true, or leave it out")
        return given

    def rules(self) -> dict[str, str]:
        """Return what the answer follows, by the kinds of quantmoe.runtime.choosing.constraint.Grammar."""
        return {kind: text for kind in ("regex", "grammar") if (text := getattr(self, kind)) is not None}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most(self) -> int | None:
        """The most tokens of an answer; None: the default."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Number of the likeliest tokens that are asked for; None: no probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """Return the fields of quantmoe.Sampling; None where they are not given."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        bias = None if self.logit_bias is None else {int(id): by for id, by in self.logit_bias.items()}
        return {name: getattr(self, name) for name in names} | {
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": bias,
        }


class AskText(Ask):
    """A request to /v1/completions."""

    prompt: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=ANSWERS)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=ANSWERS)],
        _at_most(ANSWERS),
    ]
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def top(self) -> int | None:
        return self.logprobs


class AskVectors(Options):
    """A request to /v1/embeddings."""

    input: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=TEXTS)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=TEXTS)],
        _at_most(TEXTS),
    ]
    model: StrictStr | None = Field(None, description="the name in /v1/models")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: StrictStr | None = Field(None, description="has no effect")


class Part(Options):
    type: Literal["text"]
    text: StrictStr


class Called(Options):
    name: Text
    arguments: StrictStr


class ToolCall(Options):
    """A function that the model calls."""

    id: StrictStr
    type: Literal["function"]
    function: Called


class Message(Options):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[Part], Field(min_length=1)] | None = None
    name: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    # what OpenAI's client has in the answers that it sends back
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("has no content, expected text; only a message with tool_calls needs none")
        return self

    def given(self, knows_developer: bool) -> dict[str, Any]:
        """Return it as chat templates take it. Where they do not know developers, a developer's is the system's."""
        parts = isinstance(self.content, list)
        content = "".join(part.text for part in self.content) if parts else self.content  # type: ignore[union-attr]
        role = "system" if self.role == "developer" and not knows_developer else self.role
        return self.model_dump(exclude_none=True) | {"role": role, "content": content}


class Function(Options):
    name: Text
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = Field(
        None, description="has no effect: arguments follow the schema where tool_choice requires a call"
    )


class Tool(Options):
    type: Literal["function"]
    function: Function


class ToolName(Options):
    name: Text


class NamedTool(Options):
    type: Literal["function"]
    function: ToolName


class TextFormat(Options):
    type: Literal["text"]


class ObjectFormat(Options):
    type: Literal["json_object"]


class Schema(Options):
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class SchemaFormat(Options):
    type: Literal["json_schema"]
    json_schema: Schema


class AskChat(Ask):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    reasoning_effort: StrictStr | None = Field(None, description="for chat templates that read it")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="what else the chat template reads")
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _names_a_tool(cls, given: str | NamedTool | None, others: ValidationInfo) -> str | NamedTool | None:
        if "tools" not in others.data:  # which are wrong themselves
            return given
        names = [tool.function.name for tool in others.data["tools"] or ()]
        if given == "required" and not names:
            raise ValueError('is "required" without tools; send tools, or leave it out')
        if isinstance(given, NamedTool) and given.function.name not in names:
            raise ValueError(f"is the tool {json.dumps(given.function.name)}, expected one of {json.dumps(names)}")
        return given

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(given.keys() & GIVEN) if given else ():
            raise ValueError(f"has {name}, which messages and tools give; leave it out")
        return given

    @field_validator("top_logprobs")
    @classmethod
    def _has_logprobs(cls, given: int | None, others: ValidationInfo) -> int | None:
        if given is not None and not others.data.get("logprobs"):
            raise ValueError("is given without logprobs; send logprobs: true, or leave it out")
        return given

    def rules(self) -> dict[str, str]:
        asked = self.response_format
        found = super().rules()
        if isinstance(asked, SchemaFormat):
            found["json_schema"] = json.dumps(asked.json_schema.schema_)
        if isinstance(asked, ObjectFormat):
            found["json_schema"] = '{"type": "object"}'
        return found

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def arguments(self) -> TemplateArguments:
        """Return what the chat template is rendered with."""
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools or ()]
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        choice = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return TemplateArguments(tools or None, choice or "auto", effort | (self.chat_template_kwargs or {}))

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Reply(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Head(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatAnswer(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextAnswer(Head):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Vector(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Read(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Vectors(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Vector]
    usage: Read


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class Health(BaseModel):
    status: Literal["ok"]


def finite(logprob: float) -> float:
    """Return a number that JSON has: OpenAI writes -9999 for a token that cannot come."""
    return logprob if math.isfinite(logprob) else -9999.0
