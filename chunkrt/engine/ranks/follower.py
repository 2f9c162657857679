"""A follower, which repeats the leader's calls on its own engines, states and snapshots."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.commands import Call, Compute, Message, Open, RankPath, Reference, reply
from chunkrt.errors import BackendError, ClosedError, DeviceLostError
from chunkrt.runtime.ranks.mailbox import Channel, Envelope
from chunkrt.runtime.ranks.messages import MessageCommunicator
from chunkrt.runtime.request import Request

if TYPE_CHECKING:
    from chunkrt.engine.loaded import LoadedModel


class Follower:
    """Server of the leader's commands.

    Args:
        communicator: connection to the other ranks.
        load: loads this rank's share of a model.
    """

    def __init__(
        self, communicator: MessageCommunicator, load: Callable[[str, EngineOptions, MessageCommunicator], LoadedModel]
    ) -> None:
        self._communicator = communicator
        self._load = load
        self._objects: dict[int, Any] = {}

    def serve(self) -> int:
        """Execute the leader's commands until the leader ends, and return the exit status. Rank 0 reports errors."""
        number = 0
        try:
            while True:
                number += 1
                payload = self._communicator.take(Envelope(Channel.COMMAND, number), [0])[0]
                message = Message._make(pickle.loads(payload))
                for call in message.before:
                    self._call(call)
                for old in message.forgotten:
                    self._objects.pop(old, None)
                self._obey(number, message.command)
        except ClosedError:
            return 0
        except DeviceLostError:
            return 1
        except Exception as error:
            self._communicator.leave(f"rank {self._communicator.rank} failed: {type(error).__name__}: {error}")
            return 1

    def _obey(self, number: int, command: Open | Call | Compute) -> None:
        if isinstance(command, Compute):
            self._compute(number, command)
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

    def _compute(self, number: int, command: Compute) -> None:
        """Compute this rank's part of some work. The states advance when the leader reports that its own states have
        advanced.
        """
        communicator = self._communicator
        states = [self._objects[part.state] for part in command.parts]
        for part, state in zip(command.parts, states, strict=True):
            if state.position + part.start != part.position:
                at, wanted = state.position + part.start, part.position
                raise BackendError(f"its state is at position {at}, but the state of rank 0 is at {wanted}")
        communicator.begin(number, is_urgent=command.is_urgent)
        try:
            for part, state in zip(command.parts, states, strict=True):
                if not part.start:
                    state.begin(part.num_tokens)
            requests = [
                Request(part.token_ids, state, logits=part.logits, num_before=part.start, is_for_others=True)
                for part, state in zip(command.parts, states, strict=True)
            ]
            self._objects[command.engine].take_part(command.executor, requests, number)
            communicator.send(Envelope(Channel.DONE, number), to=[0])
        except DeviceLostError:
            raise
        except Exception as error:
            if not communicator.is_aborted(number):
                communicator.abort(number, f"rank {communicator.rank}: {error}")
        finally:
            communicator.end(number)
