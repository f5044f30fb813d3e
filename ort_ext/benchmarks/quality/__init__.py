"""``quantmoe evaluate``: perplexity, and divergence from another model."""
