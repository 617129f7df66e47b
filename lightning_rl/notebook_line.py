"""A line of output in a notebook that is overwritten in place."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class NotebookLine:
    """A text stream for tqdm: what is written takes the place of what was there before.

    Carriage returns would do so on the screen, but each would stay an output of its own in the saved notebook.
    """

    encoding = "utf-8"  # tqdm asks for it before it draws a bar of anything but ASCII
    _handle: Any = None

    def write(self, text: str) -> None:
        """Show a line; blank ones, by which tqdm moves on, are left out."""
        from IPython.display import display

        shown = {"text/plain": text.strip()}
        if not shown["text/plain"]:
            return
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def flush(self) -> None:
        """Do nothing: a line is shown as soon as it is written."""
