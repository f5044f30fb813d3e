"""Conversations by onnxruntime-genai: chat.py FOLDER [--stop TEXT]... [--users N] [--max-new-tokens N]

Each line that you type is a message, except empty lines. Ctrl-C ends the answer, Ctrl-D the program. --users gives
the message to N conversations at the same time.
"""

import argparse
import contextlib
import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import onnxruntime_genai as og
from generate import open_model
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Conversation:
    """The messages of one user.

    Any number of conversations share a model. One thread at a time uses a conversation.

    Args:
        search: search options of onnxruntime-genai in the place of genai_config.json's.
    """

    def __init__(self, model, folder, **search):
        self.model, self.params = model, og.GeneratorParams(model)
        self.params.set_search_options(**search)
        self.generator = og.Generator(model, self.params)
        self.tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.template = og.Tokenizer(model) if has_template(folder) else None
        search = json.loads(Path(folder, "genai_config.json").read_text(encoding="utf-8"))["search"] | search
        self.max_length = search["max_length"]
        # genai has not run an answer's last token, and cannot go back over one token alone in a cache that grows
        self.unread = 1 if search["past_present_share_buffer"] else 2
        self.messages = []
        self.snapshot = self.kept = 0

    def reply(self, text, stop=(), max_new_tokens=512, cancelled=None):
        """Yield the answer in pieces. The pieces that came are part of the conversation, also if you stop early.

        Args:
            stop: strings that end the answer; they are not part of it.
            cancelled: a threading.Event that ends the answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = self.generator.get_sequence(0).tolist() if self.snapshot else []
        if self.template is None:
            ids = said + self.tokenizer.encode(text, add_special_tokens=not said).ids
        else:
            prompt = self.template.apply_chat_template(json.dumps(messages), add_generation_prompt=True)
            ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if len(ids) >= self.max_length:
            raise ValueError(
                f"{len(ids)} tokens and 1 for the answer do not fit into max_length, {self.max_length} tokens: "
                "begin a new conversation, or set max_length"
            )
        self._go_on(said, ids)
        stream, answer, held = DecodeStream(ids=ids, skip_special_tokens=True), "", ""
        try:
            for _ in range(max_new_tokens):
                if self.generator.is_done() or (cancelled and cancelled.is_set()):
                    break
                self.generator.generate_next_token()
                new = stream.step(self.tokenizer, int(self.generator.get_next_tokens()[0])) or ""
                piece, held, ended = cut(held + new, stop)
                answer += piece
                if piece:
                    yield piece
                if ended:
                    return
            answer += held
            if held:
                yield held
        finally:
            self.messages = [*messages, {"role": "assistant", "content": without_reasoning(answer)}]

    def _go_on(self, said, ids):
        """Go back to the tokens with which ids begin, and run the others."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, ids, strict=False)))
        most = max(0, min(common, len(said) - self.unread, len(ids) - 1))
        self.kept = self._back(most) if said else 0
        self.generator.append_tokens(ids[self.kept :])
        self.generator.snapshot_state()  # now, because all tokens are run; it does nothing in other models
        self.snapshot = len(ids)

    def _back(self, most):
        """Go back to at most so many tokens, and return to how many."""
        for length in (most, self.snapshot):  # a hybrid model goes back to its snapshot alone
            if length <= most:
                with contextlib.suppress(RuntimeError):
                    self.generator.rewind_to(length)
                    return length
        self.generator = og.Generator(self.model, self.params)  # LFM2 does not go back
        return 0


def has_template(folder):
    config = Path(folder, "tokenizer_config.json")
    return Path(folder, "chat_template.jinja").exists() or (
        config.exists() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))
    )


def without_reasoning(answer):
    """Return the answer as the next prompt has it: Qwen3's template leaves reasoning out."""
    return answer.rpartition("</think>")[2].lstrip("\n")


def cut(text, stop):
    """Return the text to show, the text that may begin a stop string, and whether a stop string came."""
    if found := [text.index(end) for end in stop if end in text]:
        return text[: min(found)], "", True
    begun = max((n for end in stop for n in range(1, len(end)) if text.endswith(end[:n])), default=0)
    return text[: len(text) - begun], text[len(text) - begun :], False


def main():
    parser = argparse.ArgumentParser(description="Let a folder's model answer the lines that you type.")
    parser.add_argument("folder", help="folder that export wrote")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text")
    parser.add_argument("--users", type=int, default=1, metavar="N", help="number of conversations (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="most tokens of an answer")
    args = parser.parse_args()
    for name, value in (("--users", args.users), ("--max-new-tokens", args.max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} {value}: expected a number from 1")
    if "" in args.stop:
        raise ValueError("--stop is empty: expected a text")
    model, cancelled = open_model(args.folder), threading.Event()
    users = [Conversation(model, args.folder) for _ in range(args.users)]
    signal.signal(signal.SIGINT, lambda *_: cancelled.set())
    for line in sys.stdin:
        if line == "\n":
            continue
        cancelled.clear()
        options = {"stop": args.stop, "max_new_tokens": args.max_new_tokens, "cancelled": cancelled}
        answers = [user.reply(line.rstrip("\n"), **options) for user in users]
        if len(answers) == 1:
            for piece in answers[0]:
                print(piece, end="", flush=True)
            print()
            continue
        with ThreadPoolExecutor(len(answers)) as threads:
            for i, answer in enumerate(threads.map("".join, answers), 1):
                print(f"{i}: {answer}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # onnxruntime-genai's exceptions have no base class of their own
        sys.exit(str(error))
