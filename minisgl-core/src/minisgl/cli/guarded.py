"""Running the ``minisgl`` command so that whatever escapes is a line and an exit status."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from minisgl.cli.output import checked_output
from minisgl.cli.quiet_start import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, end_quiet_start
from minisgl.errors import MinisglError, RequestError, SettingsError, log_in_full

logger = logging.getLogger(__name__)


def run_guarded(argv: Sequence[str] | None) -> int:
    """Run; see `minisgl.cli.main.main`."""
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
        try:
            # Most of the start is this import, and Ctrl-C may come in the middle of it.
            from minisgl.cli.dispatch import prepare  # noqa: PLC0415

            action = prepare(sys.argv[1:] if argv is None else list(argv))
        finally:
            if argv is None:
                end_quiet_start()
        return action()
    except SystemExit as end:  # argparse, after printing help
        return end.code if isinstance(end.code, int) else EXIT_FAILED


def _complain(error: MinisglError, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"minisgl: {line}\n")
    log_in_full(logger, error)
    return code
