"""Python's reading of op.def: operators, the dataclasses of their nodes, their C structs, and their shapes."""
