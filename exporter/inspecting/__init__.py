"""What an exported model holds, read from its files alone: nodes, and the memory that they need. No torch, no engine."""
