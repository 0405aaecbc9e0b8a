"""From C++ to a shared object, by the machine's own compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisgl.errors import CompileError
from minisgl.native.settings import compiler_commands

# OpenMP is called by its runtime's functions (parallel.h), so that a unit joins the threads that
# torch has, whatever compiler made it. A pragma would be ignored and leave one thread.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Werror=unknown-pragmas",
    "-Wno-psabi",
    "-shared",
)
_MAX_TAIL_LINES = 12
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and the flags for this machine.

    Attributes:
        command: The program, with the first arguments that ``$CXX`` may have.
        flags: What it is called with.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]

    @classmethod
    def find(cls) -> Compiler:
        """Return the first compiler that is there.

        Raises:
            CompileError: There is none.
        """
        commands = compiler_commands()
        for program, *arguments in commands:
            path = shutil.which(program)
            if path is not None:
                return cls((path, *arguments), (*_FLAGS, *_machine_flags()))
        tried = ", ".join(command[0] for command in commands)
        raise CompileError(f"no C++ compiler found (tried {tried}); install g++ or set CXX")

    def identity(self) -> str:
        """Return what tells this compiler, its version and this machine's CPU from others.

        The version is read off the file, since asking the program takes longer than a start may.
        """
        # Of all parts of the command, because the first may be a wrapper such as ccache.
        paths = [Path(path).resolve() for path in map(shutil.which, self.command) if path]
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return repr((self.command, files, self.flags, _cpu()))

    def compile(self, name: str, sources: Mapping[str, str]) -> bytes:
        """Compile one unit and return the shared object.

        Args:
            name: The unit is ``{name}.cpp``.
            sources: Text of every source file by its name, headers included.

        Raises:
            CompileError: The compiler cannot be run or refuses; the message has its last lines.
        """
        with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
            # The package may lie in an archive, so the files are written out for the compiler.
            for file, text in sources.items():
                (Path(folder) / file).write_text(text, "utf-8")
            target = Path(folder) / f"{name}.so"
            command = [*self.command, *self.flags, "-o", str(target), f"{name}.cpp"]
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CompileError(f"{self.command[0]} cannot be run: {error}") from error
            if done.returncode or not target.is_file():
                tail = "\n".join(done.stderr.strip().splitlines()[-_MAX_TAIL_LINES:])
                raise CompileError(
                    f"{name}.cpp does not compile with {self.command[0]} (status "
                    f"{done.returncode}): {tail or 'no message'}; set CXX to another compiler"
                )
            return target.read_bytes()


def _machine_flags() -> tuple[str, ...]:
    """Return the flags that ask for everything this CPU has."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    tune = "-march=native" if is_x86 else "-mcpu=native"
    # Undefined symbols are those of the OpenMP runtime, which torch brings.
    return (tune, "-undefined", "dynamic_lookup") if sys.platform == "darwin" else (tune,)


def _cpu() -> str:
    """Return what the machine's CPU can do: a cache may be shared between unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first[key] for key in wanted if key in first)
