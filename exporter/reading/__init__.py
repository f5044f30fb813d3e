"""Checkpoints as their quantizers wrote them: files, and the formats that say what they mean. No torch."""
