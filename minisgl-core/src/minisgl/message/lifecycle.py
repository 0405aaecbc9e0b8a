"""What a worker process tells the one that started it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReadyMsg:
    """The worker serves.

    Attributes:
        facts: Numbers that others need, such as ``max_seq_len``; a scheduler's limits.
        texts: Names that others need, such as the model's.
    """

    facts: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailedMsg:
    """The worker could not start, or had to give up.

    Attributes:
        kind: Name of the error's class.
        text: Its message.
        is_ours: Whether it is an error that minisgl raises on purpose: the text says it all.
    """

    kind: str
    text: str
    is_ours: bool


WorkerReport = ReadyMsg | FailedMsg
