"""``quantmoe bench``: times beside other engines. ``quality``: what a model predicts beside other models."""
