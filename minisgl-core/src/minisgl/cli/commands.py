"""The core's own subcommands, offered by the same hook as everyone else's."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from minisgl.cli.plugin_kinds import PLUGIN_KINDS
from minisgl.plugin.commands import Subcommand
from minisgl.plugin.hookspecs import hookimpl


@hookimpl
def minisgl_subcommands() -> list[Subcommand]:
    """Offer what works with the core alone."""
    return [
        Subcommand(
            name="generate",
            summary="generate text from a prompt and print it",
            run="minisgl.cli.generate:run",
            has_settings=True,
            has_model_argument=True,
            positionals="PROMPT",
            add_arguments=_add_generate_arguments,
        ),
        Subcommand(
            name="plugins",
            summary="list installed backends; `plugins doctor` looks for what is wrong",
            run="minisgl.cli.plugins:run",
            positionals="doctor",
            add_arguments=_add_plugins_arguments,
        ),
        Subcommand(
            name="plugins new",
            summary="write a plugin that installs, passes its tests and can be picked",
            run="minisgl.cli.new_plugin:run",
            positionals="KIND NAME",
            add_arguments=_add_new_plugin_arguments,
        ),
        Subcommand(
            name="replay",
            summary="run a trace of --record again and say where behaviour differs",
            run="minisgl.cli.replay:run",
            has_settings=True,
            positionals="FILE",
            add_arguments=_add_replay_arguments,
            complete_settings="minisgl.cli.replay:recorded_settings",
        ),
        Subcommand(
            name="completion",
            summary="print what makes a shell complete minisgl's arguments",
            run="minisgl.cli.completion:run",
            positionals="SHELL",
        ),
        Subcommand(name="version", summary="show versions", run="minisgl.cli.version:run"),
    ]


def _add_generate_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prompt and output")
    group.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from FILE; - is stdin"
    )
    group.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    group.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    group.add_argument(
        "--stream",
        action=BooleanOptionalAction,
        help="print text as it is made [default: for a single prompt]",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_sampling_arguments(parser)


def _add_sampling_arguments(parser: ArgumentParser) -> None:
    """Add the fields of SamplingParams; ranges are checked there."""
    group = parser.add_argument_group("sampling")
    integers = {
        "--max-tokens": "tokens to generate at most [default 128]",
        "--min-tokens": "tokens before an end of sequence or a stop text counts [default 0]",
        "--top-k": "keep the k likeliest tokens; -1 keeps all [default -1]",
        "--seed": "makes sampling repeatable",
        "--n": "completions of each prompt [default 1]",
        "--logprobs": "report this many likeliest tokens beside each sampled one",
    }
    numbers = {
        "--temperature": "0 is greedy [default 0]",
        "--top-p": "keep the likeliest tokens up to this share, above 0 to 1 [default 1]",
        "--min-p": "drop tokens below this share of the likeliest, 0 to 1 [default 0]",
        "--repetition-penalty": "above 1 repeats less [default 1]",
        "--presence-penalty": "-2 to 2 [default 0]",
        "--frequency-penalty": "-2 to 2 [default 0]",
    }
    for flag, text in integers.items():
        group.add_argument(flag, type=int, metavar="INT", help=text)
    for flag, text in numbers.items():
        group.add_argument(flag, type=float, metavar="FLOAT", help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end of sequence")


def _add_plugins_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", help="ask for this device: auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="ask for this dtype: auto, float32, float16 or bfloat16")
    parser.add_argument("--model", help="ask for the head sizes and dtype of this model")


def _add_replay_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("replay")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--decisions-only",
        action="store_true",
        help="load no model and compute nothing: only the scheduler, cache and policy run",
    )


def _add_new_plugin_arguments(parser: ArgumentParser) -> None:
    parser.usage = "minisgl plugins new KIND NAME [flags]"
    parser.epilog = f"KIND is one of {', '.join(PLUGIN_KINDS)}. NAME is what users pick it by."
    parser.add_argument("--dir", metavar="DIR", default=".", help="where the folder goes [here]")
    parser.add_argument(
        "--distribution", metavar="NAME", help="name to install it by [minisgl-KIND-NAME]"
    )
    parser.add_argument(
        "--license", metavar="ID", default="Apache-2.0", help="Apache-2.0 or MIT [Apache-2.0]"
    )
    parser.add_argument("--author", metavar="TEXT", help="who holds the rights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
