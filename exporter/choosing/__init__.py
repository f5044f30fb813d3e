"""Everything that is chosen, and every refusal, from headers and configuration."""
