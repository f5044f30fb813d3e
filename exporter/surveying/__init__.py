"""Contents of a checkpoint: what ``export`` would make of it, and what it refuses. No torch, no engine."""
