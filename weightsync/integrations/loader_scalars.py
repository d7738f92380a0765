"""Scalars of a traced loader: `.item()` of a tensor without data, good for one thing, to fill a parameter with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightsync.errors import LayoutError


class Scalar:
    """The only element of a tensor without data. It is no number, so arithmetic with it fails."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.reshape(())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise LayoutError(
            f"{func.__name__} needs the value of a scalar of the checkpoint; fill_ and copies can be traced"
        )


class LoaderScalars(TorchFunctionMode):
    """While active, `.item()` of a tensor that `is_known` gives a Scalar, and writing that scalar copies the tensor.

    Loaders fill one-element parameters like this (`param.fill_(weight.item())`).
    """

    def __init__(self, is_known: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_known = is_known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.item and args[0].numel() == 1 and self._is_known(args[0]):
            return Scalar(args[0])
        if func is torch.Tensor.fill_ and isinstance(args[1], Scalar):
            return args[0].copy_(args[1].tensor)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Scalar):
            return func(args[0], args[1], args[2].tensor)
        return func(*args, **(kwargs or {}))
