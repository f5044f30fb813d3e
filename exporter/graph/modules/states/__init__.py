"""Modules that keep a state in the place of keys and values, or beside them."""
