"""Modules of transformers that become operators: recognised by what they compute, and replaced before the trace."""
