"""Let a compiled loop call functions that it is given, from the cache of compiled code and without Python between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import typeof, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic


class Pointer(NamedTuple):
    """A compiled function for certain arguments: what a loop is compiled for, and what it is given in each call."""

    kind: Any  # numba type; that of None where there is no function
    address: int


NOTHING = Pointer(types.none, 0)


def is_compiled(function: Any) -> bool:
    """Whether a function is compiled by numba, so that a compiled loop can call it."""
    return isinstance(function, Dispatcher)


def pointer_to(function: Any, *arguments: Any) -> Pointer:
    """Compile a function for arguments of these types, or find its code in the cache.

    The function must stay alive as long as the pointer is used.

    Args:
        function: compiled by numba; None gives NOTHING.
        arguments: values whose types are those of every call.
    """
    return NOTHING if function is None else pointer_for(function, *(typeof(argument) for argument in arguments))


def pointer_for(function: Any, *kinds: Any) -> Pointer:
    """Like `pointer_to`, of the numba types of the arguments."""
    function.compile(kinds)
    code = function.overloads[kinds]
    address = code.library.get_pointer_to_function(code.fndesc.llvm_func_name)
    return Pointer(types.TypeRef(types.FunctionType(code.signature.return_type(*kinds))), address)


def answer_of(pointer: Pointer) -> Any:
    """Type, as numba has it, of what a function answers."""
    return pointer.kind.instance_type.signature.return_type


@intrinsic
def _function_at(typingctx, kind, address):
    """In compiled code: the function of a Pointer, from its `kind`, passed as None, and its `address`.

    numba takes functions as arguments too, but then looks up their address, 90 us, in every call from Python.
    """
    function = kind.instance_type

    def generate(context, builder, signature, arguments):
        made = cgutils.create_struct_proxy(function)(context, builder)
        made.jit_addr = builder.inttoptr(arguments[1], context.get_value_type(types.voidptr))
        made.c_addr = cgutils.get_null_value(made.c_addr.type)
        made.py_addr = cgutils.get_null_value(made.py_addr.type)
        return made._getvalue()

    return function(kind, address), generate


function_at: Any = _function_at  # what a type checker would take for a function of three arguments


def entry_of(loop: Any, pointers: tuple[Pointer, ...], *arguments: Any) -> Callable[..., Any]:
    """Compile a loop for these functions and for arguments of these types, or find its code in the cache.

    What is returned is called with the arguments alone, and only with such of the very same types: it does not look.

    Args:
        loop: compiled by numba, (kinds..., addresses, arguments...): one kind for each pointer, and a tuple of addresses.
        pointers: functions that it calls.
        arguments: values whose types are those of every call.
    """
    addresses = tuple(pointer.address for pointer in pointers)
    kinds = (*(pointer.kind for pointer in pointers), typeof(addresses), *(typeof(argument) for argument in arguments))
    loop.compile(kinds)
    code = loop.overloads[kinds].entry_point
    nothing = (None,) * len(pointers)
    return lambda *given: code(*nothing, addresses, *given)
