"""An exported folder behind Ray Serve, on one machine or several: serve.py OUTDIR [--replicas 2] [--port 8000]."""

import argparse
import os
from pathlib import Path

from ray import serve

from quantmoe.serving.app import application
from quantmoe.serving.opening import open_server


@serve.deployment
@serve.ingress()
class Serving:
    """A replica: the application of ``quantmoe serve``, in a process of its own."""

    def __init__(self, folder: str, options: dict):
        self.server = open_server(folder, **options)

    def __serve_build_asgi_app__(self):
        return application(self.server, os.environ.get("QUANTMOE_API_KEY"))

    def check_health(self):  # Ray Serve asks, and replaces a replica that raises
        if self.server.failed is not None:
            raise self.server.failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("outdir", type=Path, help="exported folder; each machine has it at this path")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=8, help="requests that a replica runs together")
    parser.add_argument("--queue", type=int, default=64, help="requests that wait for a replica; more are refused")
    parser.add_argument("--context", type=int, help="tokens of a prompt and its answer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    options = {"batch": given.batch, "queue": given.queue, "context": given.context, "device": given.device}
    serve.start(http_options={"host": given.host, "port": given.port})
    replicas = Serving.options(
        num_replicas=given.replicas,
        max_ongoing_requests=given.batch + given.queue,
        max_queued_requests=given.queue,
        ray_actor_options={"num_gpus": int(given.device == "cuda")},
    )
    serve.run(replicas.bind(str(given.outdir.resolve()), options), blocking=True)
