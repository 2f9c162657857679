"""How ranks reach each other: threads of one process, or processes that mpiexec launched."""
