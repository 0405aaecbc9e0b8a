"""What HTTP costs: tokens/s of concurrent streams against the offline LLM on the same requests.

    python benchmarks/server_overhead.py --model demo --concurrency 8 --rounds 3

Both engines live at the same time and take turns, so that a busy machine slows both alike; the
rounds' medians are compared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from minisgl import LLM, SamplingParams

PROMPT = "Story number {}: once upon a time there was"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "minisgl", "serve", arguments.model, "--port=0"]
    with (
        LLM(arguments.model) as llm,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
    ):
        try:
            address = wait_until_ready(server)
            rates: dict[str, list[float]] = {"offline": [], "http": []}
            for number in range(arguments.rounds + 1):
                prompts = [PROMPT.format(i) for i in range(arguments.concurrency)]
                offline = run_offline(llm, prompts, arguments.max_tokens)
                streamed = run_http(address, prompts, arguments.max_tokens)
                if number:  # the first round warms up
                    rates["offline"].append(offline)
                    rates["http"].append(streamed)
                print(
                    f"round {number}: offline {offline:.1f}, http {streamed:.1f} tokens/s",
                    flush=True,
                )
        finally:
            server.terminate()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    share = medians["http"] / medians["offline"]
    print(json.dumps({**medians, "share": round(share, 3), **vars(arguments)}))


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Return host and port once the server says them."""
    assert server.stderr is not None, "it is a pipe"
    for line in server.stderr:
        if found := re.search(r"ready: serving .* at (\S+) \(", line):
            return urlsplit(found[1]).netloc
    raise SystemExit("the server did not start")


def run_offline(llm: LLM, prompts: list[str], max_tokens: int) -> float:
    """Return tokens per second of one batch."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    seconds = time.perf_counter() - start
    return sum(len(output["token_ids"]) for output in outputs) / seconds


def run_http(address: str, prompts: list[str], max_tokens: int) -> float:
    """Return tokens per second of concurrent streams."""

    def stream(prompt: str) -> int:
        connection = http.client.HTTPConnection(address)
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        lines = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
        return int(usage["completion_tokens"])

    start = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        num_tokens = sum(pool.map(stream, prompts))
    return num_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
