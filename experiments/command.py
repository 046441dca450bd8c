"""What commands with plain options share: errors in one line, and an end that says what stopped them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from experiments.messages import USER_ERRORS, explain
from experiments.terminal import INTERRUPTED, Ended, ending_as_error, flush

Status = TypeVar("Status")


class Parser(argparse.ArgumentParser):
    """Errors in one line, as all of our commands have them."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def guarded(program: str, work: Callable[[], Status]) -> Status:
    """Do the work of a command; exits with 2 after an error of the user, with 128 and its number after a signal."""
    try:
        with ending_as_error():
            status = work()
            flush()
            return status
    except BrokenPipeError:  # the work is done; whoever read what we print has seen enough
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Ended as end:
        why, code = f"ended by {end.signal.name}", end.code
    except KeyboardInterrupt:
        why, code = "interrupted", INTERRUPTED
    except USER_ERRORS as error:
        why, code = f"error: {explain(error)}", 2
    print(f"{program}: {why}", file=sys.stderr)
    raise SystemExit(code)
