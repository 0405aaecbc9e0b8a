"""What this distribution registers: the subcommands ``serve`` and ``chat``."""

from __future__ import annotations

from argparse import ArgumentParser

from minisgl.plugin.commands import Subcommand
from minisgl.plugin.hookspecs import hookimpl
from minisgl_server.settings import ServerSettings


@hookimpl
def minisgl_subcommands() -> list[Subcommand]:
    """Offer the server and the chat."""
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
