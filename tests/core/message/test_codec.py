from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import ProtocolError
from minisgl.message import text, types
from minisgl.message.lifecycle import FailedMsg, ReadyMsg
from minisgl.message.wire import wire_codec
from minisgl.sampling_params import SamplingParams

CODEC = wire_codec()
PARAMS = SamplingParams(
    max_tokens=None,
    seed=-(2**63),
    temperature=0.5,
    logit_bias={5: -1.5},
    stop=("a", "é🙂"),
    stop_token_ids=(1, 2),
    n=3,
)
LOGPROBS = types.TokenLogprobs(3, -0.5, (3, 4), (-0.5, -2.0))
STATS = types.SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, {"stop": 1, "error": 0})
MESSAGES = [
    types.AbortMsg(7, "why"),
    types.FlushMsg(),
    types.StatsMsg(),
    types.ExitMsg(),
    types.ResultMsg(
        [1, 2], [30, 40], [types.FinishedReq(2, "stop", "", 40, 3, 4, 1)], {0: LOGPROBS}
    ),
    types.FlushReply(1, 2),
    types.StatsReply(STATS),
    text.TokenizeMsg([1, 2], "hi", PARAMS, -1, 2.5, False),
    text.TokenizeMsg([1], [5, 6], PARAMS),
    text.TokenizeMsg([1], text.ChatPrompt("[]", False, True, "t", '{"a": 1}'), PARAMS),
    text.CountMsg(1, "hi"),
    text.DecodeMsg(1, [1, 2], True),
    text.LimitsMsg(10, 20),
    text.StartedMsg(1, PARAMS),
    text.TokensReply(1, [1], ["a"]),
    text.DecodedReply(1, "a"),
    text.RefusedMsg([1, 2], "why"),
    text.TextMsg(
        [1],
        ["é"],
        [-1],
        [text.FinishedText(1, "stop", "", "", "END", 1, 2, 3)],
        {0: text.TextLogprob(b"\xff", 1, -0.5, [b"a"], [2], [-1.0])},
    ),
    ReadyMsg({"a": 1}, {"b": "c"}),
    FailedMsg("KeyError", "x", is_ours=False),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    assert CODEC.decode(CODEC.encode([message])) == [message]


def test_a_prompt_arrives_as_int32() -> None:
    sent = types.UserMsg(1, np.array([1, 2**31 - 1], dtype=np.int64), PARAMS, 3, 0.5)
    (got,) = CODEC.decode(CODEC.encode([sent]))
    assert got.input_ids.dtype == np.int32
    assert got.input_ids.tolist() == [1, 2**31 - 1]
    assert (got.uid, got.sampling_params, got.priority, got.deadline_s) == (1, PARAMS, 3, 0.5)


def test_messages_of_a_frame_keep_their_order() -> None:
    assert CODEC.decode(CODEC.encode(MESSAGES)) == MESSAGES
    assert CODEC.decode(CODEC.encode([])) == []


def test_what_is_not_registered_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="type dict are not registered"):
        CODEC.encode([{}])
    with pytest.raises(ProtocolError, match="type SamplingParams are not registered"):
        CODEC.encode([PARAMS])


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (pickle.dumps(types.FlushMsg()), "a frame"),
        (msgpack.packb(3), "must hold a list"),
        (msgpack.packb([3]), "pair of tag and fields"),
        (msgpack.packb([["os.system", ["true"]]]), "no such message"),
        (msgpack.packb([["abort", [1]]]), "abort: must be a list of 2 fields"),
        (msgpack.packb([["abort", {"uid": 1}]]), "abort: must be a list of 2 fields"),
        (msgpack.packb([["abort", ["1", "x"]]]), "abort.uid: must be int, not str"),
        (msgpack.packb([["abort", [True, "x"]]]), "abort.uid: must be int, not bool"),
        (msgpack.packb([["result", [[1, "2"], [], [], {}, {}]]]), "result.uids: must be int"),
        (
            msgpack.packb([["result", [[], [], [[1]], {}, {}]]]),
            "result.finished: must be a list of 8",
        ),
        (msgpack.packb([["user", [1, b"abc", [], 0, None]]]), "user.input_ids: must be an int32"),
        (b"\x91" * 100_000, "not msgpack"),
    ],
)
def test_a_malformed_frame_says_what_is_wrong(frame: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        CODEC.decode(frame)


def test_values_out_of_range_do_not_get_in() -> None:
    fields = msgpack.unpackb(CODEC.encode([text.StartedMsg(1, PARAMS)]), strict_map_key=False)
    fields[0][1][1][2] = -1.0  # the temperature
    with pytest.raises(ProtocolError, match="temperature -1.0"):
        CODEC.decode(msgpack.packb(fields))


@given(frame=st.binary(max_size=200))
@settings(max_examples=300)
def test_no_bytes_do_more_than_raise_a_protocol_error(frame: bytes) -> None:
    try:
        CODEC.decode(frame)
    except ProtocolError:
        return


_plain: st.SearchStrategy[Any] = st.recursive(  # any msgpack value
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(tag=st.sampled_from(["user", "result", "text", "tokenize", "started"]), content=_plain)
@settings(max_examples=300)
def test_no_content_does_more_than_raise_a_protocol_error(tag: str, content: Any) -> None:
    try:
        CODEC.decode(msgpack.packb([[tag, content]]))
    except ProtocolError:
        return
