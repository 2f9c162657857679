"""Check that a refused command prints one line to stderr and nothing to stdout, and exits with a status."""


def expect_one_line(finished, message, status=None):
    assert finished.status not in (0, None)
    assert status in (None, finished.status)
    assert finished.out == ""
    line, *rest = finished.err.splitlines()
    assert not rest, finished.err
    assert line.startswith("chunkrt: "), line
    assert message in line, line
    assert "Traceback" not in line
    assert "unexpected" not in line
