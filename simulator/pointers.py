"""Let a compiled loop call functions that it is given, from the cache of compiled code and without Python between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import typeof, types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numpy.typing import NDArray

from policies.jit import jit, without_cache


class Pointer(NamedTuple):
    """A compiled function for certain arguments: what a loop is compiled for, and what it is given in each call."""

    kind: Any  # numba type
    address: int


class Bound(NamedTuple):
    """A compiled function and its first arguments, of whose types a loop that calls it needs to know nothing.

    It is called as `function_at(kind, address)(None, None, kept.ctypes.data, further arguments...)`.
    """

    pointer: Pointer
    kept: NDArray[np.int64]  # what the function is bound to, as compiled code has it in memory


def is_compiled(function: Any) -> bool:
    """Whether a function is compiled by numba, so that a compiled loop can call it."""
    return isinstance(function, Dispatcher)


def pointer_to(function: Any, *arguments: Any) -> Pointer:
    """Compile a function for arguments of these types, or find its code in the cache.

    The function must stay alive as long as the pointer is used.

    Args:
        function: compiled by numba.
        arguments: values whose types are those of every call.
    """
    return pointer_for(function, *(typeof(argument) for argument in arguments))


def pointer_for(function: Any, *kinds: Any) -> Pointer:
    """Like `pointer_to`, of the numba types of the arguments; callers pass None for those that are types themselves."""
    function.compile(kinds)
    code = function.overloads[kinds]
    address = code.library.get_pointer_to_function(code.fndesc.llvm_func_name)
    given = (types.none if isinstance(kind, types.TypeRef) else kind for kind in kinds)  # both are passed as nothing
    return Pointer(kind_of(code.signature.return_type, *given), address)


def kind_of(answer: Any, *kinds: Any) -> Any:
    """Kind of a Pointer to a function of these types, as numba has them."""
    return types.TypeRef(types.FunctionType(answer(*kinds)))


def bind(caller: Any, function: Any, given: tuple[Any, ...], *arguments: Any) -> Bound:
    """Compile a function for given arguments and some further ones.

    The function and what is given must stay alive as long as what is returned is used.

    Args:
        caller: compiled by `jit`, (kind, kept, at, arguments...): calls `function_at(kind, address)` with what
            `kept_at(kept, at)` returns, the address first, and the arguments.
        function: compiled by numba.
        given: for which `is_keepable`.
        arguments: values whose types are those of every call.
    """
    pointer = pointer_to(function, *given, *arguments)
    values = (pointer.address, *given)
    caller, keep = (each if _is_ours(typeof(given)) else without_cache(each) for each in (caller, _keep))
    size = cpu_target.target_context.get_abi_sizeof(cpu_target.target_context.get_value_type(typeof(values)))
    kept = np.empty(-(-size // 8), np.int64)
    keep(kept.ctypes.data, values)
    kinds = (pointer.kind, types.TypeRef(typeof(values)), types.int64, *(typeof(argument) for argument in arguments))
    return Bound(pointer_for(caller, *kinds), kept)


def is_keepable(kind: Any) -> bool:
    """Whether `bind` takes what is of a numba type: numbers, arrays, and tuples of such."""
    if isinstance(kind, types.BaseTuple):
        return all(is_keepable(member) for member in kind)
    return isinstance(kind, types.Array | types.Number | types.Boolean | types.NoneType)


def _is_ours(kind: Any) -> bool:
    """Whether the classes of a numba type are of our policies.

    To find code in the cache imports the modules of all classes that it was ever compiled for: nobody else's.
    """
    if isinstance(kind, types.BaseNamedTuple) and not kind.instance_class.__module__.startswith("policies."):
        return False
    return all(map(_is_ours, kind)) if isinstance(kind, types.BaseTuple) else True


@jit
def _keep(address, values):
    _store(address, values)


@intrinsic
def _store(typingctx, address, values):
    """In compiled code: write values where `kept_at` reads them. It counts no references to their arrays."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], context.get_value_type(values).as_pointer())
        builder.store(_uncounted(context, builder, values, arguments[1]), place)
        return context.get_dummy_value()

    return types.void(address, values), generate


@intrinsic
def _borrowed(typingctx, values):
    """In compiled code: the same values, but the references to their arrays are not counted any more.

    They were counted at every call and every look into a tuple: 17 % of the samples of a run of moe_infinity. The
    caller in Python holds the arrays.
    """

    def generate(context, builder, signature, arguments):
        return _uncounted(context, builder, values, arguments[0])

    return values(values), generate


borrowed: Any = _borrowed  # as with `function_at`


def _uncounted(context, builder, kind, value):
    if isinstance(kind, types.BaseTuple):
        for place, member in enumerate(kind):
            inner = _uncounted(context, builder, member, builder.extract_value(value, place))
            value = builder.insert_value(value, inner, place)
    elif isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        return array._getvalue()
    return value


@intrinsic
def _kept_at(typingctx, kept, address):
    """In compiled code: the values of type `kept`, passed as None, that were kept at an address."""
    values = kept.instance_type

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[1], context.get_value_type(values).as_pointer()))

    return values(kept, address), generate


kept_at: Any = _kept_at  # as with `function_at`


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
