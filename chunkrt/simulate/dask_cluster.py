"""Evaluation of one function at many points on an existing Dask cluster.

The user starts the cluster with `dask scheduler`, and with `dask worker ADDRESS` on every machine. All machines need
the same version of chunkrt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from chunkrt.errors import ChunkrtError, ConfigError

Held = TypeVar("Held")
Point = TypeVar("Point")
Result = TypeVar("Result")

CONNECT_SECONDS = 10
"""Timeout for the connection to the scheduler, and then for its first worker."""


def run_on_dask(
    cluster: str | Any,
    function: Callable[[Held, Point], Result],
    held: Held,
    points: Sequence[Point],
    progress: Callable[[int], None],
) -> list[Result]:
    """Return `function(held, point)` for every point, in their order.

    Args:
        cluster: the address of a scheduler, or a `distributed.Client`, which stays open.
        function: a function of a module that the workers can import.
        held: the argument that all points share; it is sent to every worker once.
        points: the arguments of the single calls.
        progress: called with the number of finished points.

    Raises:
        ConfigError: distributed is not installed, the cluster cannot be reached, has no workers, or is lost.
        ChunkrtError: `function` raised this error.
    """
    with _connected(cluster) as (distributed, client):
        futures = []
        try:
            grid = client.scatter(held, broadcast=True, hash=False)
            futures = client.map(lambda point, held: function(held, point), points, held=grid, pure=False)
            for done, future in enumerate(distributed.as_completed(futures, loop=client.loop), 1):
                if future.status != "finished":
                    future.result()
                progress(done)
            results: list[Result] = client.gather(futures)
            return results
        except ChunkrtError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the Dask cluster failed ({type(error).__name__}: {error}); its workers need this version of chunkrt"
            ) from error
        finally:
            client.cancel(futures)


@contextmanager
def _connected(cluster: str | Any) -> Iterator[tuple[Any, Any]]:
    """Yield the module `distributed` and a client; close the client if it was opened here."""
    try:
        distributed = import_module("distributed")
    except ImportError as error:
        raise ConfigError(
            'a Dask cluster needs distributed, which is not installed: pip install "chunkrt[dask]"'
        ) from error
    if not isinstance(cluster, str):
        yield distributed, cluster
        return
    with _open_client(distributed, cluster) as client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError as error:
            raise ConfigError(
                f"the Dask scheduler at {cluster} has no workers; start some with `dask worker {cluster}`"
            ) from error
        yield distributed, client


def _open_client(distributed: Any, address: str) -> Any:
    """Open a client on a thread: a server at the address that is not a scheduler would block it forever."""
    answer: SimpleQueue[Any] = SimpleQueue()

    def connect() -> None:
        try:
            answer.put(distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False))
        except Exception as error:
            answer.put(error)

    try:
        import_module("distributed.comm").resolve_address(address)  # a client that failed like this blocks on close
        Thread(target=connect, daemon=True).start()
        found = answer.get(timeout=CONNECT_SECONDS + 1)
    except (ValueError, OSError) as error:
        found = error
    except Empty:
        found = TimeoutError("the scheduler does not answer")
    if isinstance(found, Exception):
        raise ConfigError(
            f"found no Dask scheduler at {address!r} ({' '.join(str(found).split())}); expected an address such as "
            "tcp://192.168.0.1:8786, as `dask scheduler` prints it"
        ) from found
    return found
