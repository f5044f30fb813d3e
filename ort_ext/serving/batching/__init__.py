"""Requests that run together: the scheduler, their caches, and their next tokens."""
