"""Ways into somebody else's model that are all taken back: wrapped calls, and hooks of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from tracer.schema import TraceError


class Hooks:
    """Changes to the objects of a running engine; `remove` undoes them, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have `around(original, *args, **kwargs)` called in place of `owner.name`, on this object alone."""
        original = getattr(owner, name)
        own = vars(owner).get(name)  # None where the class has it

        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def before(self, module: nn.Module, hook: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Show a module's arguments before each of its calls."""
        handle = module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)
        self._undo.append(handle.remove)

    def after(self, module: nn.Module, hook: Callable[[Any], None]) -> None:
        """Show a module's output after each of its calls."""
        handle = module.register_forward_hook(lambda _, args, output: hook(output))
        self._undo.append(handle.remove)

    def remove(self) -> None:
        """Leave everything as it was found."""
        while self._undo:
            self._undo.pop()()


def arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call passes, by name, defaults among it.

    Raises:
        TraceError: the function does not take these arguments.
    """
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(f"{getattr(function, '__qualname__', function)}: {error}") from None
    bound.apply_defaults()
    named = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name)
    return named


def refuse_compiled(model: nn.Module, where: str) -> None:
    """Refuse a compiled model: it runs without the hooks of the modules within.

    Raises:
        TraceError: torch.compile made it, or its `forward`.
    """
    if hasattr(model, "_orig_mod") or hasattr(model.forward, "_torchdynamo_orig_callable"):
        raise TraceError(f"{where}: is compiled, which skips hooks; attach to the model before torch.compile")
