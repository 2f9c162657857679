"""A plug-in whose library is not installed."""

import library_that_nobody_has  # noqa: F401
