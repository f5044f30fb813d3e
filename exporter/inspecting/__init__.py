"""Contents of a folder, and what export would make of it. No torch, no engine."""
