"""Read pickles of arrays and plain containers without running their code.

A pickle is a program for a small stack machine. The standard library's machine imports and calls whatever the file
names. This one allows only the instructions that build data, and maps the few names that data needs to functions of
this file. numpy's own dtype and array constructors are not among them: a forged state could make them read foreign
memory.

It is based on the standard library's unpickler in Python. The one in C lets a file of twenty bytes allocate gigabytes;
in a process with limits it would need the same stand-ins for numpy, and the largest dataset would be in memory twice.

A small pickle can describe a huge object, because parts can be used again and again. So all work is bounded: the number
of instructions, the bytes that calls may make of the file's bytes, and the depth and the number of elements of the
result, counted as if nothing were shared. Keys of dicts and members of sets are single values.
"""

import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from trident.errors import TridentError
from trident.files import open_regular

_DATA_INSTRUCTIONS = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE "
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL"
)
_MOST_INSTRUCTIONS = 2**24  # of any file; tieredImageNet's largest pickle has about 10 million
_INSTRUCTIONS = 2**22  # of any file, and then one for each so many bytes: images have few instructions for their size
_BYTES_FOR_ONE_MORE = 64
_HEAVY = 16  # a dict or set counts as so many instructions, for the memory that it takes
_MOST_BYTES = 2**34  # of the file
_LONGEST_EMPTY = 2**16  # in an array of shape (n, 0) n costs nothing, so it may not be any number
_PLAIN_DTYPE = re.compile(r"(b1|[iu][1248]|f[248]|[SU][1-9][0-9]{0,5}|O[48]?)")


_MOST_ELEMENTS = 2**24  # of the result; the largest pickle of tieredImageNet holds 448,695 images
_MOST_DEPTH = 32


class _TooLargeError(Exception):
    """The pickle asks for more work or memory than a dataset needs."""


class _ForbiddenError(Exception):
    """The pickle asks for something that is not data."""


def _text(value: Any) -> str:
    """A short numpy string, which Python 2 wrote as bytes."""
    text = value.decode("latin1") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise pickle.UnpicklingError("an array's type is malformed")
    return text


def _raw(value: Any) -> bytes:
    """The content of an array, which may be text in a Python 2 pickle."""
    if isinstance(value, str):
        return value.encode("latin1")
    if not isinstance(value, bytes):
        raise pickle.UnpicklingError("an array's content is not bytes")
    return value


class _Dtype:
    """Replaces numpy.dtype while a pickle is read: numbers, strings and objects, no records."""

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        self.code = _text(code)
        self.byte_order = "="
        if not _PLAIN_DTYPE.fullmatch(self.code):
            raise _ForbiddenError(f"an array of type '{self.code}'")

    def set_state(self, state: Any) -> None:
        """Set the byte order. The rest of a state belongs to records or follows from the code."""
        byte_order = _text(state[1])
        if byte_order not in ("<", ">", "=", "|") or any(part is not None for part in state[2:5]):
            raise _ForbiddenError("an array of records")
        self.byte_order = byte_order


def _numpy_dtype(dtype: Any) -> np.dtype:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("an array's type is malformed")
    return np.dtype("O") if dtype.code[0] == "O" else np.dtype(dtype.byte_order + dtype.code)


class _ArrayType:
    """Replaces numpy.ndarray, which a pickle only passes to _reconstruct."""


def _reconstruct(array_type: Any, shape: Any, code: Any) -> np.ndarray:
    if array_type is not _ArrayType:
        raise _ForbiddenError("an array of a type of its own")
    return np.empty((0,), np.int8)  # shape, type and content are in the state


def _check_shape(shape: Any) -> None:
    if not isinstance(shape, tuple | list) or not all(type(length) is int and length >= 0 for length in shape):
        raise pickle.UnpicklingError("an array's shape is malformed")
    if 0 in shape and max(shape) > _LONGEST_EMPTY:
        raise pickle.UnpicklingError(f"an empty array has a length of {max(shape):.6g}")


def _fill(array: np.ndarray, state: Any) -> None:
    """Fill an array from _reconstruct with the content that follows it in the pickle."""
    shape, dtype, is_fortran, content = state[-4:]  # a version number may come first
    if array.shape != (0,):
        raise pickle.UnpicklingError("an array's state is malformed")
    _check_shape(shape)
    kind = _numpy_dtype(dtype)
    if kind.hasobject:
        if not isinstance(content, list) or len(content) != prod(shape):
            raise pickle.UnpicklingError(f"an array of shape {shape} has the wrong number of objects")
    else:
        content = _raw(content)
        if len(content) != prod(shape) * kind.itemsize:
            raise pickle.UnpicklingError(f"an array of shape {shape} has {len(content)} bytes")
    restore: Any = array.__setstate__
    restore((1, tuple(shape), kind, bool(is_fortran), content))


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, axis_order: Any = None) -> np.ndarray:
    _check_shape((shape,) if isinstance(shape, int) else shape)
    array = np.frombuffer(_raw(content), _numpy_dtype(dtype)).reshape(shape, order="F" if _text(order) == "F" else "C")
    # How recent numpy writes a transposed array:
    return array.transpose(axis_order) if _text(order) == "K" and axis_order is not None else array


def _scalar(dtype: Any, content: Any) -> Any:
    return np.frombuffer(_raw(content), _numpy_dtype(dtype), 1)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    """Python 3 writes bytes like this into a pickle that Python 2 can read."""
    if not isinstance(text, str) or encoding != "latin1":
        raise _ForbiddenError(f"the text encoding '{encoding}'")
    return text.encode("latin1")


def _check_keys(keys: Iterable[Any]) -> None:
    """Check that keys of a dict or members of a set are single values: the hash of others can take for ever."""
    for key in keys:
        if not isinstance(key, str | bytes | int | float | np.generic | None):
            raise _ForbiddenError(f"a {type(key).__name__} as a key of a dict or in a set")


def _set(kind: type, members: Any = ()) -> Any:
    _check_keys(members)
    return kind(members)


def _ordered_dict(pairs: Any = ()) -> OrderedDict[Any, Any]:
    if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) for pair in pairs):
        raise pickle.UnpicklingError("an OrderedDict is malformed")
    _check_keys(pair[0] for pair in pairs)
    return OrderedDict(pairs)


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Dtype,
    ("collections", "OrderedDict"): _ordered_dict,
    ("_codecs", "encode"): _encode,
}
for _core in ("numpy.core", "numpy._core"):  # before and since numpy 2
    _NAMES[f"{_core}.multiarray", "_reconstruct"] = _reconstruct
    _NAMES[f"{_core}.multiarray", "scalar"] = _scalar
    _NAMES[f"{_core}.numeric", "_frombuffer"] = _from_buffer
for _builtins in ("builtins", "__builtin__"):  # Python 3 and Python 2
    _NAMES[_builtins, "set"] = partial(_set, set)
    _NAMES[_builtins, "frozenset"] = partial(_set, frozenset)
    _NAMES[_builtins, "bytes"] = lambda: b""  # how Python 3 writes empty bytes for Python 2


def _load_build(machine: Any) -> None:
    """The instruction that sets an object's state, for the two allowed kinds of object."""
    state = machine.stack.pop()
    machine.spend_bytes(_size_of(state))
    target = machine.stack[-1]
    if isinstance(target, _Dtype):
        target.set_state(state)
    elif isinstance(target, np.ndarray):
        _fill(target, state)
    else:
        raise _ForbiddenError(f"a state for a {type(target).__name__}")


def _load_bytes(length: struct.Struct, machine: Any) -> None:
    """Read only what is in the file. The standard library allocates whatever length the file claims.

    A Python 2 string of over 255 bytes is kept as bytes: it is an array's content, and decoding would double it.
    """
    machine.append(machine.read(length.unpack(machine.read(length.size))[0]))


def _size_of(arguments: Any) -> int:
    if not isinstance(arguments, tuple):
        raise pickle.UnpicklingError("a call's arguments are malformed")
    return sum(len(part) for part in arguments if isinstance(part, str | bytes | list | tuple))


def _load_reduce(machine: Any) -> None:
    """The instruction that calls one of `_NAMES`. What it may copy is bounded by the size of the file."""
    machine.spend_bytes(_size_of(machine.stack[-1]))
    _STANDARD[pickle.REDUCE[0]](machine)


def _load_with_keys(code: int, keys: slice, machine: Any) -> None:
    _check_keys(machine.stack[keys])
    _STANDARD[code](machine)


_STANDARD = pickle._Unpickler.dispatch
_ALLOWED: dict[int, Callable[..., None]] = {
    code: _STANDARD[code] for code in (getattr(pickle, name)[0] for name in _DATA_INSTRUCTIONS.split())
} | {
    pickle.BUILD[0]: _load_build,
    pickle.BINSTRING[0]: partial(_load_bytes, struct.Struct("<I")),
    pickle.BYTEARRAY8[0]: partial(_load_bytes, struct.Struct("<Q")),
    pickle.REDUCE[0]: _load_reduce,
}
_KEYS = {  # where the stack has keys or members. Behind the last mark stand key, value, key, value and so on.
    pickle.SETITEM[0]: slice(-2, -1),
    pickle.SETITEMS[0]: slice(0, None, 2),
    pickle.DICT[0]: slice(0, None, 2),
    pickle.ADDITEMS[0]: slice(None),
    pickle.FROZENSET[0]: slice(None),
}
_ALLOWED |= {code: partial(_load_with_keys, code, keys) for code, keys in _KEYS.items()}
_HEAVY_INSTRUCTIONS = frozenset((pickle.EMPTY_DICT[0], pickle.DICT[0], pickle.EMPTY_SET[0], pickle.FROZENSET[0]))


class _Instructions(dict[int, Callable[..., None]]):
    """The allowed instructions, those that build data, and only so many of them. Any other is an error."""

    def __init__(self, size: int) -> None:
        self._most = self._left = min(_INSTRUCTIONS + size // _BYTES_FOR_ONE_MORE, _MOST_INSTRUCTIONS)

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._left -= _HEAVY if code in _HEAVY_INSTRUCTIONS else 1
        if self._left < 0:
            raise _TooLargeError(f"more than {self._most} instructions")
        if code in _ALLOWED:
            return _ALLOWED[code]
        if code in _STANDARD:
            raise _ForbiddenError("an instruction that makes objects")
        raise pickle.UnpicklingError(f"byte {code} is no instruction of a pickle")


class _PlainUnpickler(pickle._Unpickler):
    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, encoding="latin1")
        machine: Any = self
        machine.dispatch = _Instructions(size)  # one for each file, because it counts
        self._bytes_left = 8 * size  # Python 3 makes two copies of an array's bytes for Python 2

    def spend_bytes(self, number: int) -> None:
        self._bytes_left -= number
        if self._bytes_left < 0:
            raise _TooLargeError("many times the bytes of its file")

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _NAMES:
            raise _ForbiddenError(f"'{module}.{name}'")
        return cast(Callable[..., Any], _NAMES[module, name])


_WITH_PARTS = (dict, list, tuple, set, frozenset, np.ndarray)


def _parts(value: Any) -> Sequence[Any] | None:
    """The elements of a list, dict or the like, in order; of anything else None."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else None
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else None


def _check_extent(value: Any, extents: dict[int, tuple[int, int]], depth: int = 1) -> tuple[int, int]:
    """Bound the number of elements and the depth, counting shared parts wherever they appear. A cycle has no end.

    Each part is looked at once: `extents` has the elements and the depth of those that were.
    """
    if id(value) in extents:
        return extents[id(value)]
    parts = _parts(value)
    if parts is None:
        return 0, 0
    number, height = 1 + len(parts), 1
    if depth <= _MOST_DEPTH:
        for part in parts:
            if isinstance(part, _WITH_PARTS):
                elements, below = _check_extent(part, extents, depth + 1)
                number, height = number + elements, max(height, 1 + below)
    if max(depth, height) > _MOST_DEPTH or number > _MOST_ELEMENTS:
        raise _TooLargeError(f"more than {_MOST_ELEMENTS} elements, or lists more than {_MOST_DEPTH} deep")
    extents[id(value)] = number, height
    return number, height


def load_pickle(path: Path) -> Any:
    """Read a pickle of numpy arrays and plain containers, written by Python 2 or 3. Anything else is an error."""
    try:
        with open_regular(path, _MOST_BYTES) as file:
            content = _PlainUnpickler(file, os.fstat(file.fileno()).st_size).load()
        _check_extent(content, {})
        return content
    except _TooLargeError as error:
        raise TridentError(f"{path} is refused: it holds {error}, more than a dataset's pickle needs") from error
    except _ForbiddenError as error:
        raise TridentError(
            f"{path} is refused, nothing of it was run: it asks for {_one_line(error)}, "
            "and a dataset's pickle holds numpy arrays, numbers, strings, lists and dicts only"
        ) from error
    except OSError as error:
        raise TridentError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle can raise any error
        problem = f"{type(error).__name__}: {_one_line(error)}"
        raise TridentError(f"{path} is not a whole pickle ({problem}): fetch it again") from error


def _one_line(error: Exception) -> str:
    """An error's message without line breaks and control characters, which may come from the file."""
    return "".join(letter if letter.isprintable() else " " for letter in str(error))[:200]
