"""Connection between ranks: threads of one process, or processes that mpiexec launched."""
