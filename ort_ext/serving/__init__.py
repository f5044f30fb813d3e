"""A server with OpenAI's interface: HTTP, the scheduler of requests, and prompts that are kept for the next request."""

#: defaults of a server: requests that run together, requests that wait, tokens of a prompt and its answer
BATCH, QUEUE, LENGTH = 8, 64, 8192
