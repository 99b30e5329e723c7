"""Take calls from standard input, and answer on standard output.

Loads what the calls need and nothing else: neither torch nor DeepSpeed. Ends when its standard input does, which is
when the rank that started it ends, however it does.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from typing import BinaryIO


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the rank, and that this process
    os.nice(10)
    received, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a call prints is not an answer
    sys.path[:] = pickle.load(received)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(received, calls), daemon=True).start()
    while True:
        call = calls.get()
        began = time.perf_counter()
        result, error = None, None
        try:
            result = pickle.loads(call)()
        except Exception as raised:  # the rank's to judge
            error = raised
        pickle.dump((result, error, time.perf_counter() - began), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def receive(received: BinaryIO, calls: queue.SimpleQueue[bytes]) -> None:
    """Queue calls; at the end of the input end the process, also in the middle of a call."""
    try:
        while True:
            calls.put(pickle.load(received))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
