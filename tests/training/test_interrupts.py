import os
import signal
import threading

import pytest

from ibnn.training.session import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_a_second_has_its_usual_effect(number: signal.Signals) -> None:
    before, interrupts = signal.getsignal(number), Interrupts()
    usual: list[int] = []
    signal.signal(number, lambda *arguments: usual.append(number))
    try:
        with interrupts.caught():
            os.kill(os.getpid(), number)
            assert (interrupts.number, usual) == (number, [])
            os.kill(os.getpid(), number)
            assert usual == [number]
        os.kill(os.getpid(), number)
        assert usual == [number, number]
    finally:
        signal.signal(number, before)


def test_handlers_are_given_back_after_an_error_and_untouched_in_other_threads() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), Interrupts().caught():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before
    seen: list[object] = []

    def inside() -> None:
        with Interrupts().caught():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]
