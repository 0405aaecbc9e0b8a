"""The registry: every message that may travel between processes, and its tag."""

from __future__ import annotations

from typing import Any

from minisgl.message import text, types
from minisgl.message.codec import Codec
from minisgl.message.lifecycle import FailedMsg, ReadyMsg

WireMsg = (
    types.SchedulerMsg
    | types.ReplyMsg
    | text.TokenizeMsg
    | text.CountMsg
    | text.DecodeMsg
    | text.LimitsMsg
    | text.StartedMsg
    | text.TokensReply
    | text.DecodedReply
    | text.RefusedMsg
    | text.TextMsg
    | ReadyMsg
    | FailedMsg
)
"""What can be sent."""


def wire_codec() -> Codec[Any]:  # Any: each line has its own messages, checked by its receiver
    """Return a codec that knows every message."""
    return Codec(
        {
            "user": types.UserMsg,
            "abort": types.AbortMsg,
            "flush": types.FlushMsg,
            "stats": types.StatsMsg,
            "exit": types.ExitMsg,
            "result": types.ResultMsg,
            "flushed": types.FlushReply,
            "counted": types.StatsReply,
            "tokenize": text.TokenizeMsg,
            "count": text.CountMsg,
            "decode": text.DecodeMsg,
            "limits": text.LimitsMsg,
            "started": text.StartedMsg,
            "tokens": text.TokensReply,
            "decoded": text.DecodedReply,
            "refused": text.RefusedMsg,
            "text": text.TextMsg,
            "ready": ReadyMsg,
            "failed": FailedMsg,
        }
    )
