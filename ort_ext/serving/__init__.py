"""A server with OpenAI's interface: HTTP, the scheduler of requests, and prompts that are kept for the next request."""
