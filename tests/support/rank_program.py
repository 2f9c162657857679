"""Program that tests run on several ranks: `mpiexec -n 2 python rank_program.py FUNCTION ARGUMENTS`."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event, Timer

import numpy as np
import psutil
from states import make_state

import chunkrt
from chunkrt.cli import main
from chunkrt.errors import ChunkrtError
from chunkrt.runtime.ranks import mpi
from chunkrt.runtime.ranks.mpi import MpiCommunicator
from chunkrt.runtime.request import Request

FLOAT = {"scheme": "float", "npu": "reference", "chunk_length": 8}
PROMPT = list(range(3, 34))


def on_sum(rank, position, act):
    """Call `act` on a rank, once, before its first sum of a chunk at `position` or later."""
    sums, is_done = MpiCommunicator.all_reduce, Event()

    def all_reduce(self, partial, out, *, key):
        if key[1] >= position and self.rank == rank and not is_done.is_set():
            is_done.set()
            act()
        sums(self, partial, out, key=key)

    MpiCommunicator.all_reduce = all_reduce


def greedy(session, num_tokens):
    """Return generated tokens."""
    return [piece.token_id for piece in session.generate(max_new_tokens=num_tokens)]


def logits(model, token_ids):
    """Print the logits of all tokens."""
    with chunkrt.load(model, **FLOAT) as engine:
        found = engine.session().prefill(json.loads(token_ids), logits="all").logits
    print(json.dumps(found.tolist()))


def sessions(model, state_file):
    """Use all methods of a session and its state; print the tokens and the final logits."""
    tokens = []
    with chunkrt.load(model, **FLOAT) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        tokens.append(greedy(session, 6))
        session.rewind(len(PROMPT) - 3)
        session.prefill(PROMPT[-3:])
        tokens.append(greedy(session, 4))
        fork = session.fork()
        fork.prefill(PROMPT[:5])
        tokens += [greedy(fork, 4), greedy(session, 4)]
        state, four = make_state(engine, PROMPT), np.array(PROMPT[:4])
        snapshot = state.snapshot()
        first = engine.loaded.run(Request(four, state, logits="last")).logits
        state.restore(snapshot)
        assert np.array_equal(first, engine.loaded.run(Request(four, state, logits="last")).logits)
        del snapshot, fork
        other = make_state(engine)
        state.save(state_file)
        other.load(state_file)
        assert np.array_equal(
            *(engine.loaded.run(Request(four, each, logits="last")).logits for each in (state, other))
        )
        state.reset()
        logits = engine.loaded.run(Request(np.array(PROMPT), state, logits="all")).logits
    print(json.dumps({"tokens": tokens, "logits": logits.tolist()}))


def shifting(model):
    """Generate with a context shift; print the tokens."""
    with chunkrt.load(model, **FLOAT, context_length=40, context_shift=True) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        print(json.dumps({"tokens": greedy(session, 16)}))


def at_once(model):
    """Request two engines at once, each in its own thread; print the tokens."""

    def answer(engine):
        session = engine.session()
        session.prefill(PROMPT)
        return greedy(session, 6)

    with chunkrt.load(model, **FLOAT) as one, chunkrt.load(model, **FLOAT) as other, ThreadPoolExecutor(2) as pool:
        print(json.dumps({"tokens": list(pool.map(answer, (one, other)))}))


def failing(model):
    """Let runs fail on a rank, cancel and interrupt them; print if all states are unchanged."""

    def fail():
        raise ValueError("made to fail")

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    after = len(PROMPT) + 8
    on_sum(1, after, fail)
    with chunkrt.load(model, **FLOAT) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        expected = greedy(session, 4)
        session.rewind(len(PROMPT))
        for act in (None, fail, session.cancel, interrupt):
            if act is not None:
                on_sum(0, after, act)
            try:
                session.prefill(PROMPT[:20])
            except (ChunkrtError, KeyboardInterrupt) as error:
                print(type(error).__name__, error)
            print(session.position == len(PROMPT))
        try:
            make_state(engine).load("nowhere.npz")
        except ChunkrtError as error:
            print(type(error).__name__, error)
        print(greedy(session, 4) == expected)


def interrupts(model, first, step):
    """Raise Ctrl-C at every `step`-th place of a session's calls; print the numbers of interrupts and wrong answers."""
    from interrupt_at import RANKS, InterruptAt

    expected, num_interrupts, num_wrong = {}, 0, 0
    with chunkrt.load(model, **FLOAT) as engine:
        for act in (lambda session: session.prefill(PROMPT[9:]), lambda session: greedy(session, 2)):
            for at in count(int(first), int(step)):
                session = engine.session()
                session.prefill(PROMPT[:9])
                greedy(session, 2)
                try:
                    with InterruptAt(at, RANKS):
                        act(session)
                    break
                except KeyboardInterrupt:
                    num_interrupts += 1
                tokens = session.tokens
                if tokens not in expected:
                    expected[tokens] = engine.session().prefill([*tokens, 7, 11]).logits
                found = session.prefill([7, 11]).logits
                num_wrong += not np.allclose(found, expected[tokens], rtol=0, atol=1e-4 * np.abs(found).max())
    print(json.dumps([num_interrupts, num_wrong]))


def signalled(name, *arguments):
    """Request `chunkrt`; rank 1 sends itself a signal in the middle of a prompt."""
    on_sum(1, 24, lambda: os.kill(os.getpid(), signal.Signals[name]))
    command(*arguments)


def silent(*arguments):
    """Request `chunkrt`; rank 1 stops in the middle of a prompt. With two ranks, rank 0 detects it sooner."""
    if (os.environ["PMI_RANK"], os.environ["PMI_SIZE"]) == ("0", "2"):
        mpi.LOST_S = 2.0
    signalled("SIGSTOP", *arguments)


def silent_leader(*arguments):
    """Request `chunkrt`; rank 0 stops in the middle of a prompt."""
    on_sum(0, 24, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    command(*arguments)


def ending(how, *arguments):
    """Request `chunkrt`; rank 1 exits or raises an error while the others wait for it."""

    def end(self, number, *, is_urgent):
        if how == "leaves":
            sys.exit(1)
        raise ValueError("made to fail")

    if os.environ["PMI_RANK"] == "1":
        MpiCommunicator.begin = end
    command(*arguments)


def interrupted(*arguments):
    """Request `chunkrt`; mpiexec gets Ctrl-C in the middle of a prompt."""
    on_sum(1, 24, lambda: psutil.Process().parent().parent().send_signal(signal.SIGINT))
    command(*arguments)


def command(*arguments):
    """Request `chunkrt` with arguments."""
    sys.argv = ["chunkrt", *arguments]
    main()


def plugged(folder, ranks, *arguments):
    """Request `chunkrt`; only some ranks find the plug-ins of a folder."""
    if os.environ["PMI_RANK"] in ranks:
        sys.path.insert(0, folder)
    command(*arguments)


def waiting(model):
    """Kill rank 1 while rank 0 waits for an event of its own and does not communicate."""
    mpi.GRACE_S = 0.0
    if os.environ["PMI_RANK"] == "1":
        load = chunkrt.engine.loading.load_part

        def load_and_die(*arguments):
            engine = load(*arguments)
            Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return engine

        chunkrt.engine.loading.load_part = load_and_die
    with chunkrt.load(model, **FLOAT):
        Event().wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
