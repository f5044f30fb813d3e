"""What a folder holds, and what export would make of it. No torch, no engine."""
