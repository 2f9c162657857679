"""Plug-ins: operators, backends, decoder families, policies and batchers of other distributions, by their entry points.

The installed entry points are read once per process, when a name is first looked up. A plug-in is imported once, at its
first use. A broken plug-in only affects code that uses it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from chunkrt.errors import ChunkrtError, unknown_name

Provided = TypeVar("Provided")

log = logging.getLogger(__name__)


class Plugin(Generic[Provided]):
    """One entry point of a group.

    Attributes:
        distribution, version: name and version of the distribution that provides the plug-in.
        conflict: the reason why the plug-in's name cannot be used; empty if it can.
    """

    def __init__(self, group: PluginGroup[Provided], entry_point: EntryPoint, conflict: str) -> None:
        self.group = group.name
        self.name = entry_point.name
        self.distribution = entry_point.dist.name if entry_point.dist else "?"
        self.version = entry_point.dist.version if entry_point.dist else "?"
        self.conflict = conflict
        self._entry_point = entry_point
        self._check, self._error = group.check, group.error
        self._failure: BaseException | None = None
        self._is_told = False

    def __str__(self) -> str:
        return f"plug-in {self.name!r} of {self.distribution} {self.version} ({self.group})"

    def load(self) -> Provided:
        """Return the object of the entry point. It is imported once; a failure is stored and raised again.

        Raises:
            The group's error: the import fails, the object is not of the expected kind, or the name is already in use.
        """
        if self.conflict:
            raise self._error(f"the {self} is not used: {self.conflict}")
        if self._failure is None:
            try:
                return self._provided
            except (Exception, SystemExit) as error:  # a plug-in may raise any error
                self._failure = error
        cause = self._failure
        raise self._error(
            f"the {self} is broken: {type(cause).__name__}: {cause}; repair it, or uninstall {self.distribution}"
        ) from cause

    def load_or_tell(self) -> Provided | None:
        """Return the object like `load`. If the plug-in fails, log one warning and return None."""
        try:
            return self.load()
        except ChunkrtError as error:
            self._tell(error)
            return None

    def fail(self, cause: BaseException) -> None:
        """Mark the plug-in as failed in use. Log one warning, and raise the cause in later calls of `load`."""
        self._failure = cause
        self.load_or_tell()

    def _tell(self, error: ChunkrtError) -> None:
        if not (self._is_told or self.conflict):  # a conflict is logged when it is detected
            self._is_told = True
            log.warning("%s; it is skipped", error)

    @cached_property
    def _provided(self) -> Provided:
        found = self._entry_point.load()
        if reason := self._check(self.name, found):
            raise TypeError(f"{self._entry_point.value} {reason}")
        provided: Provided = found
        return provided


class PluginGroup(Generic[Provided]):
    """The plug-ins of one kind.

    Args:
        name: name of the entry points' group.
        error: type of the error for a plug-in that was requested by name and does not work.
        own: chunkrt's own names, which plug-ins cannot replace.
        check: called with (name, object); returns the reason why the object is not suitable, or "".
    """

    def __init__(
        self,
        name: str,
        *,
        error: type[ChunkrtError],
        own: Collection[str] = (),
        check: Callable[[str, Any], str] = lambda name, found: "" if callable(found) else "cannot be called",
    ) -> None:
        self.name = name
        self.error = error
        self.check = check
        self._own = own

    @cached_property
    def plugins(self) -> Sequence[Plugin[Provided]]:
        """All installed plug-ins by name. A conflict of names is logged in one warning."""
        found = sorted(_installed(self.name), key=lambda entry_point: entry_point.name)
        counts = Counter(entry_point.name for entry_point in found)
        plugins = [Plugin(self, entry_point, self._conflict(entry_point, counts)) for entry_point in found]
        for plugin in plugins:
            if plugin.conflict:
                log.warning("the %s is not used: %s", plugin, plugin.conflict)
        return plugins

    @property
    def names(self) -> tuple[str, ...]:
        """Names that can be requested. Loading a plug-in may still fail."""
        return tuple(plugin.name for plugin in self.plugins if not plugin.conflict)

    def find(self, name: str) -> Plugin[Provided] | None:
        """Return the plug-in with a name. Return None if no such plug-in exists, or if the name is chunkrt's own."""
        return next((plugin for plugin in self.plugins if plugin.name == name and name not in self._own), None)

    def choose(self, name: str | Provided, own: Mapping[str, Provided], noun: str) -> Provided:
        """Return the object with a name: chunkrt's own object or that of a plug-in. An object of the caller is returned
        unchanged.

        Raises:
            ConfigError: the name is unknown (the message suggests the nearest name and lists all), or the plug-in is
                broken; or the object is not of the group's kind, or has the name of another one.
        """
        if not isinstance(name, str):
            named = getattr(name, "name", None)
            if reason := self.check(named if isinstance(named, str) else "", name):
                raise self.error(f"the {noun} {name!r:.80} {reason}")
            if own.get(named or "", name) is not name or self.find(named or "") not in (None, name):
                raise self.error(f"the {noun} {name!r:.80} is named {named!r}, which is another one; rename it")
            return name
        if plugin := self.find(name):
            return plugin.load()
        if name not in own:
            raise unknown_name(noun, name, (*own, *self.names))
        return own[name]

    def load_all(self) -> dict[str, Provided]:
        """Map names to the objects of all plug-ins that can be loaded. Log one warning for each other plug-in."""
        loaded = {plugin.name: plugin.load_or_tell() for plugin in self.plugins}
        return {name: provided for name, provided in loaded.items() if provided is not None}

    def _conflict(self, entry_point: EntryPoint, counts: Counter[str]) -> str:
        if entry_point.name in self._own:
            return f"chunkrt has {entry_point.name!r} itself"
        if counts[entry_point.name] > 1:
            return f"{counts[entry_point.name]} entry points have that name; uninstall all but one"
        return ""


def code_behind(group: str, name: str) -> list[tuple[str, str, int]]:
    """Return data that change when a plug-in's code changes: versions, and the files of its package with their times.

    The data are empty if no plug-in with that name exists. The plug-in is not imported.
    """
    found: list[tuple[str, str, int]] = []
    for entry_point in _installed(group):
        if entry_point.name == name:
            distribution = (entry_point.dist.name, entry_point.dist.version) if entry_point.dist else ("?", "?")
            found.append((*distribution, 0))
            spec = find_spec(entry_point.module.partition(".")[0])
            for folder in (spec and spec.submodule_search_locations) or ():
                files = sorted(Path(folder).rglob("*.py"))
                found += [(str(path), "", path.stat().st_mtime_ns) for path in files]
    return found


@cache
def _all_installed() -> Any:
    return (
        metadata.entry_points()
    )  # Python 3.11 returns another type than later versions, but it has the same method `select`


def entry_points(*, group: str) -> EntryPoints:
    """Return the entry points of a group. The first call reads all groups, because it has to examine every distribution
    anyway.
    """
    found: EntryPoints = _all_installed().select(group=group)
    return found


def _installed(group: str) -> Sequence[EntryPoint]:
    try:
        return tuple(entry_points(group=group))
    except Exception as error:  # importlib.metadata may raise any error if the files of a distribution are damaged
        log.warning(
            "no %s are used: the installed distributions cannot be read (%s: %s)", group, type(error).__name__, error
        )
        return ()
