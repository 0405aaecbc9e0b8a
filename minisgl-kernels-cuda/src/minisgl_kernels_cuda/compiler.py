"""From CUDA C++ to machine code by NVRTC, with what was compiled kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from minisgl.errors import PluginError
from minisgl_kernels_cuda.units import Unit, read_sources

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32


class Compiler:
    """Compiles units for one architecture; needs no GPU."""

    def __init__(self, arch: str, cache: Path | None) -> None:
        """Read the sources.

        Args:
            arch: Such as ``sm_90``.
            cache: Folder of what was compiled before, made at the first write; ``None``: keep
                nothing.
        """
        self._arch = arch
        self._cache = cache
        self._sources = read_sources()
        self._common_key = hashlib.sha256(
            repr((arch, nvrtc_version(), sorted(self._sources.items()))).encode()
        )

    def cubin(self, unit: Unit, macro: int) -> bytes:
        """Return machine code of ``unit`` for the element type ``macro``.

        Raises:
            PluginError: The compiler refused the source.
        """
        key = self._common_key.copy()
        key.update(f"{unit.name}:{macro}".encode())
        path = None if self._cache is None else self._cache / f"{unit.name}-{key.hexdigest()}.cubin"
        found = None if path is None else _read(path)
        if found is not None:
            return found
        code = self._compile(unit, macro)
        if path is not None:
            _write(path, code)
        return code

    def _compile(self, unit: Unit, macro: int) -> bytes:
        # Heavy, and missing where the set is only discovered.
        from cuda.core import Program, ProgramOptions  # noqa: PLC0415

        with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
            # The package may lie in an archive, so the headers are written out for the compiler.
            for name, text in self._sources.items():
                (Path(folder) / name).write_text(text, "utf-8")
            options = ProgramOptions(
                name=f"{unit.name}.cu",
                arch=self._arch,
                std="c++17",
                include_path=[folder],
                define_macro=[("MINISGL_DTYPE", str(macro))],
            )
            try:
                program = Program(self._sources[f"{unit.name}.cu"], "c++", options)
                return bytes(program.compile("cubin").code)
            except Exception as error:  # NVRTC's own classes; any of them means no kernel
                raise PluginError(
                    f"--kernels cuda: {unit.name}.cu does not compile for {self._arch}: {error}"
                ) from error


def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of the run-time compiler.

    Raises:
        PluginError: It cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package, library or symbol, each with its own class
        raise PluginError(
            f"--kernels cuda: NVRTC cannot be loaded: {error}; pip install nvidia-cuda-nvrtc"
        ) from error
    if int(status):
        raise PluginError(f"--kernels cuda: NVRTC cannot be loaded: status {int(status)}")
    return major, minor


def _read(path: Path) -> bytes | None:
    """Return the code, or ``None`` if the file is missing or not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Write in one step, so that ranks that start together never read half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(code + hashlib.sha256(code).digest())
        os.replace(temporary, path)
    except OSError as error:
        logger.warning(
            "compiled kernels cannot be kept, each start compiles them again: %s; "
            "set --cuda.cache-dir to a writable folder",
            error,
        )
