"""`python:package.module:function`: a backbone from any Python function that returns a torch module.

The module takes scaled pictures (picture, 3, size, size) and returns features (picture, feature). It may have these
attributes; the defaults are those of most networks trained on ImageNet:

    image_size   224
    centre_crop  1.0: the part of a picture's centre square that it looks at, of its height and width
    mean, std    of pixels from 0 to 255, three numbers each: ImageNet's
    licence      text
    trained_on   text

The function is run, so only give one that you trust. A name of this kind in a file is never run by itself.
"""

import ast
import hashlib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trident.backbones.pretrained import IMAGENET_MEAN, IMAGENET_STD, Facts, Pretrained, short_message
from trident.backbones.torch_module import from_module, probe
from trident.errors import TridentError
from trident.files import MOST_WEIGHTS, read_regular

UNKNOWN = "unknown"  # licence or training data
SETTINGS = ("image_size", "centre_crop", "mean", "std", "licence", "trained_on")
OLD_CROP = "middle"  # what older files call it


def load(name: str, device: str) -> Pretrained:
    module = _made(name)
    facts = facts_from(name, {key: getattr(module, key, None) for key in (*SETTINGS, OLD_CROP)})
    return from_module(name, facts, _contents(name, module) + probe(module, facts), module, device)


def facts_from(name: str, given: dict[str, Any]) -> Facts:
    """Checks the settings of a backbone; what is missing gets the usual value."""
    size, centre_crop, mean, std, licence, trained_on = (given.get(key) for key in SETTINGS)
    centre_crop = given.get(OLD_CROP) if centre_crop is None else centre_crop
    try:
        return Facts(
            224 if size is None else int(_number("image_size", size, whole=True)),
            IMAGENET_MEAN if mean is None else _three("mean", mean),
            IMAGENET_STD if std is None else _three("std", std),
            str(licence or UNKNOWN),
            str(trained_on or UNKNOWN),
            1.0 if centre_crop is None else _number("centre_crop", centre_crop),
        )
    except TridentError as error:
        raise TridentError(f"backbone {name}: {error}") from error


def _made(name: str) -> nn.Module:
    module_name, _, function_name = name.removeprefix("python:").partition(":")
    if not module_name or not function_name:
        raise TridentError(f"'{name}' is not a backbone: write python:package.module:function")
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise TridentError(f"backbone {name} failed: {type(error).__name__}: {short_message(error)}") from error
    if not isinstance(made, nn.Module):
        raise TridentError(f"backbone {name} returned {type(made).__name__}: it must return a torch.nn.Module")
    return made


def _contents(name: str, module: nn.Module) -> bytes:
    """A hash of all weights and buffers, of how the module prints itself, and of the user's code.

    Without the code, a changed `forward` would get the features that the old one computed.
    """
    digest = hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", repr(module)).encode())
    try:
        for key, value in sorted(module.state_dict().items()):
            digest.update(f"{key} ".encode())
            digest.update(_bytes_of(value))
    except Exception as error:  # odd kinds of tensors, or a state_dict of its own
        raise TridentError(f"backbone {name}: its weights cannot be read: {short_message(error)}") from error
    function_module = name.removeprefix("python:").partition(":")[0]
    code = imported_code(function_module, (type(part).__module__ for part in module.modules()))
    digest.update(repr(sorted(code.items())).encode())
    return digest.digest()


def _bytes_of(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()  # what get_extra_state returned
    numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {value.dtype} ".encode() + numbers.tobytes()


def _number(what: str, value: Any, whole: bool = False) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or (whole and not float(value).is_integer()):
        raise TridentError(f"{what} is {value!r}: it must be a {'whole ' if whole else ''}number")
    return float(value)


def _three(what: str, values: Any) -> tuple[float, float, float]:
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        given = " ".join(repr(values).split())
        raise TridentError(f"{what} is {given}: it must be three numbers, for red, green and blue") from error
    return red, green, blue


def imported_code(name: str, others: Iterable[str] = ()) -> dict[str, bytes]:
    """The code of a loaded module, of `others` and of all that they import, directly or not, by the modules' names.

    Only what lies in the folder where Python found the module; for an installed one, only what is in its package. Of
    compiled code, the file that was loaded, but not what it imports.
    """
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    root = file.parents[name.count(".") + (file.name.partition(".")[0] == "__init__")] if file.name else file
    package = name.partition(".")[0] if {"site-packages", "dist-packages"} & {*root.parts} else None
    code_of: dict[str, bytes] = {}
    waiting = [file.stem if name == "__main__" else name, *others] if file.name else []
    while waiting:
        one = waiting.pop()
        parent, path = one.rpartition(".")[0], root.joinpath(*one.split("."))
        if one and one not in code_of and package in (None, one.partition(".")[0]):
            places = {path / "__init__.py": one, path.with_name(f"{path.name}.py"): parent}
            loaded = Path(getattr(sys.modules.get(one), "__file__", None) or "")
            if loaded.parent in (path, path.parent):
                places.setdefault(loaded, parent)
            for place, base in places.items():
                if place.is_file():
                    code = read_regular(place, MOST_WEIGHTS)
                    code_of[one] = code_of.get(one, b"") + code
                    waiting += [parent, *_imported(code, base)]
    return code_of


def _imported(code: bytes, package: str) -> Iterator[str]:
    """The names of all modules that the code of a module in this package may import."""
    try:
        nodes = [*ast.walk(ast.parse(code))]
    except (SyntaxError, ValueError, RecursionError):  # so Python could not import it
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
