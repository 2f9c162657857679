"""Texts of system errors: the same words on Windows, whose own texts are in the language of the user."""

import errno
import os

import pytest

from chunkrt.errors import cause_in_file, cause_of


def windows_error(number: int, code: int) -> OSError:
    """Return an error as a function of Windows raises it."""
    error = OSError(number, "Der Prozess kann nicht auf die Datei zugreifen")
    error.winerror = code
    return error


@pytest.mark.parametrize("code", [32, 33, 1224], ids=["shared", "locked", "mapped"])
def test_cause_of_a_file_in_use_says_so(code):
    assert cause_of(windows_error(errno.EACCES, code)) == "a program uses the file; close it first"


@pytest.mark.parametrize(("code", "number"), [(2, errno.ENOENT), (5, errno.EACCES), (112, errno.ENOSPC)])
def test_cause_of_errors_of_windows_has_the_words_of_other_systems(code, number):
    assert cause_of(windows_error(number, code)) == os.strerror(number)


def test_cause_of_a_folder_that_is_opened_on_windows_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "win32")
    (tmp_path / "file").touch()
    for name, number in ((tmp_path, errno.EISDIR), (tmp_path / "file", errno.EACCES)):
        assert cause_of(PermissionError(errno.EACCES, "Permission denied", str(name))) == os.strerror(number)


def test_cause_of_an_error_without_counterpart_is_the_text_of_the_system():
    assert cause_of(windows_error(errno.EINVAL, 4390)) == "Der Prozess kann nicht auf die Datei zugreifen"


def test_cause_of_other_errors_is_their_text():
    assert cause_of(OSError(errno.ENOENT, "it is gone")) == "it is gone"
    assert cause_of(OSError("no number")) == "no number"


def test_cause_in_file_names_the_file(tmp_path):
    with pytest.raises(OSError) as raised:  # noqa: PT011, its text is the system's
        (tmp_path / "text.json").read_text()
    assert cause_in_file(raised.value) == f"text.json: {os.strerror(errno.ENOENT)}"
    assert cause_in_file(ValueError("no file")) == "no file"
