"""Prints the peak of resident memory that loading and running a model adds to its imports."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams


def main() -> None:
    """Run the demo model and write one JSON document to stdout, in bytes."""
    is_reset = reset_peak()
    before = peak_bytes()
    with LLM("demo", dtype="float32") as llm:
        llm.generate("The capital of France is", SamplingParams(max_tokens=8, ignore_eos=True))
        after = peak_bytes()
    sys.stdout.write(json.dumps({"before": before, "after": after, "is_reset": is_reset}))


def reset_peak() -> bool:
    """Forget the peak of the imports, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the peak of resident memory so far."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [each for each in status.read_text().splitlines() if each.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


if __name__ == "__main__":
    main()
