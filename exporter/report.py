"""The text that the ``quantmoe`` command prints for people, on :data:`console`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table

from quantmoe.exporter.command_arguments import terminal
from quantmoe.exporter.folder.files import MTP_MODEL
from quantmoe.exporter.folder.metadata import NO_CHAT, TARGET
from quantmoe.exporter.targets import CPU, TARGETS

if TYPE_CHECKING:
    from quantmoe.benchmarks.quality.evaluate import Evaluation
    from quantmoe.exporter.inspecting.fit import Fit
    from quantmoe.exporter.writing.checkpoint_fit import ExportSize

console = terminal()
FLOAT_HERE = "quantized in the checkpoint, float here"
PLAIN_ATTENTION = "attention of standard nodes"
APART = "shared experts that are modules of their own"
NOT_ORT = "QuantLinear in spite of --dense ort"


def print_survey(found: dict[str, Any]) -> None:
    console.print(found["checkpoint"], highlight=False)
    for part in ("files", "tensors"):
        kinds = (f"{kind} {size['count']} ({decimal(size['bytes'])})" for kind, size in found.get(part, {}).items())
        if text := ", ".join(kinds):
            console.print(f"{part}: {text}")
    if "format" in found:
        console.print(f"architecture {found['model_type']}, format {found['format'] or 'floats, not quantized'}")
    _print_types(found.get("types", []))
    rows = (
        (x["scheme"], x["experts"], x["hidden_size"], x["intermediate_size"], x["shared_size"])
        for x in found.get("layers", ())
    )
    for (scheme, experts, hidden, size, shared), count in Counter(rows).items():
        text = f"{experts} of {hidden} x {size}{f', a shared one of {hidden} x {shared}' if shared else ''}"
        _print_block(f"{count} {plural('layer', count)}", {"scheme": scheme, "experts": text})
    for text, count in found.get("linears", {}).items():
        console.print(f"{count} quantized {plural('linear', count)} outside the experts: {text}")
    if found.get("attention"):
        console.print(found["attention"])
    for remark in filter(None, (found.get("left_out"), found.get("kv_cache"))):
        console.print(remark, style="yellow")
    reasons = found["refused"]
    for reason in dict.fromkeys(filter(None, reasons.values())):
        targets = " and ".join(target for target, text in reasons.items() if text == reason)
        console.print(f"export --target {targets} refuses it: {reason}", style="yellow", highlight=False)
    if fine := [target for target, reason in reasons.items() if not reason]:
        console.print(
            f"export --target {' and '.join(fine)}: nothing in headers and config.json is in the way; "
            "export --dry-run also asks transformers for the architecture",
            highlight=False,
        )


def _print_types(rows: list[dict[str, Any]]) -> None:
    """Print the types of a GGUF file's tensors, a line each, and the bits a weight of the file."""
    for row in rows:
        text = f"{row['weights'] / 1e6:,.1f} M weights, {row['bits']:.4g} bits each"
        carried = row["scheme"].partition(", ")[2]
        kernel = f"CPU kernel here: {row['kernel']}" if row["kernel"] else ""
        console.print(
            f"{row['part']}: {row['type']}, {'; '.join(filter(None, (text, carried, kernel)))}", highlight=False
        )
    if rows:
        bits = sum(row["weights"] * row["bits"] for row in rows) / sum(row["weights"] for row in rows)
        console.print(f"all tensors: {bits:.3g} bits a weight", highlight=False)


def experts_of(attributes: Mapping[str, Any], shared: int) -> str:
    """Return a node's experts, and how many of them are a shared one: "256 and 1 shared of 2048 x 512"."""
    count = f"{attributes['num_experts'] - shared}{f' and {shared} shared' if shared else ''}"
    return f"{count} of {attributes['hidden_size']} x {attributes['intermediate_size']}"


def print_layers(layers: Iterable[tuple[str, Any, int, int | None]]) -> None:
    """Print layers with one description together: (scheme, attributes, shared experts, packed bytes or None)."""
    described = (
        (scheme, experts_of(a := spec.attributes(), shared), _activations(a, "w13", "w2"), spec.w13.scale_type, size)
        for scheme, spec, shared, size in layers
    )
    for (scheme, experts, activations, scales, size), count in Counter(described).items():
        rows = {"scheme": scheme, "experts": experts, "activations": activations, "scales": scales}
        _print_block(f"{count} {plural('layer', count)}", rows | ({"bytes": f"{size:,} each"} if size else {}))


def print_model(found: dict[str, Any]) -> None:
    _print_nodes("layer", found["layers"], ("w13", "w2"))
    ours = bool(TARGETS.get(found["metadata"].get(TARGET), CPU).library)
    _print_nodes("QuantLinear" if ours else "MatMulNBits", found["linears"], ("w",))
    experts, dense = (sum(item["bytes"] for item in found[part]) for part in ("layers", "dense"))
    console.print(
        f"experts {decimal(experts)}; linears {decimal(sum(item['bytes'] for item in found['linears']))}; "
        f"other weights {decimal(dense)}: {len(found['dense'])} tensors"
    )
    kept = {t["name"]: t["dequantized_because"] or "" for t in found["dense"] if t["dequantized_from"] is not None}
    print_reasons(FLOAT_HERE, kept)
    _print_attention(found["attention"])
    _print_indexers(found["indexers"])
    _print_linear_attention(found["linear_attention"])
    print_reasons(PLAIN_ATTENTION, found["plain_attention"])
    if no_chat := found["metadata"].get(NO_CHAT):
        console.print(no_chat, style="yellow", highlight=False)
    if "verified" in found:
        weights = [node[p] for node in found["layers"] + found["linears"] for p in ("w13", "w2", "w") if p in node]
        tensors = len(found["dense"]) + sum(len(weight.get("tensors", "1")) for weight in weights)
        same = found["verified"]
        rest = f"; {tensors - same} have none" if same < tensors else ""
        console.print(f"{same} tensors have the recorded hash{rest}", style="yellow" if rest else "green")


def print_fit(fits: Fit, model: Path, rate: str) -> None:
    """Print what fits; rate: where the memory's bytes a second are from."""
    gpu = TARGETS[fits.target].on_gpu
    where, through = ("GPU memory", "the bus") if gpu else ("memory", "the disk")
    rows = {
        "outside the experts": decimal(fits.weights),
        "cache": f"{decimal(fits.cache)} for {fits.context:,} tokens",
        "reserve": decimal(fits.reserve),
        "experts": f"{decimal(min(fits.budget, fits.all_experts))} of {decimal(fits.all_experts)}, "
        f"{fits.slots:,} of {fits.experts:,}",
    }
    if fits.ram is not None:
        rows["in RAM"] = f"{fits.ram_slots:,} of {fits.experts:,}, in {decimal(fits.ram_budget)} of {decimal(fits.ram)}"
    _print_block(f"{decimal(fits.memory)} of {where}", rows)

    def tier(size: float, at: int) -> str:
        bound = fits.bounds[at]
        text = f"{decimal(int(size))} at {decimal(int(fits.rates[at]))}/s"
        return text if bound is None else f"{text}, at most {bound:,.1f} tokens/s"

    rows = {where: f"{tier(fits.read, 0)} ({rate})"}
    if fits.slots < fits.experts:
        how = "of the trace" if fits.from_trace else "if all are as likely; --trace knows better"
        rows[through] = f"{tier(fits.missed, 1)}; hits {fits.hit_rate:.0%}, {how}"
    if fits.in_file:
        rows["the disk"] = tier(fits.from_disk, 2)
    _print_block("A token reads", rows)
    console.print(f"at most {fits.tokens_per_second:,.1f} tokens/s, one after the other")
    if fits.drafting:
        console.print(
            f"{MTP_MODEL} is not counted: with --speculate mtp it takes {decimal(fits.drafting)} more",
            style="yellow",
        )
    if fits.external:
        disk = f" QUANTMOE_EXPERTS=disk QUANTMOE_RAM={fits.ram_budget}" * fits.in_file
        console.print(f"QUANTMOE_GPU_MEMORY={fits.budget}{disk}, which TensorRT's plug-in reads", highlight=False)
        return
    command = f"quantmoe generate {model}" + " --device cuda" * gpu
    if fits.in_file:
        command += f" --experts disk --gpu-memory {fits.budget} --ram {fits.ram_budget}"
    elif fits.slots < fits.experts:
        command += f" --experts host --gpu-memory {fits.budget}" if gpu else f" --experts disk --ram {fits.budget}"
    console.print(command, highlight=False, soft_wrap=True)


def print_export_sizes(sizes: Sequence[ExportSize], memory: int, target: str, context: int) -> None:
    """Print a table of exports: what each takes, and how much of it the memory holds."""
    where = "GPU memory" if TARGETS[target].on_gpu else "RAM"
    cache = f"cache of {context:,} tokens"
    table = Table("export", "experts", "other weights", cache, "reserve", "in all", f"{decimal(memory)} of {where}")
    for size in sizes:
        option = f"--quantize {size.quantize}" if size.quantize else f"--target {target}"
        if size.refused:
            table.add_row(option, *[""] * 5, "refused")
            continue
        held = size.held(memory)
        said = "fits" if held == 1 else f"holds {held:.0%} of the experts" if held else "does not fit"
        parts = (size.experts, size.others, size.cache, size.reserve, size.total)
        table.add_row(option, *map(decimal, parts), said)
    console.print(table)
    for refused in dict.fromkeys(size.refused for size in sizes if size.refused):
        console.print(refused, style="yellow", highlight=False)
    if any(0 < size.held(memory) < 1 for size in sizes if not size.refused):
        there = "host" if TARGETS[target].on_gpu else "disk"
        console.print(f"generate --experts {there} reads the other experts when a token needs them", highlight=False)


def _print_nodes(kind: str, nodes: list[dict[str, Any]], projections: tuple[str, ...]) -> None:
    """Print nodes with one description together; linears with one description may have any size."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        described = {k: v for k, v in node["attributes"].items() if k not in ("in_features", "out_features")}
        groups.setdefault(str((node["format"], described, len(node.get("shared", ())))), []).append(node)
    for group in groups.values():
        a, first = group[0]["attributes"], projections[0]
        rows = {"scheme": group[0]["format"]}
        if "num_experts" in a:
            rows["experts"] = experts_of(a, len(group[0]["shared"]))
            if group[0]["external"]:
                rows["experts"] += ", in the data files: for TensorRT alone"
        for p in projections:
            rows[p] = _weights(*(a[f"{p}_{part}"] for part in ("format", "group_size", "scale_type")))
        rows["activations"] = _activations(a, *projections)
        rows["layout"] = f"{a[f'{first}_layout']} v{a[f'{first}_layout_version']}"
        sizes, bits = ([node[key] for node in group] for key in ("bytes", "bits_per_weight"))
        rows["bytes"] = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        rows["bits a weight"] = " to ".join(sorted({f"{min(bits):.2f}", f"{max(bits):.2f}"}))
        _print_block(f"{len(group)} {plural(kind, len(group))}: {and_more([str(n['module']) for n in group])}", rows)


def _print_attention(nodes: list[dict[str, Any]]) -> None:
    """CachedAttention nodes of the same description together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault(str((node["cache"], node["attributes"])), []).append(node)
    for group in groups.values():
        a, cache = group[0]["attributes"], group[0]["cache"]
        rows = {"heads": f"{a['num_heads']} of {a['head_size']}, {a['kv_num_heads']} of keys and values"}
        rows["norm, rotary"] = f"{a['qk_norm']}, {a['rotary_size']} features"
        if a["sliding_window"]:
            rows["sliding window"] = str(a["sliding_window"])
        rows["cache"] = f"{cache}, {sum(node['bytes_per_token'] for node in group):,} bytes a token"
        _print_block(f"{len(group)} CachedAttention: {and_more([node['node'] for node in group])}", rows)


def selection(indexer: Mapping[str, Any]) -> str:
    """Return what a SparseIndexer of these attributes selects."""
    size, groups = indexer["block_size"], indexer["num_groups"]
    found = f"{indexer['top_k']:,} tokens" if size == 1 else f"{indexer['top_k'] // size:,} blocks of {size} tokens"
    return found + (f" for each of {groups} groups of heads" if groups > 1 else "")


def _print_indexers(nodes: list[dict[str, Any]]) -> None:
    """SparseIndexer nodes of the same description together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault(str(node["attributes"]), []).append(node)
    for group in groups.values():
        a = group[0]["attributes"]
        rows = {"heads": f"{a['num_heads']} of {a['head_size']}", "selects": selection(a)}
        rows["cache"] = f"{sum(node['bytes_per_token'] for node in group):,} bytes a token"
        _print_block(f"{len(group)} SparseIndexer: {and_more([node['node'] for node in group])}", rows)


def _print_linear_attention(nodes: list[dict[str, Any]]) -> None:
    """GatedDelta and StateSpace nodes, each with its CausalConv, and CausalConv nodes alone, of the same description
    together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in nodes:
        groups.setdefault(str((node["attributes"], node["width"])), []).append(node)
    for group in groups.values():
        a, kind = group[0]["attributes"], "CausalConv and GatedDelta"
        if "num_v_heads" in a:
            rows = {"heads": f"{a['num_v_heads']} of {a['v_head_size']}, {a['num_k_heads']} keys of {a['k_head_size']}"}
        elif "num_heads" in a:
            rows = {
                "heads": f"{a['num_heads']} of {a['head_size']}, {a['num_groups']} groups of {a['state_size']} states"
            }
            kind = "CausalConv and StateSpace"
        else:
            rows, kind = {"channels": str(a["channels"])}, "CausalConv"
        if width := group[0]["width"]:
            rows["convolution"] = f"{width} tokens"
        else:
            kind = "states of standard nodes"
        rows["states"] = f"{sum(node['state_bytes'] for node in group):,} bytes, however many tokens"
        if (window := a["state_window"]) > 1:
            rows["states"] += f"; {window} of them, after each of a run's last tokens"
        _print_block(f"{len(group)} {kind}: {and_more([node['node'] for node in group])}", rows)


def print_evaluation(found: Evaluation) -> None:
    """Show what a text said of a model, in llama-perplexity's words: Q is the model, base what it is compared with."""
    figures = found.figures
    rows = {"Mean PPL(Q)": str(figures.perplexity)}
    if figures.base_perplexity and figures.log_ratio and figures.kld and figures.delta_p and figures.same_top:
        rows |= {
            "Mean PPL(base)": str(figures.base_perplexity),
            "Mean ln(PPL(Q)/PPL(base))": str(figures.log_ratio),
            "Mean KLD": str(figures.kld),
            "Maximum KLD": f"{figures.max_kld:.5f}",
            "99.0% KLD": f"{figures.kld_99:.5f}",
            "Median KLD": f"{figures.median_kld:.5f}",
            "Mean Δp": f"{100 * figures.delta_p.mean:.3f} ± {100 * figures.delta_p.error:.3f} %",
            "RMS Δp": f"{100 * (figures.rms_delta_p or 0):.3f} %",
            "Same top p": f"{100 * figures.same_top.mean:.3f} ± {100 * figures.same_top.error:.3f} %",
        }
    of = f"{found.windows} {plural('window', found.windows)} of {found.window} tokens, {found.seconds:.1f} s"
    _print_block(f"{found.model}{f' against {found.against}' if found.against else ''}: {of}", rows)
    if found.layers:
        table = Table("after layer", "relative error of the hidden states")
        for at, error in enumerate(found.layers):
            table.add_row(f"{at}{', final norm' if at + 1 == len(found.layers) else ''}", f"{error:.5f}")
        console.print(table)


def _activations(attributes: Mapping[str, Any], *projections: str) -> str:
    """Return the formats of a node's activations: one where they are alike."""
    first, *others = (attributes[f"{p}_activation_format"] for p in projections)
    return first if not others or others == [first] else f"{first}, {others[0]} in down"


def _weights(format_: str, group_size: int, scale_type: str) -> str:
    if format_ in ("bf16", "f16"):
        return format_  # their scales are ones
    return f"{format_} {f'group {group_size}' if group_size > 0 else 'row'} {scale_type}"


def _print_block(heading: str, rows: dict[str, Any]) -> None:
    """Print a description that fits any width: cells wrap, and are not cut."""
    console.print(heading, style="bold", highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(f"  {name}", str(value))
    console.print(table)


def plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def print_reasons(heading: str, reasons: dict[str, str]) -> None:
    """Print a line for each reason: the first name that has it, and how many more there are."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    for reason, names in found.items():
        console.print(f"{heading}: {and_more(names)} ({reason})", style="yellow")


def and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def peak_memory() -> str:
    """Linux only; getrusage's ru_maxrss would count the parent process's memory before exec."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8")) if status.exists() else None
    return decimal(int(found[1]) * 1024) if found else "unknown"
