"""TRIDENT: transductive decoupled variational inference for few-shot image classification."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trident.library import few_shot as few_shot

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """`few_shot` is imported when it is used, and torch with it: `import trident` is quick and changes nothing."""
    if name != "few_shot":
        raise AttributeError(f"module 'trident' has no attribute '{name}'")
    from trident.library import few_shot

    return few_shot
