"""``minisgl bench moe``: how fast the fused MoE is on this GPU, and finding better tiles."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from minisgl.device import compute_capability
from minisgl.errors import SettingsError
from minisgl.moe.contract import MoEConfig
from minisgl.plugin.commands import CommandContext
from minisgl_moe_triton.backend import FusedMoEBackend
from minisgl_moe_triton.measure import LayerBench
from minisgl_moe_triton.plan import LayerShape
from minisgl_moe_triton.settings import FusedSettings
from minisgl_moe_triton.tables import (
    TunedShape,
    TuningTable,
    read_table,
    user_table_path,
    write_table,
)
from minisgl_moe_triton.tune import tune


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: time of a layer, and the rates that it comes to."""

    num_tokens: int
    time_us: float
    weights_tb_s: float
    tflop_s: float


def run(context: CommandContext) -> int:
    """Time a layer; with ``--tune``, find tiles and keep them first.

    Returns:
        0.

    Raises:
        SettingsError: An argument is not allowed, or there is no usable GPU.
    """
    arguments = context.arguments
    shape, token_counts = _shape(arguments), _token_counts(arguments.tokens)
    if not torch.cuda.is_available():
        raise SettingsError("minisgl bench moe: needs a CUDA device, none is usable here")
    table = Path(arguments.table) if arguments.table else None
    bench = LayerBench(shape)
    if arguments.tune:
        if not arguments.json:
            # The command line shows warnings alone, and tuning takes its time.
            logging.getLogger("minisgl_moe_triton").setLevel(logging.INFO)
        table = keep_tuned(bench, token_counts, table)
    rows = time_layer(bench, token_counts, table)
    if arguments.json:
        document = {"shape": asdict(shape), "rows": [asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(_report(rows, table if arguments.tune else None))
    return 0


def keep_tuned(bench: LayerBench, token_counts: list[int], path: Path | None = None) -> Path:
    """Tune a shape and write the table, in the user's cache unless ``path`` says where."""
    sm = compute_capability(bench.device)
    assert sm is not None, "tuning is for GPUs"
    device = torch.cuda.get_device_name(bench.device)
    path = path or user_table_path(device)
    table = read_table(path) if path.is_file() else TuningTable(device, ())
    steps = tune(bench, token_counts, sm)
    write_table(path, table.with_shape(TunedShape(bench.shape, steps)))
    return path


def time_layer(bench: LayerBench, token_counts: list[int], table: Path | None = None) -> list[Row]:
    """Time whole layers through the backend."""
    backend = FusedMoEBackend(config_of(bench, max(token_counts), table))
    rows = []
    for num_tokens in token_counts:
        sets = bench.inputs(num_tokens)
        time_us = bench.time_us(lambda inputs: backend.forward(*inputs), sets)
        work = bench.work(sets)
        tb_s, tflop_s = work.num_bytes / time_us * 1e-6, work.flops / time_us * 1e-6
        rows.append(Row(num_tokens, time_us, tb_s, tflop_s))
    return rows


def config_of(bench: LayerBench, max_num_tokens: int, table: Path | None = None) -> MoEConfig:
    """Describe a benchmark's layer to a backend."""
    shape = bench.shape
    return MoEConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        is_renormalized=True,
        dtype=getattr(torch, shape.dtype),
        device=bench.device,
        max_num_tokens=max_num_tokens,
        settings=FusedSettings(table=table),
    )


def _shape(arguments: Namespace) -> LayerShape:
    for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        value = getattr(arguments, name)
        if value < 1:
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} {value}: must be at least 1")
    if arguments.top_k > arguments.num_experts:
        raise SettingsError(f"--top-k {arguments.top_k}: must be at most --num-experts")
    return LayerShape(
        arguments.num_experts,
        arguments.top_k,
        arguments.hidden_size,
        arguments.intermediate_size,
        arguments.dtype,
    )


def _token_counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise SettingsError(f"--tokens {text}: must be numbers from 1 up, with commas")
    return counts


def _report(rows: list[Row], written: Path | None) -> str:
    lines = [f"{'tokens':>7} {'us':>9} {'weights TB/s':>13} {'TFLOP/s':>8}"]
    lines += [
        f"{row.num_tokens:>7} {row.time_us:>9.1f} {row.weights_tb_s:>13.2f} {row.tflop_s:>8.0f}"
        for row in rows
    ]
    if written is not None:
        lines.append(f"tiles kept in {written}")
    return "\n".join(lines) + "\n"
