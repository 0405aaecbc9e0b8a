"""Checks plain values against type annotations, and builds what the annotations say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from minisgl.errors import MinisglError, ProtocolError

Reader = Callable[[object, str], Any]
"""Takes a plain value and where it stands; returns the object, or raises `ProtocolError`."""

_SCALARS = (int, float, str, bytes, bool, NoneType)


class Shapes:
    """Makes readers of annotations: scalars, unions, lists, tuples, dicts, arrays, dataclasses."""

    def __init__(self) -> None:
        """Know no dataclass yet."""
        self._dataclasses: dict[type[Any], Reader] = {}

    def reader(self, hint: Any) -> Reader:  # Any: an annotation
        """Return what reads values of an annotation.

        Raises:
            TypeError: The annotation is of a kind that messages do not have.
        """
        origin, args = get_origin(hint), get_args(hint)
        if hint in _SCALARS:
            return _scalar(hint)
        if hint is np.ndarray:
            return _read_array
        if origin is Literal:
            return _choice(args)
        if origin in (Union, UnionType):
            return self._union(args)
        if origin in (list, tuple, frozenset):
            return self._sequence(origin, args)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(args)
        if is_dataclass(hint) and isinstance(hint, type):
            return self._dataclass(hint)
        raise TypeError(f"messages cannot hold {hint!r}")

    def _union(self, args: tuple[Any, ...]) -> Reader:
        readers = [self.reader(arg) for arg in args]

        def read(value: object, where: str) -> Any:  # Any: as in Reader
            for each in readers:
                try:
                    return each(value, where)
                except ProtocolError:
                    continue
            raise _mismatch(where, " or ".join(map(_name, args)), value)

        return read

    def _sequence(self, kind: type[Any], args: tuple[Any, ...]) -> Reader:
        item = self.reader(args[0])
        exact = args[0] if args[0] in (int, str, float) else None

        def read(value: object, where: str) -> Any:  # Any: as in Reader
            if not isinstance(value, list):
                raise _mismatch(where, "a list", value)
            # The long lists of a step are of one plain type: one pass in C for these.
            if exact is None or set(map(type, value)) - {exact}:
                value = [item(each, where) for each in value]
            return value if kind is list else kind(value)

        return read

    def _mapping(self, args: tuple[Any, ...]) -> Reader:
        key, item = self.reader(args[0]), self.reader(args[1])

        def read(value: object, where: str) -> Any:  # Any: as in Reader
            if not isinstance(value, dict):
                raise _mismatch(where, "a mapping", value)
            return {key(k, where): item(v, where) for k, v in value.items()}

        return read

    def _dataclass(self, kind: type[Any]) -> Reader:
        if kind not in self._dataclasses:
            self._dataclasses[kind] = self._read_fields(kind)
        return self._dataclasses[kind]

    def _read_fields(self, kind: type[Any]) -> Reader:
        hints = get_type_hints(kind)
        readers = [(field.name, self.reader(hints[field.name])) for field in fields(kind)]

        def read(value: object, where: str) -> Any:  # Any: as in Reader
            if not isinstance(value, list) or len(value) != len(readers):
                raise _mismatch(where, f"a list of {len(readers)} fields", value)
            content = {
                name: each(item, f"{where}.{name}")
                for (name, each), item in zip(readers, value, strict=True)
            }
            try:
                return kind(**content)
            except MinisglError as error:
                raise ProtocolError(f"{where}: {error}") from error

        return read


def _scalar(kind: type[Any]) -> Reader:
    def read(value: object, where: str) -> object:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise _mismatch(where, _name(kind), value)

    return read


def _choice(allowed: tuple[object, ...]) -> Reader:
    def read(value: object, where: str) -> object:
        for choice in allowed:
            if type(value) is type(choice) and value == choice:
                return value
        raise _mismatch(where, f"one of {', '.join(map(repr, allowed))}", value)

    return read


def _read_array(value: object, where: str) -> np.ndarray:
    if not isinstance(value, bytes) or len(value) % 4:
        raise _mismatch(where, "an int32 array", value)
    return np.frombuffer(value, dtype=np.int32)


def _name(kind: Any) -> str:  # Any: an annotation
    return getattr(kind, "__name__", str(kind))


def _mismatch(where: str, wanted: str, value: object) -> ProtocolError:
    return ProtocolError(f"{where}: must be {wanted}, not {type(value).__name__}")
