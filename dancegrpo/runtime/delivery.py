"""Ctrl-C that stays Ctrl-C under MindSpore."""

from __future__ import annotations

import _thread
import signal
import threading

_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_state = threading.local()


def deliver_signals() -> None:
    """Makes SIGINT and SIGTERM reach Python's handlers as what they are; call it before MindSpore is loaded.

    Each run of a graph puts MindSpore's own handler in the place of Python's for SIGINT, one that sends
    SIGTERM to its own process, and leaves it there. So both signals are blocked here, in this thread and in
    all that it will start, and a thread of our own waits for them and has Python call its handler in the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread() or getattr(_state, "active", False):
        return
    _state.active = True
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    main = threading.main_thread().ident
    threading.Thread(target=_forward, args=(main,), name="signals", daemon=True).start()


def _forward(main: int) -> None:
    while True:
        _thread.interrupt_main(signal.sigwait(_SIGNALS))
        signal.pthread_kill(main, signal.SIGUSR1)  # wakes it from a blocking read or a sleep
