"""Contents of an exported model, read from its files alone: nodes, and the memory they need. No torch, no engine."""
