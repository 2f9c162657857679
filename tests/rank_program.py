"""What tests have several ranks do: `mpiexec -n 2 python rank_program.py WHAT ARGUMENTS`."""

import json
import os
import signal
import sys
import threading

import chunkrt
from chunkrt.cli import main
from chunkrt.errors import BackendError, ChunkrtError, ClosedError
from chunkrt.ranks.mpi import MpiCommunicator

RANK = int(os.environ.get("PMI_RANK", "0"))


def on_sum(position, act):
    """Have rank 1 do something in the first sum of a chunk at `position` or later."""
    sums = MpiCommunicator.all_reduce

    def all_reduce(self, partial, out, *, key):
        if key[1] >= position and self.rank == 1:
            act()
        sums(self, partial, out, key=key)

    MpiCommunicator.all_reduce = all_reduce


def once(act):
    """An act that is done the first time only."""
    is_done = threading.Event()
    return lambda: None if is_done.is_set() else (is_done.set(), act())


def fail():
    raise ValueError("made to fail")


def greedy(session, count):
    """So many tokens."""
    return [piece.token_id for piece in session.generate(max_new_tokens=count)]


def sessions(model, *prompt):
    """Everything that a session and its state can do; prints tokens, and logits at the end."""
    prompt = list(map(int, prompt))
    with chunkrt.load(model, scheme="float", npu="reference", chunk_length=8) as engine:
        session = engine.session()
        session.prefill(prompt)
        told = [greedy(session, 6)]
        session.rewind(len(prompt) - 3)
        session.prefill(prompt[-3:])
        told.append(greedy(session, 4))
        fork = session.fork()
        fork.prefill(prompt[:5])
        told.append(greedy(fork, 4))
        told.append(greedy(session, 4))
        state = session._state
        snapshot, position = state.snapshot(), state.position
        run = engine.run
        ids = [[int(t) for t in prompt[:4]]]
        import numpy as np

        first = run(np.array(ids[0]), state, logits="last").logits
        state.restore(snapshot)
        again = run(np.array(ids[0]), state, logits="last").logits
        assert (first == again).all()
        assert state.position == position + 4
        del snapshot, fork
        path = os.environ["STATE_FILE"]
        state.save(path)
        other = engine.session()._state
        other.load(path)
        saved = run(np.array([1]), state, logits="last").logits
        loaded = run(np.array([1]), other, logits="last").logits
        assert (saved == loaded).all()
        state.reset()
        everything = run(np.array(prompt), state, logits="all").logits
        print(json.dumps({"tokens": told, "logits": everything.tolist()}))


def failing(model, *prompt):
    """A run that fails on rank 1, one that is cancelled, and that all ranks then are as they were."""
    prompt = list(map(int, prompt))
    on_sum(len(prompt) + 8, once(fail))
    with chunkrt.load(model, scheme="float", npu="reference", chunk_length=8) as engine:
        session = engine.session()
        session.prefill(prompt)
        expected = greedy(session, 4)
        session.rewind(len(prompt))
        try:
            session.prefill(prompt[:20])
        except BackendError as error:
            print("failed:", error)
        cancelled = threading.Timer(0, session.cancel)
        session._engine.run, run = (lambda *a, **k: (cancelled.run(), run(*a, **k))[1]), session._engine.run
        try:
            session.prefill(prompt[:20])
        except ClosedError as error:
            print("cancelled:", error)
        session._engine.run = run
        session.prefill(prompt[:1])
        session.rewind(len(prompt))
        print("same:", greedy(session, 4) == expected)
        try:
            engine.session()._state.load("nothing.npz")
        except ChunkrtError as error:
            print("load:", error)


def killed(signal_name, *arguments):
    """`chunkrt` with arguments; rank 1 sends itself a signal in the middle of a prompt."""
    on_sum(24, lambda: os.kill(os.getpid(), signal.Signals[signal_name]))
    sys.argv = ["chunkrt", *arguments]
    main()


def waiting(model):
    """Rank 1 dies while nobody runs anything, and rank 0 waits for something else."""
    if RANK == 1:
        threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with chunkrt.load(model, scheme="float", npu="reference"):
        threading.Event().wait()


if __name__ == "__main__":
    {"sessions": sessions, "failing": failing, "killed": killed, "waiting": waiting}[sys.argv[1]](*sys.argv[2:])
