"""A process forked from an engine's gets an error at once, and ends: while other threads run, and without any."""

import os
import subprocess
import sys
import textwrap

import pytest
from fixture_checkpoints import checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

PROGRAM = """
import os, sys, threading
import chunkrt

engine = chunkrt.load(sys.argv[1], threads=2)
session = engine.session()
session.prefill([1, 2, 3])
is_running, is_over = threading.Event(), threading.Event()

def work():
    busy = engine.session()
    while not is_over.is_set():
        busy.prefill(range(1, 60))
        busy.rewind(0)
        is_running.set()

threads = [threading.Thread(target=work) for _ in range(int(sys.argv[2]))]
for thread in threads:
    thread.start()
if threads:
    is_running.wait()
for _ in range(5):
    if os.fork() == 0:
        try:
            USE
        except chunkrt.errors.ClosedError as error:
            os.write(1, f"{error}\\n".encode())
        engine.close()
        del session, engine
        sys.exit(0)
for _ in range(5):
    _, status = os.wait()
    assert status == 0, status
is_over.set()
for thread in threads:
    thread.join()
session.prefill([4])
print(session.position, flush=True)
"""


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize(
    "use",
    [
        "engine.session()",
        "session.prefill([4])",
        "list(session.generate(max_new_tokens=2))",
        "session.rewind(1)",
        "session.fork()",
    ],
)
def test_forked_process_gets_an_error(use, num_threads):
    program = textwrap.dedent(PROGRAM).replace("USE", use)
    command = [sys.executable, "-P", "-c", program, str(checkpoint("llama_gqa")), str(num_threads)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    *told, last = finished.stdout.splitlines()
    assert len(told) == 5
    assert all("start processes with 'spawn'" in line for line in told)
    assert last == "4"
