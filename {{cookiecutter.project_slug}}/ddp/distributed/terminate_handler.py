"""gloo's thread ends the process if a message has another size than its receiver expects. Explain that instead.

The sizes differ if the ranks call different collectives at the same time. Without this, the others only see that a rank
was lost: with std::terminate, the process aborts without running any Python.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress

GLOO_ERROR = b"N4gloo13EnforceNotMetE"  # typeid(gloo::EnforceNotMet).name()
_handlers: list[object] = []  # what C++ calls must not be freed


def on_gloo_error(handle: Callable[[], None]) -> None:
    """Call `handle`, which must end the process, when C++ is about to abort because of an error of gloo.

    It runs in gloo's thread. Other C++ errors abort the process as before. Does nothing without GNU's C++ library.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate, current_type = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
        set_terminate.restype = current_type.restype = ctypes.c_void_p
        function = ctypes.CFUNCTYPE(None)

        def terminate() -> None:
            if _type_name(current_type()) == GLOO_ERROR:
                handle()
            function(before)()

        handler = function(terminate)
        before: int = set_terminate(handler)
        _handlers.append(handler)


def _type_name(type_info: int | None) -> bytes:
    """The name of a C++ type: the second field of its std::type_info."""
    return ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value or b"" if type_info else b""
