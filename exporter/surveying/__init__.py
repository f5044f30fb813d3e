"""What a checkpoint holds, what ``export`` would make of it, and what it refuses. No torch, no engine."""
