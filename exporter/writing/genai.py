"""A folder runs in onnxruntime-genai if it has ``genai_config.json``.

Otherwise ``export`` prints the reason, and README.md in OUTDIR repeats it:

- It needs keys and values of one size: ``mimo_v2_flash``, ``kimi_linear``, and model types with sparse attention.
- It needs a convolution in a layer with a state: ``minimax`` (MiniMax-Text-01).
- It needs a recurrent state in a layer with a convolution: Inkling, Inkling 2, ``zaya``.
- It needs a layer with keys and values: encoders.
- It runs no slices: ranks of ``--tensor-parallel``.
- It takes ``--logits last`` or ``--logits all``: ``--logits N`` above 1.
- Its Engine has caches in blocks on NVIDIA GPUs only: ``--paged`` for the CPU.
- TensorRT alone runs the folder: ``--external-experts``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quantmoe.exporter.folder.files import MODEL
from quantmoe.exporter.folder.interface import BLOCK, HIDDEN, HIDDEN_OUT, PAGED, PAST, STATES, present
from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.exporter.folder.sampling_options import sampling_of
from quantmoe.exporter.folder.tokenizer import NAMED, end_tokens, named_token
from quantmoe.exporter.reading.config_fields import text_part
from quantmoe.exporter.reading.families import family_named
from quantmoe.exporter.targets import CUDA, Target

if TYPE_CHECKING:
    import onnx_ir as ir

#: fields that genai_config.json takes from transformers' configuration where config.json has none
FIELDS = ("hidden_size", "max_position_embeddings", "vocab_size")
#: the type of a cache, and its sizes
Cache = tuple[str, ...]
#: operators that write a cache in place
IN_PLACE = {("quantmoe", op) for op in ("CachedAttention", "CausalConv", "GatedDelta", "SparseIndexer", "StateSpace")}
#: of onnxruntime-genai's Engine: tokens of a block, requests in a run at most, and the share of the GPU's free memory
#: that the cache takes.
ENGINE = {"block_size": BLOCK, "max_batch_size": 128, "gpu_utilization_factor": 0.6}
#: tokens that onnxruntime-genai allocates a shared cache for unless the caller sets max_length: of a model's whole
#: context it may be tens of gigabytes
MAX_LENGTH = 4096
#: pixels of a resized image, at least and at most: transformers' names now and before
_PIXELS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def shares_buffer(graph: ir.Graph) -> bool:
    """Return whether past and present may be one buffer: no node reads a cache but one of IN_PLACE; others read its
    shape."""
    past = [value for value in graph.inputs if str(value.name).startswith(f"{PAST}.")]
    shape = {("", "Shape"), ("quantmoe", "TokenRows")}
    nodes = [{(use.node.domain, use.node.op_type) for use in value.uses()} - shape for value in past]
    return bool(past) and all(len(found) == 1 and found <= IN_PLACE for found in nodes)


def caches(inputs: Iterable[ir.Value], paged: bool = False) -> dict[int, dict[str, Cache]]:
    """Return what a graph caches: layer -> kind -> (type, sizes). Sizes of keys and values are the number of heads and
    their width."""
    found: dict[int, dict[str, Cache]] = defaultdict(dict)
    for value in inputs:
        prefix, _, name = str(value.name).partition(".")
        if prefix == PAST and value.shape is not None:
            layer, kind = name.split(".")
            sizes = value.shape if name.endswith(STATES) else value.shape[2:] if paged else value.shape[1::2]
            found[int(layer)][kind] = (str(value.dtype), *map(str, sizes))
    return found


def why_not(cached: Mapping[int, Mapping[str, Cache]], paged: bool = False) -> str:
    """Return why onnxruntime-genai 0.18 cannot allocate caches, "" if it can.

    Its DefaultKeyValueCache has one type for all layers, and one size for a layer's key and value. Its RecurrentState
    has both states of a layer, of one size for all layers. Its LFM2Cache has layers with a convolution alone, and one
    size for all others. Its Engine has one size, too.
    """
    keys = {layer: kinds["key"] for layer, kinds in cached.items() if "key" in kinds}
    convolution, state = (name.removeprefix(".") for name in STATES)
    states = {layer: kinds for layer, kinds in cached.items() if kinds.keys() & {convolution, state}}
    alone = [layer for layer, kinds in states.items() if state not in kinds]
    if not keys:
        return "it needs a layer with keys and values"
    if indexed := [layer for layer, kinds in cached.items() if "indexer_key" in kinds]:
        return f"it needs layers without an indexer, and layer {indexed[0]} has the keys of one"
    for layer, key in keys.items():
        if (value := cached[layer]["value"]) != key:
            return f"it needs keys and values of one size, and layer {layer} has {_size(key)} and {_size(value)}"
    if free := [layer for layer, kinds in states.items() if convolution not in kinds]:
        return f"it needs a convolution in a layer with a state, and layer {free[0]} has none"
    if alone and (len(alone) < len(states) or keys.keys() & states.keys()):
        return f"it needs a recurrent state in a layer with a convolution, and layer {alone[0]} has none"
    one_size = [{kinds.get(kind) for kinds in states.values()} for kind in (convolution, state)]
    one_size += [{key if paged or alone else key[:1] for key in keys.values()}]
    if any(len(sizes) > 1 for sizes in one_size):
        return "it needs caches of one size and type in all layers"
    return ""


def add_caches(config: dict[str, Any], cached: Mapping[int, Mapping[str, Cache]]) -> None:
    """Put the sizes of caches into genai_config.json. They are of one layer: onnxruntime-genai reads the others' from
    the model."""
    decoder = config["model"]["decoder"]
    decoder["num_key_value_heads"], decoder["head_size"] = (
        int(size) for size in next(kinds["key"][1:] for kinds in cached.values() if "key" in kinds)
    )
    if any(kinds.keys() == {"conv_state"} for kinds in cached.values()):
        config["model"]["type"] = "lfm2"
        decoder["layer_types"] = ["full_attention" if "key" in cached[layer] else "conv" for layer in sorted(cached)]
        decoder["inputs"]["past_conv_names"] = f"{PAST}.%d.conv_state"
        decoder["outputs"]["present_conv_names"] = f"{present(PAST)}.%d.conv_state"
        _no_cuda_graph(decoder)  # each step has other buffers of states


def _no_cuda_graph(decoder: dict[str, Any]) -> None:
    for provider in decoder["session_options"].get("provider_options", []):
        for options in provider.values():
            options["enable_cuda_graph"] = "0"


def _size(cache: Cache) -> str:
    return "x".join(cache[1:])


def genai_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    target: Target,
    shares: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of genai_config.json, without the sizes of :func:`add_caches`.

    Args:
        config: config.json. generation: generation_config.json, {} when there is none.
        target: of the model. onnxruntime-genai loads its library from the model's own folder only.
        shares: whether past and present may be one buffer. On a GPU, a decode step is then a CUDA graph.
        defaults: of fields that config.json has not.

    Raises:
        KeyError: a field is not there.
    """
    text = {**(defaults or {}), **text_part(config)}
    session: dict[str, Any] = {"custom_ops_library": target.library} if target.library else {}
    if target.provider:
        session["provider_options"] = [{target.provider: {"enable_cuda_graph": "1" if shares else "0"}}]
    heads, context = text["num_attention_heads"], text["max_position_embeddings"]
    tokens: dict[str, Any] = {
        name: value for name in NAMED if (value := named_token(name, generation, config)) is not None
    }
    if ends := end_tokens(generation, config):
        tokens["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    cache = {f"{way}_{kind}_names": f"{prefix}.%d.{kind}"
             for way, prefix in (("past", PAST), ("present", present(PAST)))
             for kind in ("key", "value")}  # fmt: skip
    return {
        "model": tokens
        | {
            "type": family_named(text["model_type"]).genai,
            "vocab_size": text["vocab_size"],
            "context_length": context,
            "decoder": {
                "filename": MODEL,
                "session_options": session,
                "hidden_size": text["hidden_size"],
                "num_attention_heads": heads,
                "num_hidden_layers": text["num_hidden_layers"],
                "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")}
                | {key: value for key, value in cache.items() if key.startswith("past")},
                "outputs": {"logits": "logits"}
                | {key: value for key, value in cache.items() if key.startswith("present")},
            },
        },
        "search": _search(generation)
        | {
            "max_length": min(context, MAX_LENGTH) if shares else context,
            SHARE_BUFFER: shares,
            "chunk_size": target.chunk,
        },
    }


def shared_tensors(values: Iterable[ir.Value], others: Iterable[ir.Value]) -> list[dict[str, Any]]:
    """Return the initializers of two graphs with the same names and the same bytes of a file, as onnxruntime-genai
    loads them once for both."""
    import onnx_ir as ir  # it imports sympy, half a second

    found, twins = [], {value.name: value.const_value for value in others}
    for value in values:
        tensor, twin = value.const_value, twins.get(value.name)
        if not isinstance(tensor, ir.ExternalTensor) or not isinstance(twin, ir.ExternalTensor):
            continue
        if (tensor.location, tensor.offset, tensor.length) == (twin.location, twin.offset, twin.length):
            found.append(
                {
                    "name": value.name,
                    "data_file": str(tensor.location),
                    "offset": str(tensor.offset),
                    "length": str(tensor.length),
                    "data_type": int(tensor.dtype),
                    "shape": tensor.shape.numpy(),
                }
            )
    return found


def add_mtp(config: dict[str, Any], filename: str, shared: list[dict[str, Any]]) -> None:
    """Add multi-token prediction to genai_config.json as onnxruntime-genai 0.18 has it.

    Args:
        filename: of the model that drafts. shared: of :func:`shared_tensors`, where a device would hold them twice.
    """
    model, decoder = config["model"], config["model"]["decoder"]
    names = {way: {key: value for key, value in decoder[way].items() if key != HIDDEN} for way in ("inputs", "outputs")}
    decoder["outputs"][HIDDEN] = HIDDEN
    model["mtp"] = {
        "filename": filename,
        "num_hidden_layers": 1,
        "num_key_value_heads": decoder["num_key_value_heads"],
        "head_size": decoder["head_size"],
        "main_hidden_states": HIDDEN,
        "inputs": names["inputs"] | {HIDDEN: HIDDEN},
        "outputs": names["outputs"] | {HIDDEN: HIDDEN_OUT},
    }
    if shared:
        decoder["shared_initializers"] = model["mtp"]["shared_initializers"] = shared


def add_paged(config: dict[str, Any], names: Iterable[str]) -> None:
    """Make a genai_config.json for onnxruntime-genai's Engine (0.18), which batches continuously.

    Args:
        names: of the model's inputs; the config has those that PAGED has.
    """
    decoder, inputs = config["model"]["decoder"], {*names}
    own = [name for name in ("input_ids", *PAGED) if name in inputs]
    past = {key: value for key, value in decoder["inputs"].items() if key.startswith("past")}
    decoder["inputs"] = {name: name for name in own} | past
    decoder["state_groups"] = [{"kind": "paged_kv", "layer_ids": [*range(decoder["num_hidden_layers"])]}]
    config["search"]["max_length"] = config["model"]["context_length"]  # no request has a cache of its own
    config["engine"] = {"dynamic_batching": {**ENGINE, "max_scheduled_tokens": CUDA.chunk}}


def add_vision(
    config: dict[str, Any], name: str, width: int, *, model: Any, processor: str, filenames: tuple[str, str]
) -> None:
    """Add a vision tower to genai_config.json: the decoder takes embeddings, and positions of three axes.

    Args:
        name: of the pipeline. width: of the embeddings.
        model: transformers' configuration of the whole model. processor: file name of :func:`image_processor`.
        filenames: of the tower, and of what puts its features in the places of image tokens.
    """
    found, vision, (tower, embeddings) = config["model"], model.vision_config, filenames
    found["type"] = name
    for name in ("image_token_id", "video_token_id", "vision_start_token_id"):
        found[name] = getattr(model, name)
    decoder = found["decoder"]
    decoder["hidden_size"] = width  # which onnxruntime-genai 0.18 reads for features and embeddings alone
    del decoder["inputs"]["input_ids"]
    decoder["inputs"] = {"inputs_embeds": "inputs_embeds"} | decoder["inputs"]
    del config["search"]["chunk_size"]  # a prompt is one run
    _no_cuda_graph(decoder)  # each step has other buffers of positions
    found["vision"] = {
        "filename": tower,
        "config_filename": processor,
        "spatial_merge_size": vision.spatial_merge_size,
        "patch_size": vision.patch_size,
        "inputs": {name: name for name in ("pixel_values", "image_grid_thw")},
        "outputs": {"image_features": "image_features"},
    }
    found["embedding"] = {
        "filename": embeddings,
        "inputs": {name: name for name in ("input_ids", "image_features")},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }


def image_processor(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what onnxruntime-genai's preprocessing (onnxruntime-extensions) reads, from transformers'
    Qwen2VLImageProcessor.

    Raises:
        KeyError, TypeError, ValueError: a field that it needs is not there, or of another type.
    """
    size = given.get("size") or {}
    least, most = (size.get(edge) or given[old] for edge, old in _PIXELS.items())
    patch, merged, frames = (int(given[name]) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    mean, deviation = ([float(value) for value in given[f"image_{name}"]] for name in ("mean", "std"))
    operations: list[tuple[str, dict[str, Any]]] = [
        ("DecodeImage", {"color_space": "RGB"}),
        ("ConvertRGB", {}),
        (
            "Resize",
            {
                "width": patch * merged,  # of a smart resize only the number of pixels counts
                "height": patch * merged,
                "smart_resize": 1,
                "min_pixels": int(least),
                "max_pixels": int(most),
                "patch_size": patch,
                "merge_size": merged,
            },
        ),
        ("Rescale", {"rescale_factor": float(given.get("rescale_factor", 1 / 255))}),
        ("Normalize", {"mean": mean, "std": deviation, "qwen3_vl": 1}),
        ("PatchImage", {"patch_size": patch, "temporal_patch_size": frames, "merge_size": merged}),
    ]
    transforms = [
        {"operation": {"name": kind.lower(), "type": kind} | ({"attrs": attributes} if attributes else {})}
        for kind, attributes in operations
    ]
    return {"processor": {"name": "qwen3_vl_image_processor", "transforms": transforms}}


def _search(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return how tokens are chosen: as transformers does with the same file."""
    found = sampling_of(generation)
    if found is None or not found.temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": found.temperature, "top_k": found.top_k, "top_p": found.top_p}
