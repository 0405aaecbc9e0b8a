"""Loads native units, compiling each once per machine.

A unit is one file of ``sources``; its functions are ``extern "C"`` and take pointers and integers.
What was compiled is kept in the user's cache folder under a name that tells source, compiler,
flags and CPU, with a digest at its end.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import tempfile
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from minisgl.errors import CompileError
from minisgl.native.compiler import Compiler
from minisgl.native.settings import cache_folder

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_PROBE = "probe"


@lru_cache(maxsize=64)
def load_unit(name: str) -> ctypes.CDLL:
    """Return the functions of ``sources/{name}.cpp``, compiled now if they never were.

    Call it after torch was imported: the code uses the OpenMP threads that torch has.

    Raises:
        CompileError: There is no compiler, it refuses, or what it made cannot be loaded.
    """
    return _default_library().load(name)


def unavailable_reason() -> str | None:
    """Say why native code cannot be had on this machine, or return ``None``.

    It compiles a small unit unless that was done before, and does not import torch; only where
    torch is already there can it also tell whether its OpenMP threads can be used.
    """
    return _reason(is_loadable="torch" in sys.modules)


@lru_cache(maxsize=2)
def _reason(is_loadable: bool) -> str | None:
    try:
        if is_loadable:
            load_unit(_PROBE)
        else:
            _default_library().compiled(_PROBE)
    except CompileError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _default_library() -> Library:
    return Library(Compiler.find(), cache_folder())


class Library:
    """The units of this package for one compiler, and where they are kept."""

    def __init__(self, compiler: Compiler, cache: Path) -> None:
        """Read the sources; ``cache`` is made at the first write."""
        self._compiler = compiler
        self._cache = cache
        self._sources = _read_sources()
        headers = sorted(item for item in self._sources.items() if item[0].endswith(".h"))
        self._common_key = hashlib.sha256(repr((compiler.identity(), headers)).encode())

    def load(self, name: str) -> ctypes.CDLL:
        """Compile a unit if need be, and load it; see `load_unit`."""
        path = self._path(name)
        if not _is_intact(path):
            path, folder = self._compile(name, path)
        else:
            folder = None
        try:
            return ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE))
        except OSError as error:
            raise CompileError(
                f"{name}.cpp was compiled but cannot be loaded: {error}; it needs the OpenMP "
                "runtime of torch (libgomp or one with its functions)"
            ) from error
        finally:
            if folder is not None:
                folder.cleanup()  # what is loaded stays mapped

    def compiled(self, name: str) -> None:
        """Compile a unit if need be, without loading it."""
        path = self._path(name)
        if not _is_intact(path):
            _, folder = self._compile(name, path)
            if folder is not None:
                folder.cleanup()

    def _path(self, name: str) -> Path:
        key = self._common_key.copy()
        key.update(self._source(name).encode())
        return self._cache / f"{name}-{key.hexdigest()[:32]}.so"

    def _source(self, name: str) -> str:
        source = self._sources.get(f"{name}.cpp")
        assert source is not None, f"no native unit {name!r}"
        return source

    def _compile(
        self, name: str, path: Path
    ) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
        """Write the unit to ``path``, or where that cannot be done to a folder of its own."""
        if name != _PROBE:  # that takes a moment only
            logger.warning(
                "compiling the native unit %r with %s: once on this machine, wait some seconds",
                name,
                self._compiler.command[0],
            )
        code = self._compiler.compile(name, self._sources)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, code)
        except OSError as error:
            if name != _PROBE:
                logger.warning(
                    "compiled code cannot be kept, each start compiles it again: %s; set "
                    "XDG_CACHE_HOME to a writable folder",
                    error,
                )
            folder = tempfile.TemporaryDirectory(prefix="minisgl-")
            path = Path(folder.name) / path.name
            _write(path, code)
            return path, folder
        return path, None


def _read_sources() -> dict[str, str]:
    """Return the text of every source file by its name."""
    folder = files("minisgl.native") / "sources"
    return {
        f.name: f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith((".cpp", ".h"))
    }


def _is_intact(path: Path) -> bool:
    """Return whether the file is there and as it was written; a cut one would kill the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    code, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return bool(code) and hashlib.sha256(code).digest() == digest


def _write(path: Path, code: bytes) -> None:
    """Write in one step, so that processes that start together never load half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(code + hashlib.sha256(code).digest())
    os.replace(temporary, path)
