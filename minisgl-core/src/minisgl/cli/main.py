"""The entry of the ``minisgl`` command; imports next to nothing, as Ctrl-C may come at once."""

from __future__ import annotations

from minisgl.cli.quiet_start import begin_quiet_start


def main(argv: list[str] | tuple[str, ...] | None = None) -> int:
    """Run ``minisgl``.

    Args:
        argv: Arguments without the program's name; default those of the process.

    Returns:
        0 when all went well, 1 when something failed, 2 when flags or their values are wrong, 130
        after an interrupt. An error of ours is one line on stderr, and a traceback only where a
        plugin's backend raised something else.
    """
    if argv is None:
        begin_quiet_start()
    from minisgl.cli.guarded import run_guarded  # noqa: PLC0415 - as above

    return run_guarded(argv)
