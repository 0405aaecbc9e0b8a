"""The entry of the ``minisgl`` command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from minisgl.cli.output import checked_output
from minisgl.cli.quiet_start import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, quiet_start
from minisgl.errors import MinisglError, RequestError, SettingsError

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``minisgl``.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        0 when all went well, 1 when something failed, 2 when flags or their values are wrong, 130
        after an interrupt. An error of ours is one line on stderr, never a traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with checked_output():
        return _guarded(argv)


def _guarded(argv: Sequence[str] | None) -> int:
    """Run, and turn what escapes into an exit status and a line."""
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where what becomes of it is dealt with
        return code
    except (SettingsError, RequestError) as error:
        return _complain(error, EXIT_USAGE)
    except MinisglError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED  # whoever read the output has gone


def _run(argv: Sequence[str] | None) -> int:
    try:
        with quiet_start() if argv is None else nullcontext():
            # Most of the start is this import, and Ctrl-C may come in the middle of it.
            from minisgl.cli.dispatch import prepare  # noqa: PLC0415

            action = prepare(sys.argv[1:] if argv is None else list(argv))
        return action()
    except SystemExit as end:  # argparse, after printing help
        return end.code if isinstance(end.code, int) else EXIT_FAILED


def _complain(error: MinisglError, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"minisgl: {line}\n")
    logger.debug("the error in full", exc_info=error)
    return code
