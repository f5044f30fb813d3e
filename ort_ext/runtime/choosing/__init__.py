"""Choice of the next token: sampling here or on the GPU, rules of a grammar, and the calls that a rule asks for."""
