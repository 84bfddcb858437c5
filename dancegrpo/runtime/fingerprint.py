"""A digest of everything that shapes a compiled graph: the Cell with all it holds, and the arguments.

MindSpore's compile cache identifies a graph by its number in the order of compilation only, so it gives back
a wrong graph as soon as a process compiles in another order. The digest of this module identifies it by
content: two graphs with one digest come from the same code, the same attributes and the same argument types.
What it does not understand it refuses, and then the graph is not cached.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

TRUSTED = {
    "mindspore",
    "mindformers",
    "dancegrpo",
    "numpy",
    "abc",
    "builtins",
    "collections",
    "functools",
    "types",
    "pybind11_builtins",
}
"""Packages whose code is part of the cache's key already: by version, or (dancegrpo) by its source."""

# What MindSpore notes on a Cell while it compiles and runs it; none of it is read by the graph.
_VOLATILE = {
    "_compile_cache",
    "_compile_phase",
    "_compiled",
    "_create_time",
    "_id",
    "_has_mutable_args_list",
    "_is_check_and_refresh",
    "_jit_graph_name",
    "_phase_cache",
    "arguments_key",
    "current_phase",
    "compile_phase",
    "sequence_modified",
    "__compile_cell_hook__",
    "__parse_method__",
    "_exist_names",
    "_exist_objs",
    "_init_flag",
    "_lazy_user_parameters",
    "_mutable_flags",
    "_parameter_layout_dict",
    "_parallel_parameter_name_list",
    "_parallel_parameter_merge_net_dict",
    "_scope",
    "weights_id",
}


class NotFingerprintable(Exception):
    """The object holds something whose content cannot be told."""


class Fingerprint:
    """Feeds objects into one digest; ``add`` in a fixed order, then ``hexdigest``.

    Attributes:
        parameters: all Parameters that were met.
    """

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=20)
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # ids stay unique as long as the objects live
        self._open: set[int] = set()
        self.parameters: list[Any] = []

    def hexdigest(self) -> str:
        """The digest of all that was added."""
        return self._digest.hexdigest()

    def add_arguments(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Arguments of the graph: a Tensor counts by shape and type, all else by value.

        Tuples of Tensors count by value, too, because MindSpore compiles them in as constants.
        """
        for name, value in [*enumerate(args), *sorted(kwargs.items())]:
            self._token("argument", name)
            if _kind(value) == "Tensor" and not getattr(value, "const_arg", False):
                self._token(value.dtype, value.shape)
            else:
                self.add(value)

    def add(self, value: Any) -> None:
        """Any object that a Cell may hold."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return self._token(type(value).__name__, repr(value))
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        if type(value).__module__ == "mindspore._c_expression.typing":
            return self._token("type", value)
        if isinstance(value, types.ModuleType):
            return self._token("module", value.__name__)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, enum.Enum):
            self._class(type(value))
            return self._token(value.name)
        if isinstance(value, tuple | list | set | frozenset | Mapping):
            return self._container(value)
        if id(value) in self._seen:  # two attributes that hold one object differ from two equal objects
            return self._token("seen", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._composite(value)

    def _container(self, value: Any) -> None:
        """By content alone: MindSpore replaces tuples by equal ones while it compiles."""
        if id(value) in self._open:
            raise NotFingerprintable("a container that holds itself")
        self._open.add(id(value))
        self._token(type(value).__name__, len(value))
        if isinstance(value, set | frozenset):
            if not all(isinstance(item, str | int) for item in value):
                raise NotFingerprintable(f"a set of {value}")
            self._token(sorted(map(repr, value)))
        else:
            for item in value.items() if isinstance(value, Mapping) else value:
                self.add(item)
        self._open.discard(id(value))

    def _composite(self, value: Any) -> None:
        kind = _kind(value)
        if kind == "Parameter":  # its value is an input of the graph
            self.parameters.append(value)
            self._token(kind, value.name, value.dtype, value.shape, value.requires_grad)
        elif kind == "Tensor":
            self._token(kind)
            self._array(value.asnumpy() if value.dtype.__str__() != "BFloat16" else value.float().asnumpy())
            self._token(value.dtype)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._token("method", value.__name__)
            self.add(value.__self__)
            self.add(value.__func__)
        elif isinstance(value, functools.partial):
            self._token("partial")
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, types.BuiltinFunctionType):
            self._token("builtin", value.__qualname__)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Cells, primitives and other objects with attributes."""
        self._class(type(value))
        root = type(value).__module__.split(".")[0]
        if not hasattr(value, "__dict__") or (
            root == "mindspore" and type(value).__module__.endswith("_c_expression")
        ):
            raise NotFingerprintable(f"{type(value)}")
        if _kind(value) == "Primitive":
            self.add(dict(sorted(value.get_attr_dict().items())))
        for name, item in sorted(vars(value).items()):
            if name in _VOLATILE:
                continue
            if ("hook" in name or name == "_func_graph_flags") and not item:
                continue  # None or missing before the first compilation, an empty dictionary after it
            if "hook" in name and name.startswith("_"):
                raise NotFingerprintable(f"{type(value).__name__} has a hook")
            self._token("attribute", name)
            self.add(item)

    def _function(self, value: types.FunctionType) -> None:
        self._origin(value.__module__)
        self._token("function", value.__module__, value.__qualname__)
        self._code(value.__code__)
        self.add(value.__defaults__)
        self.add(value.__kwdefaults__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if name == "hash_obj" and value.__module__.startswith("mindspore."):
                continue  # the time at which mindspore.jit wrapped the function
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                content = None
            self.add(content)

    def _code(self, code: types.CodeType) -> None:
        self._token("code", code.co_code.hex(), code.co_names, code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._token(
                    "constant",
                    repr(constant) if not isinstance(constant, frozenset) else sorted(map(repr, constant)),
                )

    def _class(self, cls: type) -> None:
        self._origin(cls.__module__)
        self._token("class", cls.__module__, cls.__qualname__)
        for base in cls.__mro__[1:-1]:
            self._origin(base.__module__)

    def _origin(self, module: str) -> None:
        """Refuses code whose text is not part of the cache's key, such as a user's own reward Cell."""
        if module.split(".")[0] not in TRUSTED:
            raise NotFingerprintable(f"code of {module}")

    def _array(self, array: np.ndarray) -> None:
        self._token("array", array.dtype.str, array.shape)
        if array.dtype.hasobject:
            raise NotFingerprintable("an array of objects")
        self._digest.update(np.ascontiguousarray(array).tobytes())

    def _token(self, *parts: Any) -> None:
        for part in parts:
            text = str(part).encode()
            self._digest.update(len(text).to_bytes(8, "little") + text)


def _kind(value: Any) -> str | None:
    """Which of MindSpore's own kinds an object is, without importing MindSpore."""
    names = {cls.__name__ for cls in type(value).__mro__ if cls.__module__.startswith("mindspore.")}
    return next((kind for kind in ("Parameter", "Tensor", "Primitive") if kind in names), None)
