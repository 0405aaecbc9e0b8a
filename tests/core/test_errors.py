"""How much of an error goes to the log."""

from __future__ import annotations

import logging

import pytest

from minisgl.errors import BackendError, MinisglError, ModelError, PluginError, log_in_full

logger = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (BackendError("attention backend 'a': a step failed"), "ERROR"),
        (PluginError("--attn zz: no installed plugin offers 'zz'"), "DEBUG"),
        (ModelError("weights are missing"), "DEBUG"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MinisglError) else value,
)
def test_the_traceback_of_a_backend_is_an_error_in_the_log_and_others_are_for_debugging(
    caplog: pytest.LogCaptureFixture, error: MinisglError, level: str
) -> None:
    with caplog.at_level(logging.DEBUG):
        log_in_full(logger, error)
    (record,) = caplog.records
    assert (record.name, record.levelname) == (__name__, level)
    assert record.exc_info is not None
    assert record.exc_info[1] is error
