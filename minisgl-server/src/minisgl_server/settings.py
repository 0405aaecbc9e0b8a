"""The settings of ``minisgl serve``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from minisgl.config.fields import Bytes, ListedText, Setting, SettingsSection


class ServerSettings(SettingsSection):
    """Where the server listens, who may use it, and how much."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        description="Address to listen on; 0.0.0.0 is every interface. Read by the server.",
    )
    port: int = Field(
        1919, ge=0, le=65535, description="TCP port; 0 takes a free one. Read by the server."
    )
    uds: str | None = Field(
        None,
        min_length=1,
        max_length=107,
        description="Unix socket to listen on, in place of host and port. Read by the server.",
    )
    root_path: Annotated[
        str, Setting(allowed="empty, or a path such as /llm that does not end in /")
    ] = Field(
        "",
        max_length=1024,
        pattern=r"^(/.*[^/])?$",
        description="Path under which a proxy offers the server. Read by the server.",
    )
    ssl_certfile: str | None = Field(
        None, min_length=1, max_length=4096, description="TLS certificate. Read by the server."
    )
    ssl_keyfile: str | None = Field(
        None, min_length=1, max_length=4096, description="Its private key. Read by the server."
    )
    api_key: Annotated[
        tuple[ListedText, ...],
        Setting(is_secret=True, allowed="keys separated by commas, none of them empty"),
    ] = Field(
        (),
        max_length=1000,
        description="Keys of which clients must send one, as a bearer token; none lets everyone "
        "in. Read by the server.",
    )
    cors_origins: tuple[ListedText, ...] = Field(
        (),
        max_length=1000,
        description="Origins whose web pages may use the server; * is all. Read by the server.",
    )
    served_model_name: tuple[ListedText, ...] = Field(
        (),
        max_length=100,
        description="Names of the model for clients, the first in answers; default what --model "
        "says. Read by the server.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="File with a chat template in place of the model's. Read by the server.",
    )
    num_tokenizer: Annotated[int, Setting(flags=("--tokenizer-count",))] = Field(
        0,
        ge=0,
        le=64,
        description="Tokenizer processes beside the detokenizer; 0 lets that one do both. "
        "Read by the launcher.",
    )
    max_body_size: Bytes = Field(
        16 * 2**20,
        ge=1024,
        le=2**32,
        description="Largest request body, in bytes. Read by the server.",
    )
    max_prompts: int = Field(
        256, ge=1, le=65536, description="Prompts of one request. Read by the server."
    )
    max_choices: int = Field(
        128, ge=1, le=1024, description="Choices (n) of one prompt. Read by the server."
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Seconds after which a request is aborted; auto is never. "
        "Read by the scheduler.",
    )
    keep_alive_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds of silence after which a stream gets a comment line, so that proxies "
        "keep it open. Read by the server.",
    )
    startup_timeout_s: float = Field(
        3600.0,
        gt=0,
        le=86400,
        description="Seconds that all processes together may take to start. Read by the launcher.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Seconds that running requests get to finish after SIGTERM or Ctrl-C. "
        "Read by the server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged. Read by every process."
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Log lines for people, or JSON objects for machines. Read by every process.",
    )
    log_interval_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="Seconds between lines about the load while there is one; 0 logs none. "
        "Read by the server.",
    )
