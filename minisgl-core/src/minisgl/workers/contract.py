"""What a worker process is told when it is started; light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["scheduler", "tokenizer", "detokenizer"]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The socket files of one server.

    Attributes:
        folder: Private folder that holds them.
        num_tokenizers: Tokenizer processes; 0 lets the detokenizer tokenize as well.
    """

    folder: Path
    num_tokenizers: int

    @property
    def scheduler(self) -> Path:
        """Inbox of scheduler rank 0."""
        return self.folder / "scheduler"

    @property
    def server(self) -> Path:
        """Inbox of the API server."""
        return self.folder / "server"

    @property
    def detokenizer(self) -> Path:
        """Inbox of the detokenizer."""
        return self.folder / "detokenizer"

    @property
    def tokenizers(self) -> list[Path]:
        """Inboxes of the tokenizers, at least one."""
        if self.num_tokenizers == 0:
            return [self.detokenizer]
        return [self.folder / f"tokenizer-{i}" for i in range(self.num_tokenizers)]

    @property
    def rendezvous(self) -> str:
        """Where tensor-parallel ranks meet, for ``torch.distributed``; no port is needed."""
        return f"file://{self.folder / 'rendezvous'}"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a process logs.

    Attributes:
        level: Name of the lowest level that is shown, such as ``"INFO"``.
        format: Lines for people or JSON objects, one a line.
    """

    level: str = "INFO"
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process.

    Attributes:
        role: What it does.
        index: Its tensor-parallel rank, or its number among tokenizers.
        settings: The pickled settings tree; pickled apart, because its classes belong to plugins,
            which the worker discovers first.
        endpoints: Where everyone listens.
        parent_pid: Who started it.
        log: How it logs.
    """

    role: Role
    index: int
    settings: bytes
    endpoints: Endpoints
    parent_pid: int
    log: LogOptions

    @property
    def name(self) -> str:
        """How logs and errors call it."""
        return f"{self.role} {self.index}"
