"""How does a result read in a terminal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text

# Bounds as they read in a column.
_BOUNDS = {"memory_weights": "weights", "memory_kv": "KV cache"}


def operating_point(document: dict[str, Any]) -> RenderableType:
    """A step from its total down to operators, its place under the roofs, what memory holds, whence its times are."""
    return Group(
        _step_tree(document),
        *_step_words(document),
        _memory_table(document["memory"], document["formats"]),
        *_memory_words(document["memory"]),
        *_origin(document),
        *document.get("notes", []),
    )


def _step_tree(document: dict[str, Any]) -> Table:
    step, point = document["step"], document["point"]
    drafts = f", {point['drafts']} drafts" if point["drafts"] else ""
    table = Table(
        title=f"{point['phase']} step of {document['model']['name']}, batch {point['batch']}, "
        f"context {point['context']}{drafts}, on {document['hardware']['name']}",
        box=None,
        pad_edge=False,
    )
    for column in ("", "calls", "time", "share", "bound", "FLOPs", "bytes"):
        left = column in ("", "bound")
        width = 8 if column == "bound" else None
        table.add_column(column, justify="left" if left else "right", no_wrap=True, min_width=width)
    table.add_row("step", "", *_amounts(step | {"share": 1.0, "bound": step["bottleneck"]}), style="bold")
    operators = {op["name"]: op for op in document["operators"]}
    for last_group, group in _marked(document["groups"]):
        table.add_row(f"{'└' if last_group else '├'} {group['name']}", "", *_amounts(group), style="bold")
        if group["operators"] == [group["name"]]:
            continue
        for last, name in _marked(group["operators"]):
            guide = f"{' ' if last_group else '│'} {'└' if last else '├'} {name}"
            table.add_row(guide, str(operators[name]["calls"]), *_amounts(operators[name]))
    return table


def _marked(items: list[Any]) -> Iterator[tuple[bool, Any]]:
    """Each item, the last one marked."""
    return ((index == len(items) - 1, item) for index, item in enumerate(items))


def _amounts(item: dict[str, Any]) -> tuple[str, str, str, str, str]:
    moved = item.get("bytes", 0.0) or sum(item.get(kind, 0.0) for kind in _KINDS_OF_BYTES)
    sent = item.get("link_bytes", 0.0)
    read = text.moved(moved) if moved else ""
    return (
        text.seconds(item["time_s"]),
        f"{item['share']:.1%}",
        _BOUNDS.get(item["bound"], item["bound"]),
        text.flops(item["flops"]).removesuffix("FLOP") if item["flops"] else "",
        ", ".join(part for part in (read, f"{text.moved(sent)} sent" if sent else "") if part),
    )


_KINDS_OF_BYTES = ("weight_bytes", "kv_bytes", "activation_bytes")


def _step_words(document: dict[str, Any]) -> Iterator[str]:
    step, ridge, parallel = document["step"], document["ridge"], document["parallel"]
    kinds = document["model"]["layers"]
    if len(kinds) > 1:
        yield "layers: " + "; ".join(f"{index}. {_layers(kind)}" for index, kind in enumerate(kinds, 1))
    if parallel["devices"] > 1:
        degrees = ", ".join(f"{name} {parallel[name]}" for name in ("tp", "pp", "dp", "ep", "cp") if parallel[name] > 1)
        yield f"on {parallel['devices']} devices ({degrees}): operators, bytes and memory are those of one of them"
    each = f" ({text.rate(step['tokens_per_s'] / parallel['devices'])} a device)" if parallel["devices"] > 1 else ""
    yield (
        f"step {text.seconds(step['time_s'])} [{text.seconds(step['low_s'])}, {text.seconds(step['high_s'])}], "
        f"{text.rate(step['tokens_per_s'])}{each}, bound by {step['bottleneck']} "
        f"({text.percent(step['bottleneck_share'][step['bottleneck']])} of the time)"
    )
    yield document["formats"]["words"]
    distance = ridge["distance"]
    apart = f"{text.digits(1 / distance)} times below" if distance < 1 else f"{text.digits(distance)} times above"
    nearer = "memory" if distance < 1 else "compute"
    yield (
        f"roofline: {text.digits(step['arithmetic_intensity'])} FLOP/byte, {apart} the ridge of "
        f"{text.digits(ridge['flops_per_byte'])} FLOP/byte where {text.flop_rate(ridge['flops_per_s'])} of "
        f"{ridge['dtype']} meet {text.bandwidth(ridge['bytes_per_s'])}: {nearer} is the nearer roof"
    )
    if "breakeven_tokens" in step:
        yield (
            f"speculation pays, besides what drafting takes, once a step yields more than "
            f"{step['breakeven_tokens']:.2f} tokens a sequence, of {step['most_tokens']} at most"
        )
    yield from document["remarks"]


def _layers(kind: dict[str, Any]) -> str:
    """`48 gqa in a window of 1024, gated`."""
    window = f" in a window of {kind['window']}" if kind["window"] else ""
    return f"{kind['count']} {kind['attention']}{window}, {kind['ffn']}"


def _memory_table(memory: dict[str, Any], formats: dict[str, Any]) -> Table:
    table = Table(title="memory of the device", box=None, pad_edge=False)
    table.add_column("")
    for column in ("holds", "share"):
        table.add_column(column, justify="right")
    table.add_column("format")
    format_of = {f"  {part}": format for part, format in formats["parts"].items()} | {"KV cache": formats["kv"]}
    states = memory["state_bytes"]
    parts = [("weights", memory["weights_bytes"])]
    parts += [(f"  {part}", held) for part, held in memory["weights_by_part"].items()]
    parts += [("KV cache", memory["kv_bytes"] - states)] if memory["kv_bytes"] > states or not states else []
    parts += [("states", states)] if states else []
    parts += [("activations", memory["activation_bytes"]), ("free", memory["free_bytes"])]
    parts += [("not used", memory["device_bytes"] - memory["usable_bytes"])]
    for name, held in parts:
        table.add_row(name, text.gib(held), f"{held / memory['device_bytes']:.1%}", format_of.get(name, ""))
    return table


def _memory_words(memory: dict[str, Any]) -> Iterator[str]:
    if not memory["fits"]:
        need, usable, device = (text.gib(memory[part]) for part in ("total_bytes", "usable_bytes", "device_bytes"))
        yield f"DOES NOT FIT: {need} in the {usable} that engines use of a device of {device}"
    batch, context = memory["largest_batch"], memory["largest_context"]
    most_batch = f"a batch of {batch:,} at this context" if batch else "no sequence at this context"
    most_context = f"a context of {context:,} at this batch" if context else "no context at this batch"
    yield f"would still fit: {most_batch}, {most_context}"


def _origin(document: dict[str, Any]) -> Iterator[RenderableType]:
    origin, device = document["origin"], document["hardware"]["name"]
    interval = f"interval ±{text.percent(document['step']['relative_error'])}"
    if origin["kind"] == "calibrated":
        yield f"times: the calibration of this machine ({document['hardware']['source']}); {interval}"
        return
    inherited = ", ".join(_devices_of(scope, device) for scope in origin["inherited_from"])
    share = text.percent(origin["measured_share"])
    yield {
        "measured": f"times: kernels measured on {device}",
        "partly": f"times: {share} of the kernels' time is measured on {device}; "
        f"the rest is not measured on this device: inherited from {inherited}",
        "inherited": f"times: not measured on this device: inherited from {inherited}",
    }[origin["kind"]] + f"; engine profile '{origin['engine']}'; {interval}"
    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "share", "measured on", "rows", "median error", "80 % within"):
        table.add_column(column, justify="left" if column in ("kernel", "measured on") else "right")
    for kernel in origin["kernels"]:
        library = "" if kernel["library"] == "any" else f", {kernel['library']}"
        table.add_row(
            f"{kernel['family']} {_kernel_words(kernel)}{library}",
            f"{kernel['share']:.1%}",
            _measured_on(kernel, device),
            f"{kernel['rows']:,}",
            f"{kernel['median_error']:.1%}",
            f"{kernel['spread']:.1%}",
        )
    yield table


def _measured_on(kernel: dict[str, Any], device: str) -> str:
    """Where a kernel was measured; of one that this device was not measured with, what it is inferred from."""
    if kernel["level"] == "kernel":
        return f"inferred from {kernel['fitted_kernel']}"
    return "this device" if kernel["level"] == "device" else _devices_of(kernel["scope"], device)


def _kernel_words(kernel: dict[str, Any]) -> str:
    wanted, fitted = kernel["kernel"], kernel["fitted_kernel"]
    return wanted if wanted == fitted else f"{wanted} (as {fitted})"


def _devices_of(scope: str, device: str) -> str:
    if scope == device:
        return "its kernels of other formats"
    return "all devices" if scope == "any" else f"{scope} devices"


def comparison(document: dict[str, Any]) -> RenderableType:
    """Predicted beside measured, one row a technique and point."""
    table = Table(title="predicted and measured")
    columns = ["point", "technique", "baseline", "predicted", "interval"]
    columns += ["measured", "spread", "error", "verdict", "bottleneck", "price"]
    for column in columns:
        table.add_column(column)
    for row in document["comparisons"]:
        scale, unit = (1e3, " ms") if row["technique"] == "baseline" else (1.0, "x")
        measured = "" if row["measured"] is None else f"{text.digits(row['measured'] * scale)}{unit}"
        before, after = row["bottleneck_before"], row["bottleneck_after"]
        table.add_row(
            ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in row["point"].items()),
            row["technique"],
            row["baseline"],
            f"{text.digits(row['predicted'] * scale)}{unit}",
            f"{text.digits(row['low'] * scale)}-{text.digits(row['high'] * scale)}",
            measured,
            "" if row["spread"] is None else f"±{row['spread'] * scale:.2g}",
            "" if row["error"] is None else f"{row['error']:+.1%}",
            row["verdict"] if row["technique"] != "baseline" else "",
            before if before == after else f"{before} -> {after}",
            "" if row["technique"] == "baseline" else _price(row),
        )
    notes = {row["conditions"] for row in document["comparisons"]}
    guesses = [_accepted(row) for row in document["comparisons"] if row.get("acceptance_by_position")]
    return Group(table, *guesses, *sorted(notes), *document.get("notes", []))


def _price(row: dict[str, Any]) -> str:
    """What a technique costs in quality, or that it costs nothing and how many outputs were checked to be equal."""
    quality, same = row["quality"], row.get("same_outputs")
    if row["lossless"]:
        return "lossless" if same is None else f"lossless, {same:.0%} of outputs equal"
    if quality is None:
        return "lossy, not measured"
    before, after = quality.get("perplexity_before"), quality.get("perplexity")
    read = f", perplexity {text.digits(before)} -> {text.digits(after)}" if before and after else ""
    return f"KL {quality['kl_nats']:.2g} nats, top-1 {quality['top1_agreement']:.1%}{read}"


def _accepted(row: dict[str, Any]) -> str:
    """The share of guesses that were right at each position, in one line."""
    point = ", ".join(f"{path.rsplit('.', 1)[-1]} {value}" for path, value in row["point"].items())
    shares = ", ".join(f"{share:.0%}" for share in row["acceptance_by_position"])
    return f"{row['technique']} ({point}): drafts right up to position 1, 2 ..: {shares}"


def calibration(document: dict[str, Any]) -> RenderableType:
    """A calibration's roofs."""
    table = Table(title=f"{document['machine']}, {document['threads']} threads, kernels {document['kernels']}")
    table.add_column("working set")
    table.add_column("GB/s", justify="right")
    for point in document["bandwidth"]:
        table.add_row(f"{point['working_set_bytes'] / 2**20:.2f} MiB", f"{point['bytes_per_s'] / 1e9:.1f}")
    formats = ", ".join(document["linear"])
    return Group(
        table,
        f"matrix tables for {formats}; two passes agree within {document['repeatability']:.1%}, "
        f"error on other shapes {document['residual']:.1%}",
        *document["notes"],
    )


def scenarios(document: dict[str, Any]) -> RenderableType:
    """The shipped scenarios."""
    table = Table(show_header=False, box=None)
    for item in document["scenarios"]:
        table.add_row(item["name"], item["description"])
    return table


# Rows of a table of groups in a terminal; the document has them all.
_MOST_GROUPS = 20


def validation(document: dict[str, Any]) -> RenderableType:
    """Errors against a table of measurements by group, the worst rows, and why rows were left out."""
    by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for group in document["groups"] + document["left_out"]:
        by_names.setdefault(tuple(group["by"]), []).append(group)
    return Group(
        f"{document['table']}: {document['rows']:,} rows, {document['predicted']:,} predicted, "
        f"{document['refused']:,} refused, {document['judged']:,} judged",
        *_in_sample(document["fitted_to_it"]),
        *(_groups(names, groups) for names, groups in by_names.items()),
        *_worst(document["worst"]),
        *_reasons("refused", document["refusals"]),
        *_reasons("predicted, but not judged", document["set_aside"]),
    )


def _in_sample(devices: list[str]) -> Iterator[str]:
    if devices:
        yield (
            f"in-sample: kernels of {', '.join(devices)} were fitted to this table on this machine, so its errors say "
            "how well they fit, not how well they predict; give rows that they were not fitted to"
        )


def _groups(names: tuple[str, ...], groups: list[dict[str, Any]]) -> Table:
    hidden = len(groups) - _MOST_GROUPS
    table = Table(
        title=f"by {' and '.join(names)}" if names else "all rows",
        caption=f"and {hidden} more; --json has all" if hidden > 0 else None,
        box=None,
        pad_edge=False,
    )
    for name in names:
        table.add_column(name)
    for column in ("rows", "median", "mean", "90 %", "bias", "in interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in groups[:_MOST_GROUPS]:
        table.add_row(
            *(group["by"][name] for name in names),
            f"{group['n']:,}",
            f"{group['median_ape']:.1%}",
            f"{group['mean_ape']:.1%}",
            f"{group['p90_ape']:.1%}",
            f"{group['bias']:+.1%}",
            f"{group['within_interval']:.0%}",
        )
    return table


def _worst(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield "the worst rows:"
    for row in rows:
        named = ", ".join(part for part in (row["source"], row["device"], row["model"]) if part)
        low, high = text.digits(row["low"]), text.digits(row["high"])
        reason = f" ({row['reason']})" if row["reason"] else ""
        yield f"  line {row['line']}: {named}: {row['what']}"
        unit = f" {row['unit']}" if row["unit"] else ""
        yield (
            f"    measured {text.digits(row['measured'])}{unit}, predicted {text.digits(row['predicted'])}{unit} "
            f"[{low}, {high}]{reason}"
        )


def _reasons(title: str, counts: dict[str, int]) -> Iterator[str]:
    if counts:
        yield f"{title}:"
    for reason, count in counts.items():
        yield f"  {count:,}: {reason}"


def foreign_calibration(document: dict[str, Any]) -> RenderableType:
    """What a table showed of each device: how far its kernels were off before and after."""
    parts: list[RenderableType] = []
    for device in document["devices"]:
        title = f"{device['device']}: median error before and after, with {device['rows']:,} rows of this table"
        table = Table(title=title, box=None, pad_edge=False)
        for column in ("kernel", "rows", "before", "after", "80 % within", "table"):
            table.add_column(column, justify="left" if column in ("kernel", "table") else "right")
        for residual in device["residuals"]:
            table.add_row(
                f"{residual['family']} {residual['kernel']}",
                f"{residual['rows']:,}",
                f"{residual['median_error_before']:.1%}",
                f"{residual['median_error_after']:.1%}",
                f"{residual['spread']:.1%}",
                residual["table"],
            )
        parts += [table, f"kept in {device['file']}; predictions of {device['device']} use it from now on"]
    return Group(*parts, *_reasons("not fitted", document["left_out"]))
