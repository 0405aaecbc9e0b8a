"""What a benchmark needs to run on."""

from __future__ import annotations

import argparse

import torch


def require_gpus(parser: argparse.ArgumentParser, num_gpus: int = 1) -> None:
    """End with a usage error, exit code 2, where torch sees fewer GPUs than that."""
    found = torch.cuda.device_count()
    if found < num_gpus:
        what = "an NVIDIA GPU" if num_gpus == 1 else f"{num_gpus} NVIDIA GPUs"
        parser.error(f"needs {what}, torch sees {found}")
