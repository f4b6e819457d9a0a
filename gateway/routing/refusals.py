"""Translates errors of routing and of the state store for operators' commands."""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import BackendUnavailable, InvalidRequest, RevisionConflict
from gateway.routing.projection import RETRY_MS
from gateway.routing.revision import RoutingFileError
from gateway.state.errors import Conflict, StateUnavailable

MAX_FAULTS = 20  # the most faults of a configuration in one message


@contextmanager
def operator_errors(*, change: bool = True, expected: int | None = None) -> Iterator[None]:
    """Translate the block's errors into those of :mod:`gateway.errors`.

    Args:
        change: the block writes.
        expected: the revision that the operator named as the last one, if any.
    """
    try:
        yield
    except RoutingFileError as error:
        faults = str(error).splitlines()
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise InvalidRequest("\n".join(faults[:MAX_FAULTS] + more), param="config") from error
    except Conflict as error:
        if expected is None:
            found, param = "another change came first", None
        else:
            found, param = f"revision {error.found} is the last one, not {expected}", "expected_revision"
        advice = "nothing was changed: look at it and decide again"
        raise RevisionConflict(f"{found}; {advice}", param=param) from error
    except StateUnavailable as error:
        doubt = f"; {error.doubt('the history')}" if change else ""
        raise BackendUnavailable(
            f"{error}; requests are served as before{doubt}", retry_after_ms=RETRY_MS
        ) from error
