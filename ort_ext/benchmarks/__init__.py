"""``quantmoe bench`` and ``quantmoe evaluate``: times beside other engines, and quality beside other models."""
