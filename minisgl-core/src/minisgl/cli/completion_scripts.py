"""The completion scripts: plain words and cases, so that pressing Tab starts no Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.cli.completion import Flag, Words

_BASH = """\
# bash completion of minisgl: source <(minisgl completion bash)
_minisgl() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
  local command= flags= values= kind= head= files=
  # bash takes --flag=value apart at the =
  if [[ $cur == = ]]; then cur=
  elif [[ $prev == = ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  COMPREPLY=()
  if (( COMP_CWORD > 2 )); then
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{pairs}
    esac
  fi
  if (( COMP_CWORD > 1 )) && [[ -z $command ]]; then command=${{COMP_WORDS[1]}}; fi
  # without a subcommand, flags are those of serve
  if [[ $command == -* || ( -z $command && $cur == -* ) ]]; then command=serve; fi
  if [[ -z $command ]]; then
    COMPREPLY=($(compgen -W {names} -- "$cur")); return
  fi
  case "$command $prev" in
{flag_cases}
  esac
  case "$command" in
{command_cases}
  esac
  case $kind in
    none) return ;;
    file) COMPREPLY=($(compgen -W "$values" -- "$cur") $(compgen -f -- "$cur")); return ;;
    words)
      if [[ $cur == *,* ]]; then head=${{cur%,*}},; fi
      COMPREPLY=($(compgen -P "$head" -W "$values" -- "${{cur##*,}}")); return ;;
  esac
  if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  else COMPREPLY=($(compgen -W "$values" -- "$cur")); fi
  if [[ -n $files && $cur != -* ]]; then COMPREPLY+=($(compgen -f -- "$cur")); fi
}}
complete -o filenames -F _minisgl minisgl
"""

_ZSH = """\
#compdef minisgl
# zsh completion of minisgl: source <(minisgl completion zsh), or a file _minisgl in $fpath
_minisgl() {{
  local -a subcommands
  subcommands=(
{names}
  )
  if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then
    _describe subcommand subcommands
    return
  fi
  local command=$words[2]
  [[ $command == -* ]] && command=serve
  if (( CURRENT > 3 )); then
    case "$words[2] $words[3]" in
{pairs}
    esac
  fi
  case $command in
{cases}
  esac
}}
if [[ $funcstack[1] == _minisgl ]]; then _minisgl "$@"; else compdef _minisgl minisgl; fi
"""

_FISH = """\
# fish completion of minisgl: minisgl completion fish | source
function __minisgl_at
    set -l words (commandline -opc)[2..-1]
    test (count $words) -ge (count $argv); or return 1
    test "$words[1..$(count $argv)]" = "$argv"
end
function __minisgl_first
    test (count (commandline -opc)) -eq 1
end
complete -c minisgl -f
"""


def bash(commands: Sequence[Words]) -> str:
    """Write the script for bash."""
    flag_cases, command_cases, pairs = [], [], []
    for command in commands:
        flags = " ".join(name for flag in command.flags for name in flag.names)
        values = " ".join([*command.values, *_second_words(commands, command.name)])
        files = "yes" if command.takes_files else ""
        command_cases.append(
            f"    {shlex.quote(command.name)}) flags={shlex.quote(flags)}; "
            f"[[ -n $kind ]] || {{ values={shlex.quote(values)}; files={files}; }} ;;"
        )
        if " " in command.name:
            pairs.append(f'      "{command.name}") command={shlex.quote(command.name)} ;;')
        for flag in command.flags:
            if flag.takes_value:
                patterns = "|".join(f'"{command.name} {name}"' for name in flag.names)
                kind = "file" if flag.is_file else "words" if flag.values else "none"
                words = shlex.quote(" ".join(flag.values))
                flag_cases.append(f"    {patterns}) kind={kind}; values={words} ;;")
    for name, seconds in _only_two_words(commands).items():
        command_cases.append(f"    {name}) values={shlex.quote(' '.join(seconds))} ;;")
    return _BASH.format(
        names=shlex.quote(" ".join(_first_words(commands))),
        flag_cases="\n".join(flag_cases),
        command_cases="\n".join(command_cases),
        pairs="\n".join(pairs),
    )


def zsh(commands: Sequence[Words]) -> str:
    """Write the script for zsh."""
    names = [f"    {shlex.quote(f'{_colons(n)}:{s}')}" for n, s in _first_words(commands).items()]
    pairs, cases = [], []
    for command in commands:
        if " " in command.name:
            pairs.append(f'      "{command.name}") command="{command.name}" ;;')
        specs = [spec for flag in command.flags for spec in _zsh_specs(flag)]
        values = [*command.values, *_second_words(commands, command.name)]
        rest = f"({' '.join(values)})" if values else ""
        rest = "{_files; compadd -- demo}" if command.takes_files else rest
        specs.append(shlex.quote(f"*:argument:{rest}"))
        lines = " \\\n      ".join(["_arguments", *specs])
        # _arguments counts from the subcommand on.
        skip = len(command.name.split())
        cases.append(
            f"    {shlex.quote(command.name)})\n      shift {skip} words; (( CURRENT -= {skip} ))\n"
            f"      {lines} ;;"
        )
    for name, values in _only_two_words(commands).items():
        cases.append(f"    {name}) compadd -- {' '.join(values)} ;;")
    return _ZSH.format(names="\n".join(names), pairs="\n".join(pairs), cases="\n".join(cases))


def fish(commands: Sequence[Words]) -> str:
    """Write the script for fish."""
    lines = [
        f"complete -c minisgl -n __minisgl_first -a {_fish(name)} -d {_fish(summary)}"
        for name, summary in _first_words(commands).items()
    ]
    for name, values in _only_two_words(commands).items():
        lines.append(f"complete -c minisgl -n '__minisgl_at {name}' -a {_fish(' '.join(values))}")
    for command in commands:
        at = f"complete -c minisgl -n {_fish(f'__minisgl_at {command.name}')}"
        if values := [*command.values, *_second_words(commands, command.name)]:
            files = " -F" if command.takes_files else ""
            lines.append(f"{at}{files} -a {_fish(' '.join(values))}")
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = ""
            if flag.takes_value:
                words = f" -a {_fish(' '.join(flag.values))}" if flag.values else ""
                value = f" -r{' -F' if flag.is_file else ' -f'}{words}"
            lines.append(f"{at} {names}{value} -d {_fish(flag.summary)}")
    return _FISH + "\n".join(lines) + "\n"


SCRIPTS: Mapping[str, Callable[[Sequence[Words]], str]] = MappingProxyType(
    {"bash": bash, "zsh": zsh, "fish": fish}
)
"""Shells, and who writes their scripts."""


def _first_words(commands: Sequence[Words]) -> dict[str, str]:
    """Return what can follow ``minisgl``, with a line of help each."""
    words: dict[str, str] = {}
    for command in commands:
        words.setdefault(command.name.split()[0], command.summary)
    return words


def _second_words(commands: Sequence[Words], first: str) -> list[str]:
    """Return what follows ``first`` in subcommands of two words."""
    pairs = [command.name.split() for command in commands if " " in command.name]
    return [pair[1] for pair in pairs if pair[0] == first]


def _only_two_words(commands: Sequence[Words]) -> dict[str, list[str]]:
    """Return first words that are no subcommand by themselves, with what follows them."""
    alone = {command.name for command in commands}
    firsts = [name for name in _first_words(commands) if name not in alone]
    return {name: _second_words(commands, name) for name in firsts}


def _zsh_specs(flag: Flag) -> Iterator[str]:
    """Write a flag for ``_arguments``, one spelling each."""
    summary = re.sub(r"([\[\]:])", r"\\\1", flag.summary)
    for name in flag.names:
        value = ""
        if flag.takes_value:
            action = f"({' '.join(flag.values)})" if flag.values else ""
            value = f":value:{'_files' if flag.is_file else action}"
        sign = "=" if flag.takes_value and name.startswith("--") else ""
        yield shlex.quote(f"{_colons(name)}{sign}[{summary}]{value}")


def _colons(text: str) -> str:
    return text.replace(":", r"\:")


def _fish(text: str) -> str:
    """Quote for fish, which knows two escapes between single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
