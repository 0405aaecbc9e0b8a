"""What this distribution registers: the subcommands ``serve``, ``chat`` and ``bench serve``."""

from __future__ import annotations

from argparse import ArgumentParser

from minisgl.plugin.commands import Subcommand
from minisgl.plugin.hookspecs import hookimpl
from minisgl_server.settings import ServerSettings


@hookimpl
def minisgl_subcommands() -> list[Subcommand]:
    """Offer the server, the chat and the benchmark."""
    return [
        Subcommand(
            name="serve",
            summary="serve a model over HTTP, with OpenAI's API",
            run="minisgl_server.serve:run",
            has_settings=True,
            has_model_argument=True,
            sections=(ServerSettings,),
            add_arguments=_add_serve_arguments,
        ),
        Subcommand(
            name="chat",
            summary="talk with a model in the terminal",
            run="minisgl_server.chat.command:run",
            has_settings=True,
            has_model_argument=True,
            add_arguments=_add_chat_arguments,
        ),
        Subcommand(
            name="bench serve",
            summary="put load on a server with OpenAI's API and time it",
            run="minisgl_server.bench.command:run",
            add_arguments=_add_bench_arguments,
        ),
    ]


def _add_serve_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--shell", action="store_true", help="talk in the terminal instead: minisgl chat"
    )
    _add_sampling_arguments(parser, "with --shell: ")


def _add_chat_arguments(parser: ArgumentParser) -> None:
    _add_sampling_arguments(parser, "")


def _add_sampling_arguments(parser: ArgumentParser, when: str) -> None:
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help=f"{when}system message")
    group.add_argument(
        "--max-tokens", type=int, metavar="INT", help=f"{when}tokens of an answer, at most"
    )
    group.add_argument(
        "--temperature", type=float, metavar="FLOAT", help=f"{when}0 is greedy [default 0.7]"
    )
    group.add_argument("--top-p", type=float, metavar="FLOAT", help=f"{when}[default 0.95]")
    group.add_argument("--top-k", type=int, metavar="INT", help=f"{when}likeliest tokens to keep")
    group.add_argument("--seed", type=int, metavar="INT", help=f"{when}makes answers repeatable")


def _add_bench_arguments(parser: ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--url", default="http://127.0.0.1:1919/v1", help="base URL [default %(default)s]"
    )
    load.add_argument("--api-key", default="", metavar="KEY", help="key of the server")
    load.add_argument("--model", metavar="NAME", help="default the first that the server lists")
    load.add_argument(
        "--num-requests", type=int, metavar="INT", help="[default 100, or all of a trace]"
    )
    load.add_argument(
        "--concurrency", type=int, metavar="INT", help="requests at a time [default no limit]"
    )
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="FLOAT",
        help="requests per second, arriving at random [default all at once]",
    )
    load.add_argument(
        "--request-timeout-s",
        type=float,
        default=600,
        metavar="SECONDS",
        help="a request that takes longer has failed [default 600]",
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--prompt-words", type=int, default=128, metavar="INT", help="[default 128]")
    work.add_argument("--max-tokens", type=int, default=64, metavar="INT", help="[default 64]")
    work.add_argument("--ignore-eos", action="store_true", help="always generate that many")
    work.add_argument(
        "--shared-prefixes",
        type=int,
        default=0,
        metavar="INT",
        help="number of prefixes that prompts share; 0 shares none [default 0]",
    )
    work.add_argument(
        "--trace", metavar="FILE", help="JSON lines with prompt, and maybe max_tokens and arrival_s"
    )
    work.add_argument("--seed", type=int, default=0, metavar="INT", help="[default 0]")
    output = parser.add_argument_group("report")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--plot", metavar="FILE", help="draw distributions and throughput as .png, .svg or .pdf"
    )
    for name, what in (("ttft", "time to first token"), ("itl", "mean time between tokens")):
        output.add_argument(
            f"--goodput-{name}-s",
            type=float,
            metavar="SECONDS",
            help=f"{what} up to which a request counts for goodput",
        )
