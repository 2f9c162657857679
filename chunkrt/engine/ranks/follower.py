"""A follower, which repeats the leader's calls on its own engines, states and snapshots."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkrt.engine.options import EngineOptions
from chunkrt.engine.ranks.commands import FOLLOWER, Call, Compute, Message, Reference, reply
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
        self._objects: dict[int, Any] = {FOLLOWER: self}

    def serve(self) -> int:
        """Execute the leader's commands until the leader ends, and return the exit status. Rank 0 reports errors."""
        number = 0
        try:
            while True:
                number += 1
                payload = self._communicator.take(Envelope(Channel.COMMAND, number), [0])[0]
                message: Message = pickle.loads(payload)
                command, before, forgotten = message
                for call in before:
                    self._call(call)
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

    def open(self, number: int, model: str, options: EngineOptions) -> Mapping[str, object]:
        """Load a model, store it under a number, and return its identity."""
        engine = self._objects[number] = self._load(model, options, self._communicator)
        return engine.identity

    def save(self, state: int, path: Path) -> None:
        """Save a state to this rank's file next to the leader's."""
        self._objects[state].save(self._own(path))

    def load(self, state: int, path: Path) -> None:
        """Load a state from this rank's file next to the leader's."""
        self._objects[state].load(self._own(path))

    def _own(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.rank{self._communicator.rank}")

    def _obey(self, number: int, command: Call | Compute) -> None:
        if isinstance(command, Compute):
            self._compute(number, command)
        elif command.has_reply:
            try:
                answer = reply(self._call(command))
            except DeviceLostError:
                raise
            except Exception as error:
                answer = reply(error=error)
            self._communicator.send(Envelope(Channel.REPLY, number), answer, to=[0])
        else:
            self._call(command)

    def _call(self, command: Call) -> object:
        """Call a method, and store or return its result."""
        method = getattr(self._objects[command.target], command.method)
        result = method(*map(self._resolve, command.arguments))
        if command.result is None:
            return result
        self._objects[command.result] = result
        return None

    def _resolve(self, argument: object) -> object:
        return self._objects[argument.number] if isinstance(argument, Reference) else argument

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
