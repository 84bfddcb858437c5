"""Ctrl-C and SIGTERM as exceptions, and a way to finish the iteration first."""

from __future__ import annotations

import signal
from types import FrameType


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no ``Exception``, so that nothing swallows it."""


def raise_terminated(*_: object) -> None:
    """Signal handler that raises ``Terminated``."""
    raise Terminated


class StopSignal:
    """Holds back Ctrl-C and SIGTERM until the caller is ready.

    ::

        with StopSignal() as stop:
            for iteration in ...:
                ...  # a half-done update would not be worth saving
                if stop.requested:
                    save()
                stop.check()  # raises KeyboardInterrupt or Terminated

    A second signal raises at once, so that a long iteration can still be left.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal arrived since the block began."""
        return self._signal is not None

    def check(self) -> None:
        """Raises what the held-back signal would have raised."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal == signal.SIGTERM:
            raise Terminated

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        second = self.requested
        self._signal = number
        if second:
            self.check()
