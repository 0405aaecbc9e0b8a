"""Messages as bytes: msgpack of registered types, checked field by field when they arrive.

A sender names a type by a short tag, never a class: what is not in the registry, or does not fit
its declared fields, is a `ProtocolError`. One frame holds a list of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_type_hints

import msgpack
import numpy as np

from minisgl.errors import ProtocolError
from minisgl.message.shapes import Reader, Shapes

_Message = TypeVar("_Message")

_MAX_FRAME_BYTES = 1 << 30  # lengths inside a frame can't make the decoder allocate more


class Codec(Generic[_Message]):
    """Packs and unpacks messages of the registered dataclasses; holds no state between calls."""

    def __init__(self, registry: Mapping[str, type[Any]]) -> None:
        """Register types.

        Args:
            registry: Tag to dataclass. Dataclasses inside of their fields need no tag.
        """
        shapes = Shapes()
        self._tags = {kind: tag for tag, kind in registry.items()}
        self._readers: Mapping[str, Reader] = MappingProxyType(
            {tag: shapes.reader(kind) for tag, kind in registry.items()}
        )
        self._writers: Mapping[type[Any], Callable[[Any], list[object]]] = MappingProxyType(
            {kind: _writer(kind) for kind in registry.values()}
        )

    def encode(self, messages: Iterable[_Message]) -> bytes:
        """Pack messages into one frame.

        Raises:
            ProtocolError: A message is of a type that is not registered.
        """
        plain: list[object] = []
        for message in messages:
            kind = type(message)
            if kind not in self._tags:
                raise ProtocolError(f"messages of type {kind.__name__} are not registered")
            plain.append((self._tags[kind], self._writers[kind](message)))
        packed: bytes = msgpack.packb(plain, default=_plain, use_bin_type=True)
        return packed

    def decode(self, frame: bytes) -> list[_Message]:
        """Unpack a frame.

        Raises:
            ProtocolError: It is not a frame, a tag is unknown, or a field has another type than
                the one declared; the message names tag and field.
        """
        return [self._decode_one(item) for item in _unpack(frame)]

    def _decode_one(self, item: object) -> _Message:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
            raise ProtocolError("a message must be a pair of tag and fields")
        tag, content = item
        reader = self._readers.get(tag)
        if reader is None:
            raise ProtocolError(f"{tag[:40]!r}: no such message")
        message: _Message = reader(content, tag)
        return message


def _unpack(frame: bytes) -> list[object]:
    if len(frame) > _MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame has {len(frame)} bytes; at most {_MAX_FRAME_BYTES} may come")
    try:
        content = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    # The library raises many types, built-in ones among them, for the many ways to be malformed.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a frame is not msgpack: {error}") from error
    if not isinstance(content, list):
        raise ProtocolError("a frame must hold a list of messages")
    return content


def _writer(kind: type[Any]) -> Callable[[Any], list[object]]:
    names = tuple(field.name for field in fields(kind))
    get_type_hints(kind)  # an annotation that cannot be resolved must fail here, not when it runs
    return lambda message: [getattr(message, name) for name in names]


def _plain(value: object) -> object:
    """Turn what msgpack does not know into what it does; `Shapes` reads it back."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value, dtype=np.int32).tobytes()
    if isinstance(value, frozenset):
        return sorted(value)
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise ProtocolError(f"a value of type {type(value).__name__} cannot be sent")
