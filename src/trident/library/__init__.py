"""The methods as a library, on features that you computed yourself: `from trident import few_shot`."""

from pathlib import Path
from typing import Any

from trident.library.comparing import compare
from trident.library.head import Head, ready_methods


class FewShot:
    """`few_shot("tim")` is the method TIM as a classifier; `few_shot.compare` measures several on the same tasks."""

    compare = staticmethod(compare)
    methods = staticmethod(ready_methods)

    def __call__(self, method: str, weights: str | Path | None = None, **settings: Any) -> Head:
        """A method by its name, with `trident methods NAME`'s settings as keywords.

        `weights`: for methods whose head is trained, a run or a name that `trident weights` lists. They take features
        of the network that they were trained with.
        """
        return Head(method, weights, settings)


few_shot = FewShot()
