"""TensorRT-RTX engine of an exported model, for GPUs that need not be here: build_engine.py MODEL PLAN [SM...].

MODEL is the folder, or a file in it: mtp.onnx.
"""

import sys
from pathlib import Path

import tensorrt_rtx_bindings as trt

import quantmoe

model, plan, *sms = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
if not builder.get_plugin_registry().load_library(quantmoe.trt_library_path()):
    sys.exit("the plug-in library does not load")
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file(str(model / "model.onnx" if model.is_dir() else model)):
    sys.exit("\n".join(parser.get_error(i).desc() for i in range(parser.num_errors)))

# batch_size, sequence_length, past_sequence_length, total_sequence_length: least, usual, most
lengths = {"input_ids": ((1, 1), (1, 1), (1, 512)), "position_ids": ((1, 1), (1, 1), (1, 512))}
lengths["attention_mask"] = ((1, 1), (1, 512), (1, 4096))
lengths["hidden_states"] = lengths["input_ids"]  # of multi-token prediction, with the features of each token
profile = builder.create_optimization_profile()
for i in range(network.num_inputs):
    tensor = network.get_input(i)
    if tensor.name.startswith("past_key_values"):
        # dynamic are the batch and, of keys and values, the length
        known = [iter((1, past)) for past in (0, 511, 3584)]
        shapes = [tuple(next(sizes) if size < 0 else size for size in tuple(tensor.shape)) for sizes in known]
    else:
        shapes = [(*sizes, *tuple(tensor.shape)[2:]) for sizes in lengths[tensor.name]]
    profile.set_shape(tensor.name, *shapes)
config = builder.create_builder_config()
config.add_optimization_profile(profile)
if sms:
    config.num_compute_capabilities = len(sms)
    for i, sm in enumerate(sms):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
engine = builder.build_serialized_network(network, config)
if engine is None:
    sys.exit("no engine")
plan.write_bytes(engine)
nodes = sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers))
print(f"{plan}: {engine.nbytes} bytes, {nodes} quantmoe layers")
