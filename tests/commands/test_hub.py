"""export ORG/MODEL, against a stand-in of the Hugging Face hub on this machine."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "llmcompressor-gptq-weight"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: files beside the checkpoint's own, which no export reads
OTHERS = {"pytorch_model.bin": b"other weights", "original/model.safetensors": b"the same weights", "README.md": b"#"}


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, ORG/MODEL; asked: the paths of all requests."""

    def __init__(self, files: dict[str, bytes], asked: list[str], *arguments: Any) -> None:
        self.files, self.asked = files, asked
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        status, headers, content = 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/api/models/ORG/MODEL/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            status, headers = 200, {"Content-Type": "application/json"}
            content = json.dumps({"id": "ORG/MODEL", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/api/models/ORG/MODEL/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in self.files.items()
            ]
            status, headers, content = 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        elif path.startswith(prefix := f"/ORG/MODEL/resolve/{COMMIT}/"):
            content = self.files[path.removeprefix(prefix)]
            status, headers = 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address, and what is asked of it."""
    asked: list[str] = []
    files = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir() if path.is_file()} | OTHERS
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, files, asked)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def command(tmp_path: Path, endpoint: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    line = [sys.executable, "-m", "quantmoe.exporter.command", *arguments]
    return subprocess.run(
        line, env=os.environ | own | environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_a_models_name_is_fetched_once(hub, tmp_path):
    """The dry run reads the cache alone; what an export does not read stays where it is."""
    endpoint, asked = hub
    fetch = "hf download ORG/MODEL --local-dir MODEL"
    done = command(tmp_path, endpoint, "export", "ORG/MODEL", "out", "--dry-run")
    assert (done.returncode, asked) == (1, [])
    assert done.stderr.endswith(f"{fetch}\n")
    done = command(tmp_path, endpoint, "export", "ORG/MODEL", "out", "--layers", "9")
    assert done.returncode == 1
    assert f"snapshots/{COMMIT}: --layers 9; the model has 1 to 1" in done.stderr.replace("\n", "")
    assert not [path for path in asked if any(path.endswith(name) for name in OTHERS)]
    assert {path.rpartition("/")[2] for path in asked} >= {"config.json", "model.safetensors"}
    done = command(tmp_path, endpoint, "export", "ORG/MODEL", "out", "--dry-run")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "out (dry run)"), done.stderr


def test_what_the_hub_refuses_is_said(hub, tmp_path):
    done = command(tmp_path, hub[0], "export", "ORG/OTHER", "out")
    assert done.returncode == 1
    assert done.stderr.startswith("quantmoe: ORG/OTHER: the Hugging Face hub answers 404; expected a model")
    assert done.stderr.count("\n") == 1


def test_without_an_answer_the_command_is_named(tmp_path):
    done = command(tmp_path, "http://127.0.0.1:9", "export", "ORG/MODEL", "out", HF_HUB_OFFLINE="1")
    assert done.stderr.endswith("to fetch it from the Hugging Face hub: hf download ORG/MODEL --local-dir MODEL\n")
