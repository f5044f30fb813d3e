"""What a type checker tells a user of ``quantmoe.export``: mypy reads this file (`make lint`), nothing runs it."""
# mypy: warn-unused-ignores

import quantmoe

quantmoe.export("checkpoint", "model", target="cuda", tensor_parallel=2, calibrate="text.txt", force=True)
quantmoe.export("checkpoint", "model", quantise="int4")  # type: ignore[call-arg]
quantmoe.export("checkpoint", "model", tensor_parallel="2")  # type: ignore[arg-type]
