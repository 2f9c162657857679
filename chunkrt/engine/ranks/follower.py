"""A follower: does to its own engines, states and snapshots what the leader does to its."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.commands import Call, Message, Open, RankPath, Reference, TakePart, reply
from chunkrt.errors import BackendError, ClosedError, DeviceLostError
from chunkrt.runtime.ranks.mailbox import Channel, Envelope
from chunkrt.runtime.ranks.mpi import MpiCommunicator
from chunkrt.runtime.run import Run


class RankEngine(Protocol):
    """What a follower takes of an engine; its other methods are called by name."""

    @property
    def identity(self) -> Mapping[str, object]:
        """What is the same for the engines of all ranks."""
        ...


class Follower:
    """Serves the leader.

    Args:
        communicator: reaches the other ranks.
        load: loads this rank's part of a model.
    """

    def __init__(
        self, communicator: MpiCommunicator, load: Callable[[str, EngineOptions, MpiCommunicator], RankEngine]
    ) -> None:
        self._communicator = communicator
        self._load = load
        self._objects: dict[int, Any] = {}

    def serve(self) -> int:
        """Do as the leader says until it ends. Returns the exit status; what went wrong, rank 0 tells."""
        number = 0
        try:
            while True:
                number += 1
                payload = self._communicator.take(Envelope(Channel.COMMAND, number), [0])[0]
                command, forgotten = Message._make(pickle.loads(payload))
                for old in forgotten:
                    self._objects.pop(old, None)
                self._obey(number, command)
        except ClosedError:
            return 0
        except DeviceLostError:
            return 1
        except Exception as error:
            self._communicator.leave(f"rank {self._communicator.rank} failed: {type(error).__name__}: {error}")
            return 1

    def _obey(self, number: int, command: Open | Call | TakePart) -> None:
        if isinstance(command, TakePart):
            self._run(number, command)
        elif isinstance(command, Open):
            self._reply(number, lambda: self._open(command))
        elif command.has_reply:
            self._reply(number, lambda: self._call(command))
        else:
            self._call(command)

    def _reply(self, number: int, do: Callable[[], object]) -> None:
        try:
            answer = reply(do())
        except DeviceLostError:
            raise
        except Exception as error:
            answer = reply(error=error)
        self._communicator.send(Envelope(Channel.REPLY, number), answer, to=[0])

    def _open(self, command: Open) -> object:
        engine = self._objects[command.result] = self._load(command.model, command.options, self._communicator)
        return engine.identity

    def _call(self, command: Call) -> None:
        method = getattr(self._objects[command.target], command.method)
        result = method(*map(self._resolve, command.arguments))
        if command.result is not None:
            self._objects[command.result] = result

    def _resolve(self, argument: object) -> object:
        if isinstance(argument, Reference):
            return self._objects[argument.number]
        return argument.of(self._communicator.rank) if isinstance(argument, RankPath) else argument

    def _run(self, number: int, command: TakePart) -> None:
        """Compute this rank's part; the state advances if the leader says so."""
        communicator, state = self._communicator, self._objects[command.state]
        communicator.begin(number, num_tokens=command.token_ids.size)
        if state.position != command.position:
            raise BackendError(f"its state is at position {state.position}, that of rank 0 at {command.position}")
        try:
            self._objects[command.engine].run(
                Run(
                    command.token_ids,
                    state,
                    logits=command.logits,
                    agree=lambda: self._agree(number),
                    is_for_others=True,
                )
            )
        except DeviceLostError:
            raise
        except Exception as error:
            if not communicator.is_aborted(number):
                communicator.abort(number, f"rank {communicator.rank}: {error}")

    def _agree(self, number: int) -> None:
        """Tell that all is computed, and wait until the leader's state has advanced."""
        self._communicator.send(Envelope(Channel.DONE, number), to=[0])
        self._communicator.take(Envelope(Channel.COMMIT, number), [0])
