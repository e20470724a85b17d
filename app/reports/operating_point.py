"""How does an operating point read in a terminal: the step, what memory holds, whence its times are?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from membound.app import text
from membound.app.reports.tables import BOUNDS


def operating_point(document: dict[str, Any]) -> RenderableType:
    """A step from its total down to operators, its place under the roofs, what memory holds, whence its times are."""
    return Group(
        *_does_not_fit(document),
        _step_tree(document),
        *_step_words(document),
        _memory_table(document["memory"], document["formats"]),
        *_memory_words(document["memory"]),
        *_origin(document),
        *document.get("notes", []),
    )


def _does_not_fit(document: dict[str, Any]) -> Iterator[str]:
    memory = document["memory"]
    if memory["fits"]:
        return
    need, usable, device = (text.gib(memory[part]) for part in ("total_bytes", "usable_bytes", "device_bytes"))
    remedy = f"; give {memory['remedy']}" if memory["remedy"] else ""
    yield (
        f"DOES NOT FIT: a device would hold {need}, but of the {device} of {document['hardware']['name']} engines use "
        f"{usable} for weights, caches and activations{remedy}"
    )
    yield "what follows is the step as if it did"


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
        BOUNDS.get(item["bound"], item["bound"]),
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
        f"{text.rate(step['tokens_per_s'])}{each}, bound by {BOUNDS.get(step['bottleneck'], step['bottleneck'])} "
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
    if token := step.get("emitted_token"):
        doubt = f" (±{token['acceptance_error']:.0%})" if token["acceptance_error"] else ""
        yield (
            f"with drafting a sequence's token takes {text.seconds(token['time_s'])} [{text.seconds(token['low_s'])}, "
            f"{text.seconds(token['high_s'])}], at {token['per_step']:.2f} tokens a step{doubt}"
        )
    yield from document["remarks"]


def _layers(kind: dict[str, Any]) -> str:
    """`48 gqa in a window of 1024, gated MLP`."""
    window = f" in a window of {kind['window']}" if kind["window"] else ""
    ffn = "gated MLP" if kind["ffn"] == "gated" else kind["ffn"]
    return f"{kind['count']} {kind['attention']}{window}, {ffn}"


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
