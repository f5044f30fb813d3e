"""The attributes of each operator's nodes as a dataclass of its name, made from op.def; nodes.pyi is what they are."""

from quantmoe.custom_ops.op_def.schema import make_projection, make_spec, schema

Projection = make_projection(schema())
globals().update({op: make_spec(schema(), op, Projection) for op in schema().operators})
