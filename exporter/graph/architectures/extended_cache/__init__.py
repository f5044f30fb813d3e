"""Architectures whose cache holds more than the keys and values of attention: an indexer's keys, short convolutions."""
